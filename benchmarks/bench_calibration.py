"""How far predictions are from real runs, without overheads and with those that one run was calibrated for.

Pipelines are run by the planner's own engine: a gloo rank for each device on this machine, operations that are timed
waits and links that are emulated (`dips plan run`), so that more ranks than processors stand for devices. One setting
is measured and calibrated; all others, with other microbatches, schedules, uneven stages and both slower and faster
links, are predicted and then measured. The same iterations judge both predictions. Short operations have the largest
part of overhead: --operation-ms. An operation ends when a wait ends, so a machine with other work shows its own
delays here: look at the load that is printed.

    python benchmarks/bench_calibration.py [--repeats R] [--rounds R] [--operation-ms MS] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from dips.local.plan_run import PlanSource, run_plan, scaled, source_of
from dips.planner.calibration import MeasuredIteration, OverheadFit, fit_overheads
from dips.planner.costs import NS, Costs
from dips.planner.ir import Schedule
from dips.planner.simulate import simulate


@dataclass(frozen=True)
class Setting:
    """What is run. latency, bandwidth: of the link between two sites, in T_F. uneven: stages' times grow by so much
    from the first one to the last one."""

    schedule: str
    microbatches: int = 8
    latency: float = 0.5
    bandwidth: float = 0.25
    uneven: float = 0.0

    @property
    def name(self) -> str:
        uneven = f", last stage {1 + self.uneven:g} x the first" if self.uneven else ""
        return f"{self.schedule} {self.microbatches} mb, latency {self.latency:g}, bandwidth {self.bandwidth:g}{uneven}"


CALIBRATED = Setting("1f1b")
OTHERS = (
    Setting("1f1b", microbatches=4),
    Setting("1f1b", microbatches=16),
    Setting("1f1b", uneven=1.0),
    Setting("1f1b", latency=2.0, bandwidth=1.0),
    Setting("1f1b", latency=0.1, bandwidth=0.05),
    Setting("zb_h1"),
    Setting("zb_v"),
    Setting("zb_v", microbatches=12, uneven=0.5, latency=0.1),
    Setting("cross_ud/2", latency=1.0, bandwidth=0.5),
)
QUICK = (Setting("1f1b", microbatches=4, latency=0.1), Setting("zb_h1", microbatches=2, uneven=1.0))


def source(setting: Setting, stages: int) -> PlanSource:
    given: dict[str, float | None] = {
        "stages": stages, "microbatches": setting.microbatches, "sites": 2, "latency": setting.latency,
        "bandwidth": setting.bandwidth, "memory": 1.0,
    }  # fmt: skip
    found = source_of(setting.schedule, given)
    n = max(1, len(found.costs.stages) - 1)
    factors = [1 + setting.uneven * stage / n for stage in range(len(found.costs.stages))]
    uneven = tuple(
        replace(s, f_ns=round(s.f_ns * k), d_ns=round(s.d_ns * k), w_ns=round(s.w_ns * k))
        for s, k in zip(found.costs.stages, factors, strict=True)
    )
    return replace(found, costs=replace(found.costs, stages=uneven))


@dataclass(frozen=True)
class Measured:
    """The iterations of a setting, of all rounds. costs: without overheads."""

    setting: Setting
    schedule: Schedule
    costs: Costs
    iterations: tuple[MeasuredIteration, ...]


def measured(
    settings: Sequence[Setting], stages: int, operation_ms: float, repeats: int, rounds: int
) -> list[Measured]:
    """Every setting is run once in each round, so that a busy minute of the machine falls on all of them."""
    sources = [source(setting, stages) for setting in settings]
    iterations: list[list[MeasuredIteration]] = [[] for _ in settings]
    for _ in range(rounds):
        for made, found in zip(sources, iterations, strict=True):
            outcome = run_plan(made, operation_ms, repeats, "gloo", None, 1.0, lambda text: nullcontext())
            found += [MeasuredIteration(one.makespan_ns, one.ends) for one in outcome.measured]
    return [
        Measured(setting, made.schedule, scaled(made.costs, stages, operation_ms), tuple(found))
        for setting, made, found in zip(settings, sources, iterations, strict=True)
    ]


def judged(one: Measured, fit: OverheadFit) -> dict[str, Any]:
    """Errors of both predictions, measured / predicted - 1."""
    operation_ns, send_ns = (round(s * NS) for s in (fit.overhead_per_op_s, fit.overhead_per_message_s))
    costs = one.costs.with_overheads(operation_ns, send_ns, one.schedule.device_of_stage)
    calibrated_s, uncalibrated_s = (simulate(one.schedule, each).makespan_ns / NS for each in (costs, one.costs))
    spans_s = sorted(iteration.span_ns / NS for iteration in one.iterations)
    median_s = statistics.median(spans_s)
    return {
        "setting": one.setting.name,
        "iterations": len(spans_s),
        "measured_s": median_s,
        "spread": (spans_s[-1] - spans_s[0]) / median_s,
        "uncalibrated_s": uncalibrated_s,
        "calibrated_s": calibrated_s,
        "uncalibrated_error": median_s / uncalibrated_s - 1,
        "calibrated_error": median_s / calibrated_s - 1,
        "in_interval": abs(median_s / calibrated_s - 1) <= fit.error,
    }


def summary(fit: OverheadFit, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "overhead_per_op_s": fit.overhead_per_op_s,
        "overhead_per_message_s": fit.overhead_per_message_s,
        "error": fit.error,
        "in_interval": sum(row["in_interval"] for row in rows),
        "settings": len(rows),
    }
    for kind in ("uncalibrated", "calibrated"):
        errors = [abs(row[f"{kind}_error"]) for row in rows]
        found |= {f"mean_{kind}_error": statistics.mean(errors), f"most_{kind}_error": max(errors)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="timed iterations of a run (default 5)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each setting, in turn (default 3)")
    parser.add_argument("--operation-ms", type=float, default=20.0, help="a forward pass on a device (default 20)")
    parser.add_argument("--quick", action="store_true", help="two ranks and few settings: does everything run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    stages, others = (2, QUICK) if arguments.quick else (4, OTHERS)
    first = replace(CALIBRATED, microbatches=4) if arguments.quick else CALIBRATED
    base, *rest = measured(
        [first, *others], stages, arguments.operation_ms, arguments.repeats, 1 if arguments.quick else arguments.rounds
    )
    fit = fit_overheads(base.schedule, base.costs, base.iterations)
    rows = [judged(one, fit) for one in rest]
    found = {
        "machine": {"cpus": os.cpu_count(), "load_1min": os.getloadavg()[0], "machine": platform.machine()},
        "ranks": stages,
        "operation_ms": arguments.operation_ms,
        "calibrated_on": judged(base, fit),
        "others": rows,
        "summary": summary(fit, rows),
    }
    print(json.dumps(found, indent=2) if arguments.json else _table(found))


def _table(found: dict[str, Any]) -> str:
    machine, all_of_them = found["machine"], found["summary"]
    lines = [
        f"{found['ranks']} ranks, forward passes of {found['operation_ms']:g} ms; {machine['cpus']} processors, load "
        f"{machine['load_1min']:.1f}",
        f"overhead {all_of_them['overhead_per_op_s'] * 1e6:.0f} us an operation, "
        f"{all_of_them['overhead_per_message_s'] * 1e6:.0f} us a message, error +- {all_of_them['error']:.2%}",
        f"{'':<72}{'measured':>10}{'spread':>8}{'uncalibrated':>14}{'calibrated':>12}",
    ]
    lines += [
        f"{row['setting']:<72}{row['measured_s']:>8.3f} s{row['spread']:>8.1%}{row['uncalibrated_error']:>+14.2%}"
        f"{row['calibrated_error']:>+12.2%}"
        for row in (found["calibrated_on"], *found["others"])
    ]
    lines.append(
        f"error of the {all_of_them['settings']} others, mean (most): uncalibrated "
        f"{all_of_them['mean_uncalibrated_error']:.2%} ({all_of_them['most_uncalibrated_error']:.2%}), calibrated "
        f"{all_of_them['mean_calibrated_error']:.2%} ({all_of_them['most_calibrated_error']:.2%}); "
        f"{all_of_them['in_interval']} of {all_of_them['settings']} within the interval"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
