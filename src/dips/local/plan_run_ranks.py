"""Runs the processes of `dips plan run`: one for each rank, on this machine, which end together.

It must leave no process behind, whatever ends the caller, and report in one sentence what went wrong in which rank.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from pathlib import Path

from dips.core.clock import Clock
from dips.core.errors import ConfigError, FatalError
from dips.local.plan_run_source import PlanSource
from dips.local.supervisor import POLL_S, ChildSpec, ProcessSupervisor, how_it_ended, last_word, log_tail
from dips.planner.run.cells import parse_cells
from dips.planner.run.job import BOARD_FILE, PlanJob, RankLink, RankReport, board_sizes, read_report, write_job
from dips.planner.run.links import LinkBoard

START_S = 120.0
"""Until the last rank has imported torch and met the others, on a slow machine."""

GRACE_S = 1.0
"""After a rank has failed its neighbours fail too; which was the first is seen when all of them have ended."""

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK, "OMP_NUM_THREADS": "1"}
_NEIGHBOUR_GONE = re.compile(r"connection (was )?(closed|reset)|broken pipe|timed out", re.IGNORECASE)


def job_of(source: PlanSource, repeats: int, backend: str, predicted_s: float) -> PlanJob:
    """The job of all ranks. source: with the times that the operations should take."""
    numbers = {resource: n for n, resource in enumerate(sorted({w.resource for w in source.costs.wires.values()}))}
    links = tuple(
        RankLink(sender, receiver, numbers[wire.resource], wire.busy_ns, wire.latency_ns, wire.hold_ns)
        for (sender, receiver), wire in sorted(source.costs.wires.items())
    )
    lasts_ns = tuple((stage.f_ns, stage.d_ns, stage.w_ns) for stage in source.costs.stages)
    return PlanJob(source.schedule.to_csv(), lasts_ns, links, repeats, backend, START_S + 3 * predicted_s)


def run_ranks(folder: Path, job: PlanJob, deadline_s: float, clock: Clock) -> list[RankReport]:
    """Run a job in `folder`, which holds the ranks' logs afterwards; the reports by rank.

    deadline_s: how long all of it may take. Raises ModuleNotFoundError without torch, ConfigError or FatalError where a
    rank cannot do its part.
    """
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("torch", name="torch")
    cells = parse_cells(job.csv, "the plan")
    write_job(folder, job)
    LinkBoard.make(folder / BOARD_FILE, *board_sizes(job, cells.n_stages, cells.n_microbatches))
    names = [rank_name(rank) for rank in range(cells.n_ranks)]
    with ProcessSupervisor(clock, lambda event: None) as ranks:
        for rank in range(cells.n_ranks):
            ranks.start(_spec(folder, rank))
        _watch(ranks, names, folder, clock, deadline_s)
    return [read_report(folder, rank) for rank in range(cells.n_ranks)]


def rank_name(rank: int) -> str:
    return f"rank {rank}"


def _spec(folder: Path, rank: int) -> ChildSpec:
    command = (sys.executable, "-m", "dips.planner.run.rank", str(folder), str(rank))
    return ChildSpec(rank_name(rank), command, log_of(folder, rank), {**os.environ, **_ENVIRONMENT}, restart=False)


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _watch(ranks: ProcessSupervisor, names: list[str], folder: Path, clock: Clock, deadline_s: float) -> None:
    """Until all have ended well. Raises ConfigError or FatalError."""
    end_s = clock.monotonic_s() + deadline_s
    while not ranks.ended(names):
        ranks.poll()
        codes = [ranks.exit_code(name) for name in names]
        if any(codes):
            break
        if clock.monotonic_s() > end_s:
            raise FatalError(
                f"the ranks have not ended within {deadline_s:.0f} s: give this machine less other work, or "
                f"look into their logs in {folder}"
            )
        time.sleep(POLL_S)
    else:
        return
    end_s = clock.monotonic_s() + GRACE_S
    while not ranks.ended(names) and clock.monotonic_s() < end_s:
        ranks.poll()
        time.sleep(POLL_S)
    raise failure([ranks.exit_code(name) for name in names], folder)


def failure(codes: list[int | None], folder: Path) -> ConfigError | FatalError:
    """Which rank failed first, and how, from exit codes and logs: one that was killed, or that misses no other."""
    failed = [rank for rank, code in enumerate(codes) if code]
    rank = min(failed, key=lambda rank: _rank_of_failure(codes[rank] or 0, log_tail(log_of(folder, rank))))
    code, log = codes[rank] or 0, log_of(folder, rank)
    sentence = last_word(log)
    if sentence:
        kind = ConfigError if code == ConfigError.exit_code else FatalError
        return kind(f"{rank_name(rank)}: {sentence}")
    if code < 0:
        return FatalError(f"{rank_name(rank)} {how_it_ended(code)}: start it again; its log is {log}")
    end = log_tail(log, 1).strip() or "its log is empty"
    return FatalError(f"{rank_name(rank)} {how_it_ended(code)}: {end}; its log is {log}")


def _rank_of_failure(code: int, log: str) -> int:
    """The smaller, the sooner a rank is the one that failed first."""
    if code < 0:
        return 0
    return 2 if _NEIGHBOUR_GONE.search(log) else 1
