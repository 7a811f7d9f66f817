"""Emulates links: computes when a message from one rank arrives at another.

The planner's convention (docs/planner.md): a message starts when its producer has ended and its link is free,
occupies the link for busy_ns and arrives latency_ns later; the sender does not wait. So a message itself is sent at
once, with a note of its arrival time, until which the receiver waits. Notes and the times at which links are free are
in one file that all ranks map, because several ranks may send over one link. They are times of the
monotonic clock, which the processes of one machine share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from pydantic import TypeAdapter

from dips.core.errors import ConfigError
from dips.planner.costs import Wire
from dips.planner.ir import Kind, Op, Schedule

# ---- job -------------------------------------------------------------------------------------------------------------
#
# Jobs and reports of the ranks of `dips plan run`, as JSON files in the folder of the run. Jobs have numbers from 0 on:
# when links change in mid-run, or the schedule, the next job says so. A file appears whole, so ranks can wait for it.


BOARD_FILE = "links.bin"
"""Of the first job; later ones have boards of their own."""

STORE_FILE = "rendezvous"

GRADIENT_TOLERANCE = 1e-10
"""The limit for the largest difference of a gradient from that of one process, divided by the largest gradient."""


class RankLink(NamedTuple):
    """A link from one rank to another: its ends, and costs.Wire."""

    source: int
    target: int
    resource: int  # links with the same number are one
    busy_ns: int
    latency_ns: int
    hold_ns: int = 0  # after a message, it takes no other for so long after busy_ns


@dataclass(frozen=True)
class PlanJob:
    """The job of all ranks."""

    csv: str  # the order of operations, in the form of plan.csv
    # of F, of the gradient of the input, and of the gradient of the weights of each stage
    lasts_ns: tuple[tuple[int, int, int], ...]
    links: tuple[RankLink, ...]
    # timed iterations; 0: none. Of the first job, they come after one that is not timed
    repeats: int
    backend: str
    timeout_s: float  # after so long without a message a rank gives up
    layers: tuple[int, ...] = ()  # of each stage; empty: one each
    last: bool = True  # no job follows; else ranks train on until the next one is there


SPARE_ITERATIONS = 1000
"""While a rank waits for the next job, it trains on for so many iterations, and pauses then."""


def board_sizes(job: PlanJob, n_stages: int, n_microbatches: int) -> tuple[int, int, int, int]:
    """The sizes of the links' file: iterations, links, stages, microbatches."""
    n_links = max((link.resource for link in job.links), default=-1) + 1
    n_iterations = max(1, job.repeats) if job.last else job.repeats + SPARE_ITERATIONS
    return n_iterations, n_links, n_stages, n_microbatches


class Sent(NamedTuple):
    """A message between ranks: the operation that made it, and its times on the link, as in planner.simulate."""

    cell: str
    target: int
    ready_ns: int
    start_ns: int
    freed_ns: int
    arrives_ns: int


@dataclass(frozen=True)
class Iteration:
    """One timed iteration of one rank. times[i]: start and end of its operation i, on the clock that all ranks
    share."""

    times: tuple[tuple[int, int], ...]
    sent: tuple[Sent, ...]


@dataclass(frozen=True)
class RankReport:
    """What a rank measured."""

    iterations: tuple[Iteration, ...]
    parameters: int  # of its stages
    gradient_error: float  # the largest difference of a gradient from that of one process, over the largest gradient
    message_bytes: int  # of one message between stages, as sent
    skipped: int = 0  # iterations of the job before that were trained and not timed
    taken_ns: int = 0  # when it took the job, after its last iteration of the one before


_JOB, _REPORT = TypeAdapter(PlanJob), TypeAdapter(RankReport)


def job_file(folder: Path, number: int) -> Path:
    return folder / f"job-{number}.json"


def board_file(folder: Path, number: int) -> Path:
    return folder / (f"{number}-{BOARD_FILE}" if number else BOARD_FILE)


def report_file(folder: Path, rank: int, number: int) -> Path:
    return folder / f"rank-{rank}-{number}.json"


def write_job(folder: Path, job: PlanJob, number: int = 0) -> None:
    """Write a job, and before it the file of its links."""
    cells = parse_cells(job.csv, "the plan")
    LinkBoard.make(board_file(folder, number), *board_sizes(job, cells.n_stages, cells.n_microbatches))
    _appear(job_file(folder, number), _JOB.dump_json(job))


def read_job(folder: Path, number: int = 0) -> PlanJob:
    return _JOB.validate_json(job_file(folder, number).read_bytes())


def write_report(folder: Path, rank: int, report: RankReport, number: int = 0) -> None:
    _appear(report_file(folder, rank, number), _REPORT.dump_json(report))


def read_report(folder: Path, rank: int, number: int = 0) -> RankReport:
    return _REPORT.validate_json(report_file(folder, rank, number).read_bytes())


def _appear(file: Path, content: bytes) -> None:
    half = file.with_suffix(".part")
    half.write_bytes(content)
    half.replace(file)


# ---- order of operations ---------------------------------------------------------------------------------------------
#
# torch's runtime checks that a schedule is complete and can end.


def read_cells(file: Path) -> Schedule:
    """Read a plan.csv: a line for each rank, a cell such as 2F3 for each operation. Raises ConfigError for a file that
    cannot be read or that no rank can run."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as a schedule: {error}: name the plan.csv of a plan") from error
    return parse_cells(text, str(file))


def parse_cells(text: str, where: str) -> Schedule:
    """Parse the text of a plan.csv. where: the text's name in error sentences. Raises ConfigError."""
    try:
        schedule = Schedule.from_csv(text, where)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if schedule.parts > 1:
        raise ConfigError(f"{where} has parts of blocks: write each as a stage of its own, as plan.csv has them")
    last = schedule.n_stages - 1
    row = schedule.orders[schedule.device_of_stage[last]]
    order = [op.microbatch for op in row if op.stage == last and op.kind is Kind.F]
    if order != sorted(order):  # torch's runtime numbers losses in the order in which the last stage makes them
        raise ConfigError(
            f"{where}: the last stage runs forward passes in the order {order[:8]}, and torch's pipeline runtime takes "
            "losses in rising order: sort them"
        )
    return schedule


# ---- links -----------------------------------------------------------------------------------------------------------


NO_NOTE = 0
FORTH, BACK = 0, 1
"""Messages to the next stage (of forward passes) and to the one before (gradients)."""


class LinkBoard:
    """The file that the ranks share. One iteration has its own links and notes: nothing is ever reset."""

    def __init__(self, file: Path, n_iterations: int, n_links: int, n_stages: int, n_microbatches: int) -> None:
        """Open the file that make() wrote. n_links: one more than the highest number of a link."""
        self._lock = os.open(file, os.O_RDWR)
        n_free, notes = n_iterations * n_links, (n_iterations, 2, n_stages, n_microbatches)
        whole = np.memmap(file, np.int64, "r+", shape=(n_free + int(np.prod(notes)),))
        self._free = whole[:n_free].reshape(n_iterations, n_links)
        self._notes = whole[n_free:].reshape(notes)

    @staticmethod
    def make(file: Path, n_iterations: int, n_links: int, n_stages: int, n_microbatches: int) -> None:
        """Make the file: all links are free, no message is on its way."""
        with file.open("wb") as stream:  # zeros that take no space until they are written
            stream.truncate(8 * n_iterations * (n_links + 2 * n_stages * n_microbatches))

    def __enter__(self) -> LinkBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def send(
        self, iteration: int, link: RankLink, direction: int, stage: int, microbatch: int, ready_ns: int
    ) -> tuple[int, int, int]:
        """Take the link for a message to `stage`, and leave the note of its arrival; returns when it begins to occupy
        the link, when the link is free of it, and when it arrives."""
        with self._locked():
            free = {link.resource: int(self._free[iteration, link.resource])}
            start_ns = Wire(*link[2:]).take(free, ready_ns)
            self._free[iteration, link.resource] = free[link.resource]
        freed_ns = start_ns + link.busy_ns
        self._notes[iteration, direction, stage, microbatch] = arrives_ns = freed_ns + link.latency_ns
        return start_ns, freed_ns, arrives_ns

    def arrives_ns(self, iteration: int, direction: int, stage: int, microbatch: int) -> int:
        """When the message to `stage` arrives; NO_NOTE while it was not sent."""
        return int(self._notes[iteration, direction, stage, microbatch])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # not on Windows, where plans are made too

        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


# ---- pace ------------------------------------------------------------------------------------------------------------
#
# Keeps a plan's times on a real clock: how long each operation of a rank takes, and when its input arrives.
#
# An operation starts when its rank has reached it and its input has arrived, does its real work, and ends when its
# planned time is over (later only if the work took longer). Knows no torch.


T = TypeVar("T")
LOOK_AGAIN_NS = 50_000
_UNTIMED = -1


class WaitingClock(Protocol):
    """A clock that can be waited on."""

    def now_ns(self) -> int: ...

    def wait_until(self, ns: int) -> None: ...


class SystemWaits:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def wait_until(self, ns: int) -> None:
        while (left := ns - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)


class RankPace:
    """Keeps the times of one rank. Before begin() nothing waits and nothing is recorded."""

    def __init__(
        self,
        job: PlanJob,
        schedule: Schedule,
        rank: int,
        board: LinkBoard,
        waits: WaitingClock,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """settle: waits until the device has finished its work."""
        self._rank, self._waits, self._settle = rank, waits, settle
        self._iteration = _UNTIMED
        self._times: list[tuple[int, int]] = []
        self._ended: dict[Op, int] = {}
        self._sent: list[Sent] = []
        self.follow(job, schedule, board)

    def follow(self, job: PlanJob, schedule: Schedule, board: LinkBoard) -> None:
        """Keep the times of another job, from the next iteration on."""
        self._schedule, self._board = schedule, board
        self._lasts = {
            (stage, kind): ns
            for stage, (f, d, w) in enumerate(job.lasts_ns)
            for kind, ns in ((Kind.F, f), (Kind.D, d), (Kind.W, w), (Kind.B, d + w))
        }
        self._links: Mapping[tuple[int, int], RankLink] = {(link.source, link.target): link for link in job.links}

    def begin(self, iteration: int) -> None:
        """The next operations belong to this timed iteration."""
        self._iteration = iteration
        self._times, self._sent, self._ended = [], [], {}

    def finish(self) -> Iteration:
        """The times that were recorded since begin()."""
        self._iteration = _UNTIMED
        return Iteration(tuple(self._times), tuple(self._sent))

    def run(self, op: Op, work: Callable[[], T]) -> T:
        """Do an operation's real work in its planned time."""
        if self._iteration == _UNTIMED:
            return work()
        self._wait_for_input(op)
        start_ns = self._waits.now_ns()
        result = work()
        self._settle()
        self._waits.wait_until(start_ns + self._lasts[op.stage, op.kind])
        end_ns = self._waits.now_ns()
        self._times.append((start_ns, end_ns))
        self._ended[op] = end_ns
        return result

    def send(self, op: Op) -> None:
        """Send the message of an operation."""
        if self._iteration == _UNTIMED:
            return
        ready_ns = self._ended[op]
        direction, stage = (FORTH, op.stage + 1) if op.kind is Kind.F else (BACK, op.stage - 1)
        target = self._schedule.device_of_stage[stage]
        link = self._links.get((self._rank, target))
        if link is None:
            self._sent.append(Sent(str(op), target, ready_ns, ready_ns, ready_ns, ready_ns))
            return
        times_ns = self._board.send(self._iteration, link, direction, stage, op.microbatch, ready_ns)
        self._sent.append(Sent(str(op), target, ready_ns, *times_ns))

    def _wait_for_input(self, op: Op) -> None:
        """Wait for the planned arrival: the bytes may be here long before a slow link would have delivered them."""
        last = self._schedule.n_stages - 1
        if op.kind is Kind.W or op.stage == (0 if op.kind is Kind.F else last):
            return
        direction, before = (FORTH, op.stage - 1) if op.kind is Kind.F else (BACK, op.stage + 1)
        if (self._schedule.device_of_stage[before], self._rank) not in self._links:
            return
        # When receiving does not wait for the device, the note can be written after this check.
        note = (self._iteration, direction, op.stage, op.microbatch)
        while (arrives_ns := self._board.arrives_ns(*note)) == NO_NOTE:
            self._waits.wait_until(self._waits.now_ns() + LOOK_AGAIN_NS)
        self._waits.wait_until(arrives_ns)
