"""The scenarios whose transcripts stand in tests/golden: each a short run of the real master among scripted peers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from support.master_bench import LEASED
from support.scribe import Scribe

from dips.core.errors import Refused
from dips.core.ids import Version
from dips.core.messages import (
    Commit,
    DrainRequest,
    EvictRequest,
    LeaveRequest,
    OperatorRequest,
    Prepare,
    ReturnDataRequest,
    Settings,
    SlaveBeat,
)
from dips.master.state.events import Pause, Resume, Stop

Scenario = Callable[[], Scribe]

V0, V1, V2 = (Version(1, v) for v in range(3))
SCENARIOS: dict[str, Scenario] = {}


def scenario(play: Scenario) -> Scenario:
    SCENARIOS[play.__name__] = play
    return play


def standing(*names: str, **config: object) -> Scribe:
    """The seed is published and pulled; its transcript is that of `seed` and left out."""
    bench = Scribe(**config)
    bench.running(*names)
    for name in names:
        bench.beat(name)
    bench.lines.clear()
    return bench


def refused(call: Callable[[], object]) -> None:
    """The refusal stands in the transcript."""
    with contextlib.suppress(Refused):
        call()


@scenario
def seed() -> Scribe:
    bench = Scribe()
    bench.say("two slaves attach; the first cluster seeds the run, the second pulls")
    bench.running("a", "b")
    return bench


@scenario
def round_of_two() -> Scribe:
    bench = standing("a", "b")
    bench.say("both clusters push; the window closes when both are in")
    for name in ("a", "b"):
        bench.push(name)
    for name in ("a", "b"):
        bench.verdict(name)
        bench.pull(name)
    return bench


@scenario
def late_push_joins_the_next_window() -> Scribe:
    bench = standing("a", "b", "c")
    bench.slaves[0].hold.add(Prepare)
    bench.say("a and b push, c does not; the grace ends; c's push comes while the round is prepared")
    bench.push("a")
    bench.push("b")
    bench.advance(2.0)
    bench.push("c")
    bench.say("the round commits; the window of c's push opens at once")
    bench.slaves[0].release(Prepare)
    bench.advance(2.0)
    return bench


@scenario
def excluded_push() -> Scribe:
    bench = standing("a", "b")
    bench.nonfinite["b"] = 3
    bench.say("b's push is not finite: it is excluded, a's is merged")
    bench.push("a")
    bench.push("b")
    bench.verdict("b")
    return bench


@scenario
def void_round() -> Scribe:
    bench = standing("a")
    bench.nonfinite["a"] = 1
    bench.say("the only push is excluded: no version changes, the fence does")
    bench.push("a")
    bench.verdict("a")
    bench.say("so the same base is stale")
    bench.begin_push("a")
    return bench


@scenario
def abort_by_slave_loss() -> Scribe:
    bench = standing("a")
    bench.slaves[1].hold.add(Prepare)
    bench.push("a")
    bench.say("a slave dies in PREPARE: the round is aborted, and so is the push, which lost its staging")
    bench.slaves[1].die()
    bench.verdict("a")
    bench.slaves[1].hold.clear()
    bench.slaves[1].attach()
    bench.say("pushed again under a new number")
    bench.push("a")
    bench.advance(3.0)
    return bench


@scenario
def commit_driven_forward_after_restart() -> Scribe:
    bench = standing("a")
    for slave in bench.slaves:
        slave.hold.add(Commit)
    bench.push("a")
    bench.say("the COMMIT is journaled, no slave has flipped, the master dies")
    for slave in bench.slaves:
        slave.hold.clear()
    bench.restart()
    bench.say("a joins again and is told")
    bench.join("a", previous=bench.clusters["a"].join.incarnation)
    return bench


@scenario
def stale_fence() -> Scribe:
    bench = standing("a", "b")
    bench.push("a")
    bench.advance(3.0)
    bench.say("a pushes again from the same base, although its push was counted")
    bench.begin_push("a")
    return bench


@scenario
def undecided() -> Scribe:
    bench = standing("a", "b")
    bench.push("a")
    bench.say("a begins another push while one is undecided")
    bench.begin_push("a")
    return bench


@scenario
def rejoin_keeps_work() -> Scribe:
    bench = standing("a", plan=LEASED)
    ranges = bench.lease("a", 100)
    bench.begin_push("a", 100, ranges)
    bench.say("a is evicted in mid-transfer; the push is aborted, the lease is kept")
    bench.operate(EvictRequest("", "a", "as a test"))
    bench.say("it joins again with what it holds and pushes it from the same base")
    base, fence = bench.clusters["a"].base, bench.clusters["a"].fence
    bench.join("a", previous=bench.clusters["a"].join.incarnation, held=ranges)
    bench.clusters["a"].base, bench.clusters["a"].fence = base, fence
    bench.push("a", 100, ranges)
    return bench


@scenario
def rollback() -> Scribe:
    bench = standing("a")
    bench.push("a")
    bench.pull("a")
    bench.say("a slave's disk comes back without the newest version: the run goes back by one")
    bench.slaves[0].come_back_without(V1)
    bench.say("what a pushes on the lost version is stale")
    bench.begin_push("a")
    return bench


@scenario
def donation() -> Scribe:
    bench = standing("a")
    bench.say("a slave's disk comes back empty: no version is left on all; a is asked for its copy")
    bench.slaves[0].come_back_without()
    bench.beat("a")
    bench.donate("a", V0)
    return bench


@scenario
def adopt() -> Scribe:
    bench = standing("a")
    old = bench.snapshot
    bench.push("a")
    bench.say("the master comes back with an older journal than the slaves' newest commit")
    bench.restart(old)
    return bench


@scenario
def rebuild() -> Scribe:
    bench = standing("a", rebuild=True)
    bench.push("a")
    bench.say("the master comes back with no journal, told to rebuild; the epoch was used before")
    for slave in bench.slaves:
        slave.alive = False
    bench.snapshot, bench.epoch = None, 0
    bench.start_master()
    with contextlib.suppress(Refused):
        bench.slaves[0].attach()
    bench.say("the process begins anew with a newer epoch")
    assert bench.began_again is not None
    bench.epoch = bench.began_again.at_least - 1
    bench.restart()
    return bench


@scenario
def eviction() -> Scribe:
    bench = standing("a", "b")
    bench.push("a")
    bench.say("b falls silent: after five beats it is evicted, and the window waits no longer for it")
    bench.silent.add("b")
    bench.advance(12.0)
    return bench


@scenario
def lease_and_return() -> Scribe:
    bench = standing("a", plan=LEASED)
    ranges = bench.lease("a", 200)
    bench.say("a gives back one of two ranges, and may not push it any more")
    bench.ask(ReturnDataRequest(bench.caller("a"), ranges[1:]))
    refused(lambda: bench.begin_push("a", 200, ranges))
    bench.push("a", 100, ranges[:1])
    return bench


@scenario
def drain() -> Scribe:
    bench = standing("a", "b")
    bench.push("a")
    bench.say("a is drained: its open push is decided, it is told to stop, pushes the steps made since, and leaves")
    bench.operate(DrainRequest("", "a", "maintenance"))
    bench.push("b")
    bench.pull("a")
    bench.beat("a")
    bench.push("a")
    bench.advance(1.5)
    bench.pull("a")
    bench.beat("a")
    bench.ask(LeaveRequest(bench.caller("a"), "drained"))
    return bench


@scenario
def pause_outlives_the_master() -> Scribe:
    bench = standing("a")
    bench.say("paused: a push is admitted, no round begins, not even after a restart")
    bench.operate(Pause(OperatorRequest("", "the operator looks")))
    bench.push("a")
    bench.advance(3.0)
    bench.restart()
    bench.join("a", previous=bench.clusters["a"].join.incarnation)
    bench.pull("a")
    bench.push("a")
    bench.advance(3.0)
    bench.say("resumed")
    bench.operate(Resume(OperatorRequest("")))
    return bench


@scenario
def stop() -> Scribe:
    bench = standing("a")
    bench.push("a")
    bench.say("the operator stops the run: the last version is pulled, the cluster leaves, everybody ends")
    bench.operate(Stop(OperatorRequest("", "enough")))
    bench.pull("a")
    bench.beat("a")
    bench.ask(LeaveRequest(bench.caller("a"), "the run has ended"))
    while bench.halted is None:
        bench.advance(0.5)
    return bench


@scenario
def async_lag() -> Scribe:
    bench = standing("a", settings=Settings(durability="async"), async_lag_versions=1)
    bench.say("in async mode slaves write versions later: rounds wait when a disk is too far behind")
    for _ in range(3):
        bench.push("a")
        bench.advance(2.0)
        if bench.verdict_is_out("a"):
            bench.pull("a")
    bench.say("the disks catch up, and the round begins")
    for slave in bench.slaves:
        slave.say(SlaveBeat(durable=V2))
    return bench


@scenario
def newer_epoch_halts() -> Scribe:
    bench = standing("a")
    bench.say("a slave has promised a newer epoch: another master serves this run")
    bench.slaves[0].die()
    bench.slaves[0].promised = 7
    bench.slaves[0].attach()
    return bench
