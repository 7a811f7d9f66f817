"""Faults of a run with a standby: it takes over from a master that is dead, asleep, cut off, or well; it dies, is slow,
or loses its directory.

After each take-over the older master ends, at the latest when the run is healed, and a new standby begins in its place
with an empty directory.
"""

from __future__ import annotations

from dips.lab.sim.faults.processes import DOWN_S, pause, running_master, the_master
from dips.lab.sim.faults.world import Faults, FaultWorld
from dips.lab.sim.hosts.master import MasterHost
from dips.lab.sim.hosts.standby import StandbyHost

FAULTS = Faults()

SLOW_S = 6.0
CUT_S = (1.0, 6.0, 25.0)
BECOMES_STANDBY_S = (0.5, 4.0)
LOOKS_S = 0.5

LEFT_BEHIND, RETURNED = "decisions_left_behind", "old_master_returned"


def _standby(world: FaultWorld) -> StandbyHost | None:
    return world.standby if world.standby is not None and world.standby.running else None


# ---- take-overs ----


def _may_take_over(world: FaultWorld) -> bool:
    """Whether an operator would: the standby knows a version, nothing is missing in it that no slave has, and no
    take-over is under way."""
    standby = _standby(world)
    if standby is None or len(world.masters) > 1 or not any(entry.kind == "COMMIT" for entry in standby.disk.entries):
        return False
    tail = world.disk.tail(standby.disk)
    state = world.masters[0].state
    moving = state is not None and state.shared.ledger.reshard is not None
    if moving or any(entry.kind == "RESHARD" for entry in tail):
        return False  # the slaves that it added would have to be started again
    return world.in_office is world.disk and (not tail or world.may_lose(["master"]))


def _take_over(world: FaultWorld) -> None:
    """Let the standby become the run's master now."""
    standby = _standby(world)
    assert standby is not None
    world.standby, world.rebuild = None, False
    heir = standby.becomes_master()
    world.kernel.note(heir.name, "takes over")
    world.taken_over(heir)
    world.masters.insert(0, heir)
    world.disk = heir.disk
    heir.boot()
    world.kernel.after(LOOKS_S, None, _until_it_ends, world, world.masters[1])


def _until_it_ends(world: FaultWorld, older: MasterHost) -> None:
    """Once the older master is gone for good, a new standby begins in its place."""
    if older in world.masters[1:] and (older.alive or older.comes_back):
        world.kernel.after(LOOKS_S, None, _until_it_ends, world, older)
        return
    if older in world.masters[1:]:
        world.masters.remove(older)
    world.kernel.after(world.kernel.rng.uniform(*BECOMES_STANDBY_S), None, world.begin_standby, older.at)


@FAULTS.of(the_master)
def take_over_from_dead(world: FaultWorld, master: MasterHost) -> bool:
    """The master's host is lost. Half of the time its process comes back later, on its own directory."""
    if not _may_take_over(world):
        return False
    rng = world.kernel.rng
    master.kill()
    master.comes_back = rng.random() < 0.5
    _take_over(world)
    if master.comes_back:
        world.kernel.after(rng.choice(DOWN_S), None, _returns, world, master)
    return True


def _returns(world: FaultWorld, older: MasterHost) -> None:
    older.comes_back = False
    if older in world.masters[1:] and not world.healed:
        world.fired(RETURNED)
        older.boot()


@FAULTS.of(running_master)
def take_over_from_sleeper(world: FaultWorld, master: MasterHost) -> bool:
    """The master stands still for longer than its lease, and wakes up."""
    if not _may_take_over(world):
        return False
    pause(world, master, world.kernel.rng.uniform(0.2, 2.0 * world.plan.config.evict_after_s))
    _take_over(world)
    return True


@FAULTS.of(the_master)
def take_over_from_live(world: FaultWorld, master: MasterHost) -> bool:
    """An operator, or a lease, is wrong: the master is well, and hears of the take-over."""
    if not _may_take_over(world):
        return False
    _take_over(world)
    return True


@FAULTS.of(the_master)
def take_over_behind_a_cut(world: FaultWorld, master: MasterHost) -> bool:
    """The master is cut off from the standby, and from some or all of the others, for a while."""
    if not _may_take_over(world):
        return False
    rng = world.kernel.rng
    others = [*world.slaves, *world.clusters]
    names = ["standby", "master", *rng.choice(([], others, rng.sample(others, k=rng.randint(1, len(others)))))]
    pairs = [pair for name in names if name != master.at for pair in ((name, master.at), (master.at, name))]
    pairs = [pair for pair in pairs if not world.net.is_cut(*pair)]
    world.net.cut_off(pairs)
    world.kernel.after(rng.choice(CUT_S), None, world.net.mend, pairs)
    _take_over(world)
    return True


# ---- a standby ----


@FAULTS.of(_standby)
def standby_crashes(world: FaultWorld, standby: StandbyHost) -> bool:
    if world.healed:
        return False
    standby.kill()
    world.restart(standby, world.kernel.rng.choice(DOWN_S))
    return True


@FAULTS.add()
def standby_sleeps(world: FaultWorld) -> bool:
    return pause(world, _standby(world), world.kernel.rng.choice(CUT_S))


@FAULTS.of(_standby)
def slow_standby_disk(world: FaultWorld, standby: StandbyHost) -> None:
    standby.disk.flush_factor = 200.0
    world.kernel.after(SLOW_S, None, setattr, standby.disk, "flush_factor", 1.0)


@FAULTS.of(_standby)
def lost_standby_disk(world: FaultWorld, standby: StandbyHost) -> None:
    world.disk.agreed = 0
    standby.loses_disk()


@FAULTS.add()
def cut_standby_from_master(world: FaultWorld) -> bool:
    pairs = [("standby", "master"), ("master", "standby")]
    if world.standby is None or any(world.net.is_cut(*pair) for pair in pairs):
        return False
    world.net.cut_off(pairs)
    world.kernel.after(world.kernel.rng.choice(CUT_S), None, world.net.mend, pairs)
    return True


BROUGHT: tuple[str, ...] = (LEFT_BEHIND, RETURNED)
"""What take-overs bring with them."""

TAKE_OVERS = ("take_over_from_dead", "take_over_from_sleeper", "take_over_from_live", "take_over_behind_a_cut")
