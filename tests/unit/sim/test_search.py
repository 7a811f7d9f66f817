"""The exhaustive search: small ones see every state and find nothing wrong, and what is wrong they tell as a story."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from search.__main__ import main, never_struck, read_counts
from search.bounds import BLOCK_BYTES, FAULTS, Bounds
from search.copying import BLIND, Arena, Fingerprints, clone
from search.explore import Result, Search, facts_of, judge
from search.master_part import MasterPart
from search.ranks_part import OpenTransfer, Ranks, shares_of
from search.reference_model import ReferenceModel
from search.searches import SEARCHES, Named, Size, by_name, run_all
from search.slave_part import TORN, SlavePart, put_chunk
from search.state import NO_MASTER, OLD, Draft, SearchState, SearchViolation
from search.system import System
from support.mutants import MUTANTS
from support.repository import ROOT

from dips.core.errors import LocalProtocolError
from dips.core.ids import ClusterId, Incarnation, PushId
from dips.core.messages import PlacementSpec, Ticket
from dips.slave.state.staging import Slot, StagingTable

FROZEN_COUNTS = ROOT / "tests" / "frozen" / "searches.txt"
COUNTS = read_counts(FROZEN_COUNTS)


def test_every_fault_is_searched() -> None:
    searched = {fault for named in SEARCHES if named.size is not Size.LONG for fault, _ in named.bounds.faults}
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
    reference = ReferenceModel(reported=frozenset({("a/1.1#1", "ABORTED")}))
    item = {"push": ["a", 1, 1, 1], "verdict": "APPLIED", "base": None, "fence": 0}
    with pytest.raises(SearchViolation, match="received ABORTED") as caught:
        reference._decide({"kind": "COMMIT", "participants": [item]})
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
        self.closure: Callable[[], list[int]] = lambda: held["a"]
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


def test_a_way_is_made_again_as_it_was() -> None:
    search = Search(by_name("lose-call").bounds)
    search.run()
    states, labels = search.path(search.ends[-1])
    assert labels[0] == ("the beginning",)
    assert len(states) == len(labels)
    for before, label, after in zip(states, labels[1:], states[1:], strict=False):
        assert (label, after) in search.system.successors(before)


# ---- two masters ----


def _overtaken() -> tuple[System, SearchState]:
    """A run in which another master has just begun, and nobody knows it."""
    system = System(by_name("two-masters").bounds)
    state = system.initial()
    after = [state for label, state in system.successors(state) if "second_master" in label[0]]
    return system, after[0]


def test_a_second_master_takes_the_journal_and_the_first_lives_on() -> None:
    system, state = _overtaken()
    assert state.old != NO_MASTER
    assert system.masters[state.master].epoch == system.masters[state.old].epoch + 1
    assert all(link.at == OLD for link in state.links)


def test_an_overtaken_master_ends_when_it_writes() -> None:
    system, state = _overtaken()
    outs = system.masters.step(state.old, ("evict", "a"), lambda part: part.evict("a"))[1]
    assert outs[-1] == ("fenced off", "EVICT")
    draft = Draft(state)
    system._master(draft, ("evict", "a"), lambda part: part.evict("a"), OLD)
    assert draft.old == NO_MASTER
    assert not [link for link in draft.links.values() if link.at == OLD]
    assert system.slaves[draft.slaves[0]].link is None


# ---- chunks ----


def test_a_push_of_which_a_chunk_lacks_is_not_staged_and_a_mixed_one_is_torn() -> None:
    push = PushId(ClusterId("a"), Incarnation(1, 1), 1)
    slave = SlavePart("s0", chunk_bytes=BLOCK_BYTES // 2)
    slave.blocks = (0,)
    slave.table = StagingTable(slave.shard)
    slot = Slot(push, 1, 0)
    slave.table.open(slot)
    slave.staging[0] = (None, None)
    headers = [put_chunk((0,), BLOCK_BYTES // 2, index, push, 1, 1, ("a1",)) for index in range(2)]
    slave.put(headers[:1], ("a1",))
    assert slave._payload(slot) == (TORN,)
    with pytest.raises(LocalProtocolError, match="1 of 2 chunks"):
        slave._say_staged(slave.table.find(push, 1))
    slave.put(headers, ("a1",))
    assert slave._payload(slot) == ("a1",)
    slave.staging[0] = (("a1",), ("b1",))
    assert slave._payload(slot) == (TORN,)


# ---- other slaves ----


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


# ---- several ranks ----


@pytest.mark.parametrize(("name", "blocks"), [("ranks", [[0, 1], [0, 1]]), ("three-ranks", [[0], [1, 1], [0]])])
def test_each_chunk_is_of_one_rank(name: str, blocks: list[list[int]]) -> None:
    bounds = by_name(name).bounds
    shares = shares_of(bounds.ranks, bounds.chunk_bytes).of_rank
    assert [sorted(chunk.block_id for chunk in share) for share in shares] == blocks
    assert len(frozenset().union(*shares)) == sum(map(len, shares)) == 4


def test_a_follower_may_send_its_part_of_an_attempt_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(by_name("ranks-drop-transfer").bounds)
    behind: set[tuple[int, int]] = set()

    def look(state: SearchState) -> None:
        ranks = search.system.clusters[state.clusters[0]].ranks
        if isinstance(ranks.job, OpenTransfer):
            attempts = [transfer.ticket.attempt for rank, transfer in ranks.sends() if rank]
            behind.update((attempt, ranks.job.ticket.attempt) for attempt in attempts)

    monkeypatch.setattr(search.system, "check", look)
    assert search.run().exhausted
    assert behind == {(1, 1), (1, 2), (2, 2)}


def test_a_follower_is_one_given_up_push_behind_at_most() -> None:
    ranks = Ranks(by_name("ranks").bounds)
    push = PushId(ClusterId("a"), Incarnation(1, 1), 1)
    unheard = []
    for attempt in range(1, 4):
        ranks.begin(OpenTransfer(attempt, push, Ticket(attempt, PlacementSpec((), (), b""), ()), 1, ("a1",)))
        unheard.append([order and order.id for order in ranks.orders[1]])
        ranks.cancel()
    assert unheard == [[1], [1, None, 2], [2, None, 3]]
    heard = []
    while ranks.orders[1]:
        ranks.hear(1)
        heard.append(ranks.carries[1])
    assert [job and job.id for job in heard] == [3, None]


# ---- what is remembered ----


def test_data_that_is_applied_again_is_a_violation() -> None:
    item = {"push": ["a", 1, 1, 2], "ranges": [[7, 0, 3, 0, 1]]}
    once = ReferenceModel()._judge_trained([item])
    assert once == {(0, 3)}
    with pytest.raises(SearchViolation, match="token 3 of pass 0 is applied again"):
        ReferenceModel(trained=once)._judge_trained([item])


def test_a_violation_comes_home_from_another_process() -> None:
    violation = pickle.loads(pickle.dumps(SearchViolation("I5", "it is gone")))
    assert (violation.name, violation.sentence, str(violation)) == ("I5", "it is gone", "I5: it is gone")


# ---- the command ----


def test_the_command_names_its_searches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--short"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        named.name for named in SEARCHES if named.size is Size.SHORT
    ]


def test_the_command_says_what_it_saw(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--name", "two-rounds", "--name", "lose-version", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("EXHAUSTED") == 2
    assert "2 searches, 2 exhausted" in out
    assert "steps that are faults: lose_version" in out


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


def test_searches_run_side_by_side() -> None:
    chosen = [by_name("two-rounds"), by_name("old-backup")]
    found = {named.name: result for named, result in run_all(chosen, None, 2)}
    assert found.keys() == {"two-rounds", "old-backup"}
    alone = Search(chosen[0].bounds).run()
    assert found["two-rounds"].states == alone.states


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


def test_the_command_knows_no_other_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--name", "nothing"]) == 2
    assert "no search is called 'nothing'" in capsys.readouterr().err


# ---- the document ----


def test_the_document_names_every_search_and_every_planted_bug() -> None:
    text = (ROOT / "docs/simulation.md").read_text()
    assert [named.name for named in SEARCHES if f"| `{named.name}` |" not in text] == []
    assert [mutant.name for mutant in MUTANTS if f"| {mutant.name} (" not in text] == []
