"""What one search may do: how many of whom, how often each fault, and which numbers of the run."""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.layout import Layout, Parameter
from dips.core.messages import DataMode, DataPlan, Settings
from dips.master.state.run_config import RunConfig

RUN = "search"
T0_S = 1000.0
"""Time stands still; a time-out is an action of its own."""

LAYOUT = Layout(tuple(Parameter(f"layers.{i}.w", (2, 2), "float32", f"layers.{i}") for i in range(2)))
"""Two blocks: one for each of two slaves."""

FAULTS = (
    "lose_call",
    "late_call",
    "repeat_word",
    "break_link",
    "kill_master",
    "kill_slave",
    "kill_cluster",
    "evict_cluster",
    "time_out",
    "lose_version",
    "empty_disk",
    "lose_journal",
    "old_backup",
)
"""lose_call: a request or an answer is lost. late_call: the caller gives up, its request arrives all the same.
repeat_word: a slave's word arrives twice. break_link: a slave's stream breaks. evict_cluster: a live cluster's beats do
not arrive. time_out: a round's time runs out although everybody lives. lose_version: a slave dies and its disk comes
back without the newest committed version. empty_disk: it comes back with nothing but its promise. lose_journal: the
master dies and comes back with an empty disk, told to rebuild. old_backup: a cluster is again as it was before its last
push, and pushes without asking."""


@dataclass(frozen=True)
class Bounds:
    """pushes: for each cluster, one more for those of `eager`. faults: how often each may happen; together they may
    happen `total_faults` times.

    slow_journal: other events come between a journal entry and its durability. from_start: from the empty run on, else
    from the published seed. bad_pushes: clusters whose pushes are not finite. s_max: versions that a base may be old,
    0 for the default. overlap: the run's setting; with it clusters make their next step while a push is on its way.
    twice: make every step twice and compare.
    """

    clusters: int = 2
    slaves: int = 2
    pushes: int = 1
    faults: tuple[tuple[str, int], ...] = ()
    total_faults: int = 99
    slow_journal: bool = False
    from_start: bool = False
    leased: bool = False
    bad_pushes: tuple[str, ...] = ()
    s_max: int = 0
    eager: tuple[str, ...] = ()
    overlap: str = "none"
    twice: bool = False

    @property
    def cluster_names(self) -> tuple[str, ...]:
        return tuple("abcd"[: self.clusters])

    @property
    def slave_names(self) -> tuple[str, ...]:
        return tuple(f"s{i}" for i in range(self.slaves))

    @property
    def plan(self) -> DataPlan:
        return DataPlan(DataMode.LEASED, b"corpus", 8, 1) if self.leased else DataPlan(DataMode.OWN)

    def run_config(self) -> RunConfig:
        settings = Settings(sync_every_steps=1, max_staleness_versions=self.s_max, overlap=self.overlap)
        return RunConfig(RUN, self.slaves, settings, max_clusters=self.clusters, grace_s=5.0, rebuild=True)
