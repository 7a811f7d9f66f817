"""Plans failures: independent exponential times for each cluster, link, slave and the master, drawn from the seed.

A cluster's clock of failures runs only while it is scheduled. Nothing else in the simulation fails by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from dips.sim.scale import tally
from dips.sim.scale.cluster import LightCluster
from dips.sim.scale.kernel import VirtualClock
from dips.sim.scale.links import SharedDirection
from dips.sim.scale.scenario import DAY_S, Scenario
from dips.sim.scale.servers import Servers


class Failures:
    """Plans windows and failures of a run on its clock."""

    def __init__(
        self,
        scenario: Scenario,
        clock: VirtualClock,
        servers: Servers,
        clusters: dict[str, LightCluster],
        directions: tuple[SharedDirection, SharedDirection],
        counts: tally.ScaleTally,
    ) -> None:
        self._scenario, self._clock, self._servers = scenario, clock, servers
        self._clusters, self._directions, self._tally = clusters, directions, counts
        for name, cluster in sorted(clusters.items()):
            self._plan_cluster(cluster, random.Random(f"{scenario.run.seed} {name} fails"))
        rng = random.Random(f"{scenario.run.seed} servers fail")
        self._again(rng, scenario.faults.slave_mtbf_days, lambda: self._slave_dies(rng))
        self._again(rng, scenario.faults.master_mtbf_days, self._master_dies)

    def _again(self, rng: random.Random, mtbf_days: float, what: Callable[[], None]) -> None:
        """Let `what` happen every so many days on average."""
        if mtbf_days <= 0:
            return

        def happen() -> None:
            what()
            self._again(rng, mtbf_days, what)

        self._clock.after(rng.expovariate(1.0 / (mtbf_days * DAY_S)), happen)

    def _plan_cluster(self, cluster: LightCluster, rng: random.Random) -> None:
        table = cluster.table
        for begin_s, end_s in self._scenario.windows_s(table):
            self._clock.at(begin_s, lambda: cluster.start(False))
            if end_s < self._scenario.duration_s:
                self._clock.at(end_s, cluster.depart)
        self._again(rng, table.mtbf_days, lambda: self._cluster_dies(cluster, rng))
        self._again(rng, table.link_mtbf_days, lambda: self._link_fails(cluster, rng))

    def _cluster_dies(self, cluster: LightCluster, rng: random.Random) -> None:
        restart_s = cluster.table.restart * rng.uniform(0.5, 1.5)
        if not cluster.running:
            return
        self._tally.faults["cluster"] += 1
        cluster.account.failures += 1
        cluster.kill(tally.RESTART)
        generation = cluster.generation
        back_s = self._clock.now_s + restart_s
        if any(begin_s <= back_s < end_s for begin_s, end_s in self._scenario.windows_s(cluster.table)):
            self._clock.at(back_s, lambda: cluster.start(True) if cluster.generation == generation else None)

    def _link_fails(self, cluster: LightCluster, rng: random.Random) -> None:
        outage_s = cluster.table.link_outage * rng.uniform(0.5, 1.5)
        if not cluster.running or not cluster.connected:
            return
        self._tally.faults["link"] += 1
        self._connect(cluster, False)
        self._clock.after(outage_s, lambda: self._connect(cluster, True))

    def _connect(self, cluster: LightCluster, is_open: bool) -> None:
        cluster.connected = is_open
        for direction in self._directions:
            direction.set_open(cluster.table.id, is_open)

    def _slave_dies(self, rng: random.Random) -> None:
        name = rng.choice(sorted(self._servers.slaves))
        if self._servers.slaves[name].alive:
            self._tally.faults["slave"] += 1
            self._servers.kill_slave(name)

    def _master_dies(self) -> None:
        if self._servers.master is not None:
            self._tally.faults["master"] += 1
            self._servers.kill_master()
