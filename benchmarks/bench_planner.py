"""How fast the planner is, and how near its greedy comes to the best schedule.

Operations a second of the simulator on one core; seconds in which the greedy plans 64 stages x 512 microbatches;
seconds of a whole `dips plan` of JEEVES' setting; and, over every case of the 4 x 8 grid, seconds in which the solver
proves its optimum, and the greedy's makespan (best of 1, 2 and 4 parts) over the solver's lower bound. Nothing here
judges a number.

    python benchmarks/bench_planner.py [--repeats R] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

from dips.planner.cluster import read_setup
from dips.planner.ir import Schedule, straight
from dips.planner.plan import make_plan
from dips.planner.problem import Problem
from dips.planner.schedules.cross_ud import cross_ud
from dips.planner.schedules.interleaved import interleaved_1f1b
from dips.planner.schedules.optimal import optimal
from dips.planner.schedules.static import zb_h1
from dips.planner.simulate import simulate
from dips.planner.sweep import GREEDY_PARTS, Case, cases

RATIOS = [0, 0.25, 0.5, 1, 2]


def seconds(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median and spread, (slowest - fastest) / median, of the processor's time, after one run that is not counted."""
    times_s = []
    for repeat in range(repeats + 1):
        began_s = time.process_time()
        work()
        if repeat:
            times_s.append(time.process_time() - began_s)
    median_s = statistics.median(times_s)
    return {"median_s": median_s, "best_s": min(times_s), "spread": (max(times_s) - min(times_s)) / median_s}


def simulation(
    make: Callable[[int, int], Schedule], chunks: int, wraps: bool, size: Case, repeats: int
) -> dict[str, Any]:
    schedule, costs = make(size.n_pp, size.n_mb), size.costs(chunks, wraps)
    found = seconds(lambda: simulate(schedule, costs), repeats)
    return {"schedule": schedule.name, "ops": schedule.n_ops, "ops_per_s": schedule.n_ops / found["median_s"], **found}


def greedy(size: Case, repeats: int) -> dict[str, Any]:
    return {"stages": size.n_pp, "microbatches": size.n_mb} | seconds(
        lambda: cross_ud(size.n_pp, size.n_mb, size.costs(), size.limits()), repeats
    )


def whole_plan(setup: str, repeats: int) -> dict[str, Any]:
    """All of `dips plan SETUP`, without its files."""
    return {"setup": setup} | seconds(lambda: make_plan(Problem(read_setup(setup))), min(repeats, 2))


def gaps(grid: list[Case], time_limit_s: float) -> dict[str, Any]:
    """The greedy's makespan over the solver's bound in each case, and how long the proofs took."""
    ratios, times_s, proved = [], [], 0
    for case in grid:
        costs, limits = case.costs(), case.limits()
        found = [cross_ud(case.n_pp, case.n_mb, costs, limits, parts) for parts in GREEDY_PARTS]
        best_ns = min(simulate(schedule, costs).makespan_ns for schedule in found)
        best = optimal("cross_ud/optimal", straight(case.n_pp), case.n_mb, costs, limits, found[0], time_limit_s)
        ratios.append(best_ns / best.lower_bound_ns)
        times_s.append(best.wall_s)
        proved += best.proved
    return {
        "cases": len(grid),
        "proved": proved,
        "median_proof_s": statistics.median(times_s),
        "longest_proof_s": max(times_s),
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
    size = Case(8, 32, 2, 1, 0.5, 1) if arguments.quick else Case(64, 512, 2, 1, 0.5, 1)
    grid = cases([4], [8], [2, 4], RATIOS, RATIOS, [1, 2])
    found: dict[str, Any] = {
        "setting": {"cpus": os.cpu_count(), "load_1min": os.getloadavg()[0], "machine": platform.machine()},
        "simulate": [
            simulation(zb_h1, 1, False, size, arguments.repeats),
            simulation(interleaved_1f1b, 2, True, size, arguments.repeats),
        ],
        "greedy": greedy(size, arguments.repeats),
        "plan": whole_plan("crosspipe-m8" if arguments.quick else "jeeves", arguments.repeats),
        "optimal": gaps(grid[:: len(grid) // 2] if arguments.quick else grid, arguments.time_limit),
    }
    print(json.dumps(found, indent=2) if arguments.json else _table(found))


def _table(found: dict[str, Any]) -> str:
    lines = [", ".join(f"{key} {value}" for key, value in found["setting"].items())]
    lines += [
        f"simulate {row['schedule']:<18}{row['ops']:>8} operations {row['ops_per_s']:>10.0f} a second, spread "
        f"{row['spread']:.0%}"
        for row in found["simulate"]
    ]
    plan, best = found["greedy"], found["optimal"]
    lines.append(
        f"greedy   {plan['stages']} stages x {plan['microbatches']} microbatches: {plan['median_s']:.2f} s, spread "
        f"{plan['spread']:.0%}"
    )
    lines.append(
        f"optimal  {best['proved']} of {best['cases']} cases proved, median {best['median_proof_s']:.2f} s, longest "
        f"{best['longest_proof_s']:.2f} s; the greedy is at {best['greedy_over_bound_median']:.3f} of the bound, "
        f"at most {best['greedy_over_bound_most']:.3f}"
    )
    whole = found["plan"]
    lines.append(f"plan     {whole['setup']}: {whole['median_s']:.2f} s, spread {whole['spread']:.0%}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
