"""The exhaustive search: small ones see every state and find nothing wrong, and what is wrong they tell as a story."""

from __future__ import annotations

import pytest
from support.mutants import MUTANTS
from support.repository import ROOT

from dips.sim.search.__main__ import main, story
from dips.sim.search.arena import BLIND, Arena
from dips.sim.search.bounds import FAULTS, Bounds
from dips.sim.search.copying import Fingerprints, clone
from dips.sim.search.explore import Search
from dips.sim.search.ghost import Ghost
from dips.sim.search.master_part import MasterPart
from dips.sim.search.paths import facts_of, judge, judge_ends
from dips.sim.search.searches import SEARCHES, by_name
from dips.sim.search.violation import Violation

QUICK = [named.name for named in SEARCHES if named.quick]
PATHS = 12
"""Histories of each search that the checker judges too."""


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_search_sees_every_state_and_finds_nothing_wrong(name: str) -> None:
    search = Search(by_name(name).bounds)
    result = search.run()
    assert result.violation is None, "\n".join([str(result.violation), *story(result.story)])
    assert result.exhausted
    assert result.ends > 0
    assert judge_ends(search, search.ends, PATHS) == []


def test_every_fault_is_searched() -> None:
    searched = {fault for named in SEARCHES if named.quick for fault, _ in named.bounds.faults}
    assert searched == set(FAULTS)


def test_a_search_is_the_same_each_time() -> None:
    first, again = (Search(by_name("kill-cluster").bounds).run() for _ in range(2))
    assert (first.states, first.steps, first.depth) == (again.states, again.steps, again.depth)


def test_a_search_that_is_not_exhausted_says_where_it_stopped() -> None:
    result = Search(by_name("pair").bounds, max_states=50).run()
    assert not result.exhausted
    assert result.words.startswith("STOPPED AT 5")


def test_the_facts_of_a_way_are_those_of_a_run() -> None:
    search = Search(by_name("two-rounds").bounds)
    search.run()
    facts = facts_of(search.system, search.path(search.ends[-1])[0])
    published = [out[3]["version"] for _, _, out in facts if out[:2] == ("fact", "publish")]
    assert published == ["1:0", "1:1", "1:2"]
    assert judge(facts).counts()["I4"] == 3


def test_states_that_are_no_way_have_no_facts() -> None:
    search = Search(by_name("two-rounds").bounds)
    search.run()
    states, _ = search.path(search.ends[-1])
    with pytest.raises(ValueError, match="does not follow"):
        facts_of(search.system, [states[0], states[-1]])
    with pytest.raises(ValueError, match="not of this search"):
        facts_of(search.system, states[1:])


def test_two_lives_with_one_promise_are_a_violation() -> None:
    ghost = Ghost(told=frozenset({("a/1.1#1", "ABORTED")}))
    item = {"push": ["a", 1, 1, 1], "verdict": "APPLIED", "base": None, "fence": 0}
    with pytest.raises(Violation, match="told ABORTED") as caught:
        ghost._decide({"kind": "COMMIT", "participants": [item]})
    assert caught.value.name == "I6"


# ---- copies ----


class _Holder:
    """Something with everything that state machines are made of."""

    def __init__(self) -> None:
        self.table = {"a": [1, 2], "b": [3]}
        self.names = {"x"}
        self.story = ["not looked at"]
        self.me = self
        held = self.table
        self.closure = lambda: held["a"]
        self.method = self.length

    def length(self) -> int:
        return len(self.table)


def test_a_copy_shares_nothing_that_can_change() -> None:
    holder = _Holder()
    copy = clone(holder)
    copy.table["a"].append(3)
    copy.table["c"] = []
    assert holder.table == {"a": [1, 2], "b": [3]}
    assert copy.me is copy
    assert copy.closure() == [1, 2, 3]
    assert holder.closure() == [1, 2]
    assert (holder.method(), copy.method()) == (2, 3)


def test_equal_things_have_equal_fingerprints_and_others_have_not() -> None:
    prints = Fingerprints(BLIND)
    holder, other = _Holder(), _Holder()
    other.story.append("nor this")
    other.table = {"b": [3], "a": [1, 2]}
    assert prints.digest(holder) == prints.digest(other) == prints.digest(clone(other))
    other.table["b"].append(4)
    assert prints.digest(holder) != prints.digest(other)


def test_a_step_is_made_once_and_its_machine_is_kept() -> None:
    arena = Arena[MasterPart](lambda part: None)
    first = arena.enter(MasterPart(Bounds()))
    made = []

    def start(part: MasterPart) -> list[tuple[object, ...]]:
        made.append(part)
        return part.start()

    step = arena.step(first, "start", start)
    assert arena.step(first, "start", start) == step
    assert len(made) == 1
    assert arena[first] is not made[0]


# ---- the command ----


def test_the_command_names_its_searches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--quick"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == QUICK


def test_the_command_says_what_it_saw(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--name", "two-rounds"]) == 0
    assert "EXHAUSTED" in capsys.readouterr().out


def test_the_command_knows_no_other_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--name", "nothing"]) == 2
    assert "no search is called 'nothing'" in capsys.readouterr().err


# ---- the document ----


def test_the_document_names_every_search_and_every_planted_bug() -> None:
    text = (ROOT / "docs/search.md").read_text()
    assert [named.name for named in SEARCHES if f"| `{named.name}` |" not in text] == []
    assert [mutant.name for mutant in MUTANTS if f"| {mutant.name} (" not in text] == []
