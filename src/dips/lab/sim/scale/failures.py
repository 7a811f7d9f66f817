"""Plans failures: independent exponential times for each cluster, link, slave and the master, drawn from the seed.

A cluster's clock of failures runs only while it is scheduled. Nothing else in the simulation fails by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from dips.lab.sim.hosts.cluster import ClusterHost
from dips.lab.sim.scale.scenario import DAY_S
from dips.lab.sim.scale.world import ScaleWorld

START_AGAIN_S = 1.0


class Failures:
    """Plans windows and failures of a run on its clock."""

    def __init__(self, world: ScaleWorld) -> None:
        self._world, self._scenario, self._kernel = world, world.scenario, world.kernel
        seed, faults = self._scenario.run.seed, self._scenario.faults
        for name, cluster in sorted(world.clusters.items()):
            self._plan_cluster(cluster, random.Random(f"{seed} {name} fails"))
        rng = random.Random(f"{seed} servers fail")
        self._again(rng, faults.slave_mtbf_days, lambda: self._slave_dies(rng))
        self._again(rng, faults.master_mtbf_days, self._master_dies)

    def _again(self, rng: random.Random, mtbf_days: float, what: Callable[[], None]) -> None:
        """Let `what` happen every so many days on average."""
        if mtbf_days <= 0:
            return

        def happen() -> None:
            what()
            self._again(rng, mtbf_days, what)

        self._kernel.after(rng.expovariate(1.0 / (mtbf_days * DAY_S)), None, happen)

    def _plan_cluster(self, cluster: ClusterHost, rng: random.Random) -> None:
        table = self._world.tables[cluster.name]
        for begin_s, end_s in self._scenario.windows_s(table):
            self._kernel.at(begin_s, None, self._begin_window, cluster)
            if end_s < self._scenario.duration_s:
                self._kernel.at(end_s, None, cluster.stop_soon, "its window ended")
        self._again(rng, table.mtbf_days, lambda: self._cluster_dies(cluster, rng))
        self._again(rng, table.link_mtbf_days, lambda: self._link_fails(cluster, rng))

    def _begin_window(self, cluster: ClusterHost) -> None:
        """Start the process, once that of the window before has left."""
        if cluster.alive:
            self._kernel.after(START_AGAIN_S, None, self._begin_window, cluster)
        else:
            cluster.boot()

    def _cluster_dies(self, cluster: ClusterHost, rng: random.Random) -> None:
        restart_s = self._world.tables[cluster.name].restart * rng.uniform(0.5, 1.5)
        if not cluster.alive:
            return
        self._world.tally.faults["cluster"] += 1
        self._world.cluster_fails(cluster)
        windows = self._scenario.windows_s(self._world.tables[cluster.name])
        back_s = self._kernel.now_s + restart_s
        if any(begin_s <= back_s < end_s for begin_s, end_s in windows):
            # A window that begins meanwhile starts the process itself.
            self._kernel.at(back_s, None, lambda: None if cluster.alive else cluster.boot())

    def _link_fails(self, cluster: ClusterHost, rng: random.Random) -> None:
        outage_s = self._world.tables[cluster.name].link_outage * rng.uniform(0.5, 1.5)
        name, net = cluster.name, self._world.net
        if not cluster.alive or net.is_cut(name, "master"):
            return
        self._world.tally.faults["link"] += 1
        pairs = [pair for other in ("master", *self._world.slaves) for pair in ((name, other), (other, name))]
        net.cut_off(pairs)
        self._world.links.lose(name)
        self._kernel.after(outage_s, None, net.mend, pairs)

    def _slave_dies(self, rng: random.Random) -> None:
        slave = self._world.slaves[rng.choice(sorted(self._world.slaves))]
        if slave.alive:
            self._world.tally.faults["slave"] += 1
            slave.kill()
            self._kernel.after(self._world.slave_restart_s(slave), None, slave.boot)

    def _master_dies(self) -> None:
        master = self._world.masters[0]
        if master.alive:
            self._world.tally.faults["master"] += 1
            master.kill()
            self._kernel.after(self._scenario.slaves.restart, None, master.boot)
