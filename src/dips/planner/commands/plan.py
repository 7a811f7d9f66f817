"""`dips plan`: finds the best way to train a model over links between sites; compares, checks and shows schedules;
groups devices."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from typer.core import TyperGroup

from dips.core.errors import ConfigError
from dips.core.units import format_seconds
from dips.planner import api
from dips.planner.adapter.advise import ADAPT_FILES, advice_json, advise, draw, read_before, traced, traced_json
from dips.planner.adapter.traces import read_trace
from dips.planner.calibration import interval_text
from dips.planner.cluster import read_setup
from dips.planner.commands.plan_best import System
from dips.planner.commands.plan_calibrate import calibrate as fit_to_run
from dips.planner.commands.plan_calibrate import calibrated_profile, calibration_json, calibration_lines
from dips.planner.commands.plan_run import outcome_json, run_plan, source_of, tell, write_files
from dips.planner.commands.plan_swap import (
    Change,
    change_json,
    change_of_file,
    change_of_name,
    run_change,
    tell_change,
    write_change,
)
from dips.planner.commands.plan_systems import decide, decision_json
from dips.planner.commands.plan_text import (
    advice_text,
    checks_text,
    decision_text,
    explored_text,
    grid_text,
    groups_text,
    replan_text,
    sweep_text,
    table_of,
    traced_text,
    tradeoff_text,
)
from dips.planner.costs import NS
from dips.planner.grouping import ALIKE, THRESHOLD_GBPS, group, grouping_json, measured_of
from dips.planner.plan import PLAN_FILES, plan_json, ready_folder, write_plan, writing
from dips.planner.profile import write_profile
from dips.planner.replan import Limits, read_measured, read_running, verdict_json
from dips.planner.replan import replan as decide_to_replan
from dips.planner.scaleacross.report import report_of
from dips.planner.scaleacross.topology import read_topology
from dips.planner.sweep import cases, check_compared, draw_maps, panels
from dips.planner.tradeoff import tradeoff as split_all_ways
from dips.planner.tradeoff import tradeoff_json
from dips.planner.validation import PaperCheck
from dips.planner.validation.crosspipe import crosspipe_checks
from dips.planner.validation.jeeves import jeeves_checks
from dips.planner.validation.scaleacross import scaleacross_checks
from dips.planner.validation.spantrain import spantrain_checks


class PlanGroup(TyperGroup):
    """`dips plan FILE` is `dips plan make FILE`: what is no sub-command is a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["make", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(no_args_is_help=False, cls=PlanGroup)

N = TypeVar("N", int, float)
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]
SetupFile = Annotated[
    str, typer.Argument(metavar="FILE", help="TOML file with sites, links, model; or a shipped one's name.")
]

MOST_REPEATS = 1000
LINKS_AFTER = 5
BACKENDS = ("gloo", "nccl")


@app.command()
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
        Path | None, typer.Option(metavar="FOLDER", help="Where run.json, trace.json, measured.json and the logs go.")
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
    links: Annotated[
        Path | None,
        typer.Option("--links", metavar="FILE", help="For a plan.json: links in mid-run, as in replan's --profile."),
    ] = None,
    then_latency: Annotated[
        float | None, typer.Option(metavar="R", help="For a name: the latency in mid-run, in T_F.")
    ] = None,
    then_bandwidth: Annotated[
        float | None, typer.Option(metavar="R", help="For a name: a message on its link in mid-run, in T_F.")
    ] = None,
    links_after: Annotated[
        int | None, typer.Option("--links-after", metavar="N", help="Timed iterations before links change; 5.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run a planned schedule here, a process for each device, and compare the time it takes with the plan.

    torch's pipeline runtime runs a small model in the planned order. Operations are stretched to the times that the
    plan gives them, and messages between sites arrive when the plan's links would bring them, so that a few
    processors represent many devices. The gradients of an iteration must equal those of one process.

    With --links (a plan.json) or --then-latency and --then-bandwidth (a name), the links between sites change in
    mid-run. Operations and messages are measured, the plan is made again with them while training goes on, and, where
    that is advised, the ranks swap it between two iterations without a restart. The plan that is made for the new links
    runs last, for comparison.

    Exit code 1: an iteration took longer or shorter by more than the tolerance, gradients differ, or a swap recovered
    less than 80 % of what the plan for the new links saves.
    """
    _check_numbers(operation_ms, repeats, tolerance, backend)
    options = {"stages": stages, "microbatches": microbatches, "sites": sites, "latency": latency,
               "bandwidth": bandwidth, "memory": memory}  # fmt: skip
    status = Console(stderr=True).status
    if links is not None or then_latency is not None or then_bandwidth is not None:
        after = LINKS_AFTER if links_after is None else links_after
        change = _change(plan, options, links, [then_latency, then_bandwidth], after, check_gradients)
        _check_ranks(ranks, change.running.schedules[0].n_devices, plan)
        swapped = run_change(change, operation_ms, after, repeats, backend, out, tolerance / 100, status)
        files = write_change(swapped, out) if out is not None else []
        _print(as_json, lambda: change_json(swapped), tell_change(swapped), files)
        return int(not swapped.good)
    if links_after is not None:
        raise ConfigError("--links-after says when links change: give --links, --then-latency or --then-bandwidth too")
    source = source_of(plan, options)
    _check_ranks(ranks, source.schedule.n_devices, plan)
    repeats = 0 if check_gradients else repeats
    outcome = run_plan(source, operation_ms, repeats, backend, out, tolerance / 100, status)
    files = write_files(outcome, out) if out is not None else []
    _print(as_json, lambda: outcome_json(outcome), tell(outcome), files)
    return int(not outcome.good)


@app.command()
def calibrate(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="The plan.json that ran, of dips plan FILE --out FOLDER.")
    ],
    measured: Annotated[
        Path, typer.Argument(metavar="MEASURED", help="The measured.json of dips plan run PLAN --out FOLDER.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="PROFILE", help="The profile file to write them to; none: only print.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Fit the overhead of an operation and of a message to a measured run of a plan, so that later plans count them and
    say how far off they may be.

    Plans from times of layers alone are too short: starting operations and handing over messages takes time too. Run a
    plan once (`dips plan run PLAN --out FOLDER`), calibrate with it, and name the profile in [profile] of the problem's
    file. Plans are then made with both overheads, and every predicted time has an interval; without, it is called
    uncalibrated. What the profile has of devices and links stays.

    Overheads are of the engine and machine that ran: measure again when these change. With `dips plan run` they are
    those of torch's pipeline runtime on this machine.
    """
    found = fit_to_run(plan, measured)
    if out is not None:
        write_profile(calibrated_profile(found, out, datetime.now(UTC).replace(microsecond=0)), out)
    _print(as_json, lambda: calibration_json(found), calibration_lines(found, out), [] if out is None else [out])
    return 0


@app.command()
def tradeoff(
    file: SetupFile,
    solver_s: Annotated[
        float | None, typer.Option("--seconds", help="Time for a solver to find the best order, for each way.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Every way to split the file's devices into stages and replicas, the fastest first: is the long link better used
    by pipelines that cross it (activations), or by whole pipelines at each site (gradients)?

    Stages x replicas and the microbatches of all replicas together stay what the file says. For each way: the best
    schedule, how long an iteration takes, the memory of the device that has least left, the bytes over each link
    between sites; and why other ways cannot be.
    """
    found = split_all_ways(api.pose(file, solver_s))
    _print(as_json, lambda: tradeoff_json(found), tradeoff_text(found), width=140)
    return 0


@app.command()
def groups(
    file: SetupFile,
    threshold_gbps: Annotated[
        float,
        typer.Option("--threshold", metavar="GBPS", help="Merge groups between which a message goes as fast as this."),
    ] = THRESHOLD_GBPS,
    alike: Annotated[
        float, typer.Option(metavar="PERCENT", help="Merge subgroups of which one is faster by this at most.")
    ] = 100 * ALIKE,
    as_json: AsJson = False,
) -> int:
    """Which of the file's devices belong together: groups with a fast network inside, and in each of them subgroups of
    devices of about the same speed (SpanTrain). Cut a model at the borders of groups: messages between them are slow.

    Devices begin alone; the two groups that are nearest merge, again and again, while a message of one microbatch goes
    between them at --threshold Gbit/s or faster, latency counted. Subgroups merge likewise, by speed: a profile's times
    of layers, or sustained_tflops. Every merge is printed, and every one that was refused at the end, with its number;
    and how far measurements may be off before groups can change.

    Every pair of sites needs a link in the file: measure those that are missing with dips profile links.
    """
    if not (math.isfinite(threshold_gbps) and threshold_gbps > 0):
        raise ConfigError(f"--threshold {threshold_gbps:g} is no rate: give Gbit/s, more than 0")
    if not (math.isfinite(alike) and alike >= 0):
        raise ConfigError(f"--alike {alike:g} is no difference: give percent, at least 0")
    found = group(measured_of(read_setup(file)), threshold_gbps, alike / 100)
    _print(as_json, lambda: grouping_json(found), groups_text(found))
    return 0


@app.command()
def explore(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="TOML file with zones, buildings, routes, model; or a shipped one's name."),
    ],
    links: Annotated[
        bool,
        typer.Option("--links", help="Go by times with one message at a time on each way; else by Algorithm 1 alone."),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """ScaleAcross Explorer: the best way to split a training over buildings and regions, among all degrees of
    parallelism, microbatches, sizes of chunks, placements and schedules.

    Prints the best configuration of each kind, what the best one spends its time on, what the next one would need, and
    how to use the long links. Both times are printed: Algorithm 1 of the paper has no contention for a link, --links
    searches by the planner's own model of links.
    """
    found = report_of(read_topology(file), links)
    _print(as_json, found.to_json, explored_text(found), width=160)
    return 0


@app.command()
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
    as_json: AsJson = False,
) -> int:
    """Play the present schedule with measured times and links, plan again with them, and say whether to swap: what an
    iteration would gain, what the swap costs, and after how many iterations it has paid off.

    Exit code 0: keep the plan. 1: swap it. 2: a mistake in a file or an option. A swap costs the time to move layers
    that change their device over the links between sites, and nothing where only the order changes.
    """
    if not 0 <= least_gain < 100:
        raise ConfigError(f"--least-gain {least_gain:g} is no part of an iteration: give 0 up to 100 (percent)")
    if within < 1:
        raise ConfigError(f"--within {within} is no number of iterations: give at least 1")
    if not (math.isfinite(pause_s) and pause_s >= 0):
        raise ConfigError(f"--pause {pause_s:g} is no time: give seconds, at least 0")
    limits = Limits(least_gain / 100, within, pause_s)
    running = read_running(api.read_text(plan, "plan.json", "make one with dips plan FILE --out FOLDER"), str(plan))
    if out is not None:
        ready_folder(out)
    verdict = decide_to_replan(running, read_measured(profile), limits)
    files = write_plan(verdict.plan, out) if out is not None and verdict.advised else []
    _print(as_json, lambda: verdict_json(running, verdict), replan_text(running, verdict), files)
    return int(verdict.advised)


@app.command()
def adapt(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="The plan.json that is carried out, of dips plan FILE --out FOLDER.")
    ],
    measured: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What was measured: TOML, or JSON if it ends in .json.")
    ] = None,
    before: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --measured: what was answered last, with --json.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Bandwidths over time: TOML, or a shipped trace's name.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --trace: where adapt.json, .svg and .png go.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """How many sequences of a microbatch each stage should take at a time while links are slower than planned
    (SpanTrain's adapter): smaller pieces arrive earlier, so that the next stage begins sooner.

    With --measured: the sizes to use now, why, and what an iteration takes with them and with whole microbatches. The
    file is that of `dips plan replan --profile`. With --before, a stage goes back to whole microbatches only when
    messages are on time again by the second, stricter threshold. With --trace: iterations under changing bandwidth,
    with and without the adapter.

    Messages are late while one of a whole microbatch takes longer than the compute that hides it. Gradients stay those
    of the whole batch: training equals synchronous training with any sizes.

    Exit code 0: keep the sizes. 1: change them. 2: a mistake in a file or an option.
    """
    if (measured is None) == (trace is None):
        raise ConfigError("give either --measured FILE, for an answer now, or --trace FILE, to play a trace")
    if (before is not None and measured is None) or (out is not None and trace is None):
        raise ConfigError("--before goes with --measured, and --out with --trace: leave it out")
    running = read_running(api.read_text(plan, "plan.json", "make one with dips plan FILE --out FOLDER"), str(plan))
    if trace is not None:
        file = read_trace(trace)
        if out is not None:
            ready_folder(out)
        rules, compared = traced(running, file)
        if out is not None:
            with writing(out):
                (out / ADAPT_FILES[0]).write_text(json.dumps(traced_json(compared)) + "\n")
                draw(running, file, compared, [out / name for name in ADAPT_FILES[1:]])
        text = traced_text(rules, compared, running.problem.calibration_error)
        _print(as_json, lambda: traced_json(compared), text, _written(out, ADAPT_FILES))
        return 0
    assert measured is not None
    last = None
    if before is not None:
        last = read_before(api.read_text(before, "an answer", "leave --before out"), str(before))
    advice = advise(running, read_measured(measured), last)
    _print(as_json, lambda: advice_json(advice), advice_text(advice))
    return int(advice.advised)


@app.command()
def make(
    file: SetupFile,
    systems: Annotated[
        list[System] | None,
        typer.Option("--system", metavar="NAME", help=f"Ask this one only, of {', '.join(System)}; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the plan's files go; none: only print.")
    ] = None,
    solver_s: Annotated[
        float | None, typer.Option("--seconds", help="Time for a solver to find the best order, for each kind.")
    ] = None,
    sensitivity: Annotated[bool, typer.Option(help="Also say what would help most.")] = True,
    as_json: AsJson = False,
) -> int:
    """How to train a file's model over its sites and links: what to take, in tokens a day, and why.

    First, where there are several sites: one training over all or some of them, one site alone, or separate clusters
    under Di-PS at all or some of them. For that all systems are asked: JEEVES and CrossPipe for the order of a
    pipeline's operations, SpanTrain for groups of devices with layers and microbatches of their own, ScaleAcross
    Explorer for all degrees of parallelism; and Di-PS for a cluster at each site that trains by itself. Then the best
    plan for the pipelines that the file describes: how long an iteration takes, memory of each stage, bytes of each
    link, what else was tried, what would help most.

    `dips plan FILE` is short for `dips plan make FILE`. With --out, writes the plan of these pipelines: plan.json,
    plan.csv (for torch's pipeline runtime), trace.json (for Perfetto), timeline.svg and timeline.png.
    """
    problem = api.pose(file, solver_s)
    if out is not None:
        ready_folder(out)
    with Console(stderr=True).status("planning") as status:
        decision = decide(problem, tuple(dict.fromkeys(systems or System)), sensitivity, status.update)
    if out is not None:
        if decision.plan is None:
            reasons = "; ".join(no.why for no in decision.refused) or "neither jeeves nor crosspipe was asked"
            raise ConfigError(f"--out {out}: there is no plan of the file's pipelines to write: {reasons}")
        write_plan(decision.plan, out)
    whole = {} if decision.plan is None or not as_json else plan_json(decision.plan)
    _print(
        as_json, lambda: whole | decision_json(decision), decision_text(decision), _written(out, PLAN_FILES), width=140
    )
    return 0


@app.command()
def compare(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="As for `dips plan FILE`, at least two.")],
    as_json: AsJson = False,
) -> int:
    """The plans of several files side by side: each schedule's iteration, in seconds."""
    if len(files) < 2:
        raise ConfigError("dips plan compare takes at least two files: name another one")
    plans = [api.make(file, sensitivity=False) for file in files]
    rows, errors = api.compared(plans), [plan.problem.calibration_error for plan in plans]
    table = table_of(("schedule",), [Path(file).stem for file in files])
    for name, times in rows.items():
        table.add_row(name, *("-" if one is None else f"{one:.4g}" for one in times))
    table.add_section()
    table.add_row("calibration", *("uncalibrated" if error is None else f"+- {error:.2%}" for error in errors))
    _print(as_json, lambda: {"files": files, "iteration_s": rows, "calibration_error": errors}, [table])
    return 0


PAPERS: Mapping[str, Callable[[float], Iterator[PaperCheck]]] = {
    "jeeves": lambda optimal_s: jeeves_checks(),
    "crosspipe": crosspipe_checks,
    "spantrain": lambda optimal_s: spantrain_checks(),
    "scaleacross": lambda optimal_s: scaleacross_checks(),
}


def all_checks(paper: str = "all", optimal_s: float = 0.0) -> Iterator[PaperCheck]:
    """The comparisons of all papers, or of one. optimal_s > 0: the solver's schedules too, with so much time for each.
    Raises ConfigError for an unknown paper."""
    if paper not in (*PAPERS, "all"):
        raise ConfigError(f"--paper {paper!r} is unknown: choose one of {', '.join(PAPERS)}, all")
    for name, checks in PAPERS.items():
        if paper in (name, "all"):
            yield from checks(optimal_s)


@app.command(name="validate")
def validate_papers(
    paper: Annotated[str, typer.Option(help="jeeves, crosspipe, spantrain, scaleacross, or all.")] = "all",
    optimal: Annotated[
        bool, typer.Option("--optimal", help="Also CrossPipe's solved schedules: ten minutes, on two cores more.")
    ] = False,
    seconds: Annotated[float, typer.Option("--seconds", help="The solver's time for each schedule.")] = 10.0,
    as_json: AsJson = False,
) -> int:
    """Published numbers of JEEVES, CrossPipe, SpanTrain and ScaleAcross Explorer next to what the planner computes,
    with the error of each.

    Exit code 1 if a number is outside of its tolerance; numbers without one are for information. What a paper leaves
    out, and what was taken in its place, is printed above its numbers.
    """
    if not 0 < seconds <= api.MOST_SECONDS:
        raise ConfigError(f"--seconds {seconds:g} is no time: give more than 0, up to {api.MOST_SECONDS:g}")
    checks = list(all_checks(paper, seconds if optimal else 0.0))
    _print(as_json, lambda: [check.to_json() for check in checks], checks_text(checks))
    return int(any(check.missed for check in checks))


@app.command()
def sweep(
    stages: Annotated[str, typer.Option(metavar="N,...", help="Devices in the pipeline.")] = "4",
    microbatches: Annotated[str, typer.Option(metavar="N,...", help="Microbatches of an iteration.")] = "8",
    sites: Annotated[str, typer.Option(metavar="N,...", help="Equal sites at which the devices are.")] = "2",
    latency: Annotated[str, typer.Option(metavar="R,...", help="Between two sites, in T_F.")] = "0,0.5,1",
    bandwidth: Annotated[str, typer.Option(metavar="R,...", help="A message's time on its link, in T_F.")] = "0",
    memory: Annotated[str, typer.Option(metavar="R,...", help="Activation memory, in that of 1F1B.")] = "1",
    profile: Annotated[
        Path | None, typer.Option(metavar="PROFILE", help="Count the overheads of its [calibration].")
    ] = None,
    operation_ms: Annotated[
        float | None, typer.Option("--operation-ms", help="With --profile: what T_F is, in milliseconds.")
    ] = None,
    optimal: Annotated[bool, typer.Option("--optimal", help="Also let a solver look for the best schedule.")] = False,
    seconds: Annotated[float, typer.Option("--seconds", help="The solver's time for each schedule.")] = 20.0,
    over: Annotated[str, typer.Option(metavar="SCHEDULE", help="What the maps compare the best one with.")] = "1f1b",
    only_map: Annotated[bool, typer.Option("--map", help="Print the maps alone, not each schedule.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where rows.json, map.svg and map.png go; none: only print.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Every schedule for every combination of sizes and delays, and maps of the best.

    Times are in units of T_F, the forward pass of one microbatch on one device; T_F = T_D = T_W = 1. A map says for
    each latency and bandwidth which schedule that fits the memory is best, and how many times faster it is than
    another one. --seconds goes with --optimal. Overheads of operations and messages count with --profile alone: they
    are times, so T_F must be one too.
    """
    overheads = api.calibrated(profile, operation_ms)
    grid = cases(
        *(
            _numbers(name, text, int)
            for name, text in (("stages", stages), ("microbatches", microbatches), ("sites", sites))
        ),
        *(
            _numbers(name, text, float)
            for name, text in (("latency", latency), ("bandwidth", bandwidth), ("memory", memory))
        ),
        overheads=overheads,
    )
    check_compared(grid, over, optimal)
    if out is not None:
        ready_folder(out)
    stderr = Console(stderr=True)
    shown = track(grid, "planning", console=stderr, disable=not stderr.is_terminal)
    rows = list(api.swept(shown, optimal, seconds))
    maps = panels(rows, over)
    plain = [{key: value for key, value in asdict(row).items() if value is not None} for row in rows]
    if out is not None:
        with writing(out):
            (out / "rows.json").write_text(json.dumps(plain) + "\n")
            draw_maps(maps, [out / "map.svg", out / "map.png"])
    files = _written(out, ("rows.json", "map.svg", "map.png"))
    _print(as_json, lambda: plain, sweep_text(rows, maps, only_map, overheads.error), files)
    return 0


@app.command()
def show(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A plan.json, or a schedule: a line for each device, as in 0F0,0F1,0B0."),
    ],
    latency: Annotated[float, typer.Option(help="Of a message between any two devices, in T_F.")] = 0.0,
    as_json: AsJson = False,
) -> int:
    """Check a plan or a schedule and draw when each device computes what.

    A plan.json is drawn with the times that were planned, a schedule alone with equal times. Every operation must
    be there once, on one device, in a possible order; else the cell is named.
    """
    text = api.read_text(file)
    whole = api.is_plan(text)
    timeline = api.planned(text, str(file)) if whole else api.played(text, str(file), latency)
    if as_json:
        rows = zip(timeline.schedule.orders, timeline.starts, timeline.ends, strict=True)
        devices = [
            [{"op": str(op), "start": start / NS, "end": end / NS} for op, start, end in zip(*row, strict=True)]
            for row in rows
        ]
        found = {"makespan": timeline.makespan_ns / NS, "bubble_fraction": timeline.bubble_fraction}
        print(json.dumps({**found, "devices": devices}))
        return 0
    makespan_ns = timeline.makespan_ns
    print("\n".join(grid_text(timeline, -(-makespan_ns // 100) if whole else NS // 2)))
    if not whole:
        print(f"makespan {makespan_ns / NS:g} T_F, bubble {timeline.bubble_fraction:.1%}")
        return 0
    error, iteration_s = api.error_of(text, str(file)), api.iteration_of(text)
    iteration_s = makespan_ns / NS if iteration_s is None else iteration_s
    print(
        f"iteration {format_seconds(iteration_s)} ({interval_text(iteration_s, error)}), of it the operations above "
        f"{format_seconds(makespan_ns / NS)}; their bubble {timeline.bubble_fraction:.1%}"
    )
    return 0


# ---- options ----


def _numbers(name: str, text: str, kind: Callable[[str], N]) -> list[N]:
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        shown = text if len(text) <= 60 else text[:60] + "..."
        raise ConfigError(f"--{name} {shown!r} is no list of {what}: write them with commas, as in 4,8") from None


def _check_numbers(operation_ms: float, repeats: int, tolerance: float, backend: str) -> None:
    if not 0 < operation_ms <= api.MOST_MS:
        raise ConfigError(f"--operation-ms {operation_ms:g} cannot be timed: give more than 0, up to {api.MOST_MS:g}")
    if not 1 <= repeats <= MOST_REPEATS:
        raise ConfigError(f"--repeats {repeats}: give 1 to {MOST_REPEATS}; --check-gradients times nothing")
    if not 0 < tolerance < 100:
        raise ConfigError(f"--tolerance {tolerance:g} is no percentage: give more than 0, below 100")
    if backend not in BACKENDS:
        raise ConfigError(f"--backend {backend} is unknown: choose {' or '.join(BACKENDS)}")


def _check_ranks(ranks: int | None, n_devices: int, plan: str) -> None:
    if ranks is not None and ranks != n_devices:
        raise ConfigError(
            f"--ranks {ranks}, but {plan} has {n_devices} devices: give --ranks {n_devices}, or make a plan for {ranks}"
        )


def _change(
    plan: str,
    options: dict[str, float | None],
    links: Path | None,
    then: Sequence[float | None],
    after: int,
    check_gradients: bool,
) -> Change:
    """then: latency and bandwidth of the links between sites, where a schedule is named. Raises ConfigError."""
    if not 1 <= after <= MOST_REPEATS:
        raise ConfigError(f"--links-after {after} is no number of iterations: give 1 to {MOST_REPEATS}")
    if check_gradients:
        raise ConfigError("--check-gradients times nothing, so links cannot change: leave it out; they are compared")
    for value in then:
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{value:g} is no delay of a link: give T_F, at least 0")
    if links is None:
        return change_of_name(plan, options, *then)
    if any(value is not None for value in then):
        raise ConfigError(
            "--links names the links' numbers, as --then-latency and --then-bandwidth do: give one of both"
        )
    return change_of_file(plan, links, options)


# ---- output ----


def _print(
    as_json: bool,
    plain: Callable[[], object],
    pieces: Iterable[str | Table],
    files: Iterable[Path] = (),
    width: int = 120,
) -> None:
    """Print JSON; or else lines and tables, then the names of written files. width: where standard output is no
    terminal."""
    if as_json:
        print(json.dumps(plain()))
        return
    console = Console(width=None if sys.stdout.isatty() else width)
    for piece in pieces:
        console.print(piece, highlight=False, markup=False)
    for file in files:
        console.print(f"wrote {file}", highlight=False, markup=False, soft_wrap=True)


def _written(folder: Path | None, names: Iterable[str]) -> list[Path]:
    return [] if folder is None else [folder / name for name in names]
