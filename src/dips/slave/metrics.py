"""The metrics of a slave; docs/metrics.md is made from this list. Labels: clusters that push here, and fixed words."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

from dips.core.clock import Clock
from dips.core.errors import Refused
from dips.core.layout import FLOAT32_BYTES
from dips.core.messages import Commit, Configure, ListShard, Measure, MoveBlocks, Prepare
from dips.core.net.security import INSECURE, Security
from dips.core.observe.metrics import CERTIFICATE, Families, Instruments, Spec
from dips.core.release import VERSION
from dips.slave.data_port import Figures
from dips.slave.memory import ShardMemory
from dips.slave.state.effects import JobCommand, Run
from dips.slave.state.shard import ShardPhase
from dips.slave.state.slave import SlaveMachine

# ---- metrics ---------------------------------------------------------------------------------------------------------


PREFIX = "dips_slave_"

_KINDS: Mapping[type[JobCommand], str] = {
    Configure: "load",
    Measure: "measure",
    Prepare: "prepare",
    Commit: "commit",
    ListShard: "list",
    MoveBlocks: "move",
}
JOBS = tuple(_KINDS.values())


def kind_of(run: Run) -> str:
    """The kind of a job in metrics. A Configure that commits the shadow in memory loads nothing."""
    return "commit" if run.shadow is not None else _KINDS[type(run.command)]


_LOADED = "the slave has its memory"

METRICS: tuple[Spec, ...] = (
    # ---- the link to the master ----
    Spec("info", "gauge", "1; the labels say which slave of which run", "1", ("run", "slave", "version")),
    Spec("link_losses_total", "counter", "Streams to the master that ended", "no increase"),
    CERTIFICATE,
    # ---- parameters ----
    Spec("shard_phase", "gauge", "1 for the phase of the slave's part of the model", "ready most of the time",
         ("phase",)),
    Spec("version", "gauge", "Version that the slave serves as the newest", "equal to the master's", (), "", _LOADED),
    Spec("durable_version", "gauge", "Newest version on this slave's disk with its COMMIT",
         "equal to version; with durability async a few less", (), "", "there is one"),
    Spec("readable_versions", "gauge", "Versions that can be pulled", "2, more while old ones are read"),
    # ---- memory and disk ----
    Spec("memory_bytes", "gauge",
         "Memory of the arrays, by use: theta, momentum, staging; and difference, residual. 0 for those in files "
         "(memory_files)", "constant, but for theta when versions are pinned", ("use",), "bytes", _LOADED),
    Spec("memory_limit_bytes", "gauge", "memory_bytes: what the arrays may use", "above the sum of memory_bytes", (),
         "bytes"),
    Spec("resident_bytes", "gauge", "Memory of the process, without mapped files", "below budget_bytes", (), "bytes"),
    Spec("budget_bytes", "gauge", "The process's budget (docs/capacity.md), which the slave enforces",
         "above resident_bytes", (), "bytes"),
    Spec("snapshots", "gauge", "Committed snapshots on disk", "snapshots_kept, fewer at the beginning"),
    Spec("snapshot_age_seconds", "gauge", "Time since this process made a snapshot durable", "about a round", (), "s",
         "it has made one"),
    Spec("snapshot_seconds", "histogram", "Time to write a snapshot or its manifest durably",
         "what the disk needs for 8 bytes a parameter", (), "s"),
    Spec("disk_free_bytes", "gauge", "Free space on the disk of the slave's directory",
         "above 1 GB; the ring is claimed when it is made", (), "bytes"),
    # ---- rounds ----
    Spec("job_seconds", "histogram", "Time of jobs by kind: load, measure, prepare, commit, list, move",
         "measure and commit: milliseconds to seconds; prepare: with the disk's time", ("kind",), "s"),
    Spec("job_failures_total", "counter", "Jobs that were refused, by kind", "no increase", ("kind",)),
    Spec("update_seconds", "gauge", "Time of the last outer step's arithmetic", "below twice its floor", (), "s",
         "there was one"),
    Spec("update_floor_seconds", "gauge",
         "Time in which this machine's memory, measured at start, could move the same bytes",
         "more than half of update_seconds", (), "s", "there was one"),
    # ---- the data port ----
    Spec("staging_open", "gauge", "Pushes that are being staged", "at most one for each cluster"),
    Spec("staged_bytes_total", "counter", "Bytes of pushes that landed", "rises with each push", (), "bytes"),
    Spec("cluster_staged_bytes_total", "counter", "The same by cluster, of those that pushed last",
         "alike for all clusters", ("cluster",), "bytes"),
    Spec("staged_pushes_total", "counter", "Pushes that were complete here", "one a round and cluster"),
    Spec("served_bytes_total", "counter", "Bytes of versions that were sent", "rises with each pull", (), "bytes"),
    Spec("refused_messages_total", "counter", "Data messages that were refused, by code (docs/protocol.md)",
         "BUSY and UNKNOWN_PUSH a few; CHUNK, KEY and MALFORMED never", ("code",)),
    Spec("refused_connections_total", "counter", "Connections that were refused or closed", "no increase"),
)  # fmt: skip


# ---- metrics counts --------------------------------------------------------------------------------------------------
#
# Counts a slave process's jobs, commands and snapshots where the shell carries them out: only on the event loop.
#
# The data port counts chunks itself.


_OF_KIND = {
    "unlinked": "link_losses_total",
    "staged": "staged_pushes_total",
}
"""Kinds of tape lines that are counted, and in which metric."""


class Counts(Instruments):
    """Counts of one process. snapshot_s: when the last snapshot became durable, of the process's clock. update_s and
    update_bytes: of the last outer step, its time and what it had to move, each stream counted once."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(PREFIX, METRICS, _OF_KIND)
        self.clock = clock
        self.snapshot_s: float | None = None
        self.update_s = self.update_bytes = math.nan
        self._jobs = self.histogram("job_seconds")
        self._failures = self.counter("job_failures_total", *JOBS)
        self._snapshots = self.histogram("snapshot_seconds")

    @contextlib.contextmanager
    def job(self, kind: str) -> Iterator[None]:
        """Count and time a job of JOBS; one that is refused is counted as failed."""
        began_s = self.clock.monotonic_s()
        try:
            yield
        except Refused:
            self._failures.labels(kind).inc()
            raise
        self._jobs.labels(kind).observe(self.clock.monotonic_s() - began_s)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Count and time the writing of a snapshot or its manifest."""
        began_s = self.clock.monotonic_s()
        yield
        self.snapshot_s = self.clock.monotonic_s()
        self._snapshots.observe(self.snapshot_s - began_s)

    @contextlib.contextmanager
    def update(self, n_elems: int, pushes: int) -> Iterator[None]:
        """Time an outer step: it reads theta, momentum and the pushes, and writes theta and momentum."""
        began_s = self.clock.monotonic_s()
        yield
        self.update_bytes = (4 + pushes) * n_elems * FLOAT32_BYTES
        self.update_s = self.clock.monotonic_s() - began_s


# ---- metrics collector -----------------------------------------------------------------------------------------------
#
# Collects a slave's metrics at a scrape: the event loop's state by a snapshot made there, the data port's latest
# figures, sizes of memory and disk on the scrape's own thread.
#
# Must be called only by a scrape, never touch the data port's tables, and never change anything.


PHASES = tuple(phase.value.lower() for phase in ShardPhase)


def families_at(
    counts: Counts, slave_id: str, state: SlaveMachine, memory: ShardMemory | None, security: Security = INSECURE
) -> Families:
    """The metric families of a scrape with the event loop's state; on the loop, between two events."""
    families, shard = counts.families(security), state.shard
    families.set("info", 1, state.link.run_id, slave_id, VERSION)
    families.one_of("shard_phase", shard.phase.now.value.lower(), PHASES)
    families.set("version", shard.current.version.v if shard.current is not None else None)
    families.set("durable_version", shard.saving.durable.v if shard.saving.durable is not None else None)
    families.set("readable_versions", len(memory.readable()) if memory is not None else 0)
    families.each("memory_bytes", memory.bytes_by_use() if memory is not None else {})
    return families


def completed(
    families: Families,
    counts: Counts,
    figures: Figures,
    gauges: Mapping[str, float | None],
    memory_bytes_per_s: float,
) -> Families:
    """The same with all that is not the event loop's. gauges: those that are read on the scrape's thread, by name.
    memory_bytes_per_s: of this machine, as measured at start."""
    if counts.snapshot_s is not None:
        families.set("snapshot_age_seconds", max(0.0, counts.clock.monotonic_s() - counts.snapshot_s))
    families.set("update_seconds", counts.update_s)
    families.set("update_floor_seconds", counts.update_bytes / memory_bytes_per_s)
    for name, value in gauges.items():
        families.set(name, value)
    families.set("staging_open", figures.beat.staging_open)
    families.set("staged_bytes_total", figures.beat.staging_bytes)
    families.set("served_bytes_total", figures.beat.served_bytes)
    families.set("refused_connections_total", figures.beat.refused_connections)
    families.each("cluster_staged_bytes_total", dict(sorted(figures.staged_of.items())))
    families.refusals("refused_messages_total", figures.refused)
    return families
