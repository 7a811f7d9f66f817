"""Shows the runs of a comparison in progress and the remaining time; never on standard output."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from dips.core.clock import Clock
from dips.core.units import format_seconds

PLAIN_EVERY_S = 10.0


class CompareProgress:
    """Shows the jobs' progress (a dips.compare.pool.ProgressListener). Use as a context manager.

    A bar for each run on a terminal; elsewhere a line every few seconds.
    """

    def __init__(self, console: Console, clock: Clock, titles: Sequence[str], tokens: Sequence[int]) -> None:
        """titles, tokens: of each job, in the order of the jobs."""
        self._console = console
        self._clock = clock
        self._titles = titles
        self._tokens = tokens
        self._made = [0] * len(titles)
        self._running: dict[int, TaskID | None] = {}  # None: no bars
        self._ended = 0
        self._begin_s = self._said_s = clock.monotonic_s()
        self._bars: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
            self._bars = Progress(*columns, console=console, transient=True)
            self._all = self._bars.add_task("all runs", total=sum(tokens))

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def began(self, index: int) -> None:
        bars = self._bars
        self._running[index] = bars.add_task(self._titles[index], total=self._tokens[index]) if bars else None

    def moved(self, index: int, tokens: int, virtual_s: float) -> None:
        self._made[index] = min(tokens, self._tokens[index])
        self._show(index)

    def ended(self, index: int) -> None:
        self._made[index] = self._tokens[index]
        self._ended += 1
        self._show(index)
        task = self._running.pop(index)
        if self._bars is not None and task is not None:
            self._bars.remove_task(task)
        age = format_seconds(round(self._clock.monotonic_s() - self._begin_s))
        self._console.print(f"{age:>12}  done: {self._titles[index]}", highlight=False, markup=False)

    def left_s(self) -> float | None:
        """Seconds until all jobs are done, at the pace so far; None while no pace is known."""
        made, whole = sum(self._made), sum(self._tokens)
        age_s = self._clock.monotonic_s() - self._begin_s
        return age_s * (whole - made) / made if made and age_s > 0 else None

    def _show(self, index: int) -> None:
        left_s = self.left_s()
        left = f", about {format_seconds(round(left_s))} left" if left_s is not None else ""
        summary = f"{self._ended} of {len(self._titles)} runs done{left}"
        task = self._running[index]
        if self._bars is not None and task is not None:
            self._bars.update(task, completed=self._made[index])
            self._bars.update(self._all, completed=sum(self._made), description=summary)
            return
        now_s = self._clock.monotonic_s()
        if now_s - self._said_s < PLAIN_EVERY_S:
            return
        self._said_s = now_s
        shares = [f"{self._titles[i]} {self._made[i] / self._tokens[i]:.0%}" for i in self._running]
        self._console.print("; ".join([summary, *shares]), highlight=False, markup=False, soft_wrap=True)
