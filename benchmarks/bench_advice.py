"""Whether a part of the sites would do better than what `dips plan FILE` takes: random problems of 2 to 5 sites.

    python benchmarks/bench_advice.py --first-seed 1 --problems 60

For each seed the advice for the whole file is compared with the advice for a file of each set of its sites, which is
planned alone. Exit code 1 where one is better by more than 0.1 %.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from dataclasses import replace

from dips.core.errors import ConfigError
from dips.planner.api import pose
from dips.planner.commands.plan_best import System
from dips.planner.commands.plan_systems import decide
from dips.planner.problem import Problem

NEAR = 0.001


def drawn(seed: int) -> Problem:
    """A problem of llama3-8b with sites and links that differ, all pairs of sites linked."""
    draw = random.Random(seed)
    base = pose("examples/04-plan-a-schedule/sites.toml")
    site, link = base.setup.sites[0], base.setup.links[0]
    sites = tuple(
        site.model_copy(
            update={
                "name": name,
                "devices": draw.choice([4, 8, 8, 16, 30, 32]),
                "sustained_tflops": draw.choice([80.0, 120.0, 160.0, 400.0]),
                "memory_gib": draw.choice([48.0, 80.0]),
                "network_gbps": draw.choice([100.0, 200.0, 400.0]),
            }
        )
        for name in "abcde"[: draw.choice([2, 3, 3, 4, 5])]
    )
    links = tuple(
        link.model_copy(
            update={
                "sender": a.name,
                "receiver": b.name,
                "bandwidth_gbps": draw.choice([1.0, 5.0, 10.0, 25.0, 100.0]),
                "latency_ms": draw.choice([1.0, 5.0, 20.0, 50.0]),
            }
        )
        for a, b in itertools.combinations(sites, 2)
    )
    problem = replace(base, setup=replace(base.setup, sites=sites, links=links))
    return problem.with_training(
        pipeline=2 * len(sites), data=2, tensor=draw.choice([1, 2]), microbatches=draw.choice([8, 16])
    )


def of(problem: Problem, names: set[str]) -> Problem:
    """The problem of a file with these sites only."""
    setup = problem.setup
    links = tuple(link for link in setup.links if {link.sender, link.receiver} <= names)
    sites = tuple(site for site in setup.sites if site.name in names)
    return replace(problem, setup=replace(setup, sites=sites, links=links)).with_training(pipeline=2 * len(sites))


def counted(problem: Problem) -> tuple[float, str]:
    """What the advice is worth, in tokens a second of synchronous training, and its name; 0 where there is none."""
    try:
        found = decide(problem, tuple(System), sensitivity=False)
    except ConfigError as error:
        return 0.0, str(error)
    if found.ways is not None:
        return found.ways.counted(found.ways.take) / 86_400, found.ways.take.name
    return max(one.tokens_per_s for one in found.answers if one.synchronous), found.use.what


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, default=1, help="of the problems (1)")
    parser.add_argument("--problems", type=int, default=60, help="how many (60)")
    given = parser.parse_args()
    worse = 0
    for seed in range(given.first_seed, given.first_seed + given.problems):
        began_s, problem = time.process_time(), drawn(seed)
        taken, name = counted(problem)
        names, best, of_best = [site.name for site in problem.setup.sites], 0.0, ""
        for size in range(1, len(names)):
            for part in itertools.combinations(names, size):
                alone, _ = counted(of(problem, set(part)))
                best, of_best = max((best, of_best), (alone, " and ".join(part)))
        worse += best > taken * (1 + NEAR)
        print(
            f"seed {seed}: {len(names)} sites, take {name}: {taken:,.0f} tokens/s; best of {of_best}: "
            f"{best / taken if taken else float('inf'):.4f} of it; {time.process_time() - began_s:.0f} s",
            flush=True,
        )
    print(f"{worse} of {given.problems} problems have a part of the sites that is better by more than {NEAR:.1%}")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
