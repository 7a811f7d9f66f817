"""What the processes of a pool do in tests; at a module's top level, so that they find it."""

from __future__ import annotations

import os
import signal

from support.compare_records import record

from dips.core.errors import DipsError
from dips.lab.compare.jobs import ComparisonJob
from dips.lab.compare.record import Progress, RunRecord


def double(number: int, tell: Progress) -> int:
    tell(number, 0.5)
    return 2 * number


def threads(_: int, tell: Progress) -> tuple[str | None, bool]:
    return os.environ.get("OMP_NUM_THREADS"), signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def die(number: int, tell: Progress) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def made_up(job: ComparisonJob, tell: Progress) -> RunRecord:
    tell(6_000, 50.0)
    return record(job.method, job.seed)


def fail_for_seed_two(job: ComparisonJob, tell: Progress) -> RunRecord:
    if job.seed == 2:
        raise DipsError("two is too much: give one")
    return made_up(job, tell)


def stumble(job: ComparisonJob, tell: Progress) -> RunRecord:
    raise ZeroDivisionError
