"""Finds the change of a setting that helps most: plans again with each change alone, for the best schedules only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dips.planner.across import data_parallel
from dips.planner.candidates import MAKERS, Candidate, coordinated, jeeves_with, plain
from dips.planner.costs import NS
from dips.planner.errors import PlanError
from dips.planner.fleet import simulate_fleet
from dips.planner.problem import Problem
from dips.planner.simulate import simulate

FEW = 8
"""Replicas that are simulated, before and after a change, to see its effect."""


@dataclass(frozen=True)
class ChangeEffect:
    """The effect of a change of the setting. saved: the part of each microbatch's share of the iteration that it
    saves."""

    change: str
    saved: float


def effects_of(problem: Problem, ranked: Sequence[Candidate]) -> Iterator[ChangeEffect]:
    """Plan again with each change alone, for the best schedules only; the greatest saving first."""
    changes: list[tuple[str, Problem]] = [
        ("microbatches x 2", problem.with_training(microbatches=2 * problem.n_microbatches))
    ]
    if len(set(problem.site_of)) > 1:
        changes += [
            ("bandwidth between sites x 2", problem.with_links(bandwidth=2)),
            ("latency between sites / 2", problem.with_links(latency=0.5)),
        ]
    changes.append(("memory of activations x 2", _more_activations(problem)))
    before = _near_the_front(problem, ranked)
    found = []
    for change, other in changes:
        each = _near_the_front(other, ranked) * problem.n_microbatches / other.n_microbatches
        found.append(ChangeEffect(change, max(0.0, 1 - each / before)))  # a change that does not help need not be used
    yield from sorted(found, key=lambda effect: -effect.saved)


def _more_activations(problem: Problem) -> Problem:
    if problem.setup.profile is not None and problem.setup.profile.memory_microbatches is not None:
        return problem.with_memory(2)
    division = problem.uniform()
    held = max(problem.state_bytes(division))
    site = min(site.memory_gib for site in problem.setup.sites if site.memory_gib is not None) * 2**30
    return problem.with_memory((2 * site - held) / site)


def _near_the_front(problem: Problem, ranked: Sequence[Candidate]) -> float:
    """The best iteration, in seconds, of the chosen order, its kind of schedule and the greedy ones."""
    chosen = ranked[0]
    spans = [_replayed_s(problem, chosen)]
    together = chosen.sharing == "coordinated"
    for name in dict.fromkeys([chosen.name, "cross_ud/1", "jeeves"]):
        try:
            if name.startswith("dp/"):
                spans.append(data_parallel(problem).iteration_s)
            elif name in MAKERS:
                candidate = plain(problem, name, chosen.division)
                spans.append((coordinated(problem, candidate, FEW) if together else candidate).iteration_s)
            elif name == "jeeves":
                division = next((c.division for c in ranked if c.name == "jeeves"), problem.uniform())
                spans.append(jeeves_with(problem, division, together, FEW).iteration_s)
        except PlanError:
            continue
    return min(spans)


def _replayed_s(problem: Problem, chosen: Candidate) -> float:
    """The iteration of the chosen order with another setting, in seconds; infinite when its microbatches differ."""
    first = chosen.schedules[0]
    if first.n_microbatches != problem.n_microbatches or chosen.name.startswith("dp/"):
        return math.inf
    if chosen.sharing != "coordinated":
        return simulate(first, problem.costs(chosen.division, first.device_of_stage)).makespan_ns / NS
    played = min(FEW, problem.replicas)
    orders = [first] * played if len(chosen.schedules) == 1 else chosen.schedules[:played]
    costs = problem.costs(chosen.division, first.device_of_stage, together=problem.replicas / played)
    return simulate_fleet(orders, costs).makespan_ns / NS
