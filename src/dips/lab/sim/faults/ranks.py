"""Faults of single ranks, in clusters of several: one is late, cut off, dies alone, or goes on after its cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dips.lab.sim.faults.processes import a_cluster, a_slave, crash, pause
from dips.lab.sim.faults.world import FaultWorld
from dips.lab.sim.hosts.cluster import ClusterHost
from dips.lab.sim.hosts.ranks import Follower

LATE_S = (0.5, 2.0, 6.0, 15.0)
BEHIND_S = (0.3, 3.0)
CUT_S = (0.5, 3.0, 12.0)
ORPHANED_S = (2.0, 6.0)
"""How long the follower sleeps while its cluster is killed and joins again."""
AWAKE_S = 3.0
"""And how long it then goes on."""


def _a_follower(world: FaultWorld) -> tuple[ClusterHost, Follower] | None:
    cluster = a_cluster(world)
    if cluster is None or cluster.ranks is None:
        return None
    alive = [follower for follower in cluster.ranks.followers if follower.running]
    return (cluster, world.kernel.rng.choice(alive)) if alive else None


def late_rank(world: FaultWorld) -> bool:
    """Stop one follower's process for a while: its part of a transfer is late, and so is all that it hears."""
    found = _a_follower(world)
    return found is not None and pause(world, found[1], world.kernel.rng.choice(LATE_S))


def deaf_rank(world: FaultWorld) -> bool:
    """One follower stops at the begin of the next push, whose attempt fails at the leader; it wakes up, and sends its
    part of that attempt before it hears of the next one.
    """
    found = _a_follower(world)
    if found is None:
        return False
    found[1].falls_behind_s = world.kernel.rng.uniform(*BEHIND_S)
    return True


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


def crash_rank(world: FaultWorld) -> bool:
    """Kill one follower: the others notice when they meet, and the cluster ends."""
    found = _a_follower(world)
    if found is None or found[0].ranks is None or world.healed:
        return False
    found[0].ranks.kill(found[1], found[0].lost_rank)
    return True


def orphaned_rank(world: FaultWorld) -> bool:
    """Stop one follower in the middle of a transfer and kill its cluster; it wakes up after that has joined again, and
    goes on with the old transfer for a while.
    """
    found = _a_follower(world)
    if found is None or found[0].ranks is None or not found[0].ranks.pushing or world.healed:
        return False
    cluster, follower = found
    asleep_s = world.kernel.rng.uniform(*ORPHANED_S)
    cluster.followers_survive_s = asleep_s + AWAKE_S
    pause(world, follower, asleep_s)
    return crash(world, cluster, 0.2)


ARMED: frozenset[str] = frozenset({"deaf_rank"})

FAULTS: Mapping[str, Callable[[FaultWorld], bool]] = {
    "late_rank": late_rank,
    "deaf_rank": deaf_rank,
    "cut_rank_from_slave": cut_rank_from_slave,
    "crash_rank": crash_rank,
    "orphaned_rank": orphaned_rank,
}
