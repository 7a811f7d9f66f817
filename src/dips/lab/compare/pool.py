"""Runs jobs on several processes, and reports their progress.

It must never leave a process behind: whatever ends the caller, ctrl-C and SIGTERM included, ends them all. It does
not depend on what a job does. (concurrent.futures has no progress of a job that runs, does not say whose process died
and how, and waits for running jobs when it is shut down.)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as ProgressBars

from dips.core.clock import Clock
from dips.core.errors import DipsError
from dips.core.units import format_seconds
from dips.lab.compare.record import Progress

J = TypeVar("J")
R = TypeVar("R")

TELL_EVERY_S = 0.2
_END_S = 5.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}

JobWork = Callable[[J, Progress], R]
"""The function that does a job; it must be at a module's top level, because it is pickled."""


class PoolJobFailed(DipsError):
    """A job failed. trace: the place in the program, for a bug; empty for an error that a sentence explains."""

    def __init__(self, index: int, sentence: str, trace: str = "") -> None:
        super().__init__(sentence)
        self.index = index
        self.trace = trace


class ProgressListener(Protocol):
    """Receives the progress of the jobs, in the caller's process."""

    def began(self, index: int) -> None: ...

    def moved(self, index: int, tokens: int, virtual_s: float) -> None: ...

    def ended(self, index: int) -> None: ...


def run_jobs(
    jobs: Sequence[J], work: JobWork[J, R], processes: int, listener: ProgressListener
) -> Generator[tuple[int, R], None, None]:
    """Run all jobs, so many at a time; yields (index, result) in the order in which they end.

    Raises JobFailed for the first that fails; the others are ended then.
    """
    waiting = deque(enumerate(jobs))
    workers: list[_Worker[J, R]] = []
    try:
        for _ in range(min(processes, len(jobs))):
            workers.append(_Worker(work))
            workers[-1].start()
            workers[-1].give(*waiting.popleft(), listener)
        while busy := [worker for worker in workers if worker.index is not None]:
            for ready in wait([worker.connection for worker in busy]):
                worker = next(worker for worker in busy if worker.connection is ready)
                found = worker.receive(listener)
                if found is None:
                    continue
                if waiting:
                    worker.give(*waiting.popleft(), listener)
                yield found
    finally:
        for worker in workers:
            worker.end()


class _Worker(Generic[J, R]):
    """One process and the caller's end of the pipe to it. index: of its job; None: it has none."""

    def __init__(self, work: JobWork[J, R]) -> None:
        context = multiprocessing.get_context("spawn")
        self.index: int | None = None
        self.connection, self._theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(self._theirs, work), daemon=True)

    def start(self) -> None:
        with _sheltered():
            self.process.start()
        self._theirs.close()  # so that its end is an end of file here

    def give(self, index: int, job: J, listener: ProgressListener) -> None:
        self.index = index
        try:
            self.connection.send(job)
        except OSError:
            raise self._died() from None
        listener.began(index)

    def receive(self, listener: ProgressListener) -> tuple[int, R] | None:
        """Receive one message; returns the job's index and result when it is done. Raises JobFailed."""
        assert self.index is not None
        index = self.index
        try:
            kind, *content = self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if kind == "failed":
            raise PoolJobFailed(index, *content)
        if kind == "moved":
            listener.moved(index, *content)
            return None
        self.index = None
        listener.ended(index)
        return index, content[0]

    def end(self) -> None:
        """End the process at any time, also when it was never started."""
        self.connection.close()
        self._theirs.close()
        if self.process.pid is None:
            return
        self.process.terminate()
        self.process.join(_END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _died(self) -> PoolJobFailed:
        self.process.join(_END_S)
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        remedy = "if memory was short, use fewer processes (--jobs)"
        assert self.index is not None
        return PoolJobFailed(self.index, f"its process {how} before it was done: {remedy}")


@contextmanager
def _sheltered() -> Iterator[None]:
    """Start processes with one thread each that ignore ctrl-C, which the caller gets."""
    resource_tracker.ensure_running()  # it would unblock the signals
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(_ONE_THREAD)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _serve(connection: Connection, work: JobWork[J, R]) -> None:
    """The loop of a process: it receives jobs and sends results until the caller is gone."""
    try:
        while True:
            connection.send(_answer(connection, work, connection.recv()))
    except (EOFError, OSError):
        return


def _answer(connection: Connection, work: JobWork[J, R], job: J) -> tuple[object, ...]:
    told_s = -TELL_EVERY_S

    def tell(tokens: int, virtual_s: float) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= TELL_EVERY_S:
            told_s = now_s
            connection.send(("moved", tokens, virtual_s))

    try:
        return ("done", work(job, tell))
    except BrokenPipeError:
        raise
    except DipsError as error:
        return ("failed", str(error))
    except Exception as error:
        return ("failed", f"a bug: {type(error).__name__}: {error}", traceback.format_exc())


# ---- progress --------------------------------------------------------------------------------------------------------
#
# Shows the runs of a comparison in progress and the remaining time; never on standard output.


PLAIN_EVERY_S = 10.0


class CompareProgress:
    """Shows the jobs' progress (a dips.lab.compare.pool.ProgressListener). Use as a context manager.

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
        self._bars: ProgressBars | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
            self._bars = ProgressBars(*columns, console=console, transient=True)
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
