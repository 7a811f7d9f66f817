"""Slaves attach, restart and lose things; the run waits, goes on, and never mixes versions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.master_bench import HELLO, Bench, refused_with

from dips.core import messages as m
from dips.core.errors import RefusalCode
from dips.core.ids import Incarnation, RoundId, Version
from dips.master.state.effects import SlaveLinkDown, SlaveSaid


def hello(bench: Bench, name: str, link: int = 99, run_id: str = "test", **changes: object) -> None:
    fields: dict[str, object] = {
        "hello": HELLO,
        "data_endpoint": "tcp://127.0.0.1:1",
        "memory_bytes": 1 << 30,
        "promised_epoch": 0,
    }
    body = m.SlaveHello(**(fields | changes))  # type: ignore[arg-type]
    bench.event(SlaveSaid(link, m.SlaveMessage(m.Caller(run_id, 0, name), body)))


def test_slave_promises_this_epoch_before_it_is_configured() -> None:
    bench = Bench()
    slave = bench.slaves[0]
    slave.hold.add(m.Welcome)
    bench.attach_all()
    slave.say(m.Promised(5))
    with refused_with(RefusalCode.BUSY, "1 of 2"):
        bench.join("a")
    slave.release(m.Welcome)
    assert slave.promised == 1
    reply = bench.join("a")
    assert (reply.seed, reply.incarnation) == (True, Incarnation(1, 1))


@pytest.mark.parametrize(("name", "changes", "code"), [
    ("Bad Name", {}, RefusalCode.MALFORMED), ("s9", {"run_id": "other"}, RefusalCode.RUN_ID),
    ("s9", {"hello": m.Hello(5, 6)}, RefusalCode.PROTOCOL_VERSION),
    ("s9", {"data_endpoint": "ipc:///etc/passwd"}, RefusalCode.MALFORMED), ("s9", {}, RefusalCode.UNKNOWN_NAME),
])  # fmt: skip
def test_bad_hello_closes_the_link_with_the_reason(name: str, changes: dict[str, object], code: RefusalCode) -> None:
    bench = Bench().running("a")
    hello(bench, name, **changes)  # type: ignore[arg-type]
    assert bench.closed[99].code is code
    bench.push("a")
    assert bench.status().published == Version(1, 1)


@pytest.mark.parametrize("rebuild", [False, True])
@pytest.mark.parametrize("promised", [1, 7])
def test_epoch_that_another_life_promised_is_not_used_again(promised: int, rebuild: bool) -> None:
    """A master that lost its journal begins with epoch 1 again; rounds of both lives must not share names."""
    bench = Bench(rebuild=rebuild)
    hello(bench, "s0", promised_epoch=promised)
    if rebuild:
        assert bench.halted is None
        assert bench.began_again is not None
        assert bench.began_again.at_least == promised + 1
        assert bench.closed[99].code is RefusalCode.STALE_EPOCH
    else:
        assert bench.began_again is None
        assert bench.halted is not None
        assert (bench.halted.exit_code, "another master" in bench.halted.sentence) == (6, True)


def test_slave_that_this_life_welcomed_may_have_promised_its_epoch() -> None:
    bench = Bench()
    hello(bench, "s0")
    bench.event(SlaveLinkDown(99))
    hello(bench, "s0", promised_epoch=1)
    assert bench.halted is None


@pytest.mark.parametrize("rebuild", [False, True])
@pytest.mark.parametrize("what", ["epoch", "timeline", "number", "round"])
def test_hello_with_numbers_beyond_any_run_is_refused(rebuild: bool, what: str) -> None:
    bench, much = Bench(rebuild=rebuild), 1 << 63
    version = Version(much if what == "timeline" else 1, much if what == "number" else 0)
    info = m.SnapshotInfo(version, RoundId(much if what == "round" else 1, 1), b"", b"", b"", True)
    hello(bench, "s0", promised_epoch=much if what == "epoch" else 0, snapshots=(info,))
    assert bench.closed[99].code is RefusalCode.MALFORMED
    assert (bench.halted, bench.began_again) == (None, None)


def test_messages_of_an_older_life_or_in_another_slaves_name_are_ignored(bench: Bench) -> None:
    slave = bench.slaves[0]
    slave.hold.add(m.Measure)
    bench.push("a")
    current = slave.incarnation
    assert current is not None
    slave.incarnation = replace(current, n=current.n + 1)
    slave.release(m.Measure)
    slave.incarnation, slave.name = current, "s1"
    slave.release(m.Measure)
    assert bench.status().phase == "MEASURE"
    slave.name = "s0"
    slave.release(m.Measure)
    assert bench.status().published == Version(1, 1)


@pytest.mark.parametrize("kind", [m.Measure, m.Prepare])
def test_slave_lost_before_commit_aborts_the_round_and_pushes_that_lost_staging(kind: type) -> None:
    bench = Bench().running("a", "b")
    bench.slaves[0].hold.add(kind)
    bench.pushes("a", "b")
    bench.slaves[0].die()
    for name in ("a", "b"):
        verdict = bench.verdict(name)
        assert verdict.kind is m.VerdictKind.ABORTED
        assert "s0" in verdict.reason
    assert bench.status().published == Version(1, 0)
    assert bench.status().waiting_for == "slave s0 is away"
    bench.slaves[0].hold.clear()
    bench.slaves[0].attach()
    bench.pushes("a", "b")
    assert bench.status().published == Version(1, 1)
    assert bench.status().rounds_aborted == 1


def test_slave_lost_after_commit_flips_from_its_shadow_when_it_comes_back(bench: Bench) -> None:
    slave = bench.slaves[0]
    slave.hold.add(m.Commit)
    bench.push("a")
    slave.die()
    token = bench.await_verdict("a")
    assert bench.is_open(token)
    assert bench.status().published == Version(1, 0)
    assert not slave.snapshots[Version(1, 1)].committed
    slave.attach()
    configure = [c for c in slave.commands if isinstance(c, m.Configure)][-1]
    assert configure.load == Version(1, 1)
    assert bench.status().published == Version(1, 1)
    assert bench.result(token).answer.kind is m.VerdictKind.APPLIED
    assert slave.snapshots[Version(1, 1)].committed


@pytest.mark.parametrize(
    ("changes", "words"), [({"digest": b"other"}, "lacks version 1:0"), ({"commit_hash": b"other"}, "another history")]
)
def test_slave_with_a_torn_snapshot_or_another_history_is_not_taken(changes: dict[str, bytes], words: str) -> None:
    bench = Bench().running("a")
    slave = bench.slaves[0]
    slave.die()
    slave.snapshots[Version(1, 0)] = replace(slave.snapshots[Version(1, 0)], **changes)  # type: ignore[arg-type]
    slave.attach()
    assert words in bench.status().waiting_for


def test_what_a_slave_does_in_its_start_is_what_the_run_waits_for() -> None:
    bench = Bench()
    slave = bench.slaves[0]
    bench.attach_all()
    slave.hold.add(m.Configure)
    slave.say(m.SlaveBeat(note="compiles kernels, 12 of 60"))
    bench.join("a")
    assert bench.status().waiting_for == "slave s0 compiles kernels, 12 of 60"
    slave.say(m.SlaveBeat())
    assert "loads its snapshot" in bench.status().waiting_for
    slave.release(m.Configure)
    bench.seed("a")
    assert bench.status().waiting_for == ""


def test_slave_with_a_directory_of_a_run_that_the_master_does_not_know() -> None:
    old = Bench().running("a")
    bench = Bench()
    bench.slaves[0].snapshots = old.slaves[0].snapshots
    bench.attach_all()
    with refused_with(RefusalCode.BUSY):
        bench.join("a")
    assert "dips master --rebuild" in bench.status().waiting_for
    bench.slaves[0].come_back_without()
    assert bench.join("a").seed


def test_silent_slave_is_given_up_and_may_attach_again(bench: Bench) -> None:
    slave = bench.slaves[0]
    slave.alive = False
    bench.advance(11.0)
    assert bench.closed[slave.link].code is RefusalCode.FENCED
    assert bench.status().waiting_for == "slave s0 is away"
    slave.attach()
    bench.push("a")
    assert bench.status().published == Version(1, 1)


def test_fewer_blocks_than_slaves_is_refused() -> None:
    bench = Bench(n_slaves=5).attach_all()
    with refused_with(RefusalCode.CONFIG):
        bench.join("a")


def test_second_process_of_the_same_slave_takes_over_and_is_not_forgotten_before_blocks_are_placed() -> None:
    bench = Bench().attach_all()
    first = bench.slaves[0].link
    bench.slaves[0].attach()
    assert bench.closed[first].code is RefusalCode.FENCED
    assert bench.join("a").seed
    bench.seed("a")
    assert bench.status().published == Version(1, 0)


def test_stream_has_one_hello() -> None:
    bench = Bench()
    hello(bench, "s0", link=7)
    hello(bench, "s1", link=7)
    assert bench.closed[7].code is RefusalCode.MALFORMED
    assert [slave.slave_id for slave in bench.status().slaves] == ["s0"]


def test_slave_whose_disk_failed_for_a_while_is_ready_when_it_says_so(bench: Bench) -> None:
    slave = bench.slaves[0]
    refused = m.ConfigureRefused(m.Refusal(RefusalCode.DISK, "no space left", 1.0))
    slave.die()
    slave.hold.add(m.Configure)
    slave.attach()
    slave.say(refused)
    assert "no space left" in bench.status().waiting_for
    slave.release(m.Configure)
    assert bench.status().waiting_for == ""
    slave.say(refused)  # a late word
    bench.push("a")
    assert bench.status().published == Version(1, 1)


def test_run_whose_blocks_are_placed_needs_no_slave_beside_those_that_hold_them() -> None:
    bench = Bench(n_slaves=2).running("a")
    for slave in bench.slaves:
        slave.alive = False
    bench.config = replace(bench.config, n_slaves=3)
    bench.start_master()
    bench.attach_all()
    hello(bench, "s2")
    assert bench.closed[99].code is RefusalCode.UNKNOWN_NAME, "no block would be left for it"
    bench.back("a")
    bench.push("a")
    assert bench.status().published == Version(1, 1)
