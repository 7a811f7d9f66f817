"""Faults by operators that add and remove slaves while the run goes on, or cancel that."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dips.core.ids import SlaveId
from dips.core.messages import ReshardRequest
from dips.lab.sim.faults.processes import the_master
from dips.lab.sim.faults.world import FaultWorld
from dips.lab.sim.hosts.slave import SlaveHost

MOST_SLAVES = 8


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
        world.kernel.after(world.kernel.rng.uniform(0.1, 3.0), None, _boot, world, host)
    return True


def reshard_remove(world: FaultWorld) -> bool:
    """Remove a slave that holds blocks."""
    placed = _placed(world)
    if len(placed) < 2:
        return False
    name = SlaveId(world.kernel.rng.choice(placed))
    return _ask(world, ReshardRequest("", remove=(name,), reason="less room"))


def reshard_replace(world: FaultWorld) -> bool:
    """Replace one slave by another."""
    placed, fresh = _placed(world), SlaveId(f"s{len(world.slaves)}")
    if not placed or len(world.slaves) >= MOST_SLAVES:
        return False
    old = SlaveId(world.kernel.rng.choice(placed))
    if not _ask(world, ReshardRequest("", add=(fresh,), remove=(old,), reason="a new host")):
        return False
    host = world.slaves[fresh] = SlaveHost(world, fresh)
    world.kernel.after(world.kernel.rng.uniform(0.1, 1.0), None, _boot, world, host)
    return True


def reshard_taken_back(world: FaultWorld) -> bool:
    """Request a RESHARD and cancel it a moment later; before the record it has not begun."""
    if not reshard_remove(world):
        return False
    world.kernel.after(world.kernel.rng.uniform(0.0, 2.0), None, _take_back, world)
    return True


def _take_back(world: FaultWorld) -> None:
    master = the_master(world)
    if master is not None and not master.paused:
        master.operate(ReshardRequest("", cancel=True))


def _ask(world: FaultWorld, request: ReshardRequest) -> bool:
    """Ask the master; returns whether it accepted: it refuses while another one is under way, or with fewer blocks than
    slaves."""
    master = the_master(world)
    if master is None or master.paused or master.state is None or master.state.shared.ledger.reshard is not None:
        return False
    master.operate(request)
    state = master.state
    return state is not None and state.shared.ledger.reshard is not None


def _placed(world: FaultWorld) -> list[str]:
    master = the_master(world)
    placement = master.state.shared.ledger.placement if master is not None and master.state is not None else None
    return list(placement.slaves) if placement is not None else []


def _boot(world: FaultWorld, host: SlaveHost) -> None:
    if not host.alive and not world.ended:
        host.boot()


FAULTS: Mapping[str, Callable[[FaultWorld], bool]] = {
    "reshard_add": reshard_add,
    "reshard_remove": reshard_remove,
    "reshard_replace": reshard_replace,
    "reshard_taken_back": reshard_taken_back,
}
