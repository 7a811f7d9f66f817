"""The master's side of a RESHARD: when it begins, what it proves, what a failure at any point leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.master_bench import LAYOUT, refused_with
from support.reshard_bench import ReshardBench

from dips.core import messages as m
from dips.core.errors import RefusalCode
from dips.core.ids import Version
from dips.master.state.effects import Pause, Resume
from dips.master.state.records import ReshardPhase

V0, V1, V2, V3 = (Version(1, v) for v in range(4))
FULL = m.Refusal(RefusalCode.DISK, "the disk is full", 1.0)


@pytest.fixture
def bench() -> ReshardBench:
    """Two slaves, clusters a and b, version 1 published."""
    bench = ReshardBench(grace_s=10.0)
    bench.running("a", "b")
    bench.rounds(1, "a", "b")
    return bench


def phase(bench: ReshardBench) -> ReshardPhase:
    return bench.state.shared.reshard.phase.now


def train(bench: ReshardBench) -> None:
    """One round of both clusters, on the slaves that there are."""
    bench.forget_stopped()
    before = bench.status().published
    assert before is not None
    bench.pushes("a", "b")
    assert bench.status().published == before.next()
    bench.pulls("a", "b")


def test_a_slave_is_added_and_the_run_goes_on(bench: ReshardBench) -> None:
    assert "start slave s2 now" in bench.reshard(add=("s2",))
    assert "slave s2 has yet to attach" in bench.status().reshard
    train(bench)  # waiting stops no cluster
    tokens, version = bench.status().tokens, bench.status().published
    bench.new_slave("s2")
    status = bench.status()
    assert (bench.placed(), status.reshard) == (("s0", "s1", "s2"), "")
    assert version is not None
    assert (status.published, status.tokens) == (version.next(), tokens)
    (record,) = bench.entries("RESHARD")
    assert record["placement_before"]["slaves"] == ["s0", "s1"]
    assert record["placement"]["slaves"] == ["s0", "s1", "s2"]
    assert (sorted(record["digests"]), record["wall_s"]) == (["s0", "s1", "s2"], bench.wall_s)
    train(bench)


def test_a_slave_is_removed_and_told_to_end_and_another_is_replaced_in_one_go(bench: ReshardBench) -> None:
    bench.reshard(remove=("s0",))
    assert bench.placed() == ("s1",)
    assert bench.slave("s0").stopped
    assert [slave.slave_id for slave in bench.status().slaves] == ["s1"]
    bench.forget_stopped()
    grant = bench.pull("a")
    assert [address.slave_id for address in grant.placement.slaves] == ["s1"]
    assert [slave for slave, _ in grant.digest_of_slave] == ["s1"]
    ticket = bench.ticket("a")
    assert ticket.placement.placement_hash == grant.placement.placement_hash
    bench.clusters["a"].seq -= 1
    bench.begin_push("a")
    bench.stage("a")
    bench.finish_push("a", attempt=2)
    bench.push("b")
    bench.pulls("a", "b")
    bench.reshard(add=("s2",), remove=("s1",))
    bench.new_slave("s2")
    assert (bench.placed(), len(bench.entries("RESHARD"))) == (("s2",), 2)
    train(bench)


def test_the_open_round_ends_first(bench: ReshardBench) -> None:
    bench.slave("s0").hold.add(m.Commit)
    bench.pushes("a", "b")
    bench.reshard(remove=("s0",))
    assert phase(bench) is ReshardPhase.WAITING
    assert not bench.entries("RESHARD")
    bench.slave("s0").release(m.Commit)
    assert bench.placed() == ("s1",)
    assert [entry.kind for entry in bench.journal][-2:] == ["RESHARD_ASKED", "RESHARD"]


def test_an_open_window_closes_with_all_its_pushes_before_blocks_move(bench: ReshardBench) -> None:
    first = bench.push("a")
    bench.reshard(remove=("s0",))
    bench.advance(3.0)
    assert (phase(bench), bench.status().phase) == (ReshardPhase.WAITING, "WINDOW")
    bench.push("b")
    assert bench.verdict("a", first).kind is m.VerdictKind.APPLIED
    assert (bench.placed(), bench.status().tokens) == (("s1",), 400)


def test_a_window_that_a_pause_holds_open_is_emptied(bench: ReshardBench) -> None:
    bench.operate(Pause(m.OperatorRequest("", "maintenance")))
    push = bench.push("a")
    bench.reshard(remove=("s0",))
    bench.advance(1.0)
    assert bench.placed() == ("s1",)
    assert bench.verdict("a", push).kind is m.VerdictKind.ABORTED
    bench.operate(Resume(m.OperatorRequest("")))
    train(bench)


def test_no_push_begins_and_no_round_while_blocks_move_but_pulls_do(bench: ReshardBench) -> None:
    bench.begin_push("a")
    bench.slave("s1").hold.add(m.MoveBlocks)
    bench.reshard(remove=("s0",))
    assert phase(bench) is ReshardPhase.MOVING
    assert "slave s1 has yet to put the new shard together" in bench.status().reshard
    answer = bench.begin_push("b")
    assert isinstance(answer, m.Busy)
    assert "blocks move to other slaves" in answer.sentence
    assert isinstance(bench.pull("b"), m.PullGrant)
    push = bench.clusters["a"].push_id
    bench.stage("a")
    bench.finish_push("a")
    bench.advance(3.0)
    assert bench.status().phase == "IDLE", "the admitted push waits"
    bench.slave("s1").release(m.MoveBlocks)
    assert bench.placed() == ("s1",)
    assert bench.verdict("a", push).kind is m.VerdictKind.ABORTED
    bench.clusters["b"].seq -= 1
    train(bench)


@pytest.mark.parametrize("kind", [m.ListShard, m.MoveBlocks])
def test_a_slave_that_dies_while_blocks_move_leaves_all_as_it_was(bench: ReshardBench, kind: type) -> None:
    bench.slave("s1").hold.add(kind)
    bench.reshard(remove=("s0",))
    bench.slave("s1").hold.clear()
    bench.slave("s1").die()
    assert phase(bench) is ReshardPhase.WAITING
    (abort,) = [command for command in bench.slave("s0").commands if isinstance(command, m.AbortRound)]
    (asked,) = [command for command in bench.slave("s0").commands if isinstance(command, m.ListShard)]
    assert (abort.round, "s1 went away" in abort.reason) == (asked.round, True)
    assert bench.placed() == ("s0", "s1")
    bench.slave("s1").attach()
    bench.advance(2.0)
    assert bench.placed() == ("s1",), "it is tried again once all are here"


def test_late_words_of_a_try_that_was_given_up_are_not_of_the_next_one(bench: ReshardBench) -> None:
    s0, s1 = bench.slave("s0"), bench.slave("s1")
    s1.hold |= {m.ListShard, m.MoveBlocks}
    bench.reshard(remove=("s0",))
    (first,) = [command for command in s1.commands if isinstance(command, m.ListShard)]
    s1.die()
    s1.attach()
    bench.advance(2.0)
    s1.obey(first)
    assert phase(bench) is ReshardPhase.LISTING
    s1.say(m.RoundRefused(first.round, "listshard", FULL))
    assert phase(bench) is ReshardPhase.LISTING
    s1.release(m.ListShard)
    assert phase(bench) is ReshardPhase.MOVING
    (move,) = [command for command in s1.commands if isinstance(command, m.MoveBlocks)]
    s1.obey(replace(move, round=first.round))
    s0.say(m.Prepared(move.round, s0.digest(V2)))
    assert (phase(bench), bench.entries("RESHARD")) == (ReshardPhase.MOVING, []), "s0 is to hold nothing"
    s1.release(m.MoveBlocks)
    assert bench.placed() == ("s1",)


@pytest.mark.parametrize("what", ["list", "move"])
def test_a_refusal_puts_it_off_and_rounds_go_on_meanwhile(bench: ReshardBench, what: str) -> None:
    bench.slave("s1").refuse[what] = FULL
    bench.reshard(remove=("s0",))
    assert "the disk is full; it is tried again in 1 s" in bench.status().reshard
    train(bench)
    tries = [len([c for c in bench.slave("s1").commands if isinstance(c, m.ListShard)])]
    for _ in range(3):
        bench.advance(30.0)
        tries.append(len([c for c in bench.slave("s1").commands if isinstance(c, m.ListShard)]))
    assert tries[-1] - tries[-2] <= 2, "the pause grows, because rounds rest during a try"
    bench.slave("s1").refuse.clear()
    bench.advance(60.0)
    assert bench.placed() == ("s1",)


def test_what_does_not_add_up_is_never_journaled(bench: ReshardBench) -> None:
    bench.slave("s1").digests[V2] = b"something else"
    bench.reshard(remove=("s0",))
    assert "does not have the digest of the lists" in bench.status().reshard
    assert not bench.entries("RESHARD")
    bench.slave("s1").digests.clear()
    bench.advance(2.0)
    assert bench.placed() == ("s1",)


def test_a_list_that_is_not_of_the_committed_version_is_never_used(bench: ReshardBench) -> None:
    bench.content_of[V1] = V0
    bench.reshard(remove=("s0",))
    assert "lists is not version 1:1" in bench.status().reshard
    assert not any(isinstance(command, m.MoveBlocks) for command in bench.slave("s1").commands)


def test_a_wish_is_taken_back_before_the_record(bench: ReshardBench) -> None:
    bench.reshard(add=("s2",))
    bench.slave("s0").hold.add(m.MoveBlocks)
    new = bench.new_slave("s2")
    assert phase(bench) is ReshardPhase.MOVING
    sentence = bench.operate(m.ReshardRequest("", cancel=True)).sentence
    assert "is taken back" in sentence
    assert new.stopped
    assert (phase(bench), bench.status().reshard) == (ReshardPhase.NONE, "")
    bench.slave("s0").hold.clear()
    train(bench)
    assert bench.placed() == ("s0", "s1")


MOMENTS: dict[str, Callable[[ReshardBench], None]] = {
    "before anybody lists": lambda bench: bench.slave("s1").hold.add(m.ListShard),
    "while blocks move": lambda bench: bench.slave("s1").hold.add(m.MoveBlocks),
    "before the record is durable": lambda bench: None,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_master_that_dies_before_the_record_begins_again(bench: ReshardBench, moment: str) -> None:
    MOMENTS[moment](bench)
    bench.reshard(add=("s2",))
    bench.hold_journal = True
    bench.new_slave("s2")
    bench.hold_journal = False
    bench.slave("s1").hold.clear()
    assert not any(slave.configure and slave.configure.load == V2 for slave in bench.slaves), "no slave was informed"
    bench.restart()
    bench.advance(2.0)
    assert bench.placed() == ("s0", "s1", "s2")
    assert bench.status().published == V2
    assert bench.status().tokens == 200


def test_a_master_that_dies_after_the_record_goes_on_with_it(bench: ReshardBench) -> None:
    bench.reshard(add=("s2",), remove=("s0",))
    bench.hold_journal = True
    bench.new_slave("s2")
    bench.hold_journal = False
    (entry,) = [entry for entry in bench.journal if entry.kind == "RESHARD"]
    assert not bench.slave("s0").stopped, "it is not let go before the record is durable"
    bench.restart(entry.snapshot_json)
    assert bench.placed() == ("s1", "s2")
    assert bench.status().published == V2
    refusal = bench.closed[bench.slave("s0").link]
    assert refusal.code is RefusalCode.UNKNOWN_NAME
    bench.slave("s0").alive = False
    bench.join("a")
    bench.join("b")
    bench.pulls("a", "b")
    train(bench)


def test_a_slave_that_dies_after_the_record_loads_its_new_shard(bench: ReshardBench) -> None:
    bench.reshard(add=("s2",))
    bench.hold_journal = True
    bench.new_slave("s2")
    bench.slave("s1").die()
    bench.hold_journal = False
    bench.write_journal(bench.journal[-1])
    assert bench.placed() == ("s0", "s1", "s2")
    assert bench.status().published == V1
    bench.slave("s1").attach()
    assert bench.status().published == V2


def test_a_wish_outlives_the_master_and_a_second_one_waits_for_it(bench: ReshardBench) -> None:
    bench.reshard(add=("s2",))
    with refused_with(RefusalCode.BUSY):
        bench.reshard(remove=("s0",))
    assert "begins between two rounds" in bench.reshard(add=("s2",)), "the same wish again is no other one"
    assert len(bench.entries("RESHARD_ASKED")) == 1
    bench.restart()
    assert "add s2: slave s2 has yet to attach" in bench.status().reshard
    bench.new_slave("s2")
    assert bench.placed() == ("s0", "s1", "s2")
    fresh = ReshardBench()
    fresh.attach_all()
    with refused_with(RefusalCode.CONFIG):
        fresh.reshard(add=("s2",))


@pytest.mark.parametrize(
    ("add", "remove", "code", "why"),
    [
        ((), (), RefusalCode.CONFIG, "name 1 to"),
        (("s0",), (), RefusalCode.CONFIG, "holds blocks already"),
        ((), ("s9",), RefusalCode.UNKNOWN_NAME, "no slave 's9'"),
        ((), ("s0", "s1"), RefusalCode.CONFIG, "a run needs a slave"),
        (("no/name",), (), RefusalCode.CONFIG, "slave id"),
        (tuple(f"x{i}" for i in range(len(LAYOUT.blocks))), (), RefusalCode.CONFIG, "fewer than the"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    bench: ReshardBench, add: tuple[str, ...], remove: tuple[str, ...], code: RefusalCode, why: str
) -> None:
    with refused_with(code, why):
        bench.reshard(add, remove)
    assert not bench.entries("RESHARD_ASKED")


def test_no_slave_gets_more_blocks_than_its_measurements_fit_into_a_message() -> None:
    """All four blocks' are 1600 bytes, those of two 800. How blocks are dealt to an absent slave is not known yet."""
    bench = ReshardBench(settings=m.Settings(max_message_bytes=1000), grace_s=10.0)
    bench.running("a", "b")
    with refused_with(RefusalCode.CONFIG, "answers MEASURE with up to 1600 bytes"):
        bench.reshard(remove=("s1",))
    bench.reshard(add=("s2",), remove=("s0", "s1"))
    bench.new_slave("s2")
    assert phase(bench) is ReshardPhase.WAITING
    assert "answers MEASURE with up to 1600 bytes" in bench.status().reshard
    bench.operate(m.ReshardRequest("", cancel=True))
    bench.reshard(add=("s2",))
    bench.new_slave("s2")
    assert bench.placed() == ("s0", "s1", "s2")


# ---- going back over a RESHARD ----


def test_a_rollback_over_it_restores_the_placement_and_does_it_again(bench: ReshardBench) -> None:
    """The new slave's disk is lost before anybody pulled: what was before is on the others' disks."""
    bench.reshard(add=("s2",))
    bench.new_slave("s2")
    assert bench.status().published == V2
    bench.content_of[Version(2, 1)] = V1  # the name that it gets
    bench.lose_disk("s2")
    (rollback,) = bench.entries("ROLLBACK")
    assert rollback["origin"] == [1, 1]
    bench.advance(3.0)
    assert bench.placed() == ("s0", "s1", "s2"), "the operator wants s2 still, and it is here again"
    assert len(bench.entries("RESHARD")) == 2
    assert bench.status().tokens == 200


def test_a_removed_slave_that_is_started_again_brings_back_what_was_lost(bench: ReshardBench) -> None:
    """The one that stayed lost the new version, not the old one; no cluster is here to give its copy."""
    bench.reshard(remove=("s0",))
    old, kept = bench.slave("s0"), bench.slave("s1")
    bench.forget_stopped()
    bench.clusters.clear()
    bench.restart()
    bench.content_of[Version(2, 1)] = V1  # the name that it gets
    kept.die()
    kept.lose(V2)
    kept.attach()
    assert "start slave s0 again, which older records name" in bench.status().recovery
    bench.slaves.insert(0, old)
    old.stopped = False
    old.attach()
    (rollback,) = bench.entries("ROLLBACK")
    assert rollback["origin"] == [1, 1]
    bench.advance(3.0)
    assert bench.placed() == ("s1",), "the operator wants it away still"
    assert old.stopped
    assert bench.status().tokens == 200


def test_a_cluster_that_stands_on_the_version_before_may_give_its_copy(bench: ReshardBench) -> None:
    """What was moved is lost before anybody pulled it, and the slave that had it before is gone: a and b have it still,
    under its older name."""
    bench.reshard(remove=("s0",))
    bench.forget_stopped()
    assert bench.status().published == V2
    lost = bench.contents["s1", V2]
    bench.lose_disk("s1")
    assert "its directory lacks version 1:2" in bench.status().recovery
    bench.beat("a")
    bench.beat("b")
    assert "cluster a gives its copy of version 1:2" in bench.status().recovery
    assert bench.beat("a").donate == V1
    bench.donate("a", V1, {"s1": lost})
    (rollback,) = bench.entries("ROLLBACK")
    assert (rollback["origin"], rollback["donor"]) == ([1, 2], "a")
    assert bench.status().published == Version(2, 2)
    assert bench.status().tokens == 200


def test_a_journal_from_before_it_waits_for_the_slaves_that_records_name(bench: ReshardBench) -> None:
    before = bench.snapshot
    assert before is not None
    bench.reshard(add=("s2",))
    third = bench.new_slave("s2")
    train(bench)
    bench.slaves.remove(third)
    third.alive = False
    bench.restart(before)
    assert "is also on slave s2, which is not here: start it" in bench.status().recovery
    assert not bench.entries("ADOPT") + bench.entries("ROLLBACK")
    bench.slaves.append(third)
    third.attach()
    assert bench.entries("ADOPT")
    assert bench.placed() == ("s0", "s1", "s2")
    assert bench.status().published == V3
