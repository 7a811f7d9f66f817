"""Faults by operators of a running run: clusters that keep joining and leaving, a rolling restart of every process, a
second master that takes over from one that was only suspended, and slaves that are added and removed.
"""

from __future__ import annotations

from collections.abc import Iterator

from dips.core.ids import SlaveId
from dips.core.messages import ReshardRequest
from dips.lab.sim.faults.processes import begin_second, end_second, operate, resume, running_master, the_master
from dips.lab.sim.faults.world import Faults, FaultWorld
from dips.lab.sim.hosts.cluster import ClusterHost
from dips.lab.sim.hosts.master import MasterHost
from dips.lab.sim.hosts.slave import SlaveHost
from dips.master.state.records import RecoveryPhase

FAULTS = Faults()

Host = MasterHost | SlaveHost | ClusterHost

CHURN_EVERY_S = 1.2
CHURN_S = (8.0, 20.0, 60.0)
AWAY_S = (0.2, 1.0, 4.0, 10.0)
LOOK_S = 0.25
PATIENCE_S = 15.0
"""How long a rolling restart waits for one process before it goes on with the next in any case."""
MOST_SLAVES = 8


# ---- clusters that come and go ----


@FAULTS.add()
def churn(world: FaultWorld) -> bool:
    """For a while, clusters join and leave at short intervals. Each one is counted as well."""
    if world.churning:
        return False
    world.churning = True
    _come_or_go(world, world.kernel.now_s + world.kernel.rng.choice(CHURN_S))
    return True


def _come_or_go(world: FaultWorld, until_s: float) -> None:
    rng = world.kernel.rng
    if world.healed or world.ended or world.kernel.now_s >= until_s:
        world.churning = False
        return
    away = [cluster for cluster in world.clusters.values() if not cluster.alive]
    here = [cluster for cluster in world.clusters.values() if cluster.running]
    if away and (rng.random() < 0.5 or len(here) < 2):
        _come(world, rng.choice(away))
    elif here:
        _go(world, rng.choice(here))
    world.kernel.after(rng.expovariate(1 / CHURN_EVERY_S), None, _come_or_go, world, until_s)


def _come(world: FaultWorld, cluster: ClusterHost) -> None:
    world.kernel.note(cluster.name, "is started")
    world.fired("churn_joined" if cluster.generation else "churn_newcomer")
    cluster.boot()


def _go(world: FaultWorld, cluster: ClusterHost) -> None:
    """Let a cluster leave in order, or kill it."""
    rng = world.kernel.rng
    if rng.random() < 0.6:
        world.fired("churn_left")
        cluster.stop_soon("asked to stop")
    else:
        world.fired("churn_killed")
        cluster.kill()
        world.kernel.note(cluster.name, "killed")
        world.restart(cluster, rng.choice(AWAY_S))


# ---- every process in turn ----


@FAULTS.add(armed=True)
def rolling_restart(world: FaultWorld) -> bool:
    """Each process is restarted once the one before it is back. Counted when the last one is.

    Not while all processes are suspended: then no operator can restart them.
    """
    if world.rolling or world.kernel.now_s < world.suspended_until_s:
        return False
    world.rolling = True
    rng = world.kernel.rng
    groups: list[list[Host]] = [[world.masters[0]], list(world.slaves.values()), list(world.clusters.values())]
    rng.shuffle(groups)
    _next_in_turn(world, iter([host for group in groups for host in group if host.alive]))
    return True


def _next_in_turn(world: FaultWorld, turn: Iterator[Host]) -> None:
    if world.healed or world.ended:
        return
    host = next(turn, None)
    if host is None:
        world.rolling = False
        world.fired("rolling_restart")
        return
    generation = host.generation
    world.kernel.note(host.name, "is restarted in its turn")
    if isinstance(host, ClusterHost) and host.running and world.kernel.rng.random() < 0.5:
        host.stop_soon("restarted in its turn")
    elif host.alive:
        host.kill()
    _wait_until_back(world, turn, host, generation, world.kernel.now_s + PATIENCE_S)


def _wait_until_back(world: FaultWorld, turn: Iterator[Host], host: Host, generation: int, until_s: float) -> None:
    if world.healed or world.ended:
        return
    if not host.alive:
        host.boot()
    if world.kernel.now_s >= until_s or (host.generation != generation and _is_back(world, host)):
        world.kernel.after(LOOK_S, None, _next_in_turn, world, turn)
    else:
        world.kernel.after(LOOK_S, None, _wait_until_back, world, turn, host, generation, until_s)


def _is_back(world: FaultWorld, host: Host) -> bool:
    """Whether the process works again, as `dips status` would show."""
    master = world.newest_master()
    if master is None or master.state is None:
        return False
    run = master.state.shared
    match host:
        case MasterHost():
            return run.all_slaves_ready() and run.recovery.phase.now is RecoveryPhase.NONE
        case SlaveHost():
            return any(slave.id == host.name for slave in run.ready_slaves())
        case ClusterHost():
            member, session = run.members.get(host.name), host.session
            known = session.shared.terms.incarnation if session is not None else None
            return member is not None and member.incarnation == known


# ---- a second master ----


@FAULTS.of(running_master, armed=True)
def failover_from_a_sleeper(world: FaultWorld, master: MasterHost) -> bool:
    """The master is suspended, another one takes over on the same journal, and then the first one resumes."""
    if len(world.masters) > 1:
        return False
    rng, config = world.kernel.rng, world.plan.config
    master.pause()
    world.kernel.after(rng.uniform(0.2, 2.0), None, _take_over, world, master, master.generation)
    world.kernel.after(rng.uniform(2.0, 2.0 * config.evict_after_s), None, resume, master, master.generation)
    return True


def _take_over(world: FaultWorld, sleeper: MasterHost, generation: int) -> None:
    if (
        world.healed
        or world.ended
        or len(world.masters) > 1
        or (sleeper.generation, sleeper.paused) != (generation, True)
    ):
        return
    world.fired("failover_from_a_sleeper")
    other = begin_second(world)
    world.kernel.after(world.kernel.rng.uniform(4.0, 15.0), None, end_second, world, other)


# ---- slaves that are added and removed ----


@FAULTS.add()
def reshard_add(world: FaultWorld) -> bool:
    """Add a new slave, or one that was removed before and still has its old directory."""
    idle = [name for name in world.slaves if name not in _placed(world)]
    fresh = SlaveId(f"s{len(world.slaves)}")
    name = SlaveId(world.kernel.rng.choice(idle)) if idle and world.kernel.rng.random() < 0.5 else fresh
    if len(world.slaves) >= MOST_SLAVES and name == fresh:
        return False
    if not _ask(world, ReshardRequest("", add=(name,), reason="more room")):
        return False
    if name == fresh:
        host = world.slaves[name] = SlaveHost(world, name)
        world.kernel.after(world.kernel.rng.uniform(0.1, 3.0), None, world.boot_if_dead, host)
    return True


@FAULTS.add()
def reshard_remove(world: FaultWorld) -> bool:
    """Remove a slave that holds blocks."""
    placed = _placed(world)
    if len(placed) < 2:
        return False
    name = SlaveId(world.kernel.rng.choice(placed))
    return _ask(world, ReshardRequest("", remove=(name,), reason="less room"))


@FAULTS.add()
def reshard_replace(world: FaultWorld) -> bool:
    """Replace one slave by another."""
    placed, fresh = _placed(world), SlaveId(f"s{len(world.slaves)}")
    if not placed or len(world.slaves) >= MOST_SLAVES:
        return False
    old = SlaveId(world.kernel.rng.choice(placed))
    if not _ask(world, ReshardRequest("", add=(fresh,), remove=(old,), reason="a new host")):
        return False
    host = world.slaves[fresh] = SlaveHost(world, fresh)
    world.kernel.after(world.kernel.rng.uniform(0.1, 1.0), None, world.boot_if_dead, host)
    return True


@FAULTS.add()
def reshard_taken_back(world: FaultWorld) -> bool:
    """Request a RESHARD and cancel it a moment later; before the record it has not begun."""
    if not reshard_remove(world):
        return False
    world.kernel.after(world.kernel.rng.uniform(0.0, 2.0), None, operate, world, ReshardRequest("", cancel=True))
    return True


def _ask(world: FaultWorld, request: ReshardRequest) -> bool:
    """Ask the master; returns whether it accepted: it refuses while another one is under way, or with fewer blocks than
    slaves."""
    master = running_master(world)
    if master is None or master.state is None or master.state.shared.ledger.reshard is not None:
        return False
    master.operate(request)
    state = master.state
    return state is not None and state.shared.ledger.reshard is not None


def _placed(world: FaultWorld) -> list[str]:
    master = the_master(world)
    placement = master.state.shared.ledger.placement if master is not None and master.state is not None else None
    return list(placement.slaves) if placement is not None else []


CHURNED: tuple[str, ...] = ("churn_joined", "churn_newcomer", "churn_left", "churn_killed")
"""Events of a churn; a newcomer is a cluster that was never there before."""
