"""Measures the speed of methods, and reproduces the paper's figures about throughput: what each runs, and how the
result compares with the paper.

Nothing is trained. Our own methods run on the simulated servers with links (engine.ServersRun). The paper's baselines
have no servers: their times follow from the set-up and the time of a ring all-reduce. Synchronous DiLoCo is both
computed and run; every gain is relative to the faster of the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dips.core.clock import Clock
from dips.core.errors import ConfigError, DipsError
from dips.core.release import software_versions
from dips.lab.compare.figures import SCHEMA, tell_statement
from dips.lab.compare.jobs import write_json
from dips.lab.compare.methods import METHODS, Method
from dips.lab.compare.pictures import draw_bars
from dips.lab.compare.pool import CompareProgress, PoolJobFailed, run_jobs
from dips.lab.compare.record import Progress, RunRecord
from dips.lab.compare.report import table_of
from dips.lab.compare.setup import ComparisonSetup

# ---- throughput ------------------------------------------------------------------------------------------------------


WARM_UP_SHARE = 0.25
"""The part of a run's tokens that is not measured: the clusters' phases still change."""

ROUNDS = 16
"""About how often each cluster pushes in a run that measures throughput."""

MOST_ROUNDS = 256


@dataclass(frozen=True)
class Throughput:
    """The throughput of a method."""

    method: str
    tokens_per_s: float  # applied, of all clusters together
    ideal_tokens_per_s: float
    rounds: int = 0  # this and the next two are 0 when it was only computed
    merged_per_round: float = 0.0
    staleness_mean: float = 0.0

    @property
    def share_of_ideal(self) -> float:
        """The part of what the clusters would train if transfers took no time and no cluster waited."""
        return self.tokens_per_s / self.ideal_tokens_per_s

    def gain_over(self, other: Throughput) -> float:
        return self.tokens_per_s / other.tokens_per_s


@dataclass(frozen=True)
class ThroughputComparison:
    """The throughputs in one set-up."""

    setup: ComparisonSetup
    synchronous: Throughput  # synchronous DiLoCo, the faster of its two forms
    # data parallel, synchronous and asynchronous DiLoCo without servers, and synchronous DiLoCo over our servers
    baselines: tuple[Throughput, ...]
    measured: tuple[Throughput, ...]  # the chosen methods

    def of(self, method: str) -> Throughput:
        return next(item for item in (*self.measured, *self.baselines) if item.method == method)


def compare_speeds(
    setup: ComparisonSetup, methods: Sequence[Method], seed: int = 1, rounds: int = ROUNDS
) -> ThroughputComparison:
    """Compare all baselines and `methods` in one set-up. Raises ConfigError for a method without servers."""
    synchronous = (ring_diloco(setup), measure(setup, METHODS["diloco"], seed, rounds))
    baselines = (data_parallel(setup), *synchronous, ring_async(setup))
    measured = tuple(measure(setup, method, seed, rounds) for method in methods)
    return ThroughputComparison(setup, max(synchronous, key=lambda item: item.tokens_per_s), baselines, measured)


def measure(setup: ComparisonSetup, method: Method, seed: int = 1, rounds: int = ROUNDS) -> Throughput:
    """Run `method` for so many rounds; the rate is that of the steady part.

    rounds: of H steps, of a cluster of mean speed; twice as many where the slowest cluster has too few of its own for a
    rate, and again. Raises ConfigError for a method without servers, for fewer than 6 rounds, which have too short a
    steady part, and where a cluster has none in MOST_ROUNDS.
    """
    if method.kind != "servers":
        raise ConfigError(f"method {method.name} has no servers to run on: use data_parallel() for it")
    if rounds < 6:
        raise ConfigError(f"{rounds} rounds are too few to measure a throughput: give at least 6")
    tokens = rounds * setup.n_clusters * setup.run.inner_steps * setup.tokens_per_step
    from dips.lab.compare.engine import ServersRun  # imports numba, which --help does without

    record = ServersRun(setup.with_overrides(tokens=tokens), method, seed).through()
    steady = steady_pushes(record)
    if any(len(steady.get(name, ())) < 2 for name in setup.cluster_names):
        if 2 * rounds > MOST_ROUNDS:
            raise ConfigError(
                f"method {method.name}: a cluster hardly merges anything in {rounds} rounds of the others"
            )
        return measure(setup, method, seed, 2 * rounds)
    judged = [push for fact in record.judged for push in fact.pushes]
    return Throughput(
        method.name,
        sum(rate_of(own) for own in steady.values()),
        setup.ideal_tokens_per_s,
        len(record.judged),
        len(judged) / len(record.judged),
        sum(push.staleness for push in judged) / len(judged),
    )


def steady_pushes(record: RunRecord) -> Mapping[str, Sequence[tuple[float, int]]]:
    """When each cluster's pushes after the warm-up were merged, and their tokens."""
    begins = WARM_UP_SHARE * record.virtual_s
    merged: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for fact in record.judged:
        for push in fact.pushes:
            if push.verdict == "APPLIED" and fact.virtual_s >= begins:
                merged[push.cluster].append((fact.virtual_s, push.tokens))
    return merged


def rate_of(pushes: Sequence[tuple[float, int]]) -> float:
    """Tokens per second of two or more steady pushes: the tokens of those after the first one, over the time from the
    first to the last. Incomplete rounds at either end do not distort it, as they would distort a total."""
    return sum(tokens for _, tokens in pushes[1:]) / (pushes[-1][0] - pushes[0][0])


# ---- the paper's baselines, without servers ----


def data_parallel(setup: ComparisonSetup) -> Throughput:
    """Data parallel: every step waits for the slowest cluster and for an all-reduce of the gradients, in float32 (paper
    5.1, i)."""
    return _computed(setup, "dp", max(setup.step_s) + setup.all_reduce_s(), 1)


def ring_diloco(setup: ComparisonSetup) -> Throughput:
    """Synchronous DiLoCo without servers: every round of H steps waits for the slowest cluster and for an all-reduce of
    the parameters (paper 5.1, ii)."""
    h = setup.run.inner_steps
    return _computed(setup, "ring-diloco", h * max(setup.step_s) + setup.all_reduce_s(), h)


def ring_async(setup: ComparisonSetup) -> Throughput:
    """Asynchronous DiLoCo without servers: each cluster has rounds of its own, but an exchange takes equally long for
    all, since the ring goes through all links (paper 5.1, iii, and 3.1: "uniformly high communication overhead").

    That exchanges slow each other down is not counted, so this is an upper bound.
    """
    h, exchange = setup.run.inner_steps, setup.all_reduce_s()
    rate = sum(h * setup.tokens_per_step / (h * step_s + exchange) for step_s in setup.step_s)
    return Throughput("ring-async", rate, setup.ideal_tokens_per_s)


def _computed(setup: ComparisonSetup, name: str, round_s: float, steps: int) -> Throughput:
    tokens = steps * setup.n_clusters * setup.tokens_per_step
    return Throughput(name, tokens / round_s, setup.ideal_tokens_per_s)


# ---- figures ---------------------------------------------------------------------------------------------------------


MEASURED = ("safe", "dynamic", "dynamic-push", "dips")
GBPS = 1e9
RATES_GBPS = (1, 2, 5, 10)
"""Rates of the last cluster's link, each way."""


@dataclass(frozen=True)
class SpeedJob:
    """One set-up, in which all methods are measured."""

    column: str  # its heading in the table
    setup: ComparisonSetup
    seed: int
    rounds: int = ROUNDS

    @property
    def title(self) -> str:
        return f"{self.setup.name}, {self.column}"


@dataclass(frozen=True)
class SpeedResult:
    """The throughputs of one family of set-ups, column by column."""

    setup: ComparisonSetup
    columns: Sequence[tuple[str, ThroughputComparison]]

    def shares(self, method: str) -> list[float]:
        """Throughput as a part of the ideal one."""
        return [found.of(method).share_of_ideal for _, found in self.columns]

    def gains(self, method: str, over: str | None = None) -> list[float]:
        """Speed relative to synchronous DiLoCo, or to another method."""
        return [
            found.of(method).gain_over(found.synchronous if over is None else found.of(over))
            for _, found in self.columns
        ]

    def ideal_gains(self) -> list[float]:
        """Speed of clusters that train all the time and never wait, relative to synchronous DiLoCo."""
        return [found.synchronous.ideal_tokens_per_s / found.synchronous.tokens_per_s for _, found in self.columns]

    def methods(self) -> list[str]:
        """Baselines first."""
        _, found = self.columns[0]
        return [item.method for item in (*found.baselines, *found.measured)]


@dataclass(frozen=True)
class SpeedFigure:
    """A figure of the paper about throughput."""

    name: str
    title: str
    section: str
    statement: str  # quoted from the paper, [...] for omissions
    setups: tuple[str, ...]  # the shipped ones that it is made of
    # the headings, each with the set-up as it is changed for it
    columns: Callable[[ComparisonSetup], list[tuple[str, ComparisonSetup]]]
    reading: Callable[[SpeedResult], str]  # our sentence about one result


def speed_jobs(
    figure: SpeedFigure, setups: Sequence[ComparisonSetup], seed: int, rounds: int = ROUNDS
) -> list[SpeedJob]:
    """The jobs of a figure. Raises ConfigError for a set-up that the figure cannot use."""
    if changing := [setup.name for setup in setups if setup.changes]:
        raise ConfigError(
            f"figure {figure.name} measures a steady throughput, and set-up {changing[0]} changes in the run: give "
            "another --setup, or leave --figure out"
        )
    return [SpeedJob(column, changed, seed, rounds) for setup in setups for column, changed in figure.columns(setup)]


def do_speed(job: SpeedJob, tell: Progress) -> ThroughputComparison:
    return compare_speeds(job.setup, [METHODS[name] for name in MEASURED], job.seed, job.rounds)


def with_last_link(setup: ComparisonSetup, bits_per_s: float) -> ComparisonSetup:
    """The set-up with this rate, both ways, for its last cluster (paper 5.1: the remaining cluster's 1 to 10 Gbps)."""
    up, down = setup.up_bits_per_s[:-1], setup.down_bits_per_s[:-1]
    return setup.with_overrides(up=(*up, bits_per_s), down=(*down, bits_per_s))


def first_clusters(setup: ComparisonSetup, n: int) -> ComparisonSetup:
    """The set-up with its first n clusters only (paper 5.2: added one after another). Raises ConfigError."""
    if not 1 <= n <= setup.n_clusters:
        raise ConfigError(f"set-up {setup.name} has {setup.n_clusters} clusters: {n} of them cannot be used")
    return setup.with_overrides(
        gaps=setup.clusters.gaps[:n], up=setup.up_bits_per_s[:n], down=setup.down_bits_per_s[:n]
    )


def _reading_9(found: SpeedResult) -> str:
    gains = ", ".join(f"{name} {span(found.gains(name))}" for name in MEASURED)
    return (
        f"{found.setup.name}: over synchronous DiLoCo {gains}, of an ideal {span(found.ideal_gains())}; "
        f"DiLoCo over data parallel {span(found.gains('ring-diloco', 'dp'))}; dips over asynchronous DiLoCo "
        f"without servers {span(found.gains('dips', 'ring-async'))}."
    )


def _reading_10(found: SpeedResult) -> str:
    if len(found.columns) == 1:
        return "one cluster never waits."
    several = SpeedResult(found.setup, found.columns[1:])
    shares = "; ".join(f"{name} {span(several.shares(name), '.1%', '')}" for name in MEASURED)
    return (
        f"from 2 to {len(found.columns)} clusters, of ideal: {shares}. dips over synchronous DiLoCo "
        f"{span(several.gains('dips'))}, over asynchronous DiLoCo without servers "
        f"{span(several.gains('dips', 'ring-async'))}."
    )


def span(values: Sequence[float], form: str = ".2f", unit: str = "x") -> str:
    """From the smallest to the largest, such as "1.12-1.20x"."""
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"


_FIGURES = (
    SpeedFigure(
        "9",
        "end-to-end throughput, the last cluster's link at 1 to 10 Gbit/s",
        "5.1",
        "Compared to global DP, the synchronous DiLoCo accelerates training 1.15-2.51x in real clusters and "
        "2.03-10.35x in emulated clusters [...]. Di-PS further achieves 1.23-1.38x speedups over synchronous DiLoCo in "
        "emulation clusters [...]. In the real cluster configuration with more severe performance disparity, Di-PS "
        "achieves 2.87-2.93x speedups over synchronous DiLoCo. [...] Di-PS provides stable convergence (Figure 7a) and "
        "adapts to heterogeneous networks, accelerating end-to-end training by 1.00-1.16x.",
        ("emulated", "real"),
        lambda setup: [(f"{rate} Gbit/s", with_last_link(setup, rate * GBPS)) for rate in RATES_GBPS],
        _reading_9,
    ),
    SpeedFigure(
        "10",
        "weak scaling, clusters added one after another",
        "5.2",
        "Di-PS achieves 1.00-1.03x speedups over the asynchronous DiLoCo approach [...]. In comparison to the "
        "synchronous DiLoCo approach, Di-PS achieves speedups ranging from 1.00 to 5.74x. [...] Except for the "
        "single-cluster case, Di-PS achieves 98.2-98.6% of the ideal performance [...].",
        ("weak-scaling",),
        lambda setup: [(str(n), first_clusters(setup, n)) for n in range(1, setup.n_clusters + 1)],
        _reading_10,
    ),
)

SPEED_FIGURES: Mapping[str, SpeedFigure] = {figure.name: figure for figure in _FIGURES}
"""Figures by their number in the paper."""


# ---- speed report ----------------------------------------------------------------------------------------------------
#
# Runs and reports a figure about throughput: tables, pictures, and the paper's statement with our result.


def run_speed(
    figure: SpeedFigure,
    setups: Sequence[ComparisonSetup],
    seed: int,
    rounds: int,
    processes: int,
    console: Console,
    clock: Clock,
) -> list[SpeedResult]:
    """Run a figure; one result for each set-up. Raises ConfigError for a set-up that does not fit, DipsError when a run
    fails."""
    jobs = speed_jobs(figure, setups, seed, rounds)
    found: dict[int, ThroughputComparison] = {}
    try:
        with (
            CompareProgress(console, clock, [job.title for job in jobs], [1] * len(jobs)) as progress,
            closing(run_jobs(jobs, do_speed, processes, progress)) as running,
        ):
            for index, comparison in running:
                found[index] = comparison
    except PoolJobFailed as failed:
        raise DipsError(f"{jobs[failed.index].title}: {failed}") from failed
    pairs = [(jobs[index], found[index]) for index in range(len(jobs))]
    return [
        SpeedResult(setup, [(job.column, comparison) for job, comparison in pairs if job.setup.name == setup.name])
        for setup in setups
    ]


def speed_json(figure: SpeedFigure, results: Sequence[SpeedResult]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "figure": figure.name,
        "title": figure.title,
        "paper": {"section": figure.section, "statement": figure.statement},
        "here": [figure.reading(result) for result in results],
        "setups": {
            result.setup.name: {
                "setup": result.setup.to_json(),
                "columns": [column for column, _ in result.columns],
                "ideal_tokens_per_s": [found.setup.ideal_tokens_per_s for _, found in result.columns],
                "ideal_over_synchronous": result.ideal_gains(),
                "methods": {
                    method: {
                        "tokens_per_s": [found.of(method).tokens_per_s for _, found in result.columns],
                        "share_of_ideal": result.shares(method),
                        "over_synchronous": result.gains(method),
                    }
                    for method in result.methods()
                },
            }
            for result in results
        },
        "software": software_versions(),
    }


def write_speed(figure: SpeedFigure, results: Sequence[SpeedResult], run_dir: Path) -> list[Path]:
    """Write figure-NAME.json, and a picture for each set-up, into the run's directory."""
    paths = [run_dir / f"figure-{figure.name}.json"]
    write_json(paths[0], speed_json(figure, results))
    for result in results:
        paths.append(run_dir / f"figure-{figure.name}-{result.setup.name}.png")
        bars = [(method, [100 * share for share in result.shares(method)]) for method in result.methods()]
        title = f"Figure {figure.name}, {result.setup.name}: {figure.title}"
        draw_bars(paths[-1], [column for column, _ in result.columns], bars, "tokens a second, % of ideal", title)
    return paths


def share_table(figure: SpeedFigure, result: SpeedResult) -> Table:
    """The table of tokens a second as a part of the ideal, column by column."""
    table = _table(f"Figure {figure.name}, {result.setup.name}: tokens a second, of ideal", result)
    for method in result.methods():
        table.add_row(method, *(f"{share:.1%}" for share in result.shares(method)))
    return table


def gain_table(result: SpeedResult) -> Table:
    """The table of tokens a second relative to synchronous DiLoCo, the faster of its two forms."""
    table = _table("tokens a second, over synchronous DiLoCo", result)
    for method in result.methods():
        table.add_row(method, *(f"{gain:.2f}x" for gain in result.gains(method)))
    table.add_row("ideal", *(f"{gain:.2f}x" for gain in result.ideal_gains()))
    return table


def tell_speed(figure: SpeedFigure, results: Sequence[SpeedResult], console: Console) -> None:
    for result in results:
        for what, value in result.setup.describe():
            console.print(f"{what:<11} {value}", soft_wrap=True, markup=False)
        for table in (share_table(figure, result), gain_table(result)):
            console.print("", table)
        console.print("")
    console.print(
        "ring-diloco, ring-async, dp: without servers, a ring all-reduce over all links, computed; diloco: over the "
        "servers. Ideal: every cluster trains all the time. Nothing is trained here.",
        markup=False,
    )
    tell_statement(console, figure.section, figure.statement, [figure.reading(result) for result in results])


def _table(title: str, result: SpeedResult) -> Table:
    return table_of(title, ["method", *(column for column, _ in result.columns)])
