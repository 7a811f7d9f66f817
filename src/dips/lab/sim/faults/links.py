"""Faults of links: cut in both directions, in one, or in a pattern; slow; streams reset; bad conditions for
datagrams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dips.lab.sim.faults.processes import a_cluster, a_slave
from dips.lab.sim.faults.world import Begin, Faults, FaultWorld
from dips.lab.sim.hosts.cluster import ClusterHost
from dips.lab.sim.hosts.slave import SlaveHost

FAULTS, MESSAGES = Faults(), Faults()

CUT_S = (0.5, 3.0, 9.0, 25.0)
WEATHER_S = 6.0

Pair = tuple[str, str]


def _both(a: str, b: str) -> list[Pair]:
    return [(a, b), (b, a)]


def _cut(world: FaultWorld, pairs: list[Pair], for_s: float | None = None) -> bool:
    pairs = [pair for pair in pairs if pair not in world.net.cut]
    if not pairs or world.healed:
        return False
    world.kernel.note("world", "cut " + ", ".join(f"{a}>{b}" for a, b in pairs))
    world.net.cut_off(pairs)
    world.kernel.after(world.kernel.rng.choice(CUT_S) if for_s is None else for_s, None, _mend, world, pairs)
    return True


def _cut_as(world: FaultWorld, kind: str, pairs: list[Pair], for_s: float) -> None:
    """Make one of several cuts of a fault; each cut that is really made is counted."""
    if _cut(world, pairs, for_s):
        world.fired(kind)


def _mend(world: FaultWorld, pairs: list[Pair]) -> None:
    world.kernel.note("world", "mended " + ", ".join(f"{a}>{b}" for a, b in pairs))
    world.net.mend(pairs)


@FAULTS.of(a_cluster)
def cut_cluster_from_master(world: FaultWorld, cluster: ClusterHost) -> bool:
    return _cut(world, _both(cluster.name, world.masters[0].at))


@FAULTS.of(a_slave)
def cut_slave_from_master(world: FaultWorld, slave: SlaveHost) -> bool:
    return _cut(world, _both(slave.name, world.masters[0].at))


@FAULTS.add()
def cut_cluster_from_slave(world: FaultWorld) -> bool:
    cluster, slave = a_cluster(world), a_slave(world)
    return cluster is not None and slave is not None and _cut(world, _both(cluster.name, slave.name))


@FAULTS.add()
def cut_one_way(world: FaultWorld) -> bool:
    """Cut a link in one direction only."""
    cluster, slave = a_cluster(world), a_slave(world)
    if cluster is None or slave is None:
        return False
    master = world.masters[0].at
    a, b = world.kernel.rng.choice(((cluster.name, master), (slave.name, master), (cluster.name, slave.name)))
    return _cut(world, [world.kernel.rng.choice(((a, b), (b, a)))])


@FAULTS.add()
def isolate_master(world: FaultWorld) -> bool:
    names = [*world.slaves, *world.clusters]
    return _cut(world, [pair for name in names for pair in _both(name, world.masters[0].at)])


@FAULTS.of(a_slave)
def isolate_slave(world: FaultWorld, slave: SlaveHost) -> bool:
    return _cut(world, [pair for name in (world.masters[0].at, *world.clusters) for pair in _both(name, slave.name)])


@FAULTS.add(armed=True)
def swizzle(world: FaultWorld) -> bool:
    """Cut hosts off one after another, and reconnect them in another order."""
    rng, names = world.kernel.rng, [*world.slaves, *world.clusters]
    for name in rng.sample(names, k=rng.randint(1, len(names))):
        for_s = rng.uniform(2.0, 10.0)
        pairs = _both(name, world.masters[0].at)
        world.kernel.after(rng.uniform(0.0, 4.0), None, _cut_as, world, "swizzle", pairs, for_s)
    return True


@FAULTS.add(armed=True)
def swizzle_pairs(world: FaultWorld) -> bool:
    """Cut any links, also of the data flow, each direction by itself, and heal them in another order."""
    rng = world.kernel.rng
    known = _all_pairs(world)
    pairs = rng.sample(known, k=min(len(known), rng.randint(2, 12)))
    cut_by_s = rng.uniform(0.5, 4.0)
    for number, pair in enumerate(pairs):
        at_s = cut_by_s * number / len(pairs)
        for_s = cut_by_s - at_s + rng.uniform(0.0, 9.0)
        world.kernel.after(at_s, None, _cut_as, world, "swizzle_pairs", [pair], for_s)
    return True


@FAULTS.add(armed=True)
def flapping_link(world: FaultWorld) -> bool:
    """Cut and heal one link repeatedly, each time for long enough to begin something."""
    rng = world.kernel.rng
    a, b = rng.choice(_all_pairs(world))
    at_s = 0.0
    for _ in range(8):
        world.kernel.after(at_s, None, _cut_as, world, "flapping_link", _both(a, b), rng.uniform(0.05, 0.8))
        at_s += rng.uniform(0.3, 1.5)
    return True


def _all_pairs(world: FaultWorld) -> list[Pair]:
    """All pairs of processes that communicate, each direction by itself."""
    alive = [name for name, cluster in world.clusters.items() if cluster.alive] or list(world.clusters)
    to_master = [pair for name in (*world.slaves, *alive) for pair in _both(name, world.masters[0].at)]
    return to_master + [pair for slave in world.slaves for name in alive for pair in _both(name, slave)]


@FAULTS.of(a_cluster)
def slow_links(world: FaultWorld, cluster: ClusterHost) -> None:
    """A cluster behind a link fifty times as slow."""
    pairs = [pair for name in (world.masters[0].at, *world.slaves) for pair in _both(name, cluster.name)]
    for pair in pairs:
        world.net.slow[pair] = 50.0
    world.kernel.after(10.0, None, lambda: [world.net.slow.pop(pair, None) for pair in pairs])


@FAULTS.of(a_slave)
def reset_stream(world: FaultWorld, slave: SlaveHost) -> bool:
    if not slave.linked:
        return False
    slave.reset_stream()
    return True


@FAULTS.add(armed=True)
def reconnect_storm(world: FaultWorld) -> bool:
    """Reset every stream repeatedly."""
    for slave in world.slaves.values():
        for _ in range(3):
            world.kernel.after(world.kernel.rng.uniform(0.0, 3.0), None, _reset, world, slave)
    return True


def _reset(world: FaultWorld, slave: SlaveHost) -> None:
    if not world.healed and slave.linked:
        world.fired("reconnect_storm")
        slave.reset_stream()


WEATHERS: Mapping[str, tuple[str, float]] = {
    "lost_chunks": ("loss", 0.2),
    "doubled_chunks": ("doubled", 0.3),
    "reordered_chunks": ("late", 0.3),
    "damaged_chunks": ("damaged", 0.2),
    "lost_requests": ("request_lost", 0.3),
    "lost_replies": ("reply_lost", 0.3),
    "late_replies": ("reply_late", 0.4),
}
"""Name -> the network condition that becomes bad, and its value. Counted when it strikes."""


def _weather(field: str, chance: float) -> Begin:
    def begin(world: FaultWorld) -> bool:
        net = world.net
        net.weather = replace(net.weather, **{field: chance})
        world.kernel.after(WEATHER_S, None, lambda: setattr(net, "weather", replace(net.weather, **{field: 0.0})))
        return True

    return begin


MESSAGES.update({name: _weather(field, chance) for name, (field, chance) in WEATHERS.items()})
MESSAGES.armed |= set(WEATHERS)
