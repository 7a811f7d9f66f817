"""Runs one simulation at scale, from its set-up to its report."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from dips.core.layout import Layout, Parameter
from dips.core.messages import DataMode, DataPlan
from dips.sim.scale.cluster import LightCluster
from dips.sim.scale.failures import Failures
from dips.sim.scale.kernel import VirtualClock
from dips.sim.scale.links import SharedDirection
from dips.sim.scale.report import ScaleReport, make_report
from dips.sim.scale.scenario import Scenario
from dips.sim.scale.servers import Servers
from dips.sim.scale.tally import ScaleTally

PROGRESS_STEPS = 200

Progress = Callable[[float, int], None]
"""Called from time to time with (share of the run that is done, tokens)."""


def layout_of(scenario: Scenario) -> Layout:
    """The layout: layers of equal size, one block each; the results do not depend on the size of blocks."""
    per_layer = math.ceil(scenario.model.parameters / scenario.model.layers)
    rows = (
        Parameter(f"layers.{i}.weight", (per_layer,), "float32", f"layers.{i}") for i in range(scenario.model.layers)
    )
    return Layout(tuple(rows), min(per_layer, 1 << 32))


def simulate(scenario: Scenario, progress: Progress | None = None) -> ScaleReport:
    """Simulate the whole run; the same scenario and seed give the same report."""
    clock, layout = VirtualClock(), layout_of(scenario)
    table, seed = scenario.slaves, scenario.run.seed
    cards = table.network * table.count
    up = SharedDirection(clock, {c.id: c.up for c in scenario.clusters}, cards)
    down = SharedDirection(clock, {c.id: c.down for c in scenario.clusters}, cards)
    tally = ScaleTally(c.id for c in scenario.clusters)
    servers = Servers(scenario, clock, up, tally)
    data = scenario.data
    plan = DataPlan(DataMode.LEASED, b"simulated", data.total_tokens, data.chunk_tokens)
    clusters = {
        c.id: LightCluster(c, servers, down, tally.clusters[c.id], layout, plan, random.Random(f"{seed} {c.id}"))
        for c in scenario.clusters
    }
    servers.on_slave_lost.extend(cluster.slave_lost for cluster in clusters.values())
    Failures(scenario, clock, servers, clusters, (up, down), tally)
    for step in range(1, PROGRESS_STEPS + 1):
        clock.run(scenario.duration_s * step / PROGRESS_STEPS)
        if progress is not None:
            progress(step / PROGRESS_STEPS, tally.tokens)
    for cluster in clusters.values():
        cluster.account.enter(cluster.account.state, clock.now_s)
    up.settle()
    down.settle()
    return make_report(scenario, tally, up, down, servers, clock)
