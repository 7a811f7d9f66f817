"""The exhaustive search and its command; that it finds what is wrong is shown by planted bugs (test_mutants.py)."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from search.__main__ import main, never_struck, read_counts
from search.bounds import FAULTS, Bounds
from search.explore import Result, Search, facts_of, judge
from search.searches import SEARCHES, Named, Size, by_name
from search.state import SearchViolation
from support.repository import ROOT

FROZEN_COUNTS = ROOT / "tests" / "frozen" / "searches.txt"
COUNTS = read_counts(FROZEN_COUNTS)


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


def test_a_violation_comes_home_from_another_process() -> None:
    violation = pickle.loads(pickle.dumps(SearchViolation("I5", "it is gone")))
    assert (violation.name, violation.sentence, str(violation)) == ("I5", "it is gone", "I5: it is gone")


def test_the_counts_of_searches_are_the_frozen_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = COUNTS
    assert sorted(known) == sorted(named.name for named in SEARCHES if named.size is not Size.LONG)
    arguments = ["--name", "two-rounds", "--name", "lose-version", "--jobs", "1", "--counts"]
    assert main([*arguments, str(FROZEN_COUNTS)]) == 0
    file = tmp_path / "searches.txt"
    file.write_text("pair 1 2 3 4\ntwo-rounds 1 2 3 4\n")
    capsys.readouterr()
    assert main([*arguments, str(file)]) == 1
    told = capsys.readouterr().out
    assert f"FAILED two-rounds: states, steps, depth, ends are {known['two-rounds']}; in {file} they are (1, 2" in told
    assert f"in {file} they are not there" in told
    assert main([*arguments, str(file), "--write-counts"]) == 0
    assert read_counts(file) == {name: known[name] for name in ("two-rounds", "lose-version")} | {"pair": (1, 2, 3, 4)}


def test_a_search_that_is_to_end_and_does_not_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Named("two-rounds", "", by_name("two-rounds").bounds, max_states=50)
    monkeypatch.setattr("search.__main__.by_name", lambda name: cut)
    assert main(["--name", "two-rounds"]) == 1
    assert main(["--name", "two-rounds", "--max-states", "50"]) == 0


def test_a_planned_fault_that_never_struck_is_named() -> None:
    named = Named("never", "", Bounds(clusters=1, faults=(("late_verdict", 1), ("lose_call", 1))))
    result = Result(exhausted=True, faults={"lose_call": 3})
    assert never_struck(named, result) == ["late_verdict"]
    assert never_struck(named, Result(faults={})) == []
