"""Runs jobs on several processes, and reports their progress.

It must never leave a process behind: whatever ends the caller, ctrl-C and SIGTERM included, ends them all. It does
not depend on what a job does.
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
from typing import Generic, Protocol, TypeVar

from dips.core.errors import DipsError

J = TypeVar("J")
R = TypeVar("R")

TELL_EVERY_S = 0.2
_END_S = 5.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}

TellProgress = Callable[[int, float], None]
"""Called by a job with its tokens and its virtual seconds so far."""

JobWork = Callable[[J, TellProgress], R]
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
