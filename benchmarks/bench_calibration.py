"""How far predictions are from real runs, without overheads and with those that one run was calibrated for.

Pipelines are run by the planner's own engine: a gloo rank for each device on this machine, operations that are timed
waits and links that are emulated (`dips plan run`), so that more ranks than processors stand for devices. One setting
is measured and calibrated; all others are predicted and then measured. The same iterations judge both predictions.
Either schedules of equal operations with other microbatches, uneven stages and both slower and faster links; or
(--layers) a transformer of 12 layers, whose times `dips profile device` measures here at three sizes of a microbatch,
on 2, 3 and 4 ranks with uneven stages and two links. Short operations have the largest part of overhead. An operation
ends when a wait ends, so a machine with other work shows its own delays here: look at the load that is printed.

    python benchmarks/bench_calibration.py [--layers] [--repeats R] [--rounds R] [--operation-ms MS] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dips.planner.calibration import MeasuredIteration, OverheadFit, fit_overheads
from dips.planner.cluster import read_setup
from dips.planner.commands.plan_run import PlanSource, run_plan, scaled, source_of
from dips.planner.costs import NS, Costs
from dips.planner.ir import Schedule
from dips.planner.problem import Problem
from dips.planner.schedules import SCHEDULES
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


@dataclass(frozen=True)
class Case:
    """What is run: a forward pass takes operation_ms on a device, on average."""

    name: str
    source: PlanSource
    operation_ms: float


def case(setting: Setting, stages: int, operation_ms: float) -> Case:
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
    return Case(setting.name, replace(found, costs=replace(found.costs, stages=uneven)), operation_ms)


# ---- layers that were measured ----

PROBLEM = """
[model]
name = "transformer of 12 layers"
layers = 12
hidden = 384
heads = 6
mlp_width = 1536
gated_mlp = false
vocabulary = 256
source = "small enough for one processor"

[[sites]]
name = "east"
devices = {east}
stages = {east}
memory_gib = 8
source = "this machine"

[[sites]]
name = "west"
devices = {west}
stages = {west}
memory_gib = 8
source = "this machine"

[[links]]
sender = "east"
receiver = "west"
bandwidth_gbps = {gbps}
latency_ms = {latency_ms}
source = "emulated"

[training]
pipeline = {ranks}
microbatches = 6
microbatch_sequences = {sequences}
sequence_tokens = 256
source = "the benchmark's"
"""
PROFILE = """
[profile]
file = "profile.toml"
source = "dips profile device, on this machine"
"""
DIVISIONS = {2: (7, 5), 3: (5, 4, 3), 4: (4, 3, 3, 2)}
LINKS = {"fast": (1.0, 1.0), "slow": (0.05, 10.0)}
"""Gbit/s and milliseconds: a message takes far less than a forward pass, or about as long."""
SCHEDULE_OF = {1: "1f1b", 2: "zb_h1", 4: "cross_ud/1"}
"""By the sequences of a microbatch."""


def layer_cases(folder: Path, quick: bool) -> list[Case]:
    """The first one is calibrated: four ranks, the shortest operations, the fast link."""

    def write(name: str, ranks: int, sequences: int, link: str, more: str = "") -> Path:
        (gbps, latency_ms), east = LINKS[link], (ranks + 1) // 2
        text = PROBLEM.format(
            east=east, west=ranks - east, ranks=ranks, sequences=sequences, gbps=gbps, latency_ms=latency_ms
        )
        (folder / name).write_text(text + more)
        return folder / name

    whole = write("whole.toml", 2, 1, "fast")
    command = ["profile", "device", str(whole), "--microbatch", "1,2,4", "--out", str(folder / "profile.toml")]
    subprocess.run([sys.executable, "-m", "dips.cli", *command], check=True, stdout=subprocess.DEVNULL)
    ranks_of, sizes = ((2,), (1,)) if quick else ((4, 3, 2), tuple(SCHEDULE_OF))
    return [
        _layer_case(write("one.toml", ranks, sequences, link, PROFILE), sequences, link)
        for ranks in ranks_of
        for sequences in sizes
        for link in LINKS
    ]


def _layer_case(file: Path, sequences: int, link: str) -> Case:
    problem, name = Problem(read_setup(file)), SCHEDULE_OF[sequences]
    n = problem.n_devices
    division = DIVISIONS[n]
    costs, memory = problem.costs(division), problem.limits(division)
    schedule = SCHEDULES[name].make(n, problem.n_microbatches, costs, memory)
    sites = tuple(problem.setup.sites[site].name for site in problem.site_of)
    forward_ms = sum(stage.f_ns for stage in costs.stages) / n / 1e6
    layers = "+".join(map(str, division))
    return Case(
        f"{n} ranks, layers {layers}, {name}, {sequences} x 256 tokens, {link} link, forward {forward_ms:.0f} ms",
        PlanSource(schedule, costs, sites),
        forward_ms,
    )


# ---- measured and predicted ----


@dataclass(frozen=True)
class Measured:
    """The iterations of a case, of all rounds. costs: without overheads."""

    name: str
    schedule: Schedule
    costs: Costs
    iterations: tuple[MeasuredIteration, ...]


def measured(cases: Sequence[Case], repeats: int, rounds: int) -> list[Measured]:
    """Every case is run once in each round, so that a busy minute of the machine falls on all of them."""
    iterations: list[list[MeasuredIteration]] = [[] for _ in cases]
    for _ in range(rounds):
        for one, found in zip(cases, iterations, strict=True):
            outcome = run_plan(one.source, one.operation_ms, repeats, "gloo", None, 1.0, lambda text: nullcontext())
            found += [MeasuredIteration(one.makespan_ns, one.ends) for one in outcome.measured]
    return [
        Measured(
            one.name,
            one.source.schedule,
            scaled(one.source.costs, one.source.schedule.n_devices, one.operation_ms),
            tuple(found),
        )
        for one, found in zip(cases, iterations, strict=True)
    ]


def judged(one: Measured, fit: OverheadFit) -> dict[str, Any]:
    """Errors of both predictions, measured / predicted - 1."""
    operation_ns, send_ns = (round(s * NS) for s in (fit.overhead_per_op_s, fit.overhead_per_message_s))
    costs = one.costs.with_overheads(operation_ns, send_ns, one.schedule.device_of_stage)
    calibrated_s, uncalibrated_s = (simulate(one.schedule, each).makespan_ns / NS for each in (costs, one.costs))
    spans_s = sorted(iteration.span_ns / NS for iteration in one.iterations)
    median_s = statistics.median(spans_s)
    return {
        "setting": one.name,
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
    parser.add_argument("--layers", action="store_true", help="a transformer whose layers are measured first")
    parser.add_argument("--quick", action="store_true", help="two ranks and few settings: does everything run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.layers:
        with tempfile.TemporaryDirectory() as folder:
            cases = layer_cases(Path(folder), arguments.quick)
    else:
        stages, others = (2, QUICK) if arguments.quick else (4, OTHERS)
        first = replace(CALIBRATED, microbatches=4) if arguments.quick else CALIBRATED
        cases = [case(setting, stages, arguments.operation_ms) for setting in (first, *others)]
    load = os.getloadavg()[0]
    base, *rest = measured(cases, arguments.repeats, 1 if arguments.quick else arguments.rounds)
    fit = fit_overheads(base.schedule, base.costs, base.iterations)
    rows = [judged(one, fit) for one in rest]
    found = {
        "machine": {"cpus": os.cpu_count(), "load_1min": load, "machine": platform.machine()},
        "calibrated_on": judged(base, fit),
        "others": rows,
        "summary": summary(fit, rows),
    }
    print(json.dumps(found, indent=2) if arguments.json else _table(found))


def _table(found: dict[str, Any]) -> str:
    machine, all_of_them = found["machine"], found["summary"]
    lines = [
        f"{machine['cpus']} processors, load before {machine['load_1min']:.1f}",
        f"overhead {all_of_them['overhead_per_op_s'] * 1e6:.0f} us an operation, "
        f"{all_of_them['overhead_per_message_s'] * 1e6:.0f} us a message, error +- {all_of_them['error']:.2%}",
        f"{'':<86}{'measured':>10}{'spread':>8}{'uncalibrated':>14}{'calibrated':>12}",
    ]
    lines += [
        f"{row['setting']:<86}{row['measured_s']:>8.3f} s{row['spread']:>8.1%}{row['uncalibrated_error']:>+14.2%}"
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
