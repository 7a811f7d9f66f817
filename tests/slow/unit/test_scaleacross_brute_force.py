"""ScaleAcross Explorer's search against all divisions of the layers of all cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.scaleacross import small

from dips.planner.scaleacross.iteration import rebuild
from dips.planner.scaleacross.search import cases_of, explore, lower_bound_s, splits
from dips.planner.scaleacross.topology import Ints


def compositions(total: int, parts: int, ratio: float) -> Ints:
    def rows(left: int, n: int) -> Iterator[tuple[int, ...]]:
        if n == 1:
            yield (left,)
            return
        for first in range(1, left - n + 2):
            for rest in rows(left - first, n - 1):
                yield (first, *rest)

    return np.array([row for row in rows(total, parts) if max(row) <= ratio * min(row)], np.int64)


@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize(
    ("layers", "oversubscription", "km"), [(6, 1, 0), (7, 8, 10), (8, 64, 200), (9, 4, 1000), (8, 1000, 0)]
)
def test_the_best_is_within_2_percent_of_all(
    tmp_path: Path, layers: int, oversubscription: float, km: float, links: bool
) -> None:
    topology = small(tmp_path, layers, oversubscription, km=km)
    best = np.inf
    for split in splits(topology):
        for case in cases_of(topology, split):
            rows = compositions(layers, case.n_chunks, topology.search.chunk_ratio)
            if len(rows):
                fastest = float(rebuild(topology, case, rows, links).seconds.min())
                # Kernels are rounded to whole nanoseconds, the bound is not.
                assert lower_bound_s(topology, case) <= fastest * (1 + 1e-7)
                best = min(best, fastest)
    assert explore(topology, links).best[0].seconds(links) <= 1.02 * best
