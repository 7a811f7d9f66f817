"""Each short search sees every state of its bounds and finds nothing wrong, and nor does the checker of runs."""

from __future__ import annotations

import pytest
from search.__main__ import never_struck, read_counts, story
from search.explore import Search, judge_ends
from search.searches import SEARCHES, Size, by_name
from support.repository import ROOT

COUNTS = read_counts(ROOT / "tests" / "frozen" / "searches.txt")
SHORT = [named.name for named in SEARCHES if named.size is Size.SHORT]
PATHS = 12
"""Histories of each search that the checker judges too."""


@pytest.mark.parametrize("name", SHORT)
def test_a_short_search_sees_every_state_and_finds_nothing_wrong(name: str) -> None:
    search = Search(by_name(name).bounds)
    result = search.run()
    assert result.violation is None, "\n".join([str(result.violation), *story(result.story)])
    assert result.exhausted
    assert (result.states, result.steps, result.depth, result.ends) == COUNTS[name]
    assert result.ends > 0
    assert never_struck(by_name(name), result) == []
    assert judge_ends(search, search.ends, PATHS) == []
