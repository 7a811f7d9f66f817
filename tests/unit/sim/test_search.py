"""The exhaustive search and its command; that it finds what is wrong is shown by planted bugs (test_mutants.py)."""

from __future__ import annotations

from search.bounds import FAULTS
from search.explore import Search, facts_of, judge
from search.searches import SEARCHES, Size, by_name


def test_every_fault_is_searched() -> None:
    searched = {fault for named in SEARCHES if named.size is not Size.LONG for fault, _ in named.bounds.faults}
    assert searched == set(FAULTS)


def test_the_facts_of_a_way_are_those_of_a_run() -> None:
    search = Search(by_name("two-rounds").bounds)
    search.run()
    facts = facts_of(search.system, search.path(search.ends[-1])[0])
    published = [out[3]["version"] for _, _, out in facts if out[:2] == ("fact", "publish")]
    assert published == ["1:0", "1:1", "1:2"]
    assert judge(facts).counts()["I4"] == 3


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
