"""Makes a plan: the best of all schedules for a problem, the others by comparison, and which change would help most.

Candidates: every schedule that fits the memory, with the stage divisions and the ways of sharing a link that the
problem allows, and the other answer to slow links, a whole pipeline at each site with gradients exchanged between
them (data parallel across sites, CrossPipe, arXiv:2507.00217, appendix E). The answer is the one with the shortest
iteration, exchanges of replicas included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dips.core.units import format_bytes
from dips.planner.across import data_parallel
from dips.planner.candidates import (
    MAKERS,
    NAMES,
    Candidate,
    RefusedCandidate,
    coordinated,
    divided,
    jeeves_of,
    optimal_of,
)
from dips.planner.effects import ChangeEffect, effects_of
from dips.planner.errors import PlanError
from dips.planner.problem import Problem

COORDINATED_TOO = 3
"""Schedules that are also simulated with one message at a time: the best so many, and jeeves."""


@dataclass(frozen=True)
class Plan:
    """A plan. candidates: the fastest first; the first is chosen."""

    problem: Problem
    candidates: tuple[Candidate, ...]
    refused: tuple[RefusedCandidate, ...]
    effects: tuple[ChangeEffect, ...]

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]


def make_plan(problem: Problem, sensitivity: bool = True) -> Plan:
    """Make the plan of a problem. Raises PlanError when nothing fits, with the reason of each candidate."""
    names = _names(problem)
    found: list[Candidate] = []
    refused: list[RefusedCandidate] = []
    for name in names:
        try:
            found += _candidates(problem, name)
        except PlanError as error:
            refused.append(RefusedCandidate(name, str(error)))
    if not found:
        _check_one_fits(problem)
        reasons = "; ".join(f"{no.name}: {no.why}" for no in refused[:3])
        raise PlanError(f"{problem.setup.file}: no schedule is possible: {reasons}")
    if problem.shares_links and problem.setup.options.replicas != "fair":
        found.sort(key=lambda c: c.iteration_s)
        plain = [c for c in found if c.sharing == "fair" and c.name in MAKERS]
        if problem.setup.options.replicas == "best":
            several = list({c.makespan_ns: c for c in reversed(plain)}.values())[::-1][:COORDINATED_TOO]
        else:
            several = plain
        found += [coordinated(problem, candidate) for candidate in several]
    if problem.setup.options.replicas == "coordinated" and problem.shares_links:
        found = [c for c in found if c.sharing != "fair"]
    ranked = tuple(sorted(found, key=lambda c: (c.makespan_ns, c.division != problem.uniform())))
    effects = tuple(effects_of(problem, ranked)) if sensitivity else ()
    return Plan(problem, ranked, tuple(refused), effects)


def _check_one_fits(problem: Problem) -> None:
    """Raise PlanError when a stage cannot hold a single microbatch."""
    division, training = problem.uniform(), problem.setup.training
    limits, costs = problem.limits(division), problem.costs(division)
    for device, (stage, limit) in enumerate(zip(costs.stages, limits, strict=True)):
        if stage.activation > limit:
            profile = problem.setup.profile
            measured = profile is not None and profile.memory_microbatches is not None
            key = (
                "[profile]: memory_microbatches" if measured else f"[[sites]] {problem.site_of[device] + 1}: memory_gib"
            )
            raise PlanError(
                f"{problem.setup.file} {key} leaves {format_bytes(limit)} for activations, one microbatch of stage "
                f"{device} needs {format_bytes(stage.activation)}: give more memory or stages, a smaller "
                f'microbatch_sequences (now {training.microbatch_sequences}), or recompute = "full"'
            )


def _names(problem: Problem) -> list[str]:
    asked, options = problem.setup.options.schedules, problem.setup.options
    for name in asked:
        if name not in NAMES:
            raise PlanError(
                f"{problem.setup.file} [options]: schedules has {name!r}, which is unknown: "
                f"choose from {', '.join(NAMES)}"
            )
    names = list(asked or NAMES)
    if not options.solver_s:
        if asked and any(name.startswith("optimal") for name in asked):
            raise PlanError(
                f"{problem.setup.file} [options]: optimal schedules need solver_s, the solver's seconds: give it"
            )
        names = [name for name in names if not name.startswith("optimal")]
    if len(problem.setup.sites) < 2 and not asked:
        names.remove("dp")
    return names


def pipelines_of(problem: Problem) -> Problem:
    """The same problem without dp, which places replicas elsewhere."""
    options = problem.setup.options
    names = [name for name in options.schedules or NAMES if name != "dp"] or list(MAKERS)
    solved = [name for name in names if options.solver_s or not name.startswith("optimal")]
    return problem.with_options(schedules=solved)


# ---- candidates ----


def _candidates(problem: Problem, name: str) -> Iterator[Candidate]:
    if name == "jeeves":
        yield from jeeves_of(problem)
    elif name == "dp":
        yield data_parallel(problem)
    elif name.startswith("optimal"):
        yield optimal_of(problem, name)
    else:
        yield from divided(problem, name)
