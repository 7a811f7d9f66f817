"""A few threads that share one piece of arithmetic: parts of an array, each given to whichever thread is free.

The work must release the interpreter lock, and no result may depend on which thread takes which part. Nothing here is
for waiting: no input, no output.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dips.core.errors import LocalProtocolError

T = TypeVar("T")
R = TypeVar("R")

MOST_THREADS = 8
"""Beyond it the memory, not the cores, is what limits arithmetic on long vectors."""


def usable_processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_processor_numbers() -> list[int]:
    """Their numbers, ascending; empty where the system does not say, and places no threads."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


class Threads:
    """A pool of n_threads, the caller's included; 0: one for each usable processor, at most MOST_THREADS."""

    def __init__(self, n_threads: int = 0) -> None:
        self.n = n_threads or min(usable_processors(), MOST_THREADS)
        self._pool = ThreadPoolExecutor(self.n - 1, "dips-compute") if self.n > 1 else None

    def run(self, work: Callable[[T], R], parts: Sequence[T]) -> list[R]:
        """work(part) for each part; results in the order of parts. What a part raises is raised when all have ended."""
        if self._pool is None or len(parts) < 2:
            return [work(part) for part in parts]
        left = iter(range(len(parts)))  # next() on it is atomic: each number goes to one thread
        results: list[list[R]] = [[] for _ in parts]

        def take() -> None:
            for number in left:
                results[number].append(work(parts[number]))

        others = [self._pool.submit(take) for _ in range(min(self.n, len(parts)) - 1)]
        try:
            take()
        finally:
            errors = [other.exception() for other in others]
        for error in errors:
            if error is not None:
                raise error
        if not all(results):
            raise LocalProtocolError("a part of the arithmetic was never done")
        return [result[0] for result in results]

    def close(self) -> None:
        """Ends the threads. Nothing may run."""
        if self._pool is not None:
            self._pool.shutdown()


def split(n: int, parts: int) -> list[tuple[int, int]]:
    """[0, n) in at most `parts` ranges of nearly the same length, in order; none for n = 0."""
    edges = [n * i // parts for i in range(parts + 1)]
    return [(start, stop) for start, stop in itertools.pairwise(edges) if start < stop]
