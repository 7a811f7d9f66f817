"""Bugs that are planted into the real state machines: each is found, by the invariant that it breaks, with a story."""

from __future__ import annotations

import pytest
from search.__main__ import story
from search.bounds import Bounds
from search.explore import Result, Search
from search.searches import by_name
from support.mutants import MUTANTS, TWO_CHECKS, Mutant, planted

MAX_STATES = 40_000
"""More than any of these bounds has without a mutant."""

NAMED = [pytest.param(mutant, id=mutant.name.replace(" ", "-")) for mutant in MUTANTS]
_clean: dict[Bounds, Result] = {}


def _without_mutant(bounds: Bounds) -> Result:
    if bounds not in _clean:
        _clean[bounds] = Search(bounds, MAX_STATES).run()
    return _clean[bounds]


@pytest.mark.parametrize("mutant", NAMED)
def test_a_planted_bug_breaks_its_invariant(mutant: Mutant) -> None:
    with planted(mutant):
        result = Search(mutant.bounds, MAX_STATES).run()
    assert result.violation is not None, f"{mutant.name} is not noticed: {result.words}"
    assert result.violation.name in mutant.breaks, str(result.violation)
    lines = story(result.story)
    print("\n".join([str(result.violation), *lines]))
    assert len(lines) > 1


@pytest.mark.parametrize("mutant", NAMED)
def test_the_same_search_is_clean_without_the_bug(mutant: Mutant) -> None:
    result = _without_mutant(mutant.bounds)
    assert result.violation is None, str(result.violation)
    assert result.exhausted


def test_what_a_rank_of_an_earlier_life_sends_is_stopped_twice() -> None:
    """With both bugs it is merged; a rank that is killed, or a late chunk, does not show that."""
    first, second = TWO_CHECKS
    for mutant in TWO_CHECKS:
        with planted(mutant):
            alone = Search(mutant.bounds, MAX_STATES).run()
        assert alone.violation is None, str(alone.violation)
        assert alone.exhausted
    with planted(first), planted(second):
        both = Search(first.bounds, MAX_STATES).run()
        others = [Search(by_name(name).bounds, MAX_STATES).run() for name in ("ranks-kill-rank", "late-chunk")]
    assert both.violation is not None
    assert both.violation.name == "I9", str(both.violation)
    assert [other.violation for other in others] == [None, None]
