"""Fits what iterations take beyond the times of layers and links: an overhead of each operation and of each message.

A simulation from layer times alone is too short: starting an operation, handing over a message and waking its receiver
take time as well. Two numbers stand for that, and one measured run gives them: `dips plan run --out` writes the run,
`dips plan calibrate` fits them to it, and the profile file keeps them (dips.planner.profile). The simulator adds one to
every operation and the other to every message (Costs.with_overheads), so schedules are chosen with them too.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dips.core.errors import ConfigError
from dips.core.units import format_seconds
from dips.planner.costs import NS, Costs
from dips.planner.ir import Schedule
from dips.planner.simulate import Timeline, simulate

Nanoseconds = npt.NDArray[np.float64]

# ---- fit -------------------------------------------------------------------------------------------------------------


STEP_NS = 1000
"""The step by which slopes are measured."""

MOST_STEPS = 30
HALVINGS = 6
"""The least part of a step that is tried is 1 / 2 ** HALVINGS."""

TOO_ALIKE = 1e-4
"""1 - cos^2 of the angle between the effects of both overheads: below it, a run cannot tell which of them it saw."""

COVERED = 0.9
"""The part of the measured iterations that lie within the error of the fitted prediction."""

SPANS_ONLY = "iterations without times of operations have one number for two overheads"
NO_MESSAGES = "the run has no messages between devices"
ALIKE = "in this run every operation waits for as many messages as it follows operations"


@dataclass(frozen=True)
class MeasuredIteration:
    """One iteration of a run."""

    span_ns: int  # from the start of its first operation to the end of its last one
    # of each operation, as the schedule orders them, after the start of the first one; empty: not measured
    ends_ns: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class OverheadFit:
    """The overheads, and how well they explain the run."""

    overhead_per_op_s: float
    overhead_per_message_s: float
    error: float  # of the prediction with them: COVERED of the iterations are as near, as a fraction
    joined: str  # why overhead_per_op_s stands for both; empty: they are separate
    iterations: int
    measured_s: float  # the median iteration
    fitted_s: float  # the prediction with overheads
    uncalibrated_s: float  # and without

    @property
    def uncalibrated_error(self) -> float:
        """Measured / predicted without overheads - 1."""
        return self.measured_s / self.uncalibrated_s - 1


def fit_overheads(schedule: Schedule, costs: Costs, iterations: Sequence[MeasuredIteration]) -> OverheadFit:
    """Fit both overheads, at least 0, to the measured iterations of a schedule. costs: overheads they have are ignored.

    The simulated end of each operation is compared with the median of its measured ends, and the sum of the squared
    differences made least. Every end is the length of a longest path: it grows by the overheads of the operations and
    messages on that path, until another path becomes the longest. So ends are piecewise linear in both overheads, and
    Gauss-Newton steps over the simulator, each a least squares fit of two numbers that cannot be negative, arrive after
    a few of them. Early operations follow few messages and late ones many, which tells the overheads apart; where it
    does not, `joined` says why, and the overhead of an operation alone is fitted. Medians make one slow iteration
    harmless. Without times of operations the spans of the iterations are compared.

    Raises ConfigError without iterations, and for a schedule that costs do not fit or that takes no time.
    """
    if not iterations:
        raise ConfigError("no iteration was measured: give at least one")
    pure = costs.with_overheads(0, 0, ())
    whole = all(one.ends_ns for one in iterations)
    measured = [_flat(one.ends_ns) if whole else np.array([float(one.span_ns)]) for one in iterations]
    target = np.median(np.stack(measured), axis=0)

    def predicted(overheads: Nanoseconds) -> Timeline:
        operation_ns, send_ns = (round(float(ns)) for ns in overheads)
        return simulate(schedule, pure.with_overheads(operation_ns, send_ns, schedule.device_of_stage))

    def times(overheads: Nanoseconds) -> Nanoseconds:
        found = predicted(overheads)
        return _flat(found.ends) - found.begin_ns if whole else np.array([float(found.makespan_ns)])

    joined = "" if whole else SPANS_ONLY
    if not joined:
        joined = _alike(_slopes(times, np.full(2, float(STEP_NS)), 2))
    fitted = _least_squares(times, target, 1 if joined else 2)
    uncalibrated_ns, fitted_ns = predicted(np.zeros(2)).makespan_ns, predicted(fitted).makespan_ns
    if not uncalibrated_ns:
        raise ConfigError("the plan takes no time: nothing can be calibrated with it")
    return OverheadFit(
        overhead_per_op_s=float(fitted[0]) / NS,
        overhead_per_message_s=float(fitted[1]) / NS,
        error=_error([one.span_ns for one in iterations], fitted_ns),
        joined=joined,
        iterations=len(iterations),
        measured_s=statistics.median(one.span_ns for one in iterations) / NS,
        fitted_s=fitted_ns / NS,
        uncalibrated_s=uncalibrated_ns / NS,
    )


def _flat(rows: Iterable[Sequence[int]]) -> Nanoseconds:
    return np.array([float(ns) for row in rows for ns in row])


def _error(spans_ns: Sequence[int], predicted_ns: int) -> float:
    differences = sorted(abs(span / predicted_ns - 1) for span in spans_ns)
    return differences[math.ceil(COVERED * len(differences)) - 1]


def _slopes(times: Callable[[Nanoseconds], Nanoseconds], at: Nanoseconds, free: int) -> Nanoseconds:
    """How much later each time is for a nanosecond more of the first `free` overheads: (times, free)."""
    here, steps = times(at), STEP_NS * np.eye(2)[:free]
    return np.stack([(times(at + step) - here) / STEP_NS for step in steps], axis=1)


def _alike(slopes: Nanoseconds) -> str:
    operations, messages = slopes.T
    if not messages.any():
        return NO_MESSAGES
    cosine = float(operations @ messages / np.linalg.norm(operations) / np.linalg.norm(messages))
    return ALIKE if 1 - cosine**2 < TOO_ALIKE else ""


def _least_squares(times: Callable[[Nanoseconds], Nanoseconds], target: Nanoseconds, free: int) -> Nanoseconds:
    """The overheads whose times are nearest to the target; only the first `free` are not 0."""

    def loss(at: Nanoseconds) -> float:
        return float(np.sum((times(at) - target) ** 2))

    here = np.zeros(2)
    least = loss(here)
    for _ in range(MOST_STEPS):
        slopes = _slopes(times, here, free)
        wanted = np.zeros(2)
        wanted[:free] = _not_negative(slopes, target - times(here) + slopes @ here[:free])
        for halving in range(HALVINGS + 1):
            there = np.rint(here + (wanted - here) / 2**halving)
            if (found := loss(there)) < least:
                here, least = there, found
                break
        else:
            return here
    return here


def _not_negative(slopes: Nanoseconds, target: Nanoseconds) -> Nanoseconds:
    """The x >= 0 with the least |slopes x - target|, for one or two unknowns: the free solution where it is not
    negative, else the better one with one of them alone."""
    free = np.linalg.lstsq(slopes, target, rcond=None)[0]
    if (free >= 0).all():
        return np.asarray(free)
    found = []
    for index, column in enumerate(slopes.T):
        alone = np.zeros(slopes.shape[1])
        alone[index] = max(0.0, float(column @ target / (column @ column)))
        found.append(alone)
    return min(found, key=lambda one: float(np.sum((slopes @ one - target) ** 2)))


# ---- interval --------------------------------------------------------------------------------------------------------


def interval_of(predicted: float, error: float | None) -> tuple[float, float] | None:
    """The prediction - and + the calibration's error; None where it is not calibrated."""
    return None if error is None else (max(0.0, predicted * (1 - error)), predicted * (1 + error))


def interval_text(predicted_s: float, error: float | None) -> str:
    """What stands behind a predicted time."""
    found = interval_of(predicted_s, error)
    return "uncalibrated" if found is None else f"{format_seconds(found[0])} to {format_seconds(found[1])}"


def interval_json(name: str, predicted_s: float, error: float | None) -> dict[str, float | None]:
    """The interval of a predicted time as NAME_low_s and NAME_high_s; null where it is not calibrated."""
    low_s, high_s = interval_of(predicted_s, error) or (None, None)
    return {f"{name}_low_s": low_s, f"{name}_high_s": high_s}


def calibration_text(error: float | None) -> str:
    """What holds for all predicted times of an output."""
    if error is None:
        return "uncalibrated: operations and messages have no measured overhead (dips plan calibrate)"
    return f"calibrated: predicted times are meant +- {error:.2%}"


# ---- measured run file -----------------------------------------------------------------------------------------------
#
# measured.json, which `dips plan run --out` writes next to run.json: the start and the end of every operation of every
# iteration. Whoever runs a plan with another engine can write the same, or only how long each iteration took.


MEASURED_FILE = "measured.json"
MEASURED_FORMAT = 1
MOST_S = 1e6
"""The longest iteration: eleven days."""

MAKE_IT = "make it with dips plan run PLAN --out FOLDER"


@dataclass(frozen=True)
class MeasuredRun:
    """The content of the file."""

    source: str  # engine, machine and setting
    # times are scaled so that a forward pass of one microbatch takes so long on a device, on average; None: the plan's
    forward_ms: float | None
    iterations: tuple[MeasuredIteration, ...]


def measured_json(source: str, forward_ms: float | None, measured: Sequence[Timeline]) -> dict[str, Any]:
    """The file of a run. measured: a timeline of the same schedule for each iteration."""
    return {
        "format": MEASURED_FORMAT,
        "source": source,
        "forward_ms": forward_ms,
        "orders": measured[0].schedule.to_csv().splitlines(),
        "iterations": [
            {
                "starts_s": [[ns / NS for ns in row] for row in timeline.starts],
                "ends_s": [[ns / NS for ns in row] for row in timeline.ends],
            }
            for timeline in measured
        ],
    }


def read_measured_run(text: str, where: str, schedule: Schedule) -> MeasuredRun:
    """Read the file of a run of `schedule`, whose parts are stages. Raises ConfigError, which names file and key."""
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or "iterations" not in found:
            raise ConfigError(f"there are no iterations in it: {MAKE_IT}")
        if found.get("format") != MEASURED_FORMAT:
            raise ConfigError(f"format is {found.get('format')!r}, not {MEASURED_FORMAT}: {MAKE_IT}")
        if found["orders"] != schedule.to_csv().splitlines():
            raise ConfigError("orders are not those of the plan: name the plan that ran, or run this one")
        source, forward_ms, rows = found["source"], found.get("forward_ms"), found["iterations"]
        if not isinstance(source, str) or not source.strip():
            raise ConfigError("source is empty: say which engine and machine were measured")
        if forward_ms is not None:
            forward_ms = _number(forward_ms, "forward_ms")
            if not forward_ms:
                raise ConfigError("forward_ms is 0: give a time, or null for those of the plan")
        if not isinstance(rows, list) or not rows:
            raise ConfigError(f"iterations are none: {MAKE_IT}")
        iterations = tuple(_iteration(row, f"iterations {n}", schedule) for n, row in enumerate(rows, 1))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{where} is not the measured.json of a run ({type(error).__name__}: {error}): {MAKE_IT}"
        ) from error
    return MeasuredRun(source, forward_ms, iterations)


def _iteration(row: dict[str, Any], where: str, schedule: Schedule) -> MeasuredIteration:
    if "ends_s" not in row and "starts_s" not in row:
        span_ns = round(_number(row["span_s"], f"{where}: span_s") * NS)
        if not span_ns:
            raise ConfigError(f"{where}: span_s is 0: remove the iteration")
        return MeasuredIteration(span_ns)
    starts, ends = (_times(row[key], f"{where}: {key}", schedule) for key in ("starts_s", "ends_s"))
    for device, (begun, ended) in enumerate(zip(starts, ends, strict=True)):
        flat = [ns for pair in zip(begun, ended, strict=True) for ns in pair]
        if any(before > after for before, after in pairwise(flat)):
            raise ConfigError(
                f"{where}: times of device {device} go back: give starts_s and ends_s in the plan's order"
            )
    first_ns = min(begun[0] for begun in starts)
    ends = tuple(tuple(ns - first_ns for ns in ended) for ended in ends)
    return MeasuredIteration(max(ended[-1] for ended in ends), ends)


def _times(rows: Sequence[Sequence[Any]], where: str, schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    got, wanted = [len(row) for row in rows], [len(order) for order in schedule.orders]
    if got != wanted:
        raise ConfigError(
            f"{where} has {got} times, the plan has {wanted} operations on its devices: give one for each"
        )
    return tuple(tuple(round(_number(value, where) * NS) for value in row) for row in rows)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_S:
        raise ConfigError(f"{where} has {value!r}: give numbers of 0 to {MOST_S:g}")
    return float(value)
