"""Faults by requests: ones that no honest cluster sends, repeated old ones, and operators' calls.

None of them may change the state of another process; the invariants check that.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from dips.lab.sim.faults.processes import a_cluster, a_slave, operate, running_master, the_master
from dips.lab.sim.faults.world import Faults, FaultWorld
from dips.lab.sim.hosts.cluster import ClusterHost
from dips.lab.sim.hosts.master import MasterHost
from dips.lab.sim.hosts.slave import SlaveHost
from dips.lab.sim.kernel import SimulatedProcess
from dips.master.state.effects import Pause, Resume, Stop
from dips.master.state.records import PushPhase

FAULTS, OPERATORS = Faults(), Faults()

HELLO = Hello(1, 1, ("codec-f32",), "bad request")
FOREIGN_LAYOUT = Layout((Parameter("other.w", (7,), "float32", "other"),))


def _caller(world: FaultWorld, **changes: Any) -> Caller | None:
    """An honest cluster's identity, with a part of it replaced."""
    cluster = a_cluster(world)
    if cluster is None or cluster.session is None or cluster.session.shared.terms.incarnation is None:
        return None
    return replace(cluster.session.shared.terms.caller("bad request"), **changes)


def _send(world: FaultWorld, request: ClusterRequest) -> bool:
    master = running_master(world)
    if master is None:
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


@FAULTS.add()
def wrong_run_id(world: FaultWorld) -> bool:
    return _as(world, _caller(world, run_id="another-run"))


@FAULTS.add()
def old_incarnation(world: FaultWorld) -> bool:
    return _as(world, _caller(world, incarnation=Incarnation(1, 0)))


@FAULTS.of(_caller)
def old_epoch(world: FaultWorld, caller: Caller) -> bool:
    return _as(world, replace(caller, epoch=caller.epoch - 1))


@FAULTS.add()
def unknown_cluster(world: FaultWorld) -> bool:
    return _as(world, _caller(world, name="nobody"))


@FAULTS.of(_caller)
def absurd_tokens(world: FaultWorld, caller: Caller) -> bool:
    """Push absurd token counts in the name of an honest cluster, whose own push may at most be aborted."""
    if (base := world.published) is None:
        return False
    tokens = world.kernel.rng.choice((0, -5, 1 << 62))
    return _send(world, BeginPushRequest(caller, 10**6, base, 0, (), tokens, 3))


@FAULTS.of(_caller)
def foreign_ranges(world: FaultWorld, caller: Caller) -> bool:
    if (base := world.published) is None:
        return False
    ranges = (DataRange(world.kernel.rng.randint(1, 9), 0, 0, 0, 4),)
    request = BeginPushRequest(caller, 10**6, base, 0, ranges, 4, 3)
    return _send(world, world.kernel.rng.choice((request, ReturnDataRequest(caller, ranges))))


@FAULTS.add()
def wrong_layout(world: FaultWorld) -> bool:
    plan = world.plan
    caller = Caller("", 0, "stranger", None, "bad request")
    layout, claimed = world.kernel.rng.choice(
        ((FOREIGN_LAYOUT, FOREIGN_LAYOUT.layout_hash), (plan.layout, b"not its hash"))
    )
    if world.disk.epoch == 0 or world.published is None:
        return False
    return _send(world, JoinRequest(caller, HELLO, layout, claimed, plan.data))


@FAULTS.add()
def replayed_request(world: FaultWorld) -> bool:
    """An earlier request arrives once more."""
    honest = [r for r in world.requests if not isinstance(r, JoinRequest | LeaveRequest)]
    return bool(honest) and _send(world, world.kernel.rng.choice(honest))


@FAULTS.add()
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


@FAULTS.of(running_master)
def repeated_welcome(world: FaultWorld, master: MasterHost) -> bool:
    return master.welcome_again()


@FAULTS.of(a_cluster)
def returned_in_its_name(world: FaultWorld, cluster: ClusterHost) -> bool:
    """Another process returns the data that a cluster trains on: its push cannot count, and it must still go on."""
    if cluster.session is None or cluster.session.shared.terms.incarnation is None:
        return False
    work = cluster.session.shared.work
    ranges = work.pending.ranges or work.held
    return bool(ranges) and _send(world, ReturnDataRequest(cluster.session.shared.terms.caller("bad request"), ranges))


@FAULTS.add(armed=True)
def finished_behind_its_back(world: FaultWorld) -> bool:
    """A cluster gets no answer from slaves while its last chunks arrive, and another process finishes its push. Counted
    when that happens."""

    def strike(process: SimulatedProcess, fields: Mapping[str, Any]) -> None:
        name = str(fields["push"]).partition("/")[0]
        pairs = [(slave, name) for slave in world.slaves]
        world.net.cut_off(pairs)
        world.kernel.after(8.0, None, world.net.mend, pairs)
        for tries in range(35):
            world.kernel.after(0.2 * (tries + 1), None, _finish_in_its_name, world, name)

    world.once("slave", "staged", "", strike)
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


@FAULTS.of(a_cluster)
def used_up_numbers(world: FaultWorld, cluster: ClusterHost) -> bool:
    """Another process asks, in a cluster's name, for the verdict of its future pushes: their numbers become void."""
    caller = _caller(world)
    if caller is None or caller.incarnation is None or cluster.session is None:
        return False
    push = PushId(ClusterId(caller.name), caller.incarnation, world.clusters[caller.name].next_seq + 1)
    return _send(world, AwaitVerdictRequest(caller, push, 1.0))


@FAULTS.of(a_slave)
def replayed_word_of_slave(world: FaultWorld, slave: SlaveHost) -> bool:
    """A slave's old message arrives on its stream again, also one of an earlier incarnation."""
    master = running_master(world)
    if master is None or not slave.said:
        return False
    link, message = world.kernel.rng.choice(slave.said)
    if isinstance(message.body, SlaveHello):
        return False
    master.slave_said(link, message)
    return True


@FAULTS.of(running_master)
def stranger_among_slaves(world: FaultWorld, master: MasterHost) -> bool:
    """A hello under a name that is not of this run, and one that lies about its run."""
    if world.published is None:
        return False
    body = SlaveHello(HELLO, "tcp://stranger:1", 1 << 20, 0)
    run_id = world.kernel.rng.choice((world.run_id, "another-run"))
    master.hello_of_stranger(SlaveMessage(Caller(run_id, 0, "stranger", None, "bad request"), body))
    return True


@FAULTS.of(a_slave)
def garbage_chunks(world: FaultWorld, slave: SlaveHost) -> bool:
    """Chunks of another run, of no push, of a block that is not there, with a checksum that is none."""
    if slave.paused:
        return False
    rng = world.kernel.rng
    push = PushId(ClusterId("a"), Incarnation(1, 1), rng.randint(1, 3))
    for run_id, block, offset in (("another-run", 0, 0), (world.run_id, 99, 0), (world.run_id, 0, 7)):
        header = DataHeader(run_id, 99, DataOp.PUT_CHUNK, 1, push, 1, None, block, offset, 1024, Codec.F32, 5)
        slave.asked(header, 1, lambda *_: None)
    return True


# ---- operators ----


@OPERATORS.add()
def operator_pauses(world: FaultWorld) -> bool:
    request = OperatorRequest("", "maintenance")
    world.kernel.after(world.kernel.rng.uniform(1.0, 6.0), None, operate, world, Resume(request))
    return operate(world, Pause(request))


@OPERATORS.of(a_cluster)
def operator_drains(world: FaultWorld, cluster: ClusterHost) -> bool:
    return operate(world, DrainRequest("", cluster.name, "maintenance"))


@OPERATORS.of(a_cluster)
def operator_evicts(world: FaultWorld, cluster: ClusterHost) -> bool:
    return operate(world, EvictRequest("", cluster.name, "suspicious"))


@OPERATORS.add()
def operator_looks(world: FaultWorld) -> bool:
    """Status, and calls with another run's id and unknown names: none may change anything."""
    actions = (StatusRequest(), StatusRequest("another-run"), EvictRequest("", "nobody"), DrainRequest("no", "a"))
    return all([operate(world, action) for action in actions])


@OPERATORS.add()
def operator_takes_an_end_back(world: FaultWorld) -> bool:
    """A stop by mistake: some pushes are aborted and some clusters leave, and then the run goes on."""
    if not operate(world, Stop(OperatorRequest("", "by mistake"))):
        return False
    later_s = world.kernel.rng.uniform(0.0, 3.0)
    world.kernel.after(later_s, None, world.operate_until_answered, lambda: ExtendRequest("", reason="it was one"))
    return True


@OPERATORS.add()
def operator_stops_early(world: FaultWorld) -> bool:
    """A stop at any time: the run must end in order."""
    if world.kernel.now_s < world.plan.faults_for_s * 0.6:
        return False
    return operate(world, Stop(OperatorRequest("", "early")))
