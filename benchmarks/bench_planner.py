"""How fast the planner is, and how near its greedy comes to the best schedule.

Operations a second of the simulator on one core, next to the floor, a plain loop over as many that only adds and
compares; seconds in which the greedy plans 64 stages x 512 microbatches; seconds of a whole `dips plan` of JEEVES'
setting, and of a file with 64 devices for which all systems have an answer, the process's start included; seconds in
which SpanTrain's planner plans its setting 1 (22 GPUs, all sizes of microbatches of a batch of 256), with the search
alone and with what the answer says of other plans; and, over every case of the 4 x 8 grid, seconds in which the solver
proves its optimum, and the greedy's makespan (best of 1, 2 and 4 parts) over the solver's lower bound. Each is printed
next to what is wanted of it, which a machine with other work can miss: look at the load that is printed.

    python benchmarks/bench_planner.py [--repeats R] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dips.planner.cluster import read_setup
from dips.planner.ir import Schedule, straight
from dips.planner.schedules.fixed import interleaved_1f1b, zb_h1
from dips.planner.schedules.greedy import cross_ud
from dips.planner.schedules.optimal import optimal
from dips.planner.simulate import simulate
from dips.planner.spantrain.report import SpanTrainReport, report_of
from dips.planner.sweep import GridPoint, cases

RATIOS = [0, 0.25, 0.5, 1, 2]

WANTED = {
    "simulate_ops_per_s": 300_000,
    "greedy_s": 2.0,
    "plan_s": 10.0,
    "all_systems_s": 30.0,
    "spantrain_s": 10.0,
    "proof_s": 3.0,
    "greedy_over_bound": 1.05,
}
"""The simulator's at least, all others at most."""

EXAMPLE = str(Path(__file__).parents[1] / "examples" / "04-plan-a-schedule" / "sites.toml")
"""64 devices at two sites: all systems have an answer."""

COMMAND = (sys.executable, "-c", "from dips.cli.main import main; main()", "plan")


def seconds(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median and spread, (slowest - fastest) / median, of the processor's time, after one run that is not counted."""
    times_s = []
    for repeat in range(repeats + 1):
        began_s = time.process_time()
        work()
        if repeat:
            times_s.append(time.process_time() - began_s)
    return summary(times_s)


def summary(times_s: list[float]) -> dict[str, float]:
    median_s = statistics.median(times_s)
    return {"median_s": median_s, "best_s": min(times_s), "spread": (max(times_s) - min(times_s)) / median_s}


def simulation(
    make: Callable[[int, int], Schedule], chunks: int, wraps: bool, size: GridPoint, repeats: int
) -> dict[str, Any]:
    schedule, costs = make(size.n_pp, size.n_mb), size.costs(chunks, wraps)
    found = seconds(lambda: simulate(schedule, costs), repeats)
    return {"schedule": schedule.name, "ops": schedule.n_ops, "ops_per_s": schedule.n_ops / found["median_s"], **found}


def greedy(size: GridPoint, repeats: int) -> dict[str, Any]:
    return {"stages": size.n_pp, "microbatches": size.n_mb} | seconds(
        lambda: cross_ud(size.n_pp, size.n_mb, size.costs(), size.limits()), repeats
    )


def floor(n_ops: int, repeats: int) -> dict[str, Any]:
    """A loop that does for each operation what no simulator in Python can do without."""
    lasts, ready = [1] * n_ops, list(range(n_ops))

    def play() -> None:
        starts, ends, free = list[int](), list[int](), 0
        for last, there in zip(lasts, ready, strict=True):
            if there > free:
                free = there
            starts.append(free)
            free += last
            ends.append(free)

    found = seconds(play, repeats)
    return {"ops": n_ops, "ops_per_s": n_ops / found["median_s"], **found}


def whole_plan(setup: str, repeats: int) -> dict[str, Any]:
    """The command, from its start to its end, as a clock on the wall sees it. cpu_s: of the processor, each time."""
    times_s, before = [], resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(min(repeats, 3)):
        began_s = time.perf_counter()
        subprocess.run([*COMMAND, setup], check=True, stdout=subprocess.DEVNULL)
        times_s.append(time.perf_counter() - began_s)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / len(times_s)
    return {"setup": Path(setup).name, "cpu_s": cpu_s} | summary(times_s)


def spantrain(setup: str, repeats: int) -> dict[str, Any]:
    """SpanTrain's planner: with other plans (without groups, with idle devices), and the search alone."""
    problem, kept = read_setup(setup), list[SpanTrainReport]()

    def plan(alternatives: bool) -> None:
        kept.append(report_of(problem, alternatives=alternatives))

    search = seconds(lambda: plan(False), repeats)
    whole = seconds(lambda: plan(True), repeats)
    found = kept[-1].found
    return {
        "setup": setup,
        "devices": sum(site.devices for site in problem.sites),
        "candidates": found.compared,
        "teams": found.evaluated,
        "search_s": search["median_s"],
    } | whole


def gaps(grid: list[GridPoint], time_limit_s: float) -> dict[str, Any]:
    """The greedy's makespan over the solver's bound in each case, and how long the proofs took."""
    ratios, times_s, cpu_s, proved = [], [], [], 0
    for case in grid:
        costs, limits = case.costs(), case.limits()
        found = [cross_ud(case.n_pp, case.n_mb, costs, limits, parts) for parts in (1, 2, 4)]
        best_ns = min(simulate(schedule, costs).makespan_ns for schedule in found)
        began_s = time.process_time()
        best = optimal("cross_ud/optimal", straight(case.n_pp), case.n_mb, costs, limits, found[0], time_limit_s)
        ratios.append(best_ns / best.lower_bound_ns)
        cpu_s.append(time.process_time() - began_s)
        times_s.append(best.wall_s)
        proved += best.proved
    return {
        "cases": len(grid),
        "proved": proved,
        "median_proof_s": statistics.median(times_s),
        "longest_proof_s": max(times_s),
        "longest_proof_cpu_s": max(cpu_s),
        "greedy_over_bound_median": statistics.median(ratios),
        "greedy_over_bound_most": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each time (default 5)")
    parser.add_argument("--time-limit", type=float, default=20.0, help="of each proof, in seconds (default 20)")
    parser.add_argument("--quick", action="store_true", help="small sizes: does everything run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    size = GridPoint(8, 32, 2, 1, 0.5, 1) if arguments.quick else GridPoint(64, 512, 2, 1, 0.5, 1)
    grid = cases([4], [8], [2, 4], RATIOS, RATIOS, [1, 2])
    found: dict[str, Any] = {
        "setting": {"cpus": os.cpu_count(), "load_1min": os.getloadavg()[0], "machine": platform.machine()},
        "simulate": [
            simulation(zb_h1, 1, False, size, arguments.repeats),
            simulation(interleaved_1f1b, 2, True, size, arguments.repeats),
        ],
        "floor": floor(3 * size.n_pp * size.n_mb, arguments.repeats),
        "greedy": greedy(size, arguments.repeats),
        "plan": whole_plan("crosspipe-m8" if arguments.quick else "jeeves", arguments.repeats),
        "all_systems": whole_plan("crosspipe-m8" if arguments.quick else EXAMPLE, arguments.repeats),
        "spantrain": spantrain("spantrain-setting-2" if arguments.quick else "spantrain-setting-1", arguments.repeats),
        "optimal": gaps(grid[:: len(grid) // 2] if arguments.quick else grid, arguments.time_limit),
    }
    if not arguments.quick:
        found["wanted"] = judged(found)
    print(json.dumps(found, indent=2) if arguments.json else _table(found))


def judged(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each number next to what is wanted of it."""
    ours = {
        "simulate_ops_per_s": min(row["ops_per_s"] for row in found["simulate"]),
        "greedy_s": found["greedy"]["median_s"],
        "plan_s": found["plan"]["median_s"],
        "all_systems_s": found["all_systems"]["median_s"],
        "spantrain_s": found["spantrain"]["median_s"],
        "proof_s": found["optimal"]["longest_proof_s"],
        "greedy_over_bound": found["optimal"]["greedy_over_bound_most"],
    }
    return {
        name: {
            "wanted": WANTED[name],
            "found": value,
            "kept": value >= WANTED[name] if "ops" in name else value <= WANTED[name],
        }
        for name, value in ours.items()
    }


def _table(found: dict[str, Any]) -> str:
    lines = [", ".join(f"{key} {value}" for key, value in found["setting"].items())]
    lines += [
        f"simulate {row['schedule']:<18}{row['ops']:>8} operations {row['ops_per_s']:>10.0f} a second, spread "
        f"{row['spread']:.0%}"
        for row in found["simulate"]
    ]
    bottom = found["floor"]
    lines.append(f"floor    a plain loop, {bottom['ops_per_s']:.0f} operations a second, spread {bottom['spread']:.0%}")
    plan, best = found["greedy"], found["optimal"]
    lines.append(
        f"greedy   {plan['stages']} stages x {plan['microbatches']} microbatches: {plan['median_s']:.2f} s, spread "
        f"{plan['spread']:.0%}"
    )
    lines.append(
        f"optimal  {best['proved']} of {best['cases']} cases proved, median {best['median_proof_s']:.2f} s, longest "
        f"{best['longest_proof_s']:.2f} s, {best['longest_proof_cpu_s']:.2f} s of the processor; the greedy is at "
        f"{best['greedy_over_bound_median']:.3f} of the bound, "
        f"at most {best['greedy_over_bound_most']:.3f}"
    )
    lines += [
        f"plan     {whole['setup']}: {whole['median_s']:.2f} s, spread {whole['spread']:.0%}; {whole['cpu_s']:.2f} s "
        "of the processor"
        for whole in (found["plan"], found["all_systems"])
    ]
    span = found["spantrain"]
    lines.append(
        f"SpanTrain {span['setup']}, {span['devices']} devices: {span['median_s']:.2f} s, spread {span['spread']:.0%}, "
        f"of it {span['search_s']:.2f} s for its search: {span['candidates']} candidates, {span['teams']} teams"
    )
    for name, row in found.get("wanted", {}).items():
        lines.append(
            f"wanted   {name:<20}{row['wanted']:>10g}, found {row['found']:.4g}: {'kept' if row['kept'] else 'MISSED'}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
