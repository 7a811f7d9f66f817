"""What would help most: each change of a setting alone, planned anew among the schedules that are near the front."""

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
"""Replicas that are played, before and after, to see what a change would do."""


@dataclass(frozen=True)
class ChangeEffect:
    """What a change of the setting would do. saved: part of each microbatch's share of the iteration that it saves."""

    change: str
    saved: float


def effects_of(problem: Problem, ranked: Sequence[Candidate]) -> Iterator[ChangeEffect]:
    """Each change alone, planned anew among the schedules that are near the front; the greatest help first."""
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
        found.append(ChangeEffect(change, max(0.0, 1 - each / before)))  # nobody has to use what does not help
    yield from sorted(found, key=lambda effect: -effect.saved)


def _more_activations(problem: Problem) -> Problem:
    if problem.setup.profile is not None and problem.setup.profile.memory_microbatches is not None:
        return problem.with_memory(2)
    division = problem.uniform()
    held = max(problem.state_bytes(division))
    site = min(site.memory_gib for site in problem.setup.sites if site.memory_gib is not None) * 2**30
    return problem.with_memory((2 * site - held) / site)


def _near_the_front(problem: Problem, ranked: Sequence[Candidate]) -> float:
    """The best iteration in seconds of the chosen order, its kind and the greedies."""
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
    """The chosen order under another setting, in seconds; infinite where that has other microbatches."""
    first = chosen.schedules[0]
    if first.n_microbatches != problem.n_microbatches or chosen.name.startswith("dp/"):
        return math.inf
    if chosen.sharing != "coordinated":
        return simulate(first, problem.costs(chosen.division, first.device_of_stage)).makespan_ns / NS
    played = min(FEW, problem.replicas)
    orders = [first] * played if len(chosen.schedules) == 1 else chosen.schedules[:played]
    costs = problem.costs(chosen.division, first.device_of_stage, together=problem.replicas / played)
    return simulate_fleet(orders, costs).makespan_ns / NS
