"""Reports a plan that was run, with its prediction: one table and one JSON object, and a trace that Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from dips.core.units import format_bytes, format_seconds
from dips.local.plan_run_source import PlanSource
from dips.planner.costs import NS
from dips.planner.ir import Op
from dips.planner.plan_file import writing
from dips.planner.run.job import GRADIENT_TOLERANCE, Iteration, RankReport
from dips.planner.simulate import SimulatedMessage, Timeline
from dips.planner.trace import trace_events

SCHEMA = "dips-plan-run/1"
BUSY_MACHINE = 0.02
"""An operation ends when its time is over; where all together are this much longer, processors were missing."""

_APART = 1000
"""Between the numbers of the predicted and of the measured processes of a trace."""


@dataclass(frozen=True)
class Gradients:
    """Compares the gradients. error: the largest difference from one process, over the largest gradient."""

    parameters: int
    error: float

    @property
    def equal(self) -> bool:
        return self.error <= GRADIENT_TOLERANCE


@dataclass(frozen=True)
class PlanRunOutcome:
    """measured: a timeline for each timed iteration, from its first operation's start. tolerance: of the error of the
    median, as a fraction. message_bytes: of one message, as it was really sent."""

    source: PlanSource
    backend: str
    forward_ms: float
    predicted: Timeline
    measured: tuple[Timeline, ...]
    gradients: Gradients
    tolerance: float
    message_bytes: int

    @property
    def median(self) -> Timeline:
        """The iteration whose length is the median; of two, the longer one."""
        return sorted(self.measured, key=lambda timeline: timeline.makespan_ns)[len(self.measured) // 2]

    @property
    def error(self) -> float:
        """Of the prediction's iteration: positive where the run took longer."""
        return self.median.makespan_ns / self.predicted.makespan_ns - 1 if self.measured else 0.0

    @property
    def slowness(self) -> float:
        """By how much all operations of the median iteration together were longer than planned."""
        ranks = range(self.source.schedule.n_devices)
        busy_s, planned_s = (sum(_busy_and_idle(one, r)[0] for r in ranks) for one in (self.median, self.predicted))
        return busy_s / planned_s - 1

    @property
    def good(self) -> bool:
        return self.gradients.equal and abs(self.error) <= self.tolerance


def timelines(source: PlanSource, reports: Sequence[RankReport]) -> tuple[Timeline, ...]:
    """A timeline for each timed iteration, from what all ranks have noted."""
    rounds = zip(*(report.iterations for report in reports), strict=True)
    return tuple(_timeline(source, iterations) for iterations in rounds)


def _timeline(source: PlanSource, iterations: Sequence[Iteration]) -> Timeline:
    first = min(one.times[0][0] for one in iterations)
    starts = tuple(tuple(start - first for start, _ in one.times) for one in iterations)
    ends = tuple(tuple(end - first for _, end in one.times) for one in iterations)
    messages = tuple(
        SimulatedMessage(Op.parse(sent.cell), rank, sent.target, *(ns - first for ns in sent[2:]))
        for rank, one in enumerate(iterations)
        for sent in one.sent
    )
    return Timeline(source.schedule, starts, ends, messages)


def gradients_of(reports: Sequence[RankReport]) -> Gradients:
    return Gradients(sum(report.parameters for report in reports), max(report.gradient_error for report in reports))


# ---- for people ----


def tell(outcome: PlanRunOutcome) -> Iterator[str | Table]:
    source, schedule = outcome.source, outcome.source.schedule
    yield (
        f"{schedule.name}: {schedule.n_microbatches} microbatches through {schedule.n_stages} stages on "
        f"{schedule.n_devices} ranks ({outcome.backend})"
    )
    if source.note:
        yield source.note
    yield _gradients_sentence(outcome.gradients)
    if not outcome.measured:
        return
    yield _times_sentence(outcome)
    if outcome.slowness > BUSY_MACHINE:
        yield (
            f"operations took {outcome.slowness:.1%} longer than their times: this machine is busy with something "
            "else; run it alone, or give longer times with --operation-ms"
        )
    yield _ranks_table(outcome)
    if outcome.median.messages:
        yield _links_table(outcome)


def _times_sentence(outcome: PlanRunOutcome) -> str:
    spans = sorted(timeline.makespan_ns / NS for timeline in outcome.measured)
    return (
        f"iteration, at {outcome.forward_ms:g} ms for a forward pass on a device: predicted "
        f"{outcome.predicted.makespan_ns / NS:.3f} s, measured {outcome.median.makespan_ns / NS:.3f} s (median of "
        f"{len(spans)}, {spans[0]:.3f} to {spans[-1]:.3f} s): {outcome.error:+.2%}, "
        f"{'within' if abs(outcome.error) <= outcome.tolerance else 'OUTSIDE OF'} {100 * outcome.tolerance:g} %"
    )


def _gradients_sentence(gradients: Gradients) -> str:
    what = "equal" if gradients.equal else "DIFFER from"
    return (
        f"gradients: those of {gradients.parameters} parameters {what} those of one process: largest difference "
        f"{gradients.error:.1e} of the largest gradient, allowed {GRADIENT_TOLERANCE:.0e}"
    )


def _ranks_table(outcome: PlanRunOutcome) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="median iteration", title_justify="left")
    for name in ("rank", "site", "stages", "busy", "predicted", "idle", "predicted"):
        table.add_column(name, justify="left" if name == "site" else "right")
    for row in ranks_json(outcome):
        times = (row[key] for key in ("busy_s", "predicted_busy_s", "idle_s", "predicted_idle_s"))
        stages = ",".join(map(str, row["stages"]))
        table.add_row(str(row["rank"]), row["site"], stages, *(format_seconds(s) for s in times))
    return table


def _links_table(outcome: PlanRunOutcome) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("from", "to", "messages", "sent", "occupied", "waited", "predicted"):
        table.add_column(name, justify="right")
    for row in links_json(outcome):
        times = (format_seconds(row[key]) for key in ("occupied_s", "waited_s", "predicted_waited_s"))
        sent = format_bytes(row["bytes"])
        table.add_row(str(row["sender"]), str(row["receiver"]), str(row["messages"]), sent, *times)
    return table


# ---- for programs ----


def outcome_json(outcome: PlanRunOutcome) -> dict[str, Any]:
    schedule, gradients = outcome.source.schedule, outcome.gradients
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "schedule": schedule.name,
        "note": outcome.source.note,
        "ranks": schedule.n_devices,
        "stages": schedule.n_stages,
        "microbatches": schedule.n_microbatches,
        "backend": outcome.backend,
        "gradients": {
            "parameters": gradients.parameters,
            "largest_difference": gradients.error,
            "tolerance": GRADIENT_TOLERANCE,
            "equal": gradients.equal,
        },
        "good": outcome.good,
    }
    if outcome.measured:
        found |= {
            "operation_ms": outcome.forward_ms,
            "predicted_s": outcome.predicted.makespan_ns / NS,
            "measured_s": [timeline.makespan_ns / NS for timeline in outcome.measured],
            "median_s": outcome.median.makespan_ns / NS,
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
    """Write run.json, and trace.json with the prediction and the median iteration. Raises PlanError."""
    texts = {folder / "run.json": json.dumps(outcome_json(outcome), indent=1)}
    if outcome.measured:
        texts[folder / "trace.json"] = json.dumps(_both(outcome))
    with writing(folder):
        for file, text in texts.items():
            file.write_text(text + "\n")
    return list(texts)


def _both(outcome: PlanRunOutcome) -> dict[str, Any]:
    sites = outcome.source.sites
    found: dict[str, Any] = trace_events(outcome.predicted, [f"predicted, rank {n}, {s}" for n, s in enumerate(sites)])
    measured = trace_events(outcome.median, [f"measured, rank {n}, {s}" for n, s in enumerate(sites)])
    for event in measured["traceEvents"]:
        event["pid"] += _APART
        found["traceEvents"].append(event)
    return found
