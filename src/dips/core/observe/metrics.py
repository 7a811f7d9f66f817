"""The parts that all roles' metrics share: the list of what a role may export, counters, and the families of a scrape.

A role's `metrics.py` lists what it exports, and nothing else can leave it: docs/metrics.md and a test are made from the
same list. What happens is counted where it happens, in prometheus_client's own counters and histograms; what is the
case is read at a scrape (core/observe/metrics_server.py), from snapshots that the thread which owns the state has made.
Must never read a role's state itself, and never take a label whose values are without a bound.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric

from dips.core.errors import LocalProtocolError
from dips.core.net.data_header import REFUSED_DATA
from dips.core.net.keys import certificate_left_s
from dips.core.net.security import Security

MetricKind = Literal["gauge", "counter", "histogram"]

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper ends of a histogram's buckets: from a memory's millisecond to a slow link's quarter of an hour."""

K = TypeVar("K")


@dataclass(frozen=True)
class Spec:
    """One metric of a role."""

    name: str  # without the role's prefix
    kind: MetricKind
    meaning: str
    normal: str  # the range that needs no attention, in words
    labels: tuple[str, ...] = ()
    unit: str = ""  # "" where it counts things that `meaning` names
    when: str = ""  # what must be so for it to be there; "": always


CERTIFICATE = Spec(
    "certificate_expires_seconds",
    "gauge",
    "Time until the process's own certificate lapses; 0 once it has",
    "above 30 days",
    unit="s",
    when="the process has keys",
)
"""Exported by every role."""


class Instruments:
    """prometheus_client's counters and histograms of one role, by the names of its list. Safe on all threads.

    They are in no registry of the library, since one process may hold several roles, as in tests: Families shows them.
    of_kind: kinds of tape lines that are counted, and in which metric.
    """

    def __init__(self, prefix: str, specs: Sequence[Spec], of_kind: Mapping[str, str] | None = None) -> None:
        self._prefix = prefix
        self._specs = {spec.name: spec for spec in specs}
        self._made: dict[str, Counter | Histogram] = {}
        self._of_kind = {kind: self.counter(name) for kind, name in (of_kind or {}).items()}

    def count_kind(self, kind: str) -> None:
        """Counts a line of the tape, where lines of its kind are counted."""
        if kind in self._of_kind:
            self._of_kind[kind].inc()

    def counter(self, name: str, *words: str) -> Counter:
        """A counter of the list. words: values of its only label that are counted from 0: a series that first appears
        with 1 would show no increase."""
        spec = self._specs[name]
        made = self._made[name] = Counter(self._prefix + name, spec.meaning, spec.labels, registry=None)
        for word in words:
            made.labels(word)
        return made

    def histogram(self, name: str, *words: str) -> Histogram:
        """A histogram of the list, of seconds. words: as for counter()."""
        spec = self._specs[name]
        made = Histogram(self._prefix + name, spec.meaning, spec.labels, registry=None, buckets=SECONDS)
        self._made[name] = made
        for word in words:
            made.labels(word)
        return made

    def collect(self) -> dict[str, Metric]:
        """What they count now, by name."""
        found = {name: next(iter(made.collect())) for name, made in self._made.items()}
        for metric in found.values():
            # The library adds when each series was made; our lists do not have that.
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
        return found

    def families(self, security: Security) -> Families:
        """Begins the families of one scrape: with what is counted, and what every role exports."""
        families = Families(self._prefix, self._specs, self.collect())
        families.set(CERTIFICATE.name, certificate_left_s(security))
        return families


class Families:
    """The families of one scrape, filled by a role's collector. Nothing that is not on the role's list can be set."""

    def __init__(self, prefix: str, specs: Mapping[str, Spec], counted: Mapping[str, Metric]) -> None:
        self._prefix = prefix
        self._specs = specs
        self._samples: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        self._counted = counted

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """One value; None or NaN: it is not known now, and there is no sample."""
        spec = self._specs.get(name)
        if spec is None or len(labels) != len(spec.labels) or name in self._counted or spec.kind == "histogram":
            raise LocalProtocolError(f"metric {self._prefix}{name} with {len(labels)} labels is not on its role's list")
        if value is not None and not math.isnan(value):
            self._samples.setdefault(name, []).append((labels, value))

    def each(self, name: str, values: Mapping[str, float]) -> None:
        """One value for each value of the only label."""
        for label, value in values.items():
            self.set(name, value, label)

    def refusals(self, name: str, counts: Mapping[str, int], *labels: str) -> None:
        """Data messages that were refused, by code, which is the last label. Codes are shown from 0: a counter that
        first appears with 1 would show no increase."""
        for code, count in sorted({**{code.name: 0 for code in REFUSED_DATA}, **counts}.items()):
            self.set(name, count, *labels, code)

    def one_of(self, name: str, now: str, states: Iterable[str], *labels: str) -> None:
        """1 for the state that holds now, 0 for the others; the state is the last label."""
        for state in states:
            self.set(name, float(state == now), *labels, state)

    def __iter__(self) -> Iterator[Metric]:
        """All families of the list, in its order; those without a sample too, so that a scrape shows what there is."""
        for spec in self._specs.values():
            yield self._counted.get(spec.name) or self._family(spec)

    def _family(self, spec: Spec) -> Metric:
        full = self._prefix + spec.name
        family = Metric(
            full.removesuffix("_total"), spec.meaning, spec.kind
        )  # a counter's samples alone have the ending
        for labels, value in self._samples.get(spec.name, ()):
            family.add_sample(full, dict(zip(spec.labels, labels, strict=True)), value)
        return family


class Recent(Generic[K]):
    """Counts by key, of the `most` keys that were counted last: for labels that others choose. For one thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: OrderedDict[K, int] = OrderedDict()

    def keep(self, most: int) -> None:
        """Set another bound."""
        self._most = most
        while len(self._counts) > most:
            self._counts.popitem(last=False)

    def add(self, key: K, count: int = 1) -> None:
        self._counts[key] = self._counts.get(key, 0) + count
        self._counts.move_to_end(key)
        if len(self._counts) > self._most:
            self._counts.popitem(last=False)

    def counted(self) -> dict[K, int]:
        """A copy."""
        return dict(self._counts)


def flag(value: object) -> float:
    """1.0 if the value is true, else 0.0."""
    return 1.0 if value else 0.0


def disk_free_bytes(directory: Path) -> int | None:
    """Bytes that this process may still allocate on the disk of its directory; None: the disk does not answer."""
    try:
        room = os.statvfs(directory)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize
