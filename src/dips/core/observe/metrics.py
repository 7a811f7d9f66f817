"""The parts that all roles' metrics share: the list that a role may export, and the families made from values.

A role's `metrics.py` lists what it exports, and nothing else can leave it: docs/metrics.md and a test are made from the
same list. Values are read at a scrape (core/observe/metrics_server.py), from snapshots that the thread which owns the
state has made. Must never read a role's state itself, and never take a label whose values are without a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from dips.core.errors import LocalProtocolError
from dips.core.observe.counting import SECONDS, Observed

MetricKind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Spec:
    """One metric of a role. name: without the role's prefix. unit: "" where it counts things that `meaning` names.

    normal: the range that needs no attention, in words. when: what must be so for it to be there; "": always.
    """

    name: str
    kind: MetricKind
    meaning: str
    normal: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    when: str = ""


CERTIFICATE = Spec(
    "certificate_expires_seconds",
    "gauge",
    "Time until the process's own certificate lapses; 0 once it has",
    "above 30 days",
    unit="s",
    when="the process has keys",
)
"""Exported by every role."""


class Families:
    """The families of one scrape, filled by a role's collector. Nothing that is not on the role's list can be set."""

    def __init__(self, prefix: str, specs: Sequence[Spec]) -> None:
        self._prefix = prefix
        self._specs = {spec.name: spec for spec in specs}
        self._samples: dict[str, list[tuple[tuple[str, ...], float | Observed]]] = {}

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """One value; None or NaN: it is not known now, and there is no sample."""
        if value is not None and not math.isnan(value):
            self._put(name, labels, value)

    def each(self, name: str, values: Mapping[str, float]) -> None:
        """One value for each value of the only label."""
        for label, value in values.items():
            self.set(name, value, label)

    def one_of(self, name: str, now: str, states: Iterable[str], *labels: str) -> None:
        """1 for the state that holds now, 0 for the others; the state is the last label."""
        for state in states:
            self.set(name, float(state == now), *labels, state)

    def observed(self, name: str, value: Observed, *labels: str) -> None:
        """A histogram."""
        self._put(name, labels, value)

    def __iter__(self) -> Iterator[Metric]:
        """All families of the list, in its order; those without a sample too, so that a scrape shows what there is."""
        for spec in self._specs.values():
            yield self._family(spec)

    def _put(self, name: str, labels: tuple[str, ...], value: float | Observed) -> None:
        spec = self._specs.get(name)
        if spec is None or len(labels) != len(spec.labels):
            raise LocalProtocolError(f"metric {self._prefix}{name} with {len(labels)} labels is not on its role's list")
        self._samples.setdefault(name, []).append((labels, value))

    def _family(self, spec: Spec) -> Metric:
        full, samples = self._prefix + spec.name, self._samples.get(spec.name, ())
        if spec.kind == "histogram":
            histogram = HistogramMetricFamily(full, spec.meaning, labels=spec.labels)
            for labels, value in samples:
                assert isinstance(value, Observed), "a histogram is set by observed()"
                histogram.add_metric(labels, list(_cumulative(value.counts)), value.total)
            return histogram
        made = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        family = made(full, spec.meaning, labels=spec.labels)
        for labels, value in samples:
            assert isinstance(value, int | float), "a histogram is set by observed() alone"
            family.add_metric(labels, value)
        return family


def full_name(prefix: str, spec: Spec) -> str:
    """The metric's name in PromQL, without a histogram's endings."""
    return prefix + spec.name


def _cumulative(counts: Sequence[int]) -> Iterator[tuple[str, float]]:
    """(upper end, values up to it), as the text format has them."""
    so_far = 0
    for end, count in zip((*map(str, SECONDS), "+Inf"), counts, strict=True):
        so_far += count
        yield end, float(so_far)


def flag(value: object) -> float:
    """1.0 if the value is true, else 0.0."""
    return 1.0 if value else 0.0
