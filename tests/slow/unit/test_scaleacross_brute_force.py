"""ScaleAcross Explorer's search against all divisions of the layers of all cases."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scaleacross import best_of_all, small

from dips.planner.scaleacross.search import explore


@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize(
    ("layers", "oversubscription", "km"), [(6, 1, 0), (7, 8, 10), (8, 64, 200), (9, 4, 1000), (8, 1000, 0)]
)
def test_within_2_percent_of_all(tmp_path: Path, layers: int, oversubscription: float, km: float, links: bool) -> None:
    topology = small(tmp_path, layers, oversubscription, km=km)
    assert explore(topology, links).best[0].seconds(links) <= 1.02 * best_of_all(topology, links)
