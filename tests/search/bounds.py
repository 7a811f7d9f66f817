"""The bounds of one search: the number of processes, how often each fault, and the run's settings."""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.layout import Layout, Parameter
from dips.core.messages import DataMode, DataPlan, Settings
from dips.master.state.shared import RunConfig

RUN = "search"
T0_S = 1000.0
"""The time, which does not advance; a time-out is an action."""

LAYOUT = Layout(tuple(Parameter(f"layers.{i}.w", (64, 32), "float32", f"layers.{i}") for i in range(2)))
"""Two blocks, one for each of two slaves, that can be cut into two chunks of the smallest size that a slave takes."""

BLOCK_BYTES = LAYOUT.blocks[0].n_bytes

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
    "second_master",
    "take_over",
    "misroute",
    "late_verdict",
    "late_chunk",
    "drop_transfer",
    "lease_ttl",
    "reshard",
    "cancel_reshard",
    "second_cluster",
    "second_slave",
    "kill_rank",
    "orphan_rank",
)
"""lose_call: a request or an answer is lost. late_call: the caller gives up, its request arrives nevertheless.
repeat_word: a slave's message arrives twice. break_link: a slave's stream breaks. evict_cluster: a live cluster's beats
do not arrive. time_out: a round's time runs out although all processes live. lose_version: a slave dies and its disk
comes back without the newest committed version. empty_disk: it comes back with nothing but its promise. lose_journal:
the master dies and comes back with an empty disk, started with --rebuild. old_backup: a cluster is again as it was
before its last push, and pushes without asking. second_master: another master begins over the same journal while the
first lives on; some streams of slaves stay with the old one, and clusters call either until they have joined the new
one. misroute: the call of a cluster that has joined the new one reaches the old one. late_verdict: a cluster waits no
longer for an answer or a version, and continues training. late_chunk: a copy of a chunk arrives at any later time.
drop_transfer: a push is given up half sent, and tried again. lease_ttl: an absent cluster's leases run out. reshard:
the operator asks for other slaves as `add` and `remove` say, and starts what is to be added. cancel_reshard: the
operator takes that back. second_cluster, second_slave: a second process comes under the name of a cluster or slave that
is here. kill_rank: a follower of a cluster of several ranks dies, and the others notice at any later time. orphan_rank:
all ranks but one are killed, which goes on with what it sends."""

MESSAGES_AND_CRASHES = FAULTS[:9]
"""Faults of any run, without loss of disk content."""


@dataclass(frozen=True)
class Bounds:
    """pushes: for each cluster, one more for those of `eager`. faults: how often each may happen; together they may
    happen `total_faults` times.

    slow_journal: other events come between a journal entry and its durability. from_start: from the empty run on, else
    from the published seed. bad_pushes: clusters whose pushes are not finite. s_max: versions that a base may be old,
    0 for the default. overlap: the run's setting; with it clusters make their next step while a push is on its way.
    twice: make every step twice and compare. chunks: of each block, on the wire; with more than one, transfers move
    chunk by chunk, and pulls slave by slave. late_answers: an answer may arrive after any number of other things.
    corpus: tokens of a pass of leased data, one to a chunk. add, remove: slaves, what the fault `reshard` asks for.
    sliding: the window starts again with each push. minimum: pushes that each round waits for. ranks: of each cluster;
    with more than one, pulls move rank by rank.
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
    chunks: int = 1
    late_answers: bool = False
    corpus: int = 8
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    sliding: bool = False
    minimum: int = 1
    ranks: int = 1

    def may(self, fault: str) -> bool:
        """Whether the search has this fault."""
        return dict(self.faults).get(fault, 0) > 0

    @property
    def chunk_bytes(self) -> int:
        return BLOCK_BYTES // self.chunks

    @property
    def cluster_names(self) -> tuple[str, ...]:
        return tuple("abcd"[: self.clusters])

    @property
    def slave_names(self) -> tuple[str, ...]:
        return (*(f"s{i}" for i in range(self.slaves)), *self.add)

    @property
    def plan(self) -> DataPlan:
        return DataPlan(DataMode.LEASED, b"corpus", self.corpus, 1) if self.leased else DataPlan(DataMode.OWN)

    def run_config(self) -> RunConfig:
        settings = Settings(
            sync_every_steps=1,
            max_staleness_versions=self.s_max,
            overlap=self.overlap,
            chunk_bytes=self.chunk_bytes,
        )
        return RunConfig(
            RUN,
            self.slaves,
            settings,
            max_clusters=self.clusters,
            grace_s=5.0,
            grace_sliding=self.sliding,
            min_clusters_per_round=self.minimum,
            round_deadline_s=30.0 if self.minimum > 1 else None,
        )
