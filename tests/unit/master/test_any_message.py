"""Whatever a peer can put on the wire, right in most fields or in none: the master goes on and can send its answers."""

from __future__ import annotations

import dataclasses
import math
import os
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.master_bench import HELLO, LAYOUT, LEASED, Bench
from support.wire_values import values_of

from dips.core import messages as m
from dips.core.ids import RoundId, Version
from dips.core.net.codec_protobuf import encode
from dips.master.state.effects import ClusterCall, SlaveSaid, Tick

PHASES = {
    "IDLE": None, "MEASURE": m.Measure, "PREPARE": m.Prepare, "COMMIT": m.Commit, "GATHERING": None, "DONATING": None,
}  # fmt: skip


def in_phase(phase: str) -> Bench:
    """Cluster a's push is in the round, b's has a ticket; slave s0 does nothing from now on but talk."""
    bench = Bench(plan=LEASED, settings=m.Settings(dynamic_local_steps=True), grace_s=0.0).running("a", "b", "c")
    ranges = {name: bench.lease(name, 100) for name in ("a", "b")}
    bench.begin_push("b", 100, ranges["b"])
    held = PHASES[phase]
    if held is not None:
        bench.slaves[0].hold.add(held)
        bench.push("a", 100, ranges["a"])
    if phase == "GATHERING":
        bench.slaves[1].die()
    if phase == "DONATING":
        bench.beat("a")
    if phase in ("GATHERING", "DONATING"):
        bench.slaves[0].come_back_without()
        assert bench.state.shared.recovery.phase.now.value == phase
    bench.slaves[0].hold |= set(typing.get_args(m.CommandBody))
    return bench


def calls(bench: Bench) -> list[Any]:
    """A call of each kind that would be right, or nearly."""
    a, b = bench.caller("a"), bench.caller("b")
    push = bench.clusters["b"].push_id
    base, fence = bench.clusters["b"].base, bench.clusters["b"].fence
    (lease,) = bench.lease("c", 100)
    digests = tuple((slave.name, slave.digest(push)) for slave in bench.slaves)
    return [
        m.JoinRequest(a, HELLO, LAYOUT, LAYOUT.layout_hash, LEASED, 0.0, (lease,), b"", (m.TensorDigest("w", 1),)),
        m.HeartbeatRequest(bench.caller("c"), steps_per_s=1.0),
        m.BeginPushRequest(bench.caller("c"), 5, base, fence, (lease,), 100, 3),
        m.BeginPushRequest(b, push.seq, base, fence, (), 100, 3), m.FinishPushRequest(b, push.seq, 1, digests),
        m.AwaitVerdictRequest(b, push, 1.0), m.BeginPullRequest(a), m.FinishPullRequest(a, 1),
        m.LeaseDataRequest(a, 100, 1), m.ReturnDataRequest(bench.caller("c"), (lease,)), m.LeaveRequest(a, ""),
    ]  # fmt: skip


def words(bench: Bench) -> list[Any]:
    """What slave s0 could rightly say, or nearly."""
    push, state = bench.clusters["b"].push_id, bench.state.shared.round
    refusal = m.Refusal(1, "no")  # type: ignore[arg-type]
    bodies: list[Any] = [
        m.SlaveHello(HELLO, "tcp://127.0.0.1:1", 1 << 30, 0), m.Promised(bench.epoch), m.Ready(Version(1, 0), b""),
        m.SlaveBeat(progress=(m.StagingProgress(push, 1, 7),)), m.Staged(push, 1, b""), m.ConfigureRefused(refusal),
        m.CommitRecord(Version(1, 0), RoundId(1, 1), b"{}"),
    ]  # fmt: skip
    if state.id is not None:
        bodies += [
            m.Measured(state.id, ()),
            m.Prepared(state.id, b"x"),
            m.RoundRefused(state.id, "measure", refusal),
            m.Flipped(state.id, Version(1, 1)),
        ]
    return bodies


def nearly(data: st.DataObject, right: Any) -> Any:
    """The same value with some of its fields replaced by anything that the wire can carry."""
    anything = data.draw(values_of(type(right)))
    fields = [field.name for field in dataclasses.fields(right) if field.name != "caller"]
    taken = data.draw(st.sets(st.sampled_from(fields), max_size=3)) if fields else set()
    return dataclasses.replace(right, **{name: getattr(anything, name) for name in taken})


def sendable(bench: Bench) -> None:
    for answer in [*bench.replies.values(), *bench.refusals.values(), *bench.closed.values()]:
        encode(answer)
    encode(bench.status())


@pytest.mark.parametrize("phase", PHASES)
@settings(max_examples=int(os.environ.get("DIPS_TEST_MESSAGES", "15")))
@given(data=st.data())
def test_no_message_ends_the_master(phase: str, data: st.DataObject) -> None:
    bench = in_phase(phase)
    slave = bench.slaves[0]
    said = m.Caller(bench.run_id, bench.epoch, slave.name, slave.incarnation)
    for number in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()):
            request = nearly(data, data.draw(st.sampled_from(calls(bench))))
            if data.draw(st.integers(0, 9)) == 0:
                request = dataclasses.replace(request, caller=data.draw(values_of(m.Caller)))
            bench.event(ClusterCall(10_000 + number, request))
            bench.call(m.FinishPullRequest(bench.caller("c"), 1))  # answers with what follows from c's beats
        else:
            body = nearly(data, data.draw(st.sampled_from(words(bench))))
            bench.event(SlaveSaid(slave.link, m.SlaveMessage(said, body)))
        bench.event(Tick())
        sendable(bench)
        deadline_s = bench.state.next_deadline_s()
        assert deadline_s is None or math.isfinite(deadline_s)
    for name in ("a", "b"):
        bench.silent.add(name)
    bench.advance(12.0)
    sendable(bench)
    assert bench.halted is None or bench.halted.exit_code == 6, "only a newer epoch, promised by a slave, ends it"
