"""I16: checks what master, slaves and clusters keep in memory and on disk against the formulas that bound it.

Checked at every publish and after every so many events. The largest use of each budget is counted, which shows bounds
that are never approached.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dips.core.machine import HISTORY_LENGTH
from dips.core.protocol import MAX_LEASED_CHUNKS
from dips.master.state.leases import MAX_RANGES_IN_A_MESSAGE
from dips.master.state.ledger import APPLIED_KEPT
from dips.master.state.pulls import MAX_READERS
from dips.master.state.shared import COMMITS_KEPT, RECENT_ROUNDS
from dips.sim.hosts.cluster import ClusterHost
from dips.sim.hosts.master import MasterHost
from dips.sim.hosts.slave import SlaveHost
from dips.slave.ring import SPARE_FILES
from dips.slave.state.slave import MAX_WAITING

if TYPE_CHECKING:
    from dips.sim.world import World

Used = Iterator[tuple[str, int, int]]
"""Names of budgets, with the used amount and the limit."""

CALLS_OF_A_CLUSTER = 4
"""Calls of a cluster that may wait for a verdict at once: its own, and abandoned ones that are not yet noticed."""

FOREIGN_CALLS = 16
"""Repeated, late and hostile calls."""

PIECES_OF_A_CHUNK = 4
"""Pieces into which steps, pushes and returns cut a leased chunk of data."""


class Budgets:
    """The budgets of one run."""

    def __init__(self, world: World) -> None:
        self._world = world

    def check(self) -> None:
        """Check all live processes now."""
        world = self._world
        for master in world.masters:
            self._compare("master", self._of_master(master))
        for slave in world.slaves.values():
            self._compare(slave.name, self._of_slave(slave))
        for cluster in world.clusters.values():
            self._compare(cluster.name, self._of_cluster(cluster))

    def _compare(self, who: str, used: Used) -> None:
        for what, size, most in used:
            self._world.counts.filled(what, size, most)
            if size > most:
                self._world.checks.violated(f"{who}: {size} {what}, at most {most} may be (I16)")

    def _of_master(self, master: MasterHost) -> Used:
        if master.state is None:
            return
        run, config = master.state.shared, self._world.plan.config
        n = config.max_clusters
        yield "members", len(run.members), n
        yield "pins", len(run.pins), n + MAX_READERS
        yield "transfers that the schedule knows", run.schedule.n_under_way, n + MAX_READERS
        waiting = sum(map(len, run.waiters.values()))
        yield "calls that wait for a verdict", waiting, CALLS_OF_A_CLUSTER * n + FOREIGN_CALLS
        yield "versions that can be pulled", len(run.kept), config.pinned_versions + 2 + COMMITS_KEPT
        yield "COMMIT records in memory", len(run.commits), COMMITS_KEPT
        yield "rounds that status tells of", len(run.recent), RECENT_ROUNDS
        yield "lines of the master's story", len(run.story.lines()), HISTORY_LENGTH
        yield "versions whose pushes are known", len(run.ledger.applied_in), APPLIED_KEPT
        yield "clusters in the ledger", len(run.ledger.clusters), len(self._world.clusters)
        if run.ledger.leases is not None:
            pieces = sum(1 for _ in run.ledger.leases.holdings())
            yield "pieces of the lease table", pieces, self._most_pieces(n)

    def _most_pieces(self, n_clusters: int) -> int:
        plan = self._world.plan
        held = n_clusters * (MAX_LEASED_CHUNKS + PIECES_OF_A_CHUNK)
        return held + 10 * PIECES_OF_A_CHUNK * plan.data.total_tokens // plan.data.chunk_tokens

    def _of_slave(self, slave: SlaveHost) -> Used:
        config, kept = self._world.plan.config, self._world.plan.snapshots_kept
        if slave.state is None:
            return
        yield "files of snapshots", sum(name.startswith("ring-") for name in slave.disk.names()), kept + SPARE_FILES
        yield "commands that wait for a job", slave.state.n_waiting, MAX_WAITING
        memory = slave.port.memory
        if memory is not None:
            yield "stagings of a slave", memory.table.n_open, config.max_clusters
            yield "versions in a slave's memory", len(memory.readable) + (memory.shadow is not None), memory.n_buffers

    def _of_cluster(self, cluster: ClusterHost) -> Used:
        session, plan = cluster.session, self._world.plan
        if session is None:
            return
        yield "transfers of a cluster", cluster.n_transfers, 2
        if plan.data.chunk_tokens:
            ranges = len(session.shared.work.all_ranges())
            yield "ranges that a cluster holds", ranges, MAX_RANGES_IN_A_MESSAGE
