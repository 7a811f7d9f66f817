"""Faults of disks: full, slow, failing, power loss within a step; damaged, lost, restored from a copy."""

from __future__ import annotations

from collections.abc import Callable

from dips.lab.sim.faults.processes import a_cluster, a_slave, a_slave_to_lose, the_master
from dips.lab.sim.faults.world import Faults, FaultWorld
from dips.lab.sim.hosts.cluster import ClusterHost
from dips.lab.sim.hosts.master import MasterHost
from dips.lab.sim.hosts.slave import SlaveHost
from dips.lab.sim.kernel import SimulatedProcess

FAULTS, LOSSES = Faults(), Faults()
"""LOSSES: committed state is gone: the run may go back, on a new timeline, and must say so."""

DOWN_S = (0.2, 1.0, 4.0)
COPY_AGE_S = (2.0, 6.0, 12.0)

# ---- the master's ----


@FAULTS.add(armed=True)
def master_disk_full(world: FaultWorld) -> bool:
    """Counted when the master ends because of it."""
    world.disk.full = True
    world.kernel.after(world.kernel.rng.uniform(1.0, 8.0), None, _ends_on_disk, world, "full", False)
    return True


def _ends_on_disk(world: FaultWorld, what: str, usual: object) -> None:
    """The disk of the master of that time; a standby may have taken over meanwhile."""
    setattr(world.disk, what, usual)


@FAULTS.of(the_master, armed=True)
def crash_master_while_writing(world: FaultWorld, master: MasterHost) -> None:
    """Kill the master during the next flush of the journal. Counted when it strikes."""
    master.dies_in_flush = True


@FAULTS.add()
def slow_master_disk(world: FaultWorld) -> bool:
    world.disk.flush_factor = 40.0
    world.kernel.after(6.0, None, _ends_on_disk, world, "flush_factor", 1.0)
    return True


JUMPS_S = (3600.0, -3600.0, 86_400.0, -86_400.0, 0.5, -0.5, 1e9, -1.6e9)
"""Jumps: a time zone, a day, an NTP correction, and clocks that were never set or are set to another century."""


@FAULTS.of(the_master)
def wall_clock_jump(world: FaultWorld, master: MasterHost) -> None:
    """Set the wall clock forward or back; a master that starts later sees it."""
    world.wall_offset_s += world.kernel.rng.choice(JUMPS_S)
    master.kill()
    world.restart(master, 1.0)


@FAULTS.add()
def wall_clock_wanders(world: FaultWorld) -> bool:
    """Set the clock repeatedly while the master runs, and at a start in between."""
    rng = world.kernel.rng
    for _ in range(4):
        world.kernel.after(rng.uniform(0.0, 8.0), None, _set_clock, world)
    return wall_clock_jump(world)


def _set_clock(world: FaultWorld) -> None:
    world.wall_offset_s += world.kernel.rng.choice(JUMPS_S)


@LOSSES.add()
def old_master_disk(world: FaultWorld) -> bool:
    """Restore the master's directory from a copy that is some seconds old."""
    copy = world.disk.copy()
    world.kernel.after(world.kernel.rng.choice(COPY_AGE_S), None, _put_master_disk_back, world, copy)
    return world.disk.epoch > 0


def _put_master_disk_back(world: FaultWorld, copy: object) -> None:
    master = world.masters[0]
    if world.healed or world.ended or not world.may_lose(["master"]):
        return
    if master.alive:
        master.kill()
    world.disk.put_back(copy)  # type: ignore[arg-type]
    world.lost_state("master", "the disk is put back from a copy")
    _start_again_with_rebuild(world)


@LOSSES.of(the_master)
def lost_master_disk(world: FaultWorld, master: MasterHost) -> bool:
    """Lose the master's disk; the operator starts the master with --rebuild."""
    if len(world.masters) > 1 or not world.may_lose(["master"]):
        return False
    master.kill()
    world.disk.lose()
    world.lost_state("master", "the disk is lost")
    _start_again_with_rebuild(world)
    return True


def _start_again_with_rebuild(world: FaultWorld) -> None:
    """Start the master again with --rebuild, sometimes first without: then it must refuse with a sentence."""
    rng = world.kernel.rng
    if rng.random() < 0.5:
        world.rebuild = True
    else:
        world.kernel.after(5.0, None, _operator_starts, world, True)
    world.restart(world.masters[0], rng.choice(DOWN_S))
    if not world.committed_somewhere:
        world.kernel.after(20.0, None, _operator_begins_anew, world)


def _operator_starts(world: FaultWorld, rebuild: bool) -> None:
    world.rebuild = rebuild
    if world.masters[0].alive and not world.ended:
        world.masters[0].kill()
        world.restart(world.masters[0], 0.5)


def _operator_begins_anew(world: FaultWorld) -> None:
    """Where there is no version to take, a rebuild only finds an epoch that no slave has promised: the operator starts
    the master again without it, and with it where that was too early."""
    if not world.committed_somewhere and not world.ended:
        _operator_starts(world, not world.rebuild)
        world.kernel.after(20.0, None, _operator_begins_anew, world)


# ---- a slave's ----


@FAULTS.of(a_slave)
def slow_slave_disk(world: FaultWorld, slave: SlaveHost) -> None:
    slave.disk.fsync_factor = 60.0
    world.kernel.after(6.0, None, setattr, slave.disk, "fsync_factor", 1.0)


@FAULTS.of(a_slave, armed=True)
def slave_disk_error(world: FaultWorld, slave: SlaveHost) -> None:
    """Let writes or syncs fail a few times. Counted when it strikes."""
    rng = world.kernel.rng
    errors = rng.randint(1, 3)
    match rng.randrange(3):
        case 0:
            slave.disk.write_errors = errors
        case 1:
            slave.disk.sync_errors = errors
        case _:
            slave.disk.manifest_errors = errors
    if rng.random() < 0.4:
        slave.kill()  # so that they strike while it starts
        world.restart(slave, 0.5)


@FAULTS.of(a_slave, armed=True)
def power_loss_in_disk_step(world: FaultWorld, slave: SlaveHost) -> None:
    """Cut the power between any two steps of the disk. Counted when it strikes."""
    slave.disk.dies_in = world.kernel.rng.randint(1, 20)


@FAULTS.of(a_slave, armed=True)
def power_loss_with_unsynced(world: FaultWorld, slave: SlaveHost) -> None:
    """Cut the power before a step of the disk at which written data is not synced yet. Counted when it strikes."""
    slave.disk.dies_dirty = world.kernel.rng.randint(1, 6)


@LOSSES.of(a_slave_to_lose)
def damaged_snapshot(world: FaultWorld, slave: SlaveHost) -> bool:
    """A bit of a file flips, and the slave starts again: reading it back shows it."""
    _with_another_disk(world, slave, "a bit of a snapshot flips")
    return slave.disk.flip_a_bit(world.kernel.rng, "ring-")


@LOSSES.of(a_slave_to_lose)
def damaged_manifest(world: FaultWorld, slave: SlaveHost) -> bool:
    _with_another_disk(world, slave, "a bit of a manifest flips")
    return slave.disk.flip_a_bit(world.kernel.rng, "manifest-")


@LOSSES.of(a_slave_to_lose)
def lost_slave_disk(world: FaultWorld, slave: SlaveHost) -> None:
    _with_another_disk(world, slave, "the disk is lost")
    slave.disk.lose()


@LOSSES.add()
def all_slave_disks_lost(world: FaultWorld) -> bool:
    """Lose all slaves' disks: only the clusters still hold a common version."""
    if not world.may_lose(list(world.slaves)):
        return False
    for slave in world.slaves.values():
        if slave.alive:
            _with_another_disk(world, slave, "the disk is lost, like all slaves'")
            slave.disk.lose()
    return True


@LOSSES.of(a_slave_to_lose)
def snapshot_rots(world: FaultWorld, slave: SlaveHost) -> bool:
    """Flip bits of all files of a slave while it runs: it may just have reported what it holds."""
    prefix = world.kernel.rng.choice(("ring-", "manifest-"))
    world.attic[slave.name] = slave.disk.copy()
    world.lost_state(slave.name, f"the files {prefix}* rot")
    return any([slave.disk.flip_a_bit(world.kernel.rng, prefix) for _ in range(8)])


@LOSSES.of(a_slave_to_lose)
def disk_comes_back(world: FaultWorld, slave: SlaveHost) -> None:
    """Lose a slave's disk and restore it soon after, as if it had been mounted too late."""
    _with_another_disk(world, slave, "the disk is not mounted")
    slave.disk.lose()
    copy = world.attic[slave.name]
    world.kernel.after(world.kernel.rng.uniform(2.0, 7.0), None, _put_slave_disk_back, world, slave, copy)


@LOSSES.of(a_slave)
def old_slave_disk(world: FaultWorld, slave: SlaveHost) -> None:
    """Restore a slave's directory from a copy that is some seconds old."""
    world.kernel.after(world.kernel.rng.choice(COPY_AGE_S), None, _put_slave_disk_back, world, slave, slave.disk.copy())


def _put_slave_disk_back(world: FaultWorld, slave: SlaveHost, copy: dict[str, bytes]) -> None:
    if world.healed or world.ended or not world.may_lose([slave.name]):
        return
    _with_another_disk(world, slave, "the disk is put back from a copy")
    slave.disk.put_back(copy)


def _with_another_disk(world: FaultWorld, slave: SlaveHost, why: str) -> None:
    """Change a slave's disk while it is down; the old content is kept in `attic`."""
    if slave.alive:
        slave.kill()
        world.restart(slave, world.kernel.rng.choice(DOWN_S))
    world.attic[slave.name] = slave.disk.copy()
    world.lost_state(slave.name, why)


@FAULTS.of(a_cluster, armed=True)
def cluster_disk_error(world: FaultWorld, cluster: ClusterHost) -> None:
    """Let writes of push records fail. Counted when it strikes."""
    cluster.checkpoint_disk.errors = world.kernel.rng.randint(1, 4)


@FAULTS.of(a_cluster)
def lost_checkpoint(world: FaultWorld, cluster: ClusterHost) -> bool:
    """Lose a cluster's checkpoint: its next process starts without state."""
    if cluster.checkpoint_disk.model is None:
        return False
    cluster.kill()
    cluster.checkpoint_disk.lose()
    world.restart(cluster, world.kernel.rng.choice(DOWN_S))
    return True


# ---- at a moment of their own ----


def _when(world: FaultWorld, role: str, kind: str, phase: str, act: Callable[[SimulatedProcess], None]) -> None:
    """Call once, right after the next such line of a tape."""
    world.once(role, kind, phase, lambda process, _: world.kernel.after(0.0, None, act, process))


@FAULTS.add(armed=True)
def killed_between_prepare_and_commit(world: FaultWorld) -> bool:
    """Kill a slave between prepare and commit; its disk takes no manifest for a while. The COMMIT must still be
    completed."""

    def strike(process: SimulatedProcess) -> None:
        slave = world.slaves[process.name]
        if slave.alive and not world.healed:
            world.fired("killed_between_prepare_and_commit")
            slave.kill()
            slave.disk.manifest_errors = 2
            world.restart(slave, 0.3)

    _when(world, "slave", "prepared", "", strike)
    return True


@LOSSES.of(a_slave_to_lose, armed=True)
def rots_after_hello(world: FaultWorld, slave: SlaveHost) -> None:
    """A slave starts, reports what it holds, and then cannot read it."""

    def strike(process: SimulatedProcess) -> None:
        name = process.name
        if not world.healed and world.may_lose([name]):
            world.fired("rots_after_hello")
            world.attic[name] = world.slaves[name].disk.copy()
            world.lost_state(name, "its snapshots rot after its hello")
            for _ in range(30):
                world.slaves[name].disk.flip_a_bit(world.kernel.rng, "ring-")

    slave.kill()
    world.restart(slave, 0.3)
    _when(world, "slave", "promised", "", strike)


@LOSSES.add(armed=True)
def asked_slave_fails(world: FaultWorld) -> bool:
    """The master's disk is lost, and the slave that is asked for a record dies or cannot read it."""
    if not lost_master_disk(world):
        return False

    def strike(process: SimulatedProcess) -> None:
        master = world.masters[0]
        asked = master.state.shared.recovery.asked if master.state is not None else None
        if asked is None or world.healed:
            return
        slave = world.slaves[str(asked)]
        world.fired("asked_slave_fails")
        if world.kernel.rng.random() < 0.5:
            slave.kill()
            world.restart(slave, 1.0)
        else:
            slave.disk.flip_a_bit(world.kernel.rng, "manifest-")

    _when(world, "master", "recovery", "ASKING", strike)
    return True


@LOSSES.add(armed=True)
def lost_disk_in_commit(world: FaultWorld) -> bool:
    """Lose a slave's disk between the journal's COMMIT and the publish."""

    def strike(process: SimulatedProcess) -> None:
        slave = a_slave(world)
        if slave is not None and not world.healed and world.may_lose([slave.name]):
            world.fired("lost_disk_in_commit")
            _with_another_disk(world, slave, "the disk is lost while a version is committed")
            slave.disk.lose()

    _when(world, "master", "round", "COMMIT", strike)
    return True


@LOSSES.add(armed=True)
def donation_fails(world: FaultWorld) -> bool:
    """The model is lost, a cluster begins to give it back, and then: the disk is restored, or a slave dies."""

    def strike(process: SimulatedProcess) -> None:
        rng, names = world.kernel.rng, sorted(world.attic)
        if world.healed or not names:
            return
        slave = world.slaves[rng.choice(names)]
        world.fired("donation_fails")
        if rng.random() < 0.6:
            copy = world.attic[slave.name]
            slave.kill()
            slave.disk.put_back(copy)
            world.restart(slave, 0.1)
        else:
            slave.kill()
            world.restart(slave, 1.0)

    _when(world, "worker", "donated", "", strike)
    return lost_disk_in_commit(world) if world.kernel.rng.random() < 0.6 else lost_slave_disk(world)
