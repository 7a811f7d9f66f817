"""All numbers of the papers: those that bind are kept, and docs/papers/ has each of them, to the last digit there."""

from __future__ import annotations

import pytest
from support.papers import not_on_the_page

from dips.planner.commands.plan import PAPERS, all_checks

COUNTS = {"jeeves": (24, 5), "crosspipe": (95, 69), "spantrain": (68, 27), "scaleacross": (87, 12)}
"""Of all numbers, and of those that bind."""


@pytest.mark.parametrize("paper", PAPERS)
def test_every_number_is_on_its_page_and_none_that_binds_is_missed(paper: str) -> None:
    checks = list(all_checks(paper))
    assert [(check.what, check.ours) for check in checks if check.missed] == []
    assert list(not_on_the_page(paper, checks)) == []
    assert (len(checks), sum(check.binds for check in checks)) == COUNTS[paper]
    # Orderings that come out the other way are said so there: with what was assumed before comparing.
    assert any(check.what.endswith("DOES NOT HOLD") for check in checks) == (paper == "scaleacross")
