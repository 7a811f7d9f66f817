"""`dips plan run` with links that change in mid-run: the plan is made again for what was measured, and swapped while
training goes on (CrossPipe, arXiv:2507.00217, section 6).

Four parts of one run, in the same processes: the plan on the links that it was made for; the same plan on the changed
links; what `replan` makes of the times and messages that the ranks measured there; the plan that is made for the
changed links themselves, as if they had been known. How much of the lost time the third part recovers is measured, and
not taken from predictions. While this process plans, the ranks train on with the old plan.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from dips.core.clock import SystemClock
from dips.core.config import SettingsFile
from dips.core.errors import ConfigError
from dips.core.units import format_seconds
from dips.planner.api import is_plan, read_text
from dips.planner.cluster import setup_of
from dips.planner.commands.plan_run import (
    BUSY_MACHINE,
    START_S,
    PlanSource,
    RunPart,
    busy_text,
    case_of,
    filled,
    job_of,
    part_of,
    predicted_of,
    ranks_folder,
    reports_of,
    run_ranks,
    source_of,
    stretch_of,
    stretched,
    with_parts_as_stages,
)
from dips.planner.commands.plan_text import table_of
from dips.planner.costs import NS
from dips.planner.ir import Kind, Op, Schedule
from dips.planner.plan import make_plan, pipelines_of, write_plan, writing
from dips.planner.problem import Problem
from dips.planner.replan import (
    Limits,
    MeasuredFile,
    MeasuredLink,
    MeasuredTable,
    ReplanVerdict,
    Running,
    layers_moved,
    read_measured,
    read_running,
    replan,
    verdict_json,
    with_measured_links,
)
from dips.planner.run.links import GRADIENT_TOLERANCE, PlanJob, RankReport, Sent, report_file, write_job
from dips.planner.schedules import SCHEDULES
from dips.planner.sweep import GridPoint
from dips.planner.units import Division

SCHEMA = "dips-plan-swap/1"

RECOVERED = 0.8
"""The least part of the lost time that a swap must recover."""

BLOCKS = 4
"""Of the small model for each layer: the smallest number that schedules with parts divide (cross_ud/4)."""

MOST_GBPS = 1e9
"""The highest rate that a file may give."""

PLANNING_S = 600.0
"""The longest time that planning may take."""

BEFORE, OLD, NEW, BEST = range(4)
"""The parts of a run, and the numbers of their jobs."""

PARTS = ("before the change", "old plan", "swapped plan", "plan for these links")


# ---- what is run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A plan that runs, and the links between its sites from some iteration on."""

    running: Running
    links: MeasuredFile

    @property
    def problem(self) -> Problem:
        """With the changed links."""
        return with_measured_links(self.running.problem, self.links)


def change_of_file(plan: str, links: Path, options: dict[str, float | None]) -> Change:
    """plan: a plan.json. links: what they become, in the form of replan's measured file.

    Raises ConfigError for what cannot be read, for links that the plan does not have, and for a plan of
    several replicas: one runs here, and its link is not what replicas share.
    """
    text = read_text(Path(plan), "plan.json", "make one with dips plan FILE --out FOLDER")
    if not is_plan(text):
        raise ConfigError(f"--links goes with a plan.json, which has sites and links, and {plan} is none: name one")
    source_of(plan, options)  # refuses what could not run at all
    change = Change(read_running(text, plan), read_measured(links))
    training = change.running.problem.setup.training
    if training.data * training.context > 1 or change.running.groups > 1:
        raise ConfigError(
            f"{plan} has data x context = {training.data * training.context} replicas, of which one runs here, so what "
            "they share of a link would not be measured: make a plan with data = 1 and context = 1"
        )
    if change.links.stages:
        raise ConfigError(f"{links}: [[stages]] do not go with --links, which changes links alone: remove them")
    _ = change.problem  # refuses links that the plan does not have
    return change


def change_of_name(
    name: str, options: dict[str, float | None], latency: float | None, bandwidth: float | None
) -> Change:
    """The schedule of a name with the options of CASE; latency and bandwidth, in T_F: what the links between sites
    become, None: as before. Raises ConfigError."""
    if name not in SCHEDULES:
        raise ConfigError(
            f"--then-latency and --then-bandwidth go with a schedule's name, and {name} is none: choose one of "
            f"{', '.join(SCHEDULES)}, or give --links with a plan.json"
        )
    source_of(name, options)  # refuses what could not run at all
    given = filled(options)
    if given["sites"] < 2:
        raise ConfigError("--then-latency and --then-bandwidth change links between sites: give --sites 2 or more")
    then = {**given, **{k: v for k, v in (("latency", latency), ("bandwidth", bandwidth)) if v is not None}}
    before, after = case_of(given), case_of(then)
    problem = problem_of(before, max(2, SCHEDULES[name].chunks(before.n_pp)))
    places = SCHEDULES[name].places(before.n_pp)
    division = problem.uniform(len(places))
    costs, limits = problem.costs(division, places), problem.limits(division, places)
    schedule = SCHEDULES[name].make(before.n_pp, before.n_mb, costs, limits)
    links = tuple(
        MeasuredLink(
            sender=link.sender,
            receiver=link.receiver,
            bandwidth_gbps=_gbps_of(after.bandwidth),
            latency_ms=after.latency * 1e3,
        )
        for link in problem.setup.links
    )
    changed = MeasuredFile("--then-latency and --then-bandwidth", MeasuredTable(source="options"), (), links)
    return Change(Running(problem, 1, name, "alone", division, (schedule,)), changed)


def problem_of(case: GridPoint, layers_of_a_device: int) -> Problem:
    """A case of `sweep` as a problem of sites and links, in which T_F is a second and a message a megabyte."""
    says = {"source": "dips plan run: T_F = T_D = T_W = 1"}
    sites = [f"site {number}" for number in range(case.n_sites)]
    neighbours = list(pairwise(sites))
    if len(sites) > 2:
        neighbours.append((sites[-1], sites[0]))  # for pipelines that go round
    rate = {"bandwidth_gbps": _gbps_of(case.bandwidth), "latency_ms": case.latency * 1e3}
    tables: dict[str, Any] = {
        "model": {
            "name": "equal layers",
            "layers": layers_of_a_device * case.n_pp,
            **dict.fromkeys(("hidden", "heads", "mlp_width", "vocabulary"), 1),
            **says,
        },
        "sites": [{"name": site, "devices": case.n_pp // case.n_sites, **says} for site in sites],
        "links": [{"sender": a, "receiver": b, **rate, **says} for a, b in neighbours],
        "training": {"pipeline": case.n_pp, "microbatches": case.n_mb, "sequence_tokens": 1, **says},
        "profile": {
            **dict.fromkeys(("forward_ms", "input_gradient_ms", "weight_gradient_ms"), 1000.0),
            "message_mb": 1.0,
            "memory_microbatches": case.memory * case.n_pp,
            **says,
        },
    }
    return Problem(setup_of(SettingsFile("dips plan run", tables)), released=0.5)


def _gbps_of(bandwidth: float) -> float:
    """The rate at which a message of a megabyte occupies its link for so many seconds; 0: the fastest there is."""
    return min(MOST_GBPS, 8e-3 / bandwidth) if bandwidth else MOST_GBPS


# ---- what was measured -----------------------------------------------------------------------------------------------


class _Way(NamedTuple):
    """Times of the messages from one site to another, as the ranks at its ends noted them, in nanoseconds."""

    busy: list[int]  # from a message's start to when its sender's link was free again
    travelled: list[int]  # from then until the receiver, which waited for it, began with it


def measured_profile(
    running: Running, source: PlanSource, reports: Sequence[RankReport], stretch: float
) -> dict[str, Any]:
    """The profile of what the ranks measured with a plan, for `replan`. Medians of operations, and of messages between
    sites: the time on the link, and the time from then until a receiver that waited began with it. stretch: of all
    times.

    A link that no message of a timed iteration used, or for whose messages no rank waited, is left out. A backward pass
    that is not split is shared as planned.
    """
    n = len(reports[0].iterations)
    said = f"dips plan run: medians of {n} iterations of {source.schedule.name}, after the links changed"
    lasted = defaultdict[tuple[int, Kind], list[int]](list)
    for report, order in zip(reports, source.schedule.orders, strict=True):
        for iteration in report.iterations:
            for op, (start, end) in zip(order, iteration.times, strict=True):
                lasted[op.stage, op.kind].append(end - start)
    parts = running.schedules[0].parts
    planned = running.problem.costs(running.division, running.places).stages
    rows = []
    for stage, plan in enumerate(planned):
        f, d, w, b = (
            sum(statistics.median(lasted[s, kind] or [0]) for s in range(stage * parts, (stage + 1) * parts))
            for kind in (Kind.F, Kind.D, Kind.W, Kind.B)
        )
        share = plan.d_ns / max(1, plan.d_ns + plan.w_ns)
        times = (f, d + share * b, (w + (1 - share) * b) * (plan.w_ns > 0))  # no weights: an operation without work
        names = ("forward_ms", "input_gradient_ms", "weight_gradient_ms")
        rows.append({"stage": stage, **{k: ns / stretch / 1e6 for k, ns in zip(names, times, strict=True)}})
    return {
        "measured": {"source": said, "iterations": n},
        "stages": rows,
        "links": _measured_links(running, source, reports, stretch),
    }


def _measured_links(
    running: Running, source: PlanSource, reports: Sequence[RankReport], stretch: float
) -> list[dict[str, Any]]:
    ways = defaultdict[tuple[str, str], _Way](lambda: _Way([], []))
    for iterations in zip(*(report.iterations for report in reports), strict=True):
        sent = dict[tuple[bool, int, int], tuple[int, Sent]]()  # by direction, stage that takes it and microbatch
        for rank, row in enumerate(iterations):
            for one in row.sent:
                op = Op.parse(one.cell)
                forward = op.kind is Kind.F
                sent[forward, op.stage + (1 if forward else -1), op.microbatch] = rank, one
        for rank, (order, row) in enumerate(zip(source.schedule.orders, iterations, strict=True)):
            ended = None
            for op, (start, end) in zip(order, row.times, strict=True):
                needed = op.kind is Kind.F, op.stage, op.microbatch
                sender, message = (rank, None) if op.kind is Kind.W else sent.get(needed, (rank, None))
                if message is not None and source.sites[sender] != source.sites[rank]:
                    way = ways[source.sites[sender], source.sites[rank]]
                    way.busy.append(message.freed_ns - message.start_ns)
                    if ended is None or message.arrives_ns > ended:  # it came after the rank was ready for it
                        way.travelled.append(start - message.freed_ns)
                ended = end
    message_bits = running.problem.message_bytes * 8
    rows = []
    for (here, there), way in sorted(ways.items()):
        if way.travelled:
            busy_ns = max(1.0, statistics.median(way.busy) / stretch)  # a clock shows no less
            rows.append(
                {
                    "sender": here,
                    "receiver": there,
                    "both_ways": False,
                    "bandwidth_gbps": min(MOST_GBPS, message_bits / busy_ns),
                    "latency_ms": max(0.0, statistics.median(way.travelled)) / stretch / 1e6,
                }
            )
    return rows


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SwapOutcome:
    """What came of a run. parts: PARTS, or the first two where no swap was advised. layers: that moved to another rank
    in the swap, of those that the plan has."""

    change: Change
    backend: str
    operation_ms: float
    profile: dict[str, Any]
    verdict: ReplanVerdict
    parts: tuple[RunPart, ...]
    layers: int
    tolerance: float

    @property
    def recovered(self) -> float | None:
        """(old - swapped) / (old - best): of the time that a plan for these links saves, measured. None: no swap, or
        nothing was lost."""
        if len(self.parts) <= NEW:
            return None
        old_s, new_s, best_s = (self.parts[part].median_s for part in (OLD, NEW, BEST))
        return (old_s - new_s) / (old_s - best_s) if best_s < old_s else None

    @property
    def gradients_equal(self) -> bool:
        return all(part.gradients_equal for part in self.parts)

    @property
    def good(self) -> bool:
        """Gradients, times, and, where a swap was advised, what it recovered."""
        kept = not self.verdict.advised or (self.recovered is not None and self.recovered >= RECOVERED)
        return kept and self.gradients_equal and all(abs(part.error) <= self.tolerance for part in self.parts)


class SwapRun:
    """Follows the ranks through a run: called again and again, it plans as soon as they have measured the old plan on
    the changed links, and gives them the jobs that follow. sources: of each part; jobs: of the first two."""

    def __init__(
        self, folder: Path, change: Change, operation_ms: float, after: int, repeats: int, backend: str
    ) -> None:
        running = change.running
        self._folder, self._change, self._backend, self._repeats = folder, change, backend, repeats
        costs = running.problem.costs(running.division, running.places)
        self._stretch = stretch_of(costs, running.schedules[0].n_devices, operation_ms)
        best = make_plan(pipelines_of(change.problem), sensitivity=False).chosen
        self._best = self._source(change.problem, best.schedules[0], best.division)
        self.sources = [
            self._source(problem, running.schedules[0], running.division)
            for problem in (running.problem, change.problem)
        ]
        self.n_ranks = running.schedules[0].n_devices
        self.jobs = [
            self._job(self.sources[BEFORE], after, last=False),
            self._job(self.sources[OLD], repeats, last=False),
        ]
        self.verdict: ReplanVerdict | None = None
        self.profile: dict[str, Any] = {}
        self.layers = 0

    def _source(self, problem: Problem, schedule: Schedule, division: Division) -> PlanSource:
        costs = problem.costs(division, schedule.device_of_stage)
        sites = tuple(problem.setup.sites[site].name for site in problem.site_in_file)
        return with_parts_as_stages(PlanSource(schedule, costs, sites, layers=division), BLOCKS)

    def _job(self, source: PlanSource, repeats: int, last: bool) -> PlanJob:
        timed = replace(source, costs=stretched(source.costs, self._stretch))
        return job_of(timed, repeats, self._backend, predicted_of(source, self._stretch).makespan_ns / NS, last)

    @property
    def longest_s(self) -> float:
        """How long all of it may take."""
        old_s = predicted_of(self.sources[OLD], self._stretch).makespan_ns / NS
        iterations = self.jobs[BEFORE].repeats + 3 * self._repeats + 1
        return START_S + PLANNING_S + 3 * old_s * iterations

    def __call__(self) -> None:
        there = (report_file(self._folder, rank, OLD).exists() for rank in range(self.n_ranks))
        if self.verdict is not None or not all(there):
            return
        running, old = self._change.running, self.sources[OLD]
        self.profile = measured_profile(running, old, reports_of(self._folder, self.n_ranks, OLD), self._stretch)
        file = self._folder / "profile.json"
        file.write_text(json.dumps(self.profile, indent=1) + "\n")
        self.verdict = verdict = replan(running, read_measured(file), Limits())
        if not verdict.advised:
            write_job(self._folder, self._job(old, 0, last=True), NEW)
            return
        schedule = verdict.new.schedules[0]
        self.layers = len(
            layers_moved((running.division, running.places), (verdict.new.division, schedule.device_of_stage))
        )
        self.sources += [self._source(self._change.problem, schedule, verdict.new.division), self._best]
        write_job(self._folder, self._job(self._best, self._repeats, last=True), BEST)
        write_job(self._folder, self._job(self.sources[NEW], self._repeats, last=False), NEW)

    def parts(self) -> tuple[RunPart, ...]:
        return tuple(
            RunPart(
                **part_of(source, predicted_of(source, self._stretch), reports_of(self._folder, self.n_ranks, number))
            )
            for number, source in enumerate(self.sources)
        )


def run_change(
    change: Change,
    operation_ms: float,
    after: int,
    repeats: int,
    backend: str,
    out: Path | None,
    tolerance: float,
    status: Callable[[str], AbstractContextManager[object]],
) -> SwapOutcome:
    """Run a plan whose links change, swap the plan if that is advised, and compare.

    after: timed iterations before the links change. repeats: timed iterations of each later part. out: where the ranks'
    files go. status: shows what goes on. Raises as run_ranks() and replan() do.
    """
    with ranks_folder(out) as folder:
        swap = SwapRun(folder, change, operation_ms, after, repeats, backend)
        what = f"{swap.n_ranks} ranks run {after} iterations, the links change, and {repeats} and more follow"
        with status(what):
            run_ranks(folder, swap.jobs, swap.longest_s, SystemClock(), swap)
        assert swap.verdict is not None  # the ranks waited for it
        parts = swap.parts()
    return SwapOutcome(change, backend, operation_ms, swap.profile, swap.verdict, parts, swap.layers, tolerance)


# ---- report ----------------------------------------------------------------------------------------------------------


def tell_change(outcome: SwapOutcome) -> Iterator[str | Table]:
    running, verdict = outcome.change.running, outcome.verdict
    schedule = running.schedules[0]
    yield (
        f"{running.name}: {schedule.n_microbatches} microbatches, {schedule.n_devices} ranks ({outcome.backend}), "
        f"{outcome.operation_ms:g} ms for a forward pass on a device; the links change after "
        f"{len(outcome.parts[BEFORE].measured)} timed iterations"
    )
    table = table_of(("iterations", "schedule"), ("predicted", "measured", "from", "to", "error"))
    for name, part in zip(PARTS, outcome.parts, strict=False):
        spans = part.spans_s
        times = (format_seconds(s) for s in (part.predicted_s, part.median_s, spans[0], spans[-1]))
        table.add_row(name, part.source.schedule.name, *times, f"{part.error:+.2%}")
    yield table
    longer = max(part.slowness for part in outcome.parts)
    if longer > BUSY_MACHINE:
        yield busy_text(longer)
    for link in outcome.profile["links"]:
        true = outcome.change.problem.setup.link(link["sender"], link["receiver"])
        yield (
            f"link {link['sender']} to {link['receiver']}, measured: {link['bandwidth_gbps']:.4g} Gbit/s, "
            f"{link['latency_ms']:.4g} ms (it is {true.bytes_per_s * 8 / 1e9:.4g} Gbit/s, {true.latency_ms:.4g} ms)"
        )
    error = max(part.gradient_error for part in outcome.parts)
    yield (
        f"gradients: {'equal to' if outcome.gradients_equal else 'DIFFER from'} those of one process, which trains as "
        f"long, before and after each change: largest difference {error:.1e} of the largest gradient, allowed "
        f"{GRADIENT_TOLERANCE:.0e}"
    )
    if not verdict.advised:
        yield f"no swap: {verdict.why}"
        return
    new = outcome.parts[NEW]
    yield (
        f"swap to {verdict.new.name}: {verdict.why}; {outcome.layers} of {sum(running.division)} layers moved; "
        f"training paused for {format_seconds(new.pause_s)}, and {new.skipped} iterations of the old plan went on "
        "while the new one was made"
    )
    found = outcome.recovered
    if found is None:
        yield "recovered: NOTHING, the plan for these links is not faster than the old one"
    else:
        yield (
            f"recovered: {found:.1%} of what a plan for these links saves, "
            f"{'at least' if found >= RECOVERED else 'LESS THAN'} {RECOVERED:.0%}"
        )


def change_json(outcome: SwapOutcome) -> dict[str, Any]:
    """The outcome as a JSON object; times in seconds."""
    advised = outcome.verdict.advised
    return {
        "schema": SCHEMA,
        "backend": outcome.backend,
        "ranks": outcome.change.running.schedules[0].n_devices,
        "operation_ms": outcome.operation_ms,
        "parts": [
            {
                "part": name,
                "schedule": part.source.schedule.name,
                "predicted_s": part.predicted_s,
                "measured_s": [timeline.makespan_ns / NS for timeline in part.measured],
                "median_s": part.median_s,
                "error": part.error,
                "gradient_difference": part.gradient_error,
            }
            for name, part in zip(PARTS, outcome.parts, strict=False)
        ],
        "profile": outcome.profile,
        "verdict": verdict_json(outcome.change.running, outcome.verdict),
        "layers_moved": outcome.layers,
        "pause_s": outcome.parts[NEW].pause_s if advised else None,
        "iterations_while_planning": outcome.parts[NEW].skipped if advised else None,
        "recovered": outcome.recovered,
        "recovered_at_least": RECOVERED,
        "gradients_equal": outcome.gradients_equal,
        "tolerance": outcome.tolerance,
        "good": outcome.good,
    }


def write_change(outcome: SwapOutcome, folder: Path) -> list[Path]:
    """Write run.json; profile.json, what was measured, for `dips plan replan`; and, after a swap, the new plan into the
    folder plan. Raises ConfigError."""
    texts = {"run.json": change_json(outcome), "profile.json": outcome.profile}
    with writing(folder):
        for name, found in texts.items():
            (folder / name).write_text(json.dumps(found, indent=1) + "\n")
    plan = write_plan(outcome.verdict.plan, folder / "plan") if outcome.verdict.advised else []
    return [*(folder / name for name in texts), *plan]
