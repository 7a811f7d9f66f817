"""`dips plan run`: runs a planned schedule with torch on this machine, and compares its time with the plan's."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dips.core.clock import SystemClock
from dips.core.errors import ConfigError
from dips.local.plan_run_ranks import START_S, job_of, run_ranks
from dips.local.plan_run_report import PlanRunOutcome, gradients_of, outcome_json, tell, timelines, write_files
from dips.local.plan_run_source import PlanSource, scaled, source_of
from dips.planner.costs import NS, Costs
from dips.planner.plan_file import ready_folder, writing
from dips.planner.simulate import Timeline, simulate

MOST_MS = 60_000.0
MOST_REPEATS = 1000
BACKENDS = ("gloo", "nccl")


def run(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="A plan.json, a plan.csv, or a schedule's name, such as zb_v.")
    ],
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Processes; as many as the plan has devices, which is the default.")
    ] = None,
    operation_ms: Annotated[
        float,
        typer.Option("--operation-ms", help="A forward pass of a microbatch on a device; the rest in proportion."),
    ] = 80.0,
    repeats: Annotated[int, typer.Option(metavar="N", help="Timed iterations; the median counts.")] = 5,
    tolerance: Annotated[float, typer.Option(metavar="PERCENT", help="Exit code 1 where the error is larger.")] = 5.0,
    check_gradients: Annotated[
        bool, typer.Option("--check-gradients", help="Only compare the gradients with those of one process.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where run.json, trace.json and the ranks' logs go.")
    ] = None,
    backend: Annotated[str, typer.Option(help="gloo (processors), or nccl (a GPU for each rank).")] = "gloo",
    stages: Annotated[int | None, typer.Option(metavar="N", help="For a name: devices; 4.")] = None,
    microbatches: Annotated[int | None, typer.Option(metavar="N", help="For a name: of an iteration; 8.")] = None,
    sites: Annotated[
        int | None, typer.Option(metavar="N", help="For a name or plan.csv: equal sites; 2, of an odd plan.csv 1.")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(metavar="R", help="For a name or plan.csv: between sites, in T_F; 0.5.")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(metavar="R", help="For a name or plan.csv: a message on its link, in T_F; 0.25.")
    ] = None,
    memory: Annotated[float | None, typer.Option(metavar="R", help="For a name: of 1F1B's memory; 1.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Run a planned schedule here, a process for each device, and compare the time it takes with the plan.

    torch's pipeline runtime runs a small model in the planned order. Operations are stretched to the times that the
    plan gives them, and messages between sites arrive when the plan's links would bring them, so that a few
    processors represent many devices. The gradients of an iteration must equal those of one process.

    Exit code 1: the iteration took longer or shorter by more than the tolerance, or gradients differ.
    """
    _check_numbers(operation_ms, repeats, tolerance, backend)
    options = {"stages": stages, "microbatches": microbatches, "sites": sites, "latency": latency,
               "bandwidth": bandwidth, "memory": memory}  # fmt: skip
    source = source_of(plan, options)
    n = source.schedule.n_devices
    if ranks is not None and ranks != n:
        raise ConfigError(f"--ranks {ranks}, but {plan} has {n} devices: give --ranks {n}, or make a plan for {ranks}")
    costs = scaled(source.costs, n, operation_ms)
    outcome = _outcome(source, costs, 0 if check_gradients else repeats, backend, out, operation_ms, tolerance / 100)
    files = write_files(outcome, out) if out is not None else []
    if as_json:
        print(json.dumps(outcome_json(outcome)))
    else:
        console = Console(width=None if sys.stdout.isatty() else 120)
        for piece in (*tell(outcome), *(f"wrote {file}" for file in files)):
            console.print(piece, highlight=False, markup=False)
    return int(not outcome.good)


def _check_numbers(operation_ms: float, repeats: int, tolerance: float, backend: str) -> None:
    if not 0 < operation_ms <= MOST_MS:
        raise ConfigError(f"--operation-ms {operation_ms:g} cannot be timed: give more than 0, up to {MOST_MS:g}")
    if not 1 <= repeats <= MOST_REPEATS:
        raise ConfigError(f"--repeats {repeats}: give 1 to {MOST_REPEATS}; --check-gradients times nothing")
    if not 0 < tolerance < 100:
        raise ConfigError(f"--tolerance {tolerance:g} is no percentage: give more than 0, below 100")
    if backend not in BACKENDS:
        raise ConfigError(f"--backend {backend} is unknown: choose {' or '.join(BACKENDS)}")


def _outcome(
    source: PlanSource,
    costs: Costs,
    repeats: int,
    backend: str,
    out: Path | None,
    operation_ms: float,
    tolerance: float,
) -> PlanRunOutcome:
    predicted = simulate(source.schedule, costs)
    predicted_s = predicted.makespan_ns / NS
    job = job_of(PlanSource(source.schedule, costs, source.sites), repeats, backend, predicted_s)
    stderr = Console(stderr=True)
    with _folder(out) as folder, stderr.status(_what_goes_on(predicted, repeats)):
        reports = run_ranks(folder, job, START_S + 3 * predicted_s * (repeats + 1), SystemClock())
    return PlanRunOutcome(
        source=source,
        backend=backend,
        forward_ms=operation_ms,
        predicted=predicted,
        measured=timelines(source, reports),
        gradients=gradients_of(reports),
        tolerance=tolerance,
        message_bytes=reports[0].message_bytes,
    )


def _what_goes_on(predicted: Timeline, repeats: int) -> str:
    n = predicted.schedule.n_devices
    if not repeats:
        return f"{n} ranks run one iteration"
    return f"{n} ranks run {repeats} iterations of about {predicted.makespan_ns / NS:.1f} s"


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Where the ranks' files go: a new folder under --out, or a temporary one, which stays only where a rank failed."""
    if out is None:
        folder = Path(tempfile.mkdtemp(prefix="dips-plan-run-"))
        try:
            yield folder
        except (KeyboardInterrupt, SystemExit):
            shutil.rmtree(folder)
            raise
        shutil.rmtree(folder)
        return
    ready_folder(out)
    folder = out / "ranks"
    with writing(out):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    yield folder
