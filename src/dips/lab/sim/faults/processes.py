"""Faults of processes: killed, stopped for a while, slow, started twice, or computing nonsense; and of single ranks, in
clusters of several: one is late, cut off, dies alone, or goes on after its cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dips.lab.sim.content import KIND_NAMES
from dips.lab.sim.faults.world import Begin, Faults, FaultWorld
from dips.lab.sim.hosts.cluster import ClusterHost
from dips.lab.sim.hosts.master import MasterHost
from dips.lab.sim.hosts.ranks import Follower
from dips.lab.sim.hosts.slave import SlaveHost
from dips.lab.sim.kernel import SimulatedProcess
from dips.master.state.effects import OperatorAction
from dips.master.state.records import RoundPhase

FAULTS, OF_RANKS = Faults(), Faults()

DOWN_S = (0.2, 1.0, 4.0, 12.0)
SLOW_FACTOR = 6.0
TWIN_LIVES_S = 12.0
TWIN_GENERATION = 1000
"""So that a second process under a slave's name has other data endpoints than the first."""


def a_slave(world: FaultWorld) -> SlaveHost | None:
    """The slave of the moment, else any live one."""
    alive = [slave for slave in world.slaves.values() if slave.alive]
    if world.struck in alive and world.kernel.rng.random() < 0.7:
        return next(slave for slave in alive if slave is world.struck)
    return world.kernel.rng.choice(alive) if alive else None


def a_cluster(world: FaultWorld) -> ClusterHost | None:
    """The cluster of the moment, else any live one; if all faults are of one cluster, that one."""
    only = world.plan.sabotaged
    alive = [cluster for cluster in world.clusters.values() if cluster.alive and only in ("", cluster.name)]
    if world.struck in alive and world.kernel.rng.random() < 0.7:
        return next(cluster for cluster in alive if cluster is world.struck)
    return world.kernel.rng.choice(alive) if alive else None


def the_master(world: FaultWorld) -> MasterHost | None:
    master = world.masters[0]
    return master if master.alive else None


def running_master(world: FaultWorld) -> MasterHost | None:
    master = world.masters[0]
    return master if master.running else None


def operate(world: FaultWorld, action: OperatorAction) -> bool:
    """An operator's request to the master; returns whether it can take one now."""
    master = running_master(world)
    if master is not None:
        master.operate(action)
    return master is not None


def a_slave_to_lose(world: FaultWorld) -> SlaveHost | None:
    """One whose disk may be lost."""
    slave = a_slave(world)
    return slave if slave is not None and world.may_lose([slave.name]) else None


# ---- killed ----


@FAULTS.add()
def crash_all_slaves(world: FaultWorld) -> bool:
    return all([crash(world, slave) for slave in world.slaves.values() if slave.alive])


@FAULTS.add()
def crash_all_clusters(world: FaultWorld) -> bool:
    return all([crash(world, cluster) for cluster in world.clusters.values() if cluster.alive])


@FAULTS.add()
def power_failure(world: FaultWorld) -> bool:
    """Kill all processes at once."""
    master = crash(world, the_master(world))
    slaves, clusters = crash_all_slaves(world), crash_all_clusters(world)
    return master or slaves or clusters


@FAULTS.of(a_slave)
def crash_loop_of_slave(world: FaultWorld, slave: SlaveHost) -> bool:
    """A slave that dies repeatedly soon after each start."""
    for _ in range(4):
        world.kernel.after(world.kernel.rng.uniform(0.5, 6.0), None, crash, world, slave, 0.3)
    return crash(world, slave, 0.3)


def crash(world: FaultWorld, host: MasterHost | SlaveHost | ClusterHost | None, down_s: float | None = None) -> bool:
    if host is None or not host.alive or world.healed:
        return False
    host.kill()
    world.kernel.note(host.name, "killed")
    world.restart(host, world.kernel.rng.choice(DOWN_S) if down_s is None else down_s)
    return True


# ---- stopped for a while ----


def pause(world: FaultWorld, host: SimulatedProcess | None, for_s: float) -> bool:
    if host is None or not host.running or world.healed:
        return False
    host.pause()
    world.kernel.note(host.name, f"stopped for {for_s:.1f} s")
    world.kernel.after(for_s, None, resume, host, host.generation)
    return True


def resume(host: SimulatedProcess, generation: int) -> None:
    if host.generation == generation:
        host.resume()


SUSPENDED_S = (2.0, 20.0, 600.0, 7200.0)
"""Suspensions: a machine's snapshot, a live migration, a power outage of ten minutes, a laptop that was closed."""


@FAULTS.add()
def suspend_all(world: FaultWorld) -> bool:
    """Suspend all processes at once, and resume them in another order; no time-out is the fault of a single one."""
    rng = world.kernel.rng
    hosts = [host for host in _hosts(world) if host.running]
    if len(hosts) < 2 or world.rolling:
        return False
    for_s = rng.choice(SUSPENDED_S)
    world.faults_until_s += for_s
    world.suspended_until_s = world.kernel.now_s + for_s
    for host in hosts:
        host.pause()
        world.kernel.after(for_s + rng.uniform(0.0, 1.0), None, resume, host, host.generation)
    world.kernel.note("world", f"everybody stands still for {for_s:.0f} s")
    return True


@FAULTS.add(armed=True)
def stutter(world: FaultWorld) -> bool:
    """Suspend processes for moments, several at once, repeatedly."""
    rng, hosts = world.kernel.rng, _hosts(world)
    for _ in range(3 * len(hosts)):
        world.kernel.after(rng.uniform(0.0, 8.0), None, _falter, world, rng.choice(hosts), rng.expovariate(1.0))
    return True


def _falter(world: FaultWorld, host: SimulatedProcess, for_s: float) -> None:
    if pause(world, host, for_s):
        world.fired("stutter")


def _hosts(world: FaultWorld) -> list[SimulatedProcess]:
    return [world.masters[0], *world.slaves.values(), *world.clusters.values(), world.reader]


# ---- killed within a step ----

WITHOUT_TIME = (RoundPhase.SEALED, RoundPhase.JUDGE, RoundPhase.PUBLISH)
"""The master goes through these phases within one step: no other fault can happen in them."""


@FAULTS.add(armed=True)
def crash_master_in_step(world: FaultWorld) -> bool:
    """Kill the master between two effects of its next step, or as soon as its tape shows a phase, also one without
    duration."""
    master, rng = the_master(world), world.kernel.rng
    if master is None:
        return False
    if rng.random() < 0.3:
        master.dies_after = rng.randint(1, 25)
        return True
    aimed_at = rng.choice((*RoundPhase, *WITHOUT_TIME, *WITHOUT_TIME)).value

    def strike(process: SimulatedProcess, fields: Mapping[str, Any]) -> None:
        process.dies_after = 1

    world.once("master", "round", aimed_at, strike)
    return True


@FAULTS.of(a_cluster)
def cluster_leaves(world: FaultWorld, cluster: ClusterHost) -> bool:
    """Ask a cluster to stop at any time; it comes back when all is healed."""
    if cluster.paused:
        return False
    cluster.stop_soon("asked to stop")
    return True


# ---- slow, doubled, wrong ----


@FAULTS.of(a_cluster)
def slow_cluster(world: FaultWorld, cluster: ClusterHost) -> None:
    cluster.step_s *= SLOW_FACTOR
    world.kernel.after(8.0, None, _as_fast_as_before, cluster)


def _as_fast_as_before(cluster: ClusterHost) -> None:
    cluster.step_s /= SLOW_FACTOR


@FAULTS.of(a_cluster)
def same_cluster_twice(world: FaultWorld, cluster: ClusterHost) -> bool:
    """Start a second process under a live cluster's name."""
    if world.twins:
        return False
    twin = ClusterHost(world, cluster.name, cluster.step_s)
    world.twins.append(twin)
    twin.boot()
    world.kernel.after(10.0, None, twin.kill)
    return True


@FAULTS.of(a_slave_to_lose)
def same_slave_twice(world: FaultWorld, slave: SlaveHost) -> bool:
    """Start a second process under a live slave's name, with a directory of its own, as if made elsewhere. Half of the
    time the first one dies, for so long that its name is free and the second takes over."""
    if world.twins:
        return False
    twin = SlaveHost(world, slave.name)
    twin.generation = TWIN_GENERATION
    world.twins.append(twin)
    twin.boot()
    if world.kernel.rng.random() < 0.5:
        crash(world, slave, TWIN_LIVES_S)
    world.kernel.after(TWIN_LIVES_S, None, twin.end)
    return True


@FAULTS.of(the_master)
def two_masters(world: FaultWorld, master: MasterHost) -> bool:
    """Start a second master on the same journal; peers reach either one."""
    if len(world.masters) > 1:
        return False
    world.kernel.after(12.0, None, end_second, world, begin_second(world))
    return True


def begin_second(world: FaultWorld) -> MasterHost:
    """Start a second master on the same journal."""
    other = MasterHost(world, "master2", world.disk, world.masters[0].at)
    world.masters.append(other)
    other.boot()
    return other


def end_second(world: FaultWorld, other: MasterHost) -> None:
    """Kill the second master if it is still alive."""
    if other.alive:
        other.kill()
    if other in world.masters:
        world.masters.remove(other)


def _bad_push(kind: int) -> Begin:
    def begin(world: FaultWorld) -> bool:
        cluster = a_cluster(world)
        if cluster is None or cluster.session is None or cluster.session.shared.base is None:
            return False
        cluster.next_push_kind = kind
        return True

    return begin


@FAULTS.of(a_slave, armed=True)
def overflow_in_prepare(world: FaultWorld, slave: SlaveHost) -> None:
    """Make the merge of finite pushes overflow in one element."""
    slave.overflow = True


@FAULTS.of(a_slave, armed=True)
def crash_slave_in_step(world: FaultWorld, slave: SlaveHost) -> None:
    slave.dies_after = world.kernel.rng.randint(1, 8)


@FAULTS.of(a_cluster, armed=True)
def crash_cluster_in_step(world: FaultWorld, cluster: ClusterHost) -> None:
    cluster.dies_after = world.kernel.rng.randint(1, 12)


# ---- single ranks ----

LATE_S = (0.5, 2.0, 6.0, 15.0)
BEHIND_S = (0.3, 3.0)
CUT_S = (0.5, 3.0, 12.0)
ORPHANED_S = (2.0, 6.0)
"""How long the follower sleeps while its cluster is killed and joins again."""
AWAKE_S = 3.0
"""And how long it then goes on."""


Found = tuple[ClusterHost, Follower]


def _a_follower(world: FaultWorld) -> Found | None:
    cluster = a_cluster(world)
    if cluster is None or cluster.ranks is None:
        return None
    alive = [follower for follower in cluster.ranks.followers if follower.running]
    return (cluster, world.kernel.rng.choice(alive)) if alive else None


@OF_RANKS.of(_a_follower)
def late_rank(world: FaultWorld, found: Found) -> bool:
    """Stop one follower's process for a while: its part of a transfer is late, and so is all that it hears."""
    return pause(world, found[1], world.kernel.rng.choice(LATE_S))


@OF_RANKS.of(_a_follower, armed=True)
def deaf_rank(world: FaultWorld, found: Found) -> None:
    """One follower stops at the begin of the next push, whose attempt fails at the leader; it wakes up, and sends its
    part of that attempt before it hears of the next one.
    """
    found[1].falls_behind_s = world.kernel.rng.uniform(*BEHIND_S)


@OF_RANKS.add()
def cut_rank_from_slave(world: FaultWorld) -> bool:
    """Cut one follower off from a slave, which the other ranks reach."""
    found, slave = _a_follower(world), a_slave(world)
    if found is None or slave is None:
        return False
    name = found[1].name
    pairs = [pair for pair in ((name, slave.name), (slave.name, name)) if not world.net.is_cut(*pair)]
    world.net.cut_off(pairs)
    world.kernel.after(world.kernel.rng.choice(CUT_S), None, world.net.mend, pairs)
    return bool(pairs)


@OF_RANKS.of(_a_follower)
def crash_rank(world: FaultWorld, found: Found) -> bool:
    """Kill one follower: the others notice when they meet, and the cluster ends."""
    cluster, follower = found
    if cluster.ranks is None or world.healed:
        return False
    cluster.ranks.kill(follower, cluster.lost_rank)
    return True


@OF_RANKS.of(_a_follower)
def orphaned_rank(world: FaultWorld, found: Found) -> bool:
    """Stop one follower in the middle of a transfer and kill its cluster; it wakes up after that has joined again, and
    goes on with the old transfer for a while.
    """
    cluster, follower = found
    if cluster.ranks is None or not cluster.ranks.pushing or world.healed:
        return False
    asleep_s = world.kernel.rng.uniform(*ORPHANED_S)
    cluster.followers_survive_s = asleep_s + AWAKE_S
    pause(world, follower, asleep_s)
    return crash(world, cluster, 0.2)


FAULTS.update(
    {
        "crash_master": lambda world: crash(world, the_master(world)),
        "crash_slave": lambda world: crash(world, a_slave(world)),
        "crash_cluster": lambda world: crash(world, a_cluster(world)),
        "pause_master_short": lambda world: pause(
            world, the_master(world), 0.3 * world.plan.config.settings.heartbeat_s
        ),
        "pause_master_long": lambda world: pause(world, the_master(world), 1.5 * world.plan.config.evict_after_s),
        "pause_slave_short": lambda world: pause(world, a_slave(world), 0.8 * world.plan.config.settings.heartbeat_s),
        "pause_slave_long": lambda world: pause(world, a_slave(world), 1.5 * world.plan.config.evict_after_s),
        "pause_cluster_short": lambda world: pause(
            world, a_cluster(world), 0.8 * world.plan.config.settings.heartbeat_s
        ),
        "pause_cluster_long": lambda world: pause(world, a_cluster(world), 1.5 * world.plan.config.evict_after_s),
        **{name: _bad_push(kind) for kind, name in KIND_NAMES.items()},
    }
)
FAULTS.armed |= set(KIND_NAMES.values())
