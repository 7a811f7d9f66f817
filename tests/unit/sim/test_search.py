"""The exhaustive search and its command; that it finds what is wrong is shown by planted bugs (test_mutants.py)."""

from __future__ import annotations

import pytest
from search.bounds import FAULTS
from search.explore import Search
from search.searches import by_name
from support.mutants import MUTANTS, Mutant, planted


def test_a_reshard_ends_on_the_slaves_that_were_asked_for() -> None:
    search = Search(by_name("reshard-change").bounds)
    search.run()
    system = search.system
    placed = set()
    for end in search.ends:
        state = search.path(end)[0][-1]
        placement = system.masters[state.master].state.shared.ledger.placement
        assert placement is not None
        placed.add((placement.slaves, state.budget[FAULTS.index("reshard")]))
    assert placed == {(("s0",), 1), (("s1",), 0)}, "moved where it was asked for, and only there"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_planted_bug_has_its_place_in_the_code(mutant: Mutant) -> None:
    """Of the long tier, which would find out only then."""
    with planted(mutant):
        pass
