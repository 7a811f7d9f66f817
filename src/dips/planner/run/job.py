"""The job and the report of a rank of `dips plan run`, as JSON files in the folder of the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

JOB_FILE = "job.json"
BOARD_FILE = "links.bin"
STORE_FILE = "rendezvous"

GRADIENT_TOLERANCE = 1e-10
"""The limit for the largest difference of a gradient from that of one process, divided by the largest gradient."""


class RankLink(NamedTuple):
    """A link from one rank to another. resource: links with the same number are one. hold_ns: after a message, it takes
    no other for so long after busy_ns."""

    source: int
    target: int
    resource: int
    busy_ns: int
    latency_ns: int
    hold_ns: int = 0


@dataclass(frozen=True)
class PlanJob:
    """The job of all ranks. csv: the order of operations, in the form of plan.csv. lasts_ns[s]: of F, of the gradient
    of the input, and of the gradient of the weights of stage s. repeats: timed iterations after the first, which is not
    timed; 0: none.

    timeout_s: after so long without a message a rank gives up.
    """

    csv: str
    lasts_ns: tuple[tuple[int, int, int], ...]
    links: tuple[RankLink, ...]
    repeats: int
    backend: str
    timeout_s: float


def board_sizes(job: PlanJob, n_stages: int, n_microbatches: int) -> tuple[int, int, int, int]:
    """The sizes of the links' file: iterations, links, stages, microbatches."""
    n_links = max((link.resource for link in job.links), default=-1) + 1
    return max(1, job.repeats), n_links, n_stages, n_microbatches


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
    """What a rank measured. gradient_error: the largest difference of a gradient from that of one process, divided by
    the largest gradient. message_bytes: size of one message between stages as sent."""

    iterations: tuple[Iteration, ...]
    parameters: int
    gradient_error: float
    message_bytes: int


_JOB, _REPORT = TypeAdapter(PlanJob), TypeAdapter(RankReport)


def write_job(folder: Path, job: PlanJob) -> None:
    (folder / JOB_FILE).write_bytes(_JOB.dump_json(job))


def read_job(folder: Path) -> PlanJob:
    return _JOB.validate_json((folder / JOB_FILE).read_bytes())


def write_report(folder: Path, rank: int, report: RankReport) -> None:
    (folder / f"rank-{rank}.json").write_bytes(_REPORT.dump_json(report))


def read_report(folder: Path, rank: int) -> RankReport:
    return _REPORT.validate_json((folder / f"rank-{rank}.json").read_bytes())
