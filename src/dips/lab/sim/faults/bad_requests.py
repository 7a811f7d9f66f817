"""Faults by requests: ones that no honest cluster sends, repeated old ones, and operators' calls.

None of them may change the state of another process; the invariants check that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.layout import Layout, Parameter
from dips.core.messages import (
    AwaitVerdictRequest,
    BeginPullRequest,
    BeginPushRequest,
    Caller,
    ClusterRequest,
    DataRange,
    DrainRequest,
    EvictRequest,
    ExtendRequest,
    FinishPushRequest,
    HeartbeatRequest,
    Hello,
    JoinRequest,
    LeaseDataRequest,
    LeaveRequest,
    OperatorRequest,
    ReturnDataRequest,
    SlaveHello,
    SlaveMessage,
    StatusRequest,
)
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.wire import Codec
from dips.lab.sim.faults.processes import a_cluster, a_slave, the_master
from dips.lab.sim.faults.world import FaultWorld
from dips.lab.sim.kernel import SimulatedProcess
from dips.master.state.effects import OperatorAction, Pause, Resume, Stop
from dips.master.state.records import PushPhase

HELLO = Hello(1, 1, ("codec-f32",), "bad request")
FOREIGN_LAYOUT = Layout((Parameter("other.w", (7,), "float32", "other"),))


def _caller(world: FaultWorld, **changes: Any) -> Caller | None:
    """An honest cluster's identity, with a part of it replaced."""
    cluster = a_cluster(world)
    if cluster is None or cluster.session is None or cluster.session.shared.terms.incarnation is None:
        return None
    return replace(cluster.session.shared.terms.caller("bad request"), **changes)


def _send(world: FaultWorld, request: ClusterRequest) -> bool:
    master = the_master(world)
    if master is None or master.paused:
        return False
    world.kernel.aside("world", f"bad request {type(request).__name__}")
    master.called_blindly(request)
    return True


def _calls(caller: Caller, world: FaultWorld) -> list[ClusterRequest]:
    """One of each call that changes something."""
    base = world.published or Version(1, 0)
    return [
        BeginPushRequest(caller, 1, base, 0, (), 40, 3),
        FinishPushRequest(caller, 1, 1, ()),
        LeaseDataRequest(caller, 1000, 1),
        ReturnDataRequest(caller, (DataRange(1, 0, 0, 0, 4),)),
        LeaveRequest(caller, "not me"),
        HeartbeatRequest(caller, steps=10**9, base=base),
        BeginPullRequest(caller),
        AwaitVerdictRequest(caller, PushId(ClusterId(caller.name), Incarnation(1, 1), 1), 1.0),
    ]


def _as(world: FaultWorld, caller: Caller | None) -> bool:
    return caller is not None and _send(world, world.kernel.rng.choice(_calls(caller, world)))


def wrong_run_id(world: FaultWorld) -> bool:
    return _as(world, _caller(world, run_id="another-run"))


def old_incarnation(world: FaultWorld) -> bool:
    return _as(world, _caller(world, incarnation=Incarnation(1, 0)))


def old_epoch(world: FaultWorld) -> bool:
    caller = _caller(world)
    return _as(world, replace(caller, epoch=caller.epoch - 1) if caller else None)


def unknown_cluster(world: FaultWorld) -> bool:
    return _as(world, _caller(world, name="nobody"))


def absurd_tokens(world: FaultWorld) -> bool:
    """Push absurd token counts in the name of an honest cluster, whose own push may at most be aborted."""
    caller = _caller(world)
    base = world.published
    if caller is None or base is None:
        return False
    tokens = world.kernel.rng.choice((0, -5, 1 << 62))
    return _send(world, BeginPushRequest(caller, 10**6, base, 0, (), tokens, 3))


def foreign_ranges(world: FaultWorld) -> bool:
    caller = _caller(world)
    base = world.published
    if caller is None or base is None:
        return False
    ranges = (DataRange(world.kernel.rng.randint(1, 9), 0, 0, 0, 4),)
    request = BeginPushRequest(caller, 10**6, base, 0, ranges, 4, 3)
    return _send(world, world.kernel.rng.choice((request, ReturnDataRequest(caller, ranges))))


def wrong_layout(world: FaultWorld) -> bool:
    plan = world.plan
    caller = Caller("", 0, "stranger", None, "bad request")
    layout, claimed = world.kernel.rng.choice(
        ((FOREIGN_LAYOUT, FOREIGN_LAYOUT.layout_hash), (plan.layout, b"not its hash"))
    )
    if world.disk.epoch == 0 or world.published is None:
        return False
    return _send(world, JoinRequest(caller, HELLO, layout, claimed, plan.data))


def replayed_request(world: FaultWorld) -> bool:
    """An earlier request arrives once more."""
    honest = [r for r in world.requests if not isinstance(r, JoinRequest | LeaveRequest)]
    return bool(honest) and _send(world, world.kernel.rng.choice(honest))


def repeated_begin_push(world: FaultWorld) -> bool:
    """The open push is begun once more while it is sent: what was sent for the previous attempt is late."""
    for cluster in world.clusters.values():
        session = cluster.session
        if session is not None and session.pushing.open is not None and session.pushing.open.ticket is not None:
            push = session.pushing.open
            caller, work = session.shared.terms.caller("bad request"), push.work
            request = BeginPushRequest(
                caller, push.id.seq, push.base, push.fence, work.ranges, work.tokens, work.steps, donates=push.donates
            )
            return _send(world, request)
    return False


def repeated_welcome(world: FaultWorld) -> bool:
    master = the_master(world)
    return master is not None and not master.paused and master.welcome_again()


def returned_in_its_name(world: FaultWorld) -> bool:
    """Another process returns the data that a cluster trains on: its push cannot count, and it must still go on."""
    cluster = a_cluster(world)
    if cluster is None or cluster.session is None or cluster.session.shared.terms.incarnation is None:
        return False
    work = cluster.session.shared.work
    ranges = work.pending.ranges or work.held
    return bool(ranges) and _send(world, ReturnDataRequest(cluster.session.shared.terms.caller("bad request"), ranges))


def finished_behind_its_back(world: FaultWorld) -> bool:
    """A cluster gets no answer from slaves while its last chunks arrive, and another process finishes its push. Counted
    when that happens."""

    def watch(role: str, process: SimulatedProcess, kind: str, fields: Mapping[str, Any]) -> None:
        if (role, kind) != ("slave", "staged"):
            return
        world.watchers.remove(watch)
        name = str(fields["push"]).partition("/")[0]
        pairs = [(slave, name) for slave in world.slaves]
        world.net.cut_off(pairs)
        world.kernel.after(8.0, None, world.net.mend, pairs)
        for tries in range(35):
            world.kernel.after(0.2 * (tries + 1), None, _finish_in_its_name, world, name)

    world.watchers.append(watch)
    return True


def _finish_in_its_name(world: FaultWorld, name: str) -> None:
    master, session = the_master(world), world.clusters[name].session
    member = master.state.shared.members.get(name) if master is not None and master.state is not None else None
    if world.healed or session is None or member is None or member.push is None:
        return
    push = member.push
    if push.phase.now is PushPhase.STAGED and push.id.incarnation == session.shared.terms.incarnation:
        world.fired("finished_behind_its_back")
        digests = tuple(sorted(push.digest_of_slave.items()))
        caller = session.shared.terms.caller("bad request")
        _send(world, FinishPushRequest(caller, push.id.seq, push.attempt, digests))


def used_up_numbers(world: FaultWorld) -> bool:
    """Another process asks, in a cluster's name, for the verdict of its future pushes: their numbers become void."""
    cluster = a_cluster(world)
    caller = _caller(world)
    if cluster is None or caller is None or caller.incarnation is None or cluster.session is None:
        return False
    push = PushId(ClusterId(caller.name), caller.incarnation, world.clusters[caller.name].next_seq + 1)
    return _send(world, AwaitVerdictRequest(caller, push, 1.0))


def replayed_word_of_slave(world: FaultWorld) -> bool:
    """A slave's old message arrives on its stream again, also one of an earlier incarnation."""
    slave, master = a_slave(world), the_master(world)
    if slave is None or master is None or master.paused or not slave.said:
        return False
    link, message = world.kernel.rng.choice(slave.said)
    if isinstance(message.body, SlaveHello):
        return False
    master.slave_said(link, message)
    return True


def stranger_among_slaves(world: FaultWorld) -> bool:
    """A hello under a name that is not of this run, and one that lies about its run."""
    master = the_master(world)
    if master is None or master.paused or world.published is None:
        return False
    body = SlaveHello(HELLO, "tcp://stranger:1", 1 << 20, 0)
    run_id = world.kernel.rng.choice((world.run_id, "another-run"))
    master.hello_of_stranger(SlaveMessage(Caller(run_id, 0, "stranger", None, "bad request"), body))
    return True


def garbage_chunks(world: FaultWorld) -> bool:
    """Chunks of another run, of no push, of a block that is not there, with a checksum that is none."""
    slave = a_slave(world)
    if slave is None or slave.paused:
        return False
    rng = world.kernel.rng
    push = PushId(ClusterId("a"), Incarnation(1, 1), rng.randint(1, 3))
    for run_id, block, offset in (("another-run", 0, 0), (world.run_id, 99, 0), (world.run_id, 0, 7)):
        header = DataHeader(run_id, 99, DataOp.PUT_CHUNK, 1, push, 1, None, block, offset, 1024, Codec.F32, 5)
        slave.asked(header, 1, lambda *_: None)
    return True


# ---- operators ----


def _operate(world: FaultWorld, action: OperatorAction) -> bool:
    master = the_master(world)
    if master is None or master.paused:
        return False
    master.operate(action)
    return True


def operator_pauses(world: FaultWorld) -> bool:
    request = OperatorRequest("", "maintenance")
    world.kernel.after(world.kernel.rng.uniform(1.0, 6.0), None, _operate, world, Resume(request))
    return _operate(world, Pause(request))


def operator_drains(world: FaultWorld) -> bool:
    cluster = a_cluster(world)
    return cluster is not None and _operate(world, DrainRequest("", cluster.name, "maintenance"))


def operator_evicts(world: FaultWorld) -> bool:
    cluster = a_cluster(world)
    return cluster is not None and _operate(world, EvictRequest("", cluster.name, "suspicious"))


def operator_looks(world: FaultWorld) -> bool:
    """Status, and calls with another run's id and unknown names: none may change anything."""
    actions = (StatusRequest(), StatusRequest("another-run"), EvictRequest("", "nobody"), DrainRequest("no", "a"))
    return all([_operate(world, action) for action in actions])


def operator_takes_an_end_back(world: FaultWorld) -> bool:
    """A stop by mistake: some pushes are aborted and some clusters leave, and then the run goes on."""
    if not _operate(world, Stop(OperatorRequest("", "by mistake"))):
        return False
    later_s = world.kernel.rng.uniform(0.0, 3.0)
    world.kernel.after(later_s, None, world.operate_until_answered, lambda: ExtendRequest("", reason="it was one"))
    return True


def operator_stops_early(world: FaultWorld) -> bool:
    """A stop at any time: the run must end in order."""
    if world.kernel.now_s < world.plan.faults_for_s * 0.6:
        return False
    return _operate(world, Stop(OperatorRequest("", "early")))


ARMED: frozenset[str] = frozenset({"finished_behind_its_back"})

OPERATORS: Mapping[str, Callable[[FaultWorld], bool]] = {
    "operator_pauses": operator_pauses,
    "operator_drains": operator_drains,
    "operator_evicts": operator_evicts,
    "operator_looks": operator_looks,
    "operator_takes_an_end_back": operator_takes_an_end_back,
    "operator_stops_early": operator_stops_early,
}

FAULTS: Mapping[str, Callable[[FaultWorld], bool]] = {
    "wrong_run_id": wrong_run_id,
    "old_incarnation": old_incarnation,
    "old_epoch": old_epoch,
    "unknown_cluster": unknown_cluster,
    "absurd_tokens": absurd_tokens,
    "foreign_ranges": foreign_ranges,
    "wrong_layout": wrong_layout,
    "replayed_request": replayed_request,
    "repeated_begin_push": repeated_begin_push,
    "used_up_numbers": used_up_numbers,
    "repeated_welcome": repeated_welcome,
    "returned_in_its_name": returned_in_its_name,
    "finished_behind_its_back": finished_behind_its_back,
    "replayed_word_of_slave": replayed_word_of_slave,
    "stranger_among_slaves": stranger_among_slaves,
    "garbage_chunks": garbage_chunks,
    **OPERATORS,
}
