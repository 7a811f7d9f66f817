"""The commands of `dips plan` that begin with a plan: replan, run and tradeoff."""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dips.cli.plan_text import SHARING
from dips.core.clock import SystemClock
from dips.core.errors import ConfigError
from dips.core.units import format_bytes, format_seconds
from dips.local.plan_run import (
    START_S,
    PlanRunOutcome,
    PlanSource,
    gradients_of,
    job_of,
    outcome_json,
    run_ranks,
    scaled,
    source_of,
    tell,
    timelines,
    write_files,
)
from dips.planner.api import read_text
from dips.planner.cluster import read_setup
from dips.planner.costs import NS, Costs
from dips.planner.plan import ready_folder, write_plan, writing
from dips.planner.problem import Problem, assumptions
from dips.planner.replan import Limits, ReplanVerdict, Running, read_measured, read_running
from dips.planner.replan import replan as judge
from dips.planner.simulate import Timeline, simulate
from dips.planner.tradeoff import Choice, Split, Tradeoff
from dips.planner.tradeoff import tradeoff as find

# ---- plan replan -----------------------------------------------------------------------------------------------------
#
# `dips plan replan`: says whether a running plan, now measured, should be swapped for another one.


def replan(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="The plan.json that is carried out, of dips plan FILE --out FOLDER.")
    ],
    profile: Annotated[
        Path, typer.Option("--profile", metavar="FILE", help="What was measured: TOML, or JSON if it ends in .json.")
    ],
    least_gain: Annotated[
        float, typer.Option("--least-gain", metavar="PERCENT", help="The least gain of an iteration for which to swap.")
    ] = 2.0,
    within: Annotated[
        int, typer.Option("--within", metavar="N", help="Iterations after which a swap must have paid off.")
    ] = 1000,
    pause_s: Annotated[
        float, typer.Option("--pause", metavar="SECONDS", help="Time that any swap takes, apart from moving layers.")
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the new plan's files go, if a swap is advised.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Play the present schedule with measured times and links, plan again with them, and say whether to swap: what an
    iteration would gain, what the swap costs, and after how many iterations it has paid off.

    Exit code 0: keep the plan. 1: swap it. 2: a mistake in a file or an option. A swap costs the time to move layers
    that change their device over the links between sites, and nothing where only the order changes.
    """
    limits = _limits(least_gain, within, pause_s)
    running = read_running(read_text(plan, "plan.json", "make one with dips plan FILE --out FOLDER"), str(plan))
    if out is not None:
        ready_folder(out)
    verdict = judge(running, read_measured(profile), limits)
    files = write_plan(verdict.plan, out) if out is not None and verdict.advised else []
    if as_json:
        print(json.dumps(verdict_json(running, verdict)))
        return int(verdict.advised)
    console = Console(width=None if sys.stdout.isatty() else 120)
    for line in _print_replanned(running, verdict):
        console.print(line, highlight=False, markup=False)
    for written in files:
        console.print(f"wrote {written}", highlight=False, markup=False)
    return int(verdict.advised)


def _limits(least_gain: float, within: int, pause_s: float) -> Limits:
    if not 0 <= least_gain < 100:
        raise ConfigError(f"--least-gain {least_gain:g} is no part of an iteration: give 0 up to 100 (percent)")
    if within < 1:
        raise ConfigError(f"--within {within} is no number of iterations: give at least 1")
    if not (math.isfinite(pause_s) and pause_s >= 0):
        raise ConfigError(f"--pause {pause_s:g} is no time: give seconds, at least 0")
    return Limits(least_gain / 100, within, pause_s)


def verdict_json(running: Running, verdict: ReplanVerdict) -> dict[str, Any]:
    """The verdict as a JSON object; times in seconds."""
    new, swap = verdict.new, verdict.swap
    return {
        "advised": verdict.advised,
        "why": verdict.why,
        "present": {
            "schedule": running.name,
            "sharing": running.sharing,
            "layers": list(running.division),
            "planned_s": verdict.planned_s,
            "iteration_s": verdict.now_s,
        },
        "new": {
            "schedule": new.name,
            "sharing": new.sharing,
            "layers": list(new.division),
            "iteration_s": new.iteration_s,
        },
        "gain_s": verdict.gain_s,
        "swap": {
            "layers": swap.layers,
            "links": [
                {"sender": sender, "receiver": receiver, "bytes": size}
                for (sender, receiver), size in sorted(swap.link_bytes.items())
            ],
            "inside_bytes": swap.inside_bytes,
            "seconds": swap.seconds,
        },
        "break_even_iterations": verdict.break_even,
    }


def _print_replanned(running: Running, verdict: ReplanVerdict) -> Iterator[str]:
    new, swap = verdict.new, verdict.swap
    yield (
        f"present: {_named(running.name, running.sharing)}: {format_seconds(verdict.now_s)} an iteration as measured, "
        f"{format_seconds(verdict.planned_s)} as planned"
    )
    layers = ",".join(map(str, new.division))
    yield f"best now: {_named(new.name, new.sharing)}, layers {layers}: {format_seconds(new.iteration_s)} an iteration"
    yield f"gain: {format_seconds(verdict.gain_s)} an iteration, {verdict.gain_s / verdict.now_s:.2%}"
    moved = "only the order changes" if not swap.layers else f"{swap.layers} layers change their device"
    yield f"swap: {moved}, {format_seconds(swap.seconds)}"
    for (sender, receiver), size in sorted(swap.link_bytes.items()):
        yield f"  {sender} to {receiver}: {format_bytes(round(size))}"
    yield f"{'swap' if verdict.advised else 'keep'}: {verdict.why}"


def _named(name: str, sharing: str) -> str:
    return f"{name}, {SHARING[sharing]}" if SHARING[sharing] else name


# ---- plan run --------------------------------------------------------------------------------------------------------
#
# `dips plan run`: runs a planned schedule with torch on this machine, and compares its time with the plan's.


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


# ---- plan tradeoff ---------------------------------------------------------------------------------------------------


def tradeoff(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="TOML file with sites, links, model; or a shipped one's name.")
    ],
    solver_s: Annotated[
        float | None, typer.Option("--seconds", help="Time for a solver to find the best order, for each way.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Every way to split the file's devices into stages and replicas, the fastest first: is the long link better used
    by pipelines that cross it (activations), or by whole pipelines at each site (gradients)?

    Stages x replicas and the microbatches of all replicas together stay what the file says. For each way: the best
    schedule, how long an iteration takes, the memory of the device that has least left, the bytes over each link
    between sites; and why other ways cannot be.
    """
    problem = Problem(read_setup(file))
    if solver_s is not None:
        if not 0 <= solver_s <= 3600:
            raise ConfigError(f"--seconds {solver_s:g} is no time for a solver: give 0 to 3600")
        problem = problem.with_options(solver_s=solver_s)
    found = find(problem)
    if as_json:
        print(json.dumps(tradeoff_json(found)))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 140)
    for piece in _print_tradeoff(found):
        console.print(piece, highlight=False, markup=False)
    return 0


def tradeoff_json(found: Tradeoff) -> dict[str, Any]:
    """All ways as a JSON object, the fastest first; times in seconds."""
    setup, best_s = found.problem.setup, found.choices[0].best.iteration_s
    return {
        "setup": Path(setup.file).name,
        "model": setup.model.name,
        "choices": [_choice_json(found, choice, best_s) for choice in found.choices],
        "impossible": [{**_split_json(no.split), "why": no.why} for no in found.impossible],
        "assumptions": assumptions(found.problem),
    }


def _choice_json(found: Tradeoff, choice: Choice, best_s: float) -> dict[str, Any]:
    sites, best = found.problem.setup.sites, choice.best
    return {
        **_split_json(choice.split),
        "schedule": best.name,
        "sharing": best.sharing,
        "layers": list(best.division),
        "iteration_s": best.iteration_s,
        "slower_by": best.iteration_s / best_s - 1,
        "sync_s": best.sync_ns / 1e9,
        "bubble_fraction": best.bubble_fraction,
        "memory_used": choice.memory_used,
        "links": [
            {"sender": sites[a].name, "receiver": sites[b].name, "bytes": size}
            for (a, b), size in sorted(best.link_bytes.items())
        ],
    }


def _split_json(split: Split) -> dict[str, Any]:
    return {
        "pipeline": split.pipeline,
        "data": split.data,
        "microbatches": split.microbatches,
        "groups": split.groups,
        "long_links_carry": split.long_links_carry,
    }


def _print_tradeoff(found: Tradeoff) -> Iterator[str | Table]:
    setup = found.problem.setup
    training = setup.training
    yield (
        f"{setup.model.name}, {setup.model.parameters() / 1e9:.4g}B parameters: stages x replicas = "
        f"{training.pipeline * training.data}, {training.microbatches * training.data} microbatches in all"
    )
    yield _table(found)
    for no in found.impossible:
        split = no.split
        carries = "" if split.n_sites == 1 else f", long links carry {split.long_links_carry}"
        yield f"not possible: {split.pipeline} x {split.data}{carries}: {no.why}"
    yield "assumed: " + "; ".join(assumptions(found.problem))


def _table(found: Tradeoff) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("stages x replicas", "long links carry", "schedule", "replicas on a link"):
        table.add_column(name)
    for name in ("iteration", "slower by", "memory", "busiest link"):
        table.add_column(name, justify="right")
    best_s = found.choices[0].best.iteration_s
    for choice in found.choices:
        best = choice.best
        table.add_row(
            f"{choice.split.pipeline} x {choice.split.data}",
            choice.split.long_links_carry,
            best.name,
            SHARING[best.sharing],
            format_seconds(best.iteration_s),
            f"{best.iteration_s / best_s - 1:.1%}",
            f"{choice.memory_used:.0%}",
            format_bytes(round(max(best.link_bytes.values(), default=0.0))),
        )
    return table
