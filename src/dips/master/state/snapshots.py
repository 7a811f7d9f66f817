"""Compares what slaves' disks hold, according to their hellos, with what the run has committed. Decides nothing."""

from __future__ import annotations

from dips.core.ids import RoundId, SlaveId, Version
from dips.core.messages import SnapshotInfo
from dips.master.state.ledger import Ledger
from dips.master.state.records import HeldVersion, Slave
from dips.master.state.shared import SharedState

Broken = set[tuple[SlaveId, Version, RoundId]]


def committed(shared: SharedState, slave: Slave) -> list[SnapshotInfo]:
    """The slave's committed snapshots of versions that are still part of the run's history."""
    return [s for s in slave.snapshots if s.committed and not shared.ledger.is_given_up(s.version)]


def newest_committed(shared: SharedState, slave: Slave) -> Version | None:
    return max((s.version for s in committed(shared, slave)), default=None)


def newest_timeline(shared: SharedState) -> int:
    """The newest timeline of any version on any slave, also a given up one; 0 when there is none."""
    found = (s for slave in shared.slaves.values() for s in slave.snapshots)
    return max((s.version.timeline for s in found if s.committed), default=0)


def holds(slave: Slave, ledger: Ledger, broken: Broken) -> bool:
    """Whether the slave can load the ledger's commit, by its name or by that of the rollback's origin."""
    commit = ledger.commit
    digest = dict(commit.digest_of_slave).get(slave.id) if commit else None
    if commit is None or digest is None:
        return False
    for info in slave.snapshots:
        if (slave.id, info.version, info.round) in broken or info.digest != digest or not _fits(info, ledger):
            continue
        if (info.version, info.round) == (commit.version, commit.round):
            if not info.committed or info.commit_hash == commit.commit_hash:
                return True
        elif (info.version, info.round) == ledger.origin and info.committed:
            return True
    return False


def holds_committed(slave: Slave, ledger: Ledger, broken: Broken) -> bool:
    """Whether the slave can go back to the ledger's commit: it is on its disk with this name."""
    commit = ledger.commit
    digest = dict(commit.digest_of_slave).get(slave.id) if commit else None
    return commit is not None and any(
        info.committed
        and info.digest == digest
        and _fits(info, ledger)
        and snapshot_of(info) == (commit.version, commit.round, commit.commit_hash)
        and (slave.id, info.version, info.round) not in broken
        for info in slave.snapshots
    )


def _fits(info: SnapshotInfo, ledger: Ledger) -> bool:
    """Whether its blocks are those that the slave is to hold."""
    layout, placement = ledger.layout, ledger.placement
    return (
        layout is not None
        and placement is not None
        and (info.layout_hash, info.placement_hash) == (layout.layout_hash, placement.placement_hash)
    )


def snapshot_of(info: SnapshotInfo) -> HeldVersion:
    return (info.version, info.round, info.commit_hash)


def why_not(shared: SharedState, slave: Slave) -> str:
    """A sentence when the slave's disk does not hold what this run has committed; empty when it does."""
    commit, newest = shared.ledger.commit, newest_committed(shared, slave)
    if commit is None:
        return _unknown_run(newest) if newest is not None else ""
    if newest is not None and newest > commit.version:
        return (
            f"its directory holds version {newest}, newer than the master's {commit.version}: the master's directory "
            "is an old copy"
        )
    if holds(slave, shared.ledger, shared.recovery.broken):
        return ""
    here = [s for s in slave.snapshots if s.version == commit.version and s.committed]
    if any(s.commit_hash != commit.commit_hash for s in here):
        return (
            f"its directory holds version {commit.version} of another history than the master's: one of the two was "
            "restored from a copy"
        )
    held = ", ".join(sorted(str(s.version) for s in slave.snapshots)) or "none"
    return f"its directory lacks version {commit.version} (it holds: {held})"


def _unknown_run(newest: Version) -> str:
    return (
        f"its directory holds version {newest}, but this master knows none: start it with `dips master --rebuild` to "
        "take the run's state from the slaves, or give the slave an empty directory to begin again"
    )
