"""Small counters, each an entry of a dictionary, and a bounded number of them: metrics are read from these.

Knows nothing of Prometheus, so that code that counts need not import it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper ends of a histogram's buckets: from a memory's millisecond to a slow link's quarter of an hour."""


K = TypeVar("K")


@dataclass(frozen=True)
class Observed:
    """A histogram at one moment: how many values each bucket of SECONDS holds, the last one those above; their sum."""

    counts: tuple[int, ...]
    total: float


class Durations:
    """Durations in seconds, counted in the buckets of SECONDS. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(SECONDS) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect_left(SECONDS, seconds)] += 1
            self._total += seconds

    def observed(self) -> Observed:
        with self._lock:
            return Observed(tuple(self._counts), self._total)


class Recent(Generic[K]):
    """Counts by key, of the `most` keys that were counted last. For one thread."""

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


class Rising(Generic[K]):
    """Makes counters of numbers that may fall (a ROLLBACK takes tokens back): what they rose by, since the first look.

    A key that is not looked at is forgotten. Begins with the number itself, so that a restart continues the count.
    """

    def __init__(self) -> None:
        self._seen: dict[K, tuple[int, int]] = {}

    def look(self, values: Mapping[K, int]) -> dict[K, int]:
        """The counters of these keys, none of which ever falls."""
        seen: dict[K, tuple[int, int]] = {}
        for key, value in values.items():
            last, counter = self._seen.get(key, (value, value))
            seen[key] = (value, counter + max(0, value - last))
        self._seen = seen
        return {key: counter for key, (_, counter) in seen.items()}
