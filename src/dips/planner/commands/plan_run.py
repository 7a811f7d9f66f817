"""`dips plan run`: what is run, its processes on this machine, and the report next to the prediction."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from dips.core.clock import Clock, SystemClock
from dips.core.errors import ConfigError, FatalError
from dips.core.units import format_bytes, format_seconds
from dips.local.supervisor import POLL_S, ChildSpec, ProcessSupervisor, how_it_ended, last_word, log_tail
from dips.planner.api import error_of, is_plan, read_text
from dips.planner.calibration import MEASURED_FILE, interval_json, interval_text, measured_json
from dips.planner.commands.plan_text import table_of
from dips.planner.costs import NS, Costs, StageCost, equal_sites, read_costs
from dips.planner.ir import Kind, Op, Schedule
from dips.planner.plan import read_plan, ready_folder, writing
from dips.planner.run.links import (
    GRADIENT_TOLERANCE,
    PlanJob,
    RankLink,
    RankReport,
    parse_cells,
    read_report,
    write_job,
)
from dips.planner.schedules import MANY_CHUNKS, SCHEDULES
from dips.planner.simulate import SimulatedMessage, Timeline, simulate, validate
from dips.planner.sweep import GridPoint, cases
from dips.planner.trace import trace_events

# ---- plan run source -------------------------------------------------------------------------------------------------
#
# Finds what `dips plan run` runs: a schedule with its costs, from a plan.json, from a plan.csv, or by its name.
#
# torch's runtime knows no parts of blocks, so each part becomes a stage, as in plan.csv, with its part of the time.


CASE = {"stages": 4, "microbatches": 8, "sites": 2, "latency": 0.5, "bandwidth": 0.25, "memory": 1.0}
"""What is run where a schedule is named alone: latency and bandwidth in T_F, memory in that of 1F1B."""

MOST_RANKS = 64
_OF_CSV = ("sites", "latency", "bandwidth")
ALONE = "the plan's replicas take turns on the links; here one of them runs alone"
UNEXCHANGED = "one replica runs: what replicas exchange of gradients and weights is neither predicted nor run here"


@dataclass(frozen=True)
class PlanSource:
    """schedule: of whole blocks, its parts being stages. costs: of those stages. sites[d]: the name of device d's.
    note: in what the run differs from the plan; empty: in nothing. error: of predictions, as a fraction, where the plan
    is calibrated. layers: of each stage, as the small model has them; empty: one each."""

    schedule: Schedule
    costs: Costs
    sites: tuple[str, ...]
    note: str = ""
    error: float | None = None
    layers: tuple[int, ...] = ()


def source_of(plan: str, options: dict[str, float | None]) -> PlanSource:
    """plan: a file's path or a schedule's name; options: those of CASE, None where not given.

    Raises ConfigError for what cannot be read, found or run.
    """
    names = (*SCHEDULES, *MANY_CHUNKS)
    if plan in names:
        case = case_of(filled(options))
        found = PlanSource(*case.schedule(plan), _site_names(case.n_pp, case.n_sites))
    else:
        if not Path(plan).exists():
            known = ", ".join(names)
            raise ConfigError(f"{plan} is no file, nor a schedule: name a plan.json, a plan.csv, or one of {known}")
        text = read_text(Path(plan), "plan", "name a plan.json or a plan.csv")
        found = _from_json(text, plan, options) if is_plan(text) else _from_csv(text, plan, options)
    found = with_parts_as_stages(found)
    schedule = found.schedule
    validate(schedule, found.costs)
    idle = [device for device, order in enumerate(schedule.orders) if not order]
    if idle:
        raise ConfigError(f"{schedule.name}: device {idle[0]} runs nothing: every rank needs a stage")
    if schedule.n_devices > MOST_RANKS:
        raise ConfigError(f"{schedule.n_devices} ranks are too many processes for one machine: at most {MOST_RANKS}")
    return found


def scaled(costs: Costs, n_devices: int, forward_ms: float) -> Costs:
    """The same with all times in proportion, so that a forward pass of one microbatch takes so long on a device (on
    average, where devices differ), and without overheads. Raises ConfigError where forward passes take no time."""
    return stretched(costs, stretch_of(costs, n_devices, forward_ms))


def stretch_of(costs: Costs, n_devices: int, forward_ms: float) -> float:
    """The factor of all times with which a forward pass takes so long. Raises ConfigError where it takes no time."""
    forward_ns = sum(stage.f_ns for stage in costs.stages)
    if not forward_ns:
        raise ConfigError("forward passes of the plan take no time: nothing can be timed with it")
    return forward_ms * 1e6 * n_devices / forward_ns


def stretched(costs: Costs, factor: float) -> Costs:
    """The same with all times multiplied, and without overheads."""
    costs = costs.with_overheads(0, 0, ())
    stages = tuple(
        replace(s, f_ns=round(s.f_ns * factor), d_ns=round(s.d_ns * factor), w_ns=round(s.w_ns * factor))
        for s in costs.stages
    )
    wires = {}
    for pair, wire in costs.wires.items():
        busy_ns, latency_ns, hold_ns = (round(ns * factor) for ns in (wire.busy_ns, wire.latency_ns, wire.hold_ns))
        wires[pair] = wire._replace(busy_ns=busy_ns, latency_ns=latency_ns, hold_ns=hold_ns)
    return Costs(stages, wires)


def predicted_of(source: PlanSource, factor: float) -> Timeline:
    """An iteration with all times multiplied, and overheads as they are."""
    costs, overheads = stretched(source.costs, factor), (source.costs.operation_ns, source.costs.send_ns)
    return simulate(source.schedule, costs.with_overheads(*overheads, source.schedule.device_of_stage))


# ---- by name ----


def case_of(given: Mapping[str, float]) -> GridPoint:
    """The case that the options of CASE name."""
    (case,) = cases(
        *([int(given[key])] for key in ("stages", "microbatches", "sites")),
        *([given[key]] for key in ("latency", "bandwidth", "memory")),
    )
    return case


def filled(options: dict[str, float | None]) -> dict[str, float]:
    """The options of CASE, with its numbers where they were not given."""
    return {key: CASE[key] if value is None else value for key, value in options.items()}


def _site_names(n_devices: int, n_sites: int) -> tuple[str, ...]:
    return tuple(f"site {site}" for site in equal_sites(n_devices, n_sites))


# ---- from files ----


def _from_json(text: str, where: str, options: dict[str, float | None]) -> PlanSource:
    _refuse(options, (), "a plan.json, which has its own")
    schedule, _ = read_plan(text, where)
    found = json.loads(text)
    try:
        costs = read_costs(found["costs"])
        layers = tuple(int(n) for n in found["chosen"]["layers"])
        sites = tuple(str(stage["site"]) for stage in found["chosen"]["stages"])
        notes = [ALONE] * (found["chosen"]["sharing"] == "coordinated")
        notes += [UNEXCHANGED] * bool(found["costs"]["replicas_exchange"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} does not say what its operations cost ({type(error).__name__}: {error}): make it again with "
            "dips plan FILE --out FOLDER"
        ) from error
    return PlanSource(schedule, costs, sites, "; ".join(notes), error_of(text, where), layers)


def _from_csv(text: str, where: str, options: dict[str, float | None]) -> PlanSource:
    _refuse(options, _OF_CSV, "a plan.csv, which has its own")
    schedule = Schedule.from_csv(text, where)
    n = schedule.n_devices
    sizes = {"stages": n, "microbatches": schedule.n_microbatches, "sites": options["sites"] or 2 - n % 2}
    case = case_of(filled({**options, **sizes}))
    last_to_first = any(
        {a, b} == {0, n - 1} for a, b in zip(schedule.device_of_stage, schedule.device_of_stage[1:], strict=False)
    )
    one = case.costs(schedule.chunks, wraps=last_to_first)
    costs = Costs((one.stages[0],) * schedule.n_stages, one.wires)
    return PlanSource(schedule, costs, _site_names(n, case.n_sites))


def _refuse(options: dict[str, float | None], known: Sequence[str], what: str) -> None:
    for key, value in options.items():
        if value is not None and key not in known:
            raise ConfigError(f"--{key} does not go with {what}: leave it out")


# ---- what torch can run ----


def with_parts_as_stages(source: PlanSource, blocks: int = 0) -> PlanSource:
    """The source with a stage for each part. The small model has so many blocks for each of the plan's layers; 0: as
    many as parts, so that each part gets some of each layer."""
    schedule, costs = source.schedule, source.costs
    parts = schedule.parts
    layers = tuple(n * (blocks or parts) // parts for n in source.layers for _ in range(parts))
    if parts == 1:
        return replace(source, layers=layers)
    pure = costs.with_overheads(0, 0, ())
    stages = tuple(_part(pure, stage, part, parts) for stage in range(schedule.n_stages) for part in range(parts))
    whole, places = schedule.with_parts_as_stages(), schedule.device_of_stage
    made = Costs(stages, pure.wires).with_overheads(costs.operation_ns, costs.send_ns, places)
    return replace(source, schedule=whole, costs=made, layers=layers)


def _part(costs: Costs, stage: int, part: int, parts: int) -> StageCost:
    """Backward passes go through the parts in the other order. Activations do not matter here."""
    back = parts - 1 - part
    return StageCost(
        costs.compute_ns(stage, Kind.F, part, parts),
        costs.compute_ns(stage, Kind.D, back, parts),
        costs.compute_ns(stage, Kind.W, back, parts),
        activation=0,
        d_release=0,
    )


# ---- plan run ranks --------------------------------------------------------------------------------------------------
#
# Runs the processes of `dips plan run`: one for each rank, on this machine, which end together.
#
# It must leave no process behind, whatever ends the caller, and report in one sentence what went wrong in which rank.


START_S = 120.0
"""Until the last rank has imported torch and met the others, on a slow machine."""

GRACE_S = 1.0
"""After a rank has failed its neighbours fail too; which was the first is seen when all of them have ended."""

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK, "OMP_NUM_THREADS": "1"}
_NEIGHBOUR_GONE = re.compile(r"connection (was )?(closed|reset)|broken pipe|timed out", re.IGNORECASE)


def job_of(source: PlanSource, repeats: int, backend: str, predicted_s: float, last: bool = True) -> PlanJob:
    """The job of all ranks. source: with the times that the operations should take. last: no other job follows."""
    numbers = {resource: n for n, resource in enumerate(sorted({w.resource for w in source.costs.wires.values()}))}
    links = tuple(
        RankLink(sender, receiver, numbers[wire.resource], wire.busy_ns, wire.latency_ns, wire.hold_ns)
        for (sender, receiver), wire in sorted(source.costs.wires.items())
    )
    lasts_ns = tuple((stage.f_ns, stage.d_ns, stage.w_ns) for stage in source.costs.stages)
    timeout_s = START_S + 3 * predicted_s
    return PlanJob(source.schedule.to_csv(), lasts_ns, links, repeats, backend, timeout_s, source.layers, last)


def run_ranks(
    folder: Path,
    jobs: Sequence[PlanJob],
    deadline_s: float,
    clock: Clock,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Run jobs in `folder`, which holds the ranks' reports and logs afterwards.

    deadline_s: how long all of it may take. meanwhile: is called again and again while the ranks run; it may write more
    jobs, if the last one here says that others follow. Raises ModuleNotFoundError without torch, ConfigError or
    FatalError where a rank cannot do its part.
    """
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("torch", name="torch")
    for number, job in enumerate(jobs):
        write_job(folder, job, number)
    n_devices = parse_cells(jobs[0].csv, "the plan").n_devices
    names = [rank_name(rank) for rank in range(n_devices)]
    with ProcessSupervisor(clock, lambda event: None) as ranks:
        for rank in range(n_devices):
            command = (sys.executable, "-m", "dips.planner.run.rank", str(folder), str(rank))
            ranks.start(
                ChildSpec(rank_name(rank), command, log_of(folder, rank), {**os.environ, **_ENVIRONMENT}, restart=False)
            )
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
            meanwhile()
            time.sleep(POLL_S)
        else:
            return
        end_s = clock.monotonic_s() + GRACE_S
        while not ranks.ended(names) and clock.monotonic_s() < end_s:
            ranks.poll()
            time.sleep(POLL_S)
        raise failure([ranks.exit_code(name) for name in names], folder)


def reports_of(folder: Path, n_ranks: int, number: int = 0) -> list[RankReport]:
    """The reports of a job, by rank."""
    return [read_report(folder, rank, number) for rank in range(n_ranks)]


def rank_name(rank: int) -> str:
    return f"rank {rank}"


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def failure(codes: list[int | None], folder: Path) -> ConfigError | FatalError:
    """Which rank failed first, and how, from exit codes and logs: one that was killed, or that misses no other."""

    def order(rank: int) -> int:
        """The smaller, the sooner a rank is the one that failed first."""
        if (codes[rank] or 0) < 0:
            return 0
        return 2 if _NEIGHBOUR_GONE.search(log_tail(log_of(folder, rank))) else 1

    rank = min((rank for rank, code in enumerate(codes) if code), key=order)
    code, log = codes[rank] or 0, log_of(folder, rank)
    sentence = last_word(log)
    if sentence:
        kind = ConfigError if code == ConfigError.exit_code else FatalError
        return kind(f"{rank_name(rank)}: {sentence}")
    if code < 0:
        return FatalError(f"{rank_name(rank)} {how_it_ended(code)}: start it again; its log is {log}")
    end = log_tail(log, 1).strip() or "its log is empty"
    return FatalError(f"{rank_name(rank)} {how_it_ended(code)}: {end}; its log is {log}")


# ---- plan run report -------------------------------------------------------------------------------------------------


SCHEMA = "dips-plan-run/1"
BUSY_MACHINE = 0.02
"""An operation ends when its time is over; where all together are this much longer, processors were missing."""

_APART = 1000
"""Between the numbers of the predicted and of the measured processes of a trace."""


@dataclass(frozen=True)
class RunPart:
    """A schedule as its ranks ran it. measured: a timeline for each timed iteration, from its first operation's start.
    message_bytes: of one message, as it was really sent."""

    source: PlanSource
    predicted: Timeline
    measured: tuple[Timeline, ...]
    parameters: int
    gradient_error: float  # the largest difference from one process, over the largest gradient
    message_bytes: int
    skipped: int  # iterations before it that were trained and not timed
    pause_s: float  # from when all ranks had ended those until the first operation

    @property
    def predicted_s(self) -> float:
        return self.predicted.makespan_ns / NS

    @property
    def spans_s(self) -> list[float]:
        return sorted(timeline.makespan_ns / NS for timeline in self.measured)

    @property
    def median(self) -> Timeline:
        """The iteration whose length is the median; of two, the longer one."""
        return sorted(self.measured, key=lambda timeline: timeline.makespan_ns)[len(self.measured) // 2]

    @property
    def median_s(self) -> float:
        return self.median.makespan_ns / NS

    @property
    def error(self) -> float:
        """Of the prediction's iteration: positive where the run took longer."""
        return self.median.makespan_ns / self.predicted.makespan_ns - 1 if self.measured else 0.0

    @property
    def slowness(self) -> float:
        """By how much all operations of the median iteration together were longer than planned."""
        ranks = range(self.source.schedule.n_devices)
        busy_s, planned_s = (
            sum(_busy_and_idle(one, rank)[0] for rank in ranks) for one in (self.median, self.predicted)
        )
        return busy_s / planned_s - 1

    @property
    def gradients_equal(self) -> bool:
        return self.gradient_error <= GRADIENT_TOLERANCE


@dataclass(frozen=True)
class PlanRunOutcome(RunPart):
    """tolerance: of the error of the median, as a fraction."""

    backend: str
    forward_ms: float
    tolerance: float

    @property
    def good(self) -> bool:
        return self.gradients_equal and abs(self.error) <= self.tolerance


def run_plan(
    source: PlanSource,
    operation_ms: float,
    repeats: int,
    backend: str,
    out: Path | None,
    tolerance: float,
    status: Callable[[str], AbstractContextManager[object]],
) -> PlanRunOutcome:
    """Run a plan's iterations, with forward passes of so many milliseconds on a device, and compare them with the plan.

    repeats: 0: only gradients are compared. out: where the ranks' files go. status: shows what goes on. Raises as
    run_ranks() does.
    """
    factor = stretch_of(source.costs, source.schedule.n_devices, operation_ms)
    predicted = predicted_of(source, factor)
    predicted_s = predicted.makespan_ns / NS
    job = job_of(replace(source, costs=stretched(source.costs, factor)), repeats, backend, predicted_s)
    what = f"{repeats} iterations of about {predicted_s:.1f} s" if repeats else "one iteration"
    with ranks_folder(out) as folder, status(f"{source.schedule.n_devices} ranks run {what}"):
        run_ranks(folder, [job], START_S + 3 * predicted_s * (repeats + 1), SystemClock())
        reports = reports_of(folder, source.schedule.n_devices)
    found = part_of(source, predicted, reports)
    return PlanRunOutcome(**found, backend=backend, forward_ms=operation_ms, tolerance=tolerance)


@contextmanager
def ranks_folder(out: Path | None) -> Iterator[Path]:
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


def timelines(source: PlanSource, reports: Sequence[RankReport]) -> tuple[Timeline, ...]:
    """A timeline for each timed iteration, from what all ranks have noted."""
    found = []
    for iterations in zip(*(report.iterations for report in reports), strict=True):
        first = min(one.times[0][0] for one in iterations)
        starts = tuple(tuple(start - first for start, _ in one.times) for one in iterations)
        ends = tuple(tuple(end - first for _, end in one.times) for one in iterations)
        messages = tuple(
            SimulatedMessage(Op.parse(sent.cell), rank, sent.target, *(ns - first for ns in sent[2:]))
            for rank, one in enumerate(iterations)
            for sent in one.sent
        )
        found.append(Timeline(source.schedule, starts, ends, messages))
    return tuple(found)


def part_of(source: PlanSource, predicted: Timeline, reports: Sequence[RankReport]) -> dict[str, Any]:
    """The fields of RunPart, from the reports of all ranks."""
    starts = [one.iterations[0].times[0][0] for one in reports if one.iterations]
    return {
        "source": source,
        "predicted": predicted,
        "measured": timelines(source, reports),
        "parameters": sum(report.parameters for report in reports),
        "gradient_error": max(report.gradient_error for report in reports),
        "message_bytes": reports[0].message_bytes,
        "skipped": max(report.skipped for report in reports),
        "pause_s": (min(starts) - max(report.taken_ns for report in reports)) / NS if starts else 0.0,
    }


def busy_text(longer: float) -> str:
    return (
        f"operations took {longer:.1%} longer than their times: this machine is busy with something "
        "else; run it alone, or give longer times with --operation-ms"
    )


# ---- for people ----


def tell(outcome: PlanRunOutcome) -> Iterator[str | Table]:
    source, schedule = outcome.source, outcome.source.schedule
    yield (
        f"{schedule.name}: {schedule.n_microbatches} microbatches through {schedule.n_stages} stages on "
        f"{schedule.n_devices} ranks ({outcome.backend})"
    )
    if source.note:
        yield source.note
    what = "equal" if outcome.gradients_equal else "DIFFER from"
    yield (
        f"gradients: those of {outcome.parameters} parameters {what} those of one process: largest difference "
        f"{outcome.gradient_error:.1e} of the largest gradient, allowed {GRADIENT_TOLERANCE:.0e}"
    )
    if not outcome.measured:
        return
    predicted_s, spans = outcome.predicted_s, outcome.spans_s
    yield (
        f"iteration, at {outcome.forward_ms:g} ms for a forward pass on a device: predicted "
        f"{predicted_s:.3f} s ({interval_text(predicted_s, source.error)}), measured "
        f"{outcome.median_s:.3f} s (median of {len(spans)}, {spans[0]:.3f} to "
        f"{spans[-1]:.3f} s): {outcome.error:+.2%}, "
        f"{'within' if abs(outcome.error) <= outcome.tolerance else 'OUTSIDE OF'} {100 * outcome.tolerance:g} %"
    )
    if outcome.slowness > BUSY_MACHINE:
        yield busy_text(outcome.slowness)
    table = table_of(("site",), ("stages", "busy", "predicted", "idle", "predicted"), first=("rank",))
    table.title, table.title_justify = "median iteration", "left"
    for row in ranks_json(outcome):
        times = (row[key] for key in ("busy_s", "predicted_busy_s", "idle_s", "predicted_idle_s"))
        stages = ",".join(map(str, row["stages"]))
        table.add_row(str(row["rank"]), row["site"], stages, *(format_seconds(s) for s in times))
    yield table
    if outcome.median.messages:
        table = table_of((), ("from", "to", "messages", "sent", "occupied", "waited", "predicted"))
        for row in links_json(outcome):
            times = (format_seconds(row[key]) for key in ("occupied_s", "waited_s", "predicted_waited_s"))
            sent = format_bytes(row["bytes"])
            table.add_row(str(row["sender"]), str(row["receiver"]), str(row["messages"]), sent, *times)
        yield table


# ---- for programs ----


def outcome_json(outcome: PlanRunOutcome) -> dict[str, Any]:
    schedule = outcome.source.schedule
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "schedule": schedule.name,
        "note": outcome.source.note,
        "ranks": schedule.n_devices,
        "stages": schedule.n_stages,
        "microbatches": schedule.n_microbatches,
        "backend": outcome.backend,
        "gradients": {
            "parameters": outcome.parameters,
            "largest_difference": outcome.gradient_error,
            "tolerance": GRADIENT_TOLERANCE,
            "equal": outcome.gradients_equal,
        },
        "good": outcome.good,
    }
    if outcome.measured:
        found |= {
            "operation_ms": outcome.forward_ms,
            "predicted_s": outcome.predicted_s,
            **interval_json("predicted", outcome.predicted_s, outcome.source.error),
            "calibration_error": outcome.source.error,
            "measured_s": [timeline.makespan_ns / NS for timeline in outcome.measured],
            "median_s": outcome.median_s,
            "error": outcome.error,
            "tolerance": outcome.tolerance,
            "of_ranks": ranks_json(outcome),
            "of_links": links_json(outcome),
        }
    return found


def ranks_json(outcome: PlanRunOutcome) -> list[dict[str, Any]]:
    """The ranks of the median iteration. idle: the iteration without what was computed."""
    schedule = outcome.source.schedule
    rows = []
    for rank, site in enumerate(outcome.source.sites):
        busy_s, idle_s = _busy_and_idle(outcome.median, rank)
        planned_busy_s, planned_idle_s = _busy_and_idle(outcome.predicted, rank)
        rows.append(
            {
                "rank": rank,
                "site": site,
                "stages": [stage for stage, place in enumerate(schedule.device_of_stage) if place == rank],
                "busy_s": busy_s,
                "predicted_busy_s": planned_busy_s,
                "idle_s": idle_s,
                "predicted_idle_s": planned_idle_s,
            }
        )
    return rows


def _busy_and_idle(timeline: Timeline, rank: int) -> tuple[float, float]:
    busy_ns = sum(timeline.ends[rank]) - sum(timeline.starts[rank])
    return busy_ns / NS, (timeline.makespan_ns - busy_ns) / NS


def links_json(outcome: PlanRunOutcome) -> list[dict[str, Any]]:
    """The pairs of ranks with messages in the median iteration. waited: for the link, of all messages together."""
    rows = []
    for pair in sorted({(m.source, m.target) for m in outcome.median.messages}):
        ours = [m for m in outcome.median.messages if (m.source, m.target) == pair]
        planned = [m for m in outcome.predicted.messages if (m.source, m.target) == pair]
        rows.append(
            {
                "sender": pair[0],
                "receiver": pair[1],
                "messages": len(ours),
                "bytes": len(ours) * outcome.message_bytes,
                "occupied_s": sum(m.freed_ns - m.start_ns for m in ours) / NS,
                "waited_s": sum(m.start_ns - m.ready_ns for m in ours) / NS,
                "predicted_waited_s": sum(m.start_ns - m.ready_ns for m in planned) / NS,
            }
        )
    return rows


def write_files(outcome: PlanRunOutcome, folder: Path) -> list[Path]:
    """Write run.json; trace.json with the prediction and the median iteration; and measured.json with the times of all
    operations, which `dips plan calibrate` reads. Raises ConfigError."""
    texts = {folder / "run.json": json.dumps(outcome_json(outcome), indent=1)}
    if outcome.measured:
        sites = list(enumerate(outcome.source.sites))
        both = trace_events(outcome.predicted, [f"predicted, rank {rank}, {site}" for rank, site in sites])
        measured = trace_events(outcome.median, [f"measured, rank {rank}, {site}" for rank, site in sites])
        for event in measured["traceEvents"]:
            event["pid"] += _APART
            both["traceEvents"].append(event)
        texts[folder / "trace.json"] = json.dumps(both)
        ran = f"dips plan run of {outcome.source.schedule.name}, {outcome.backend}, {platform.node()}, torch's runtime"
        texts[folder / MEASURED_FILE] = json.dumps(measured_json(ran, outcome.forward_ms, outcome.measured))
    with writing(folder):
        for file, text in texts.items():
            file.write_text(text + "\n")
    return list(texts)
