"""Compares the ways to split the same devices and batch into stages and replicas, and what long links then carry.

CrossPipe (arXiv:2507.00217), sections 2.4 and 7.4 and appendix E: stages x replicas and the batch stay
the same, so half as many replicas take twice the microbatches each. Where sites hold whole pipelines, their links
carry weights and gradients; where a pipeline crosses the sites, activations; with groups of sites, both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dips.core.errors import ConfigError
from dips.planner.calibration import interval_json
from dips.planner.candidates import Candidate
from dips.planner.cluster import check_parallelism, divisors
from dips.planner.costs import NS
from dips.planner.plan import Plan, make_plan, pipelines_of
from dips.planner.problem import Problem, assumptions, regrouped


@dataclass(frozen=True)
class DeviceSplit:
    """One way to split devices and batch."""

    pipeline: int  # stages
    data: int  # replicas
    microbatches: int  # of each replica
    groups: int  # of sites, each with whole pipelines
    n_sites: int

    @property
    def long_links_carry(self) -> str:
        """activations, gradients, both, or nothing where there is one site."""
        if self.n_sites == 1:
            return "nothing"
        if self.groups == 1:
            return "activations"
        return "gradients" if self.groups == self.n_sites else "both"


@dataclass(frozen=True)
class SplitChoice:
    """One way to split, with the best schedule for it."""

    split: DeviceSplit
    plan: Plan

    @property
    def best(self) -> Candidate:
        return self.plan.chosen

    @property
    def memory_used(self) -> float:
        """The used part of the memory of the device with the least free memory, from 0 to 1."""
        best = self.best
        return max(
            (state + held) / (state + limit)
            for state, held, limit in zip(best.state_bytes, best.activation_bytes, best.limit_bytes, strict=True)
        )


@dataclass(frozen=True)
class Tradeoff:
    """The result."""

    problem: Problem
    choices: tuple[SplitChoice, ...]  # the fastest first
    impossible: tuple[tuple[DeviceSplit, str], ...]  # with the reason as a sentence


def tradeoff(problem: Problem) -> Tradeoff:
    """Plan every way to split. Raises ConfigError when none is possible, with the first reasons."""
    choices: list[SplitChoice] = []
    impossible: list[tuple[DeviceSplit, str]] = []
    for split in splits(problem):
        try:
            choices.append(SplitChoice(split, make_plan(pipelines_of(divided_so(problem, split)), sensitivity=False)))
        except ConfigError as error:
            impossible.append((split, str(error)))
    if not choices:
        reasons = "; ".join(f"{split.pipeline} x {split.data}: {why}" for split, why in impossible[:3])
        raise ConfigError(f"{problem.setup.file}: no way to split is possible: {reasons}")
    choices.sort(key=lambda choice: (choice.best.makespan_ns, choice.split.groups))
    return Tradeoff(problem, tuple(choices), tuple(impossible))


def splits(problem: Problem) -> Iterator[DeviceSplit]:
    """All ways with the same stages x replicas and the same microbatches in all, fewest stages first; some are
    impossible."""
    training, n_sites = problem.setup.training, len(problem.setup.sites)
    places, batch = training.pipeline * training.data, training.microbatches * training.data
    for pipeline in divisors(places):
        data = places // pipeline
        for groups in divisors(n_sites):
            yield DeviceSplit(pipeline, data, batch // data, groups, n_sites)


def divided_so(problem: Problem, split: DeviceSplit) -> Problem:
    """The problem of one way to split. Raises ConfigError when it is not possible."""
    training = problem.setup.training
    batch = training.microbatches * training.data
    if batch % split.data:
        raise ConfigError(f"{batch} microbatches do not divide among {split.data} replicas")
    changed = problem
    if split.pipeline != training.pipeline:
        sites = tuple(site.model_copy(update={"stages": 0}) for site in problem.setup.sites)
        changed = replace(problem, setup=replace(problem.setup, sites=sites))
    changed = changed.with_training(pipeline=split.pipeline, data=split.data, microbatches=split.microbatches)
    found = regrouped(changed, split.groups)
    check_parallelism(found.setup)
    if split.pipeline == training.pipeline and split.data == training.data:
        return found
    return with_scaled_profile(problem, found)


def with_scaled_profile(before: Problem, after: Problem) -> Problem:
    """The measured profile, converted to the new number of stages: times of a stage and microbatches that fit."""
    profile = before.setup.profile
    if profile is None:
        return after
    share = before.n_devices / after.n_devices
    changes: dict[str, float] = {}
    if profile.times_of_stage_ms is not None:
        names = ("forward_ms", "input_gradient_ms", "weight_gradient_ms")
        changes = {name: time_ms * share for name, time_ms in zip(names, profile.times_of_stage_ms, strict=True)}
    if profile.memory_microbatches is not None:
        # Microbatches that a stage can hold: as before, plus or minus the change of its weights and optimizer state.
        microbatches = profile.memory_microbatches
        held = max(unit.activation_bytes for unit in before.units) * len(before.units)
        was, now = (max(one.state_bytes(one.uniform())) for one in (before, after))
        room = (microbatches * held / before.n_devices + was - now) / (held / after.n_devices)
        if room < 1:
            raise ConfigError(
                f"a stage has room for {max(room, 0):.2f} microbatches next to its weights and optimizer state: too few"
            )
        changes["memory_microbatches"] = room
    scaled = profile.model_copy(update=changes)
    return replace(after, setup=replace(after.setup, profile=scaled))


# ---- JSON ----


def tradeoff_json(found: Tradeoff) -> dict[str, Any]:
    """All ways as a JSON object, the fastest first; times in seconds."""
    setup, best_s = found.problem.setup, found.choices[0].best.iteration_s
    return {
        "setup": Path(setup.file).name,
        "model": setup.model.name,
        "calibration_error": found.problem.calibration_error,
        "choices": [_choice_json(found, choice, best_s) for choice in found.choices],
        "impossible": [{**_split_json(split), "why": why} for split, why in found.impossible],
        "assumptions": assumptions(found.problem),
    }


def _choice_json(found: Tradeoff, choice: SplitChoice, best_s: float) -> dict[str, Any]:
    sites, best = found.problem.setup.sites, choice.best
    return {
        **_split_json(choice.split),
        "schedule": best.name,
        "sharing": best.sharing,
        "layers": list(best.division),
        "iteration_s": best.iteration_s,
        **interval_json("iteration", best.iteration_s, found.problem.calibration_error),
        "slower_by": best.iteration_s / best_s - 1,
        "sync_s": best.sync_ns / NS,
        "bubble_fraction": best.bubble_fraction,
        "memory_used": choice.memory_used,
        "links": [
            {"sender": sites[a].name, "receiver": sites[b].name, "bytes": size}
            for (a, b), size in sorted(best.link_bytes.items())
        ],
    }


def _split_json(split: DeviceSplit) -> dict[str, Any]:
    return {
        "pipeline": split.pipeline,
        "data": split.data,
        "microbatches": split.microbatches,
        "groups": split.groups,
        "long_links_carry": split.long_links_carry,
    }
