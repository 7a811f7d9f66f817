"""Runs one simulation at scale, from its set-up to its report.

Failures are independent exponential times for each cluster, link, slave and the master, drawn from the seed. A
cluster's clock of failures runs only while it is scheduled. Nothing else in the simulation fails by itself.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dips.core.layout import Layout, Parameter
from dips.lab.sim.hosts.cluster import ClusterHost
from dips.lab.sim.scale.scenario import DAY_S, ClusterTable, Scenario
from dips.lab.sim.scale.tally import DOWNTIME, OVERHEAD, TRAIN, UP, ClusterAccount
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


# ---- report ----------------------------------------------------------------------------------------------------------
#
# The report of a run at scale, as plain data for the screen, --json and tests.


SCHEMA = "dips-simulate/1"


@dataclass(frozen=True)
class ClusterReport:
    """The report of one cluster: its seconds by state, its applied tokens, and its link."""

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
    presence: list[tuple[float, bool]]  # (second, is it up)


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


def make_report(world: ScaleWorld) -> ScaleReport:
    """Make the report from the counts of a finished run."""
    scenario, tally = world.scenario, world.tally
    carried = Counter[tuple[str, str]]()
    for (source, target), n_bytes in world.links.sent_bytes.items():
        carried[source, "out"] += n_bytes
        carried[target, "in"] += n_bytes
    clusters = [_cluster(table, tally.clusters[table.id], carried) for table in scenario.clusters]
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
        slave_bytes={name: {way: carried[name, way] for way in ("in", "out")} for name in world.slaves},
        epochs=world.masters[0].epoch,
        journal_entries=tally.journal_entries,
        events=world.kernel.handled,
        halted=world.halted,
    )


def _cluster(table: ClusterTable, account: ClusterAccount, carried: Counter[tuple[str, str]]) -> ClusterReport:
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
        up_bytes=carried[table.id, "out"],
        down_bytes=carried[table.id, "in"],
        up_busy_s=8 * carried[table.id, "out"] / table.up,
        down_busy_s=8 * carried[table.id, "in"] / table.down,
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
    world = ScaleWorld(scenario, layout_of(scenario))
    Failures(world)
    for step in range(1, PROGRESS_STEPS + 1):
        world.kernel.run(scenario.duration_s * step / PROGRESS_STEPS)
        if progress is not None:
            progress(step / PROGRESS_STEPS, world.tally.tokens)
    world.close()
    return make_report(world)
