"""Runs one simulation at scale, from its set-up to its report."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dips.core.layout import Layout, Parameter
from dips.core.messages import DataMode, DataPlan
from dips.sim.scale.cluster import LightCluster
from dips.sim.scale.failures import Failures
from dips.sim.scale.kernel import VirtualClock
from dips.sim.scale.links import SharedDirection
from dips.sim.scale.scenario import ClusterTable, Scenario
from dips.sim.scale.servers import Servers
from dips.sim.scale.tally import DOWNTIME, OVERHEAD, TRAIN, UP, ClusterAccount, ScaleTally

# ---- report ----------------------------------------------------------------------------------------------------------
#
# The report of a run at scale, as plain data for the screen, --json and tests.


SCHEMA = "dips-simulate/1"


@dataclass(frozen=True)
class ClusterReport:
    """The report of one cluster: its seconds by state, its applied tokens, and its link. presence: (second, is it
    up)."""

    id: str
    npus: int
    seconds: dict[str, float]
    downtime_s: dict[str, float]
    overhead: dict[str, float]
    failures: int
    joins: int
    pushes: dict[str, int]
    tokens_applied: int
    up_bytes: int
    down_bytes: int
    up_busy_s: float
    down_busy_s: float
    presence: list[tuple[float, bool]]


@dataclass(frozen=True)
class ScaleReport:
    """The report of one run. Shares are parts of 1; overhead is a share of the time that clusters took part."""

    schema: str
    scenario: str
    about: str
    seed: int
    hours: float
    tokens: int
    tokens_per_s: float
    ideal_tokens: float
    share_of_ideal: float
    paper_tokens: int
    overhead: dict[str, float]
    overhead_total: float
    paper_overhead: float
    downtime_s: dict[str, float]
    rounds: dict[str, int]
    versions_published: int
    merged: dict[int, int]
    merged_mean: float
    staleness: dict[int, int]
    failures: dict[str, int]
    alarms: dict[str, int]
    clusters: list[ClusterReport]
    slave_bytes: dict[str, dict[str, int]]
    epochs: int
    journal_entries: int
    events: int
    halted: str

    def to_json(self) -> dict[str, Any]:
        """The report as JSON; keys of histograms become text."""
        raw = asdict(self)
        for name in ("merged", "staleness"):
            raw[name] = {str(key): value for key, value in raw[name].items()}
        return raw


def make_report(
    scenario: Scenario,
    tally: ScaleTally,
    up: SharedDirection,
    down: SharedDirection,
    servers: Servers,
    clock: VirtualClock,
) -> ScaleReport:
    """Make the report from the counts of a finished run."""
    clusters = [_cluster(table, tally.clusters[table.id], up, down) for table in scenario.clusters]
    here_s = sum(c.seconds[state] for c in clusters for state in UP)
    overhead = {state: _share(sum(c.seconds[state] for c in clusters), here_s) for state in OVERHEAD}
    rounds = sum(count for count in tally.merged.values())
    ideal = scenario.ideal_tokens()
    return ScaleReport(
        schema=SCHEMA,
        scenario=scenario.name,
        about=scenario.run.about,
        seed=scenario.run.seed,
        hours=scenario.run.hours,
        tokens=tally.tokens,
        tokens_per_s=tally.tokens / scenario.duration_s,
        ideal_tokens=ideal,
        share_of_ideal=_share(tally.tokens, ideal),
        paper_tokens=scenario.run.paper_tokens,
        overhead=overhead,
        overhead_total=sum(overhead.values()),
        paper_overhead=scenario.run.paper_overhead,
        downtime_s={state: sum(c.seconds[state] for c in clusters) for state in DOWNTIME},
        rounds={kind: tally.rounds[kind] for kind in ("committed", "void", "aborted")},
        versions_published=tally.published,
        merged=dict(sorted(tally.merged.items())),
        merged_mean=_share(sum(n * count for n, count in tally.merged.items()), rounds),
        staleness=dict(sorted(tally.staleness.items())),
        failures={kind: count for kind, count in sorted(tally.faults.items()) if count},
        alarms=dict(sorted(tally.alarms.items())),
        clusters=clusters,
        slave_bytes={
            name: {"in": round(up.bytes_of_slave.get(name, 0)), "out": round(down.bytes_of_slave.get(name, 0))}
            for name in servers.slaves
        },
        epochs=servers.epoch,
        journal_entries=tally.journal_entries,
        events=clock.events,
        halted=servers.halted,
    )


def _cluster(table: ClusterTable, account: ClusterAccount, up: SharedDirection, down: SharedDirection) -> ClusterReport:
    states = (*DOWNTIME, *OVERHEAD, TRAIN)
    seconds = dict.fromkeys(states, 0.0) | account.seconds
    here_s = sum(seconds[state] for state in UP)
    return ClusterReport(
        id=table.id,
        npus=table.npus,
        seconds=seconds,
        downtime_s={state: seconds[state] for state in DOWNTIME},
        overhead={state: _share(seconds[state], here_s) for state in OVERHEAD},
        failures=account.failures,
        joins=account.rejoins,
        pushes={kind: account.pushes[kind] for kind in ("applied", "excluded")},
        tokens_applied=account.tokens_applied,
        up_bytes=round(up.bytes_of_cluster[table.id]),
        down_bytes=round(down.bytes_of_cluster[table.id]),
        up_busy_s=up.busy_s[table.id],
        down_busy_s=down.busy_s[table.id],
        presence=list(account.presence),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


# ---- run -------------------------------------------------------------------------------------------------------------


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
