"""A map from token positions [0, total) to values, kept as intervals; neighbours of equal value are one interval.

Memory is proportional to the number of boundaries, not of tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class IntervalMap(Generic[V]):
    """Every position in [0, total) has exactly one value."""

    def __init__(self, total: int, value: V) -> None:
        self.total = total
        self._starts: list[int] = [0]
        self._values: list[V] = [value]

    def __iter__(self) -> Iterator[tuple[int, int, V]]:
        """(begin, end, value), in order."""
        ends = [*self._starts[1:], self.total]
        return iter(list(zip(self._starts, ends, self._values, strict=True)))

    def over(self, begin: int, end: int) -> list[tuple[int, int, V]]:
        """The intervals within [begin, end), cut to it, with their values."""
        pieces: list[tuple[int, int, V]] = []
        index = bisect_right(self._starts, begin) - 1
        while index < len(self._starts) and self._starts[index] < end:
            stop = self._starts[index + 1] if index + 1 < len(self._starts) else self.total
            pieces.append((max(begin, self._starts[index]), min(end, stop), self._values[index]))
            index += 1
        return pieces

    def put(self, begin: int, end: int, value: V) -> None:
        """Sets the value of [begin, end)."""
        if not 0 <= begin < end <= self.total:
            raise ValueError(f"[{begin}, {end}) is empty or outside [0, {self.total})")
        first = self._cut(begin)
        last = self._cut(end) if end < self.total else len(self._starts)
        self._starts[first:last] = [begin]
        self._values[first:last] = [value]
        self._merge(first + 1)
        self._merge(first)

    def _cut(self, at: int) -> int:
        """Makes `at` a boundary and returns its index."""
        index = bisect_right(self._starts, at) - 1
        if self._starts[index] == at:
            return index
        self._starts.insert(index + 1, at)
        self._values.insert(index + 1, self._values[index])
        return index + 1

    def _merge(self, index: int) -> None:
        if 0 < index < len(self._starts) and self._values[index - 1] == self._values[index]:
            del self._starts[index]
            del self._values[index]
