"""Runs the simulator without faults: it boots, trains until the master ends the run, and must end in order.

The same processes as in every simulated run, without faults, readers and restarts: a failed cluster, a broken
promise or an exception in a state machine ends the comparison with an error: numbers of a broken run mean nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dips.core.errors import LocalProtocolError
from dips.core.ids import Version, parse_version
from dips.sim.arithmetic import F32
from dips.sim.hosts.cluster import ClusterHost
from dips.sim.hosts.master import MasterHost
from dips.sim.kernel import SimulatedProcess
from dips.sim.run_plan import SimulatedRunPlan
from dips.sim.world import World
from dips.worker.state.effects import Finished

CLUSTERS_BOOT_S = 1.0
"""The time at which clusters start: the servers are up by then, so all clusters join together."""


class SimulationError(LocalProtocolError):
    """The simulated run broke a promise, or did not end."""


class Course(World):
    """A simulated run without faults. published: called for each published version; journal: for each durable
    record."""

    def __init__(
        self,
        seed: int,
        plan: SimulatedRunPlan,
        published: Callable[[Version], None],
        journal: Callable[[Mapping[str, Any]], None],
    ) -> None:
        super().__init__(seed, plan=plan, planned=())
        self._published = published
        self._journal = journal
        self.watchers.append(self._watch)

    def run_through(self, stop: Callable[[], bool], limit_s: float) -> None:
        """Run until the master ends the run, or `stop` does. limit_s: virtual. Raises SimulationError."""
        self._boot()
        self._until(lambda: bool(self.ended) or stop(), limit_s)
        if self.ended:
            self.judge.finish()
        if self.checks.violations:
            raise SimulationError(f"the simulated run is broken: {self.checks.violations[0]}")
        if not self.ended and not stop():
            raise SimulationError(f"the simulated run does not end within {limit_s:.0f} s: {self.waiting_for()}")

    def parameters(self, version: Version) -> F32:
        """The parameters of a published version on the slaves, in layout order. Only when chunks are numbers."""
        flat = np.full(self.plan.layout.n_elems, math.nan, np.float32)
        for slave in self.slaves.values():
            memory = slave.port.memory
            assert memory is not None, "a published version is on all slaves"
            theta, start = memory.readable[version].theta, 0
            for block in memory.blocks:
                flat[block.start_elem : block.stop_elem] = theta[start : start + block.n_elems]
                start += block.n_elems
        return flat

    # ---- what World draws at random or repairs ----

    def _boot(self) -> None:
        for boot in (self.masters[0].boot, *(slave.boot for slave in self.slaves.values())):
            self.kernel.after(0.0, None, boot)
        for cluster in self.clusters.values():
            self.kernel.after(CLUSTERS_BOOT_S, None, cluster.boot)

    def cluster_ended(self, cluster: ClusterHost, finished: Finished) -> None:
        if finished.error is not None:
            self.checks.violated(f"cluster {cluster.name} failed: {finished.error}")

    # ---- facts ----

    def journalled(self, master: MasterHost, record: Mapping[str, Any]) -> None:
        super().journalled(master, record)
        self._journal(record)

    def _watch(self, role: str, process: SimulatedProcess, kind: str, fields: Mapping[str, Any]) -> None:
        if role == "master" and kind == "publish":
            self._published(parse_version(fields["version"]))
