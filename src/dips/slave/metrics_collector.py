"""Collects a slave's metrics at a scrape: the event loop's state by a snapshot made there, the data port's latest
figures, sizes of memory and disk on the scrape's own thread.

Must be called only by a scrape, never touch the data port's tables, and never change anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dips.core.ids import Version
from dips.core.net.data_header import REFUSED_DATA
from dips.core.net.keys import certificate_left_s
from dips.core.net.security import INSECURE, Security
from dips.core.observe.metrics import CERTIFICATE, Families, flag
from dips.core.release import VERSION
from dips.slave.data_port import Figures
from dips.slave.memory import ShardMemory
from dips.slave.metrics import METRICS, PREFIX
from dips.slave.metrics_counts import JOBS, Counted, Counts
from dips.slave.state.shard import ShardPhase
from dips.slave.state.slave import SlaveMachine

PHASES = tuple(phase.value.lower() for phase in ShardPhase)

_UNREFUSED = {code.name: 0 for code in REFUSED_DATA}
"""Refusal codes of data messages, counted from 0: a counter that first appears with 1 would show no increase."""


@dataclass(frozen=True)
class Held:
    """A slave's memory: bytes by use, bytes of one version's parameters, and the number of readable versions."""

    use: Mapping[str, int]
    shard_bytes: int
    readable: int


@dataclass(frozen=True)
class MetricsMoment:
    """The event loop's state at one moment. now_s: of the process's clock."""

    run_id: str
    attached: bool
    epoch: int
    phase: str
    version: Version | None
    durable: Version | None
    held: Held | None
    counted: Counted
    now_s: float


def snapshot(state: SlaveMachine, memory: ShardMemory | None, counts: Counts) -> MetricsMoment:
    """Take the snapshot; on the event loop, between two events."""
    shard = state.shard
    return MetricsMoment(
        state.link.run_id,
        state.link.attached,
        state.link.promised_epoch,
        shard.phase.now.value.lower(),
        shard.current.version if shard.current is not None else None,
        shard.saving.durable,
        _held(memory) if memory is not None else None,
        counts.counted(),
        counts.clock.monotonic_s(),
    )


def _held(memory: ShardMemory) -> Held:
    return Held(memory.bytes_by_use(), memory.map.n_bytes, len(memory.readable()))


@dataclass(frozen=True)
class DiskSizes:
    """Sizes that are read on the scrape's thread. None: cannot be read now."""

    resident_bytes: int
    budget_bytes: int
    disk_free_bytes: int | None
    snapshots: int


@dataclass(frozen=True)
class Collector:
    """Makes the metric families of each scrape. memory_bytes_per_s: of this machine, as measured at start."""

    slave_id: str
    memory_limit_bytes: int
    memory_bytes_per_s: float
    security: Security = INSECURE

    def families(self, now: MetricsMoment, figures: Figures, sizes: DiskSizes) -> Families:
        families = Families(PREFIX, METRICS)
        families.set("info", 1, now.run_id, self.slave_id, VERSION)
        families.set(CERTIFICATE.name, certificate_left_s(self.security))
        families.set("memory_limit_bytes", self.memory_limit_bytes)
        _link(families, now)
        _shard(families, now)
        _jobs(families, now, self.memory_bytes_per_s)
        _sizes(families, sizes)
        _port(families, figures)
        return families


def _link(families: Families, now: MetricsMoment) -> None:
    events = now.counted.events
    families.set("attached", flag(now.attached))
    families.set("epoch", now.epoch)
    families.set("incarnations_total", events.get("incarnation", 0))
    families.set("link_losses_total", events.get("unlinked", 0))
    families.set("refused_commands_total", events.get("refused_command", 0))
    families.set("staged_pushes_total", events.get("staged", 0))


def _shard(families: Families, now: MetricsMoment) -> None:
    families.one_of("shard_phase", now.phase, PHASES)
    families.set("version", now.version.v if now.version else None)
    families.set("timeline", now.version.timeline if now.version else None)
    families.set("durable_version", now.durable.v if now.durable else None)
    families.set("readable_versions", now.held.readable if now.held else 0)
    if now.held is not None:
        families.set("shard_bytes", now.held.shard_bytes)
        families.each("memory_bytes", now.held.use)


def _jobs(families: Families, now: MetricsMoment, memory_bytes_per_s: float) -> None:
    counted = now.counted
    for kind in JOBS:
        families.set("job_failures_total", counted.failures.get(kind, 0), kind)
        if kind in counted.jobs:
            families.observed("job_seconds", counted.jobs[kind], kind)
    families.observed("snapshot_seconds", counted.snapshots)
    if counted.snapshot_s is not None:
        families.set("snapshot_age_seconds", max(0.0, now.now_s - counted.snapshot_s))
    if counted.update is not None:
        families.set("update_seconds", counted.update.seconds)
        families.set("update_floor_seconds", counted.update.n_bytes / memory_bytes_per_s)


def _sizes(families: Families, sizes: DiskSizes) -> None:
    families.set("resident_bytes", sizes.resident_bytes)
    families.set("budget_bytes", sizes.budget_bytes)
    families.set("disk_free_bytes", sizes.disk_free_bytes)
    families.set("snapshots", sizes.snapshots)


def _port(families: Families, figures: Figures) -> None:
    families.set("staging_open", figures.beat.staging_open)
    families.set("staged_bytes_total", figures.beat.staging_bytes)
    families.set("served_bytes_total", figures.beat.served_bytes)
    families.set("refused_connections_total", figures.beat.refused_connections)
    families.each("cluster_staged_bytes_total", dict(sorted(figures.staged_of.items())))
    families.each("refused_messages_total", dict(sorted({**_UNREFUSED, **figures.refused}.items())))


def disk_free_bytes(directory: Path) -> int | None:
    """Bytes that this process may still allocate on the disk of its directory."""
    try:
        room = os.statvfs(directory)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize
