"""Defines the paper's figures about throughput: what each runs, and how the result compares with the paper.

Nothing is trained: the real state machines run the set-up's rounds over its links (dips.compare.throughput), and the
paper's baselines without servers are computed. A gain is relative to synchronous DiLoCo, the faster of its two forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dips.compare.methods import find_method
from dips.compare.pool import TellProgress
from dips.compare.setup import ComparisonSetup
from dips.compare.throughput import ThroughputComparison, compare, first_clusters, with_last_link

METHODS = ("dips", "dynamic", "dynamic-push", "dynamic-full")
GBPS = 1e9
RATES_GBPS = (1, 2, 5, 10)
"""Rates of the last cluster's link, each way."""


@dataclass(frozen=True)
class SpeedJob:
    """One set-up, in which all methods are measured. column: its heading in the table."""

    column: str
    setup: ComparisonSetup
    seed: int

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
    """setups: the shipped ones that it is made of. statement: quoted from the paper, [...] for omissions.
    reading: our sentence about one result."""

    name: str
    title: str
    section: str
    statement: str
    setups: tuple[str, ...]
    columns: Callable[[ComparisonSetup], list[tuple[str, ComparisonSetup]]]
    reading: Callable[[SpeedResult], str]


def speed_jobs(figure: SpeedFigure, setups: Sequence[ComparisonSetup], seed: int) -> list[SpeedJob]:
    """The jobs of a figure. Raises ConfigError for a set-up that the figure cannot use."""
    return [SpeedJob(column, changed, seed) for setup in setups for column, changed in figure.columns(setup)]


def do_speed(job: SpeedJob, tell: TellProgress) -> ThroughputComparison:
    return compare(job.setup, [find_method(name) for name in METHODS], job.seed)


def _last_links(setup: ComparisonSetup) -> list[tuple[str, ComparisonSetup]]:
    return [(f"{rate} Gbit/s", with_last_link(setup, rate * GBPS)) for rate in RATES_GBPS]


def _numbers_of_clusters(setup: ComparisonSetup) -> list[tuple[str, ComparisonSetup]]:
    return [(str(n), first_clusters(setup, n)) for n in range(1, setup.n_clusters + 1)]


def _reading_9(found: SpeedResult) -> str:
    return (
        f"{found.setup.name}: over synchronous DiLoCo {_each(found.gains)}, of an ideal {span(found.ideal_gains())}; "
        f"DiLoCo over data parallel {span(found.gains('ring-diloco', 'dp'))}; dynamic-full over asynchronous DiLoCo "
        f"without servers {span(found.gains('dynamic-full', 'ring-async'))}."
    )


def _reading_10(found: SpeedResult) -> str:
    if len(found.columns) == 1:
        return "one cluster never waits."
    several = SpeedResult(found.setup, found.columns[1:])
    shares = "; ".join(f"{name} {span(several.shares(name), '.1%', '')}" for name in METHODS)
    return (
        f"from 2 to {len(found.columns)} clusters, of ideal: {shares}. dynamic-full over synchronous DiLoCo "
        f"{span(several.gains('dynamic-full'))}, over asynchronous DiLoCo without servers "
        f"{span(several.gains('dynamic-full', 'ring-async'))}."
    )


def _each(gains: Callable[[str], list[float]]) -> str:
    return ", ".join(f"{name} {span(gains(name))}" for name in METHODS)


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
        _last_links,
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
        _numbers_of_clusters,
        _reading_10,
    ),
)

SPEED_FIGURES: Mapping[str, SpeedFigure] = {figure.name: figure for figure in _FIGURES}
"""Figures by their number in the paper."""
