"""Finds the best that some sites of a problem do together with a batch: best(), which every way of training asks.

Pipelines are tried with every split of all devices into stages and replicas; SpanTrain and ScaleAcross Explorer choose
more than that, and are asked where the network inside each site is known. No answer is better than bound().
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dips.core.errors import ConfigError
from dips.planner.candidates import NAMES
from dips.planner.cluster import MOST_MESSAGES, ClusterFile, Link, check_parallelism
from dips.planner.plan import Plan, make_plan
from dips.planner.problem import Problem, regrouped
from dips.planner.scaleacross.report import name_of, report_of
from dips.planner.scaleacross.topology import of_problem
from dips.planner.spantrain.report import report_of_best_groups
from dips.planner.tradeoff import with_scaled_profile
from dips.planner.units import WEIGHT_BYTES


class System(StrEnum):
    """A system that can be asked."""

    JEEVES = "jeeves"
    CROSSPIPE = "crosspipe"
    SPANTRAIN = "spantrain"
    SCALEACROSS = "scaleacross"
    DIPS = "dips"


SCHEDULES_OF = {
    System.JEEVES: ("jeeves",),
    System.CROSSPIPE: tuple(name for name in NAMES if name != "jeeves"),
}
"""The schedules of a plan that are a system's answer. CrossPipe compares its own with all others that are known."""

DECIDE_INSIDE = (System.SPANTRAIN, System.SCALEACROSS)
"""Systems that choose how devices of one site share layers. Where its network is not given, that costs them nothing."""

INSIDE_A_SITE = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "cross_ud/1")
"""The schedules that are compared inside of a site, whose messages are short: those without solver."""

OVER_SITES = ("1f1b", "zb_h1", "zb_v", "cross_ud/1", "cross_wave")
"""The schedules of a pipeline over sites whose split is searched for; the best of them is within a few percent of the
best of all."""

MOST_MESSAGES_TRIED = 1 << 15
"""Stages x microbatches x replicas up to which splits over sites are searched for: larger ones take long."""


@dataclass(frozen=True)
class SystemAnswer:
    """What a system says of how some sites do a batch together."""

    system: System
    what: str  # in a few words
    tokens_per_s: float
    iteration_s: float | None  # of the batch; None: clusters do not meet for one
    found: Any  # all of it: Plan of pipelines, SpanTrainReport, ScaleAcrossReport or AsynchronousClusters
    tokens: int = 0  # of an iteration

    @property
    def synchronous(self) -> bool:
        """Whether its training is equal to that of one device which takes the whole batch."""
        return self.iteration_s is not None

    @property
    def split(self) -> tuple[int, int, int] | None:
        """Stages, replicas and microbatches of pipelines."""
        if not isinstance(self.found, Plan):
            return None
        training = self.found.problem.setup.training
        return training.pipeline, training.data, training.microbatches

    @classmethod
    def of_batch(cls, system: System, what: str, setup: ClusterFile, iteration_s: float, found: object) -> SystemAnswer:
        """The answer of a system that trains the batch of a file in so many seconds."""
        training = setup.training
        tokens = training.data * training.microbatches * training.microbatch_sequences * training.sequence_tokens
        return cls(system, what, tokens / iteration_s, iteration_s, found, tokens)


def best(
    problem: Problem, sites: Sequence[int], batch: int, systems: Sequence[System] = tuple(System), near: float = 0.0
) -> SystemAnswer:
    """The most tokens a second at these sites, with a batch of so many microbatches or up to the part `near` more or
    less.

    Raises ConfigError with the reason of the pipeline where the sites cannot train the model.
    """
    found, why = list[SystemAnswer](), list[ConfigError]()
    here = _at(problem, sites)
    for ask in (_pipelines, _searches):
        try:
            found += ask(problem, here, sites, batch, systems, near)
        except ConfigError as error:
            why.append(error)
    if not found:
        asked = " and ".join(system.value for system in systems)
        raise why[0] if why else ConfigError(f"{here.file}: no answer from {asked} for {_names(here)}")
    return max(found, key=lambda one: one.tokens_per_s)


def bound(problem: Problem, sites: Sequence[int], batch: int) -> float:
    """Tokens a second that these sites cannot exceed together with a batch of so many microbatches.

    All devices compute all the time, and over its fastest link each site exchanges what it must at least: activations
    of every microbatch, or the gradients of the layers once. 0 where a site has no link to another one.
    """
    setup, training = problem.setup, problem.setup.training
    speed, exchange_s, model = 0.0, 0.0, setup.model
    layers = model.parameters() - model.embedding_parameters() - model.output_parameters()
    must_bytes = min(batch * problem.message_bytes, layers * WEIGHT_BYTES)
    for site in sites:
        alone = as_measured_at(problem, site).setup
        units = Problem(replace(alone, sites=(alone.sites[site],), links=())).units
        speed += alone.sites[site].devices / sum(unit.total_s for unit in units)
        if len(sites) > 1:
            ends = {setup.sites[other].name for other in sites if other != site}, setup.sites[site].name
            rate = max((link.bytes_per_s for link in setup.links if _joins(link, *ends)), default=0.0)
            exchange_s = max(exchange_s, must_bytes / rate if rate else math.inf)
    compute_s = batch * training.tensor * training.context / speed
    return batch * training.microbatch_sequences * training.sequence_tokens / max(compute_s, exchange_s)


def _joins(link: Link, others: set[str], site: str) -> bool:
    return (link.sender == site and link.receiver in others) or (link.receiver == site and link.sender in others)


def _at(problem: Problem, sites: Sequence[int]) -> ClusterFile:
    setup = problem.setup
    chosen = tuple(setup.sites[site].model_copy(update={"stages": 0}) for site in sites)
    names = [site.name for site in chosen]
    links = tuple(link for link in setup.links if link.sender in names and link.receiver in names)
    return replace(setup, sites=chosen, links=links)


def _names(here: ClusterFile) -> str:
    return " and ".join(site.name for site in here.sites)


# ---- pipelines -------------------------------------------------------------------------------------------------------


def _pipelines(
    problem: Problem, here: ClusterFile, sites: Sequence[int], batch: int, systems: Sequence[System], near: float
) -> Iterator[SystemAnswer]:
    """The best plan of all splits of all devices into stages and replicas that share the batch; at several sites
    pipelines cross all of them, or each site has whole ones.

    Raises ConfigError with the reason of the split with the most stages when none is possible."""
    training, asked = problem.setup.training, problem.setup.options.schedules
    if not any(system in SCHEDULES_OF for system in systems):
        return
    usual, most = (INSIDE_A_SITE, MOST_MESSAGES) if len(sites) == 1 else (OVER_SITES, MOST_MESSAGES_TRIED)
    schedules = usual if len(sites) == 1 else [name for name in usual if name in asked or not asked] or usual
    places = sum(site.devices for site in here.sites) // (training.tensor * training.context)
    timed, found, reasons = as_measured_at(problem, sites[0]), list[SystemAnswer](), list[str]()
    deepest = problem.setup.model.layers + training.extra_layers
    for data in (number for number in range(1, places + 1) if places % number == 0):
        stages, microbatches = places // data, max(1, round(batch / data))
        total = microbatches * data
        if abs(total - batch) > near * batch or stages > deepest or stages * total > most:
            continue
        for groups in dict.fromkeys((1, len(sites))):
            try:
                inner = replace(problem, setup=here, paces=())
                inner = inner.with_training(pipeline=stages, data=data, microbatches=microbatches)
                inner = regrouped(inner, groups)
                check_parallelism(inner.setup)
                names = schedules if stages > 1 else ("1f1b",)  # one stage has nothing to order
                inner = with_scaled_profile(timed, inner).with_options(schedules=list(names))
                plan = make_plan(inner, sensitivity=False)
                where = ", whole pipelines at each site" if groups > 1 else ""
                what = f"{plan.chosen.name}, {count(stages, 'stage')} x {count(data, 'replica')}{where}"
                found.append(
                    SystemAnswer.of_batch(System.CROSSPIPE, what, plan.problem.setup, plan.chosen.iteration_s, plan)
                )
            except ConfigError as error:
                reasons.append(str(error))
    if not found:
        alone = " alone" if len(sites) < len(problem.setup.sites) else ""
        unsplit = (
            f"{here.file}: its {places} groups of tensor x context devices do not divide into at most {deepest} "
            f"stages and replicas that share {batch} microbatches evenly"
        )
        raise ConfigError(f"{_names(here)}{alone} cannot train the model: {(reasons or [unsplit])[0]}")
    yield max(found, key=lambda one: one.tokens_per_s)


def as_measured_at(problem: Problem, site: int) -> Problem:
    """The problem with the times of a stage at a site; its profile has those of the first one, as in all plans."""
    profile, sites = problem.setup.profile, problem.setup.sites
    times_ms = None if profile is None else profile.times_of_stage_ms
    first, here = sites[0].sustained_tflops, sites[site].sustained_tflops
    if profile is None or times_ms is None or first is None or here is None or first == here:
        return problem
    names = ("forward_ms", "input_gradient_ms", "weight_gradient_ms")
    slower = {name: time_ms * first / here for name, time_ms in zip(names, times_ms, strict=True)}
    return replace(problem, setup=replace(problem.setup, profile=profile.model_copy(update=slower)))


# ---- systems that choose more ----------------------------------------------------------------------------------------


def _searches(
    problem: Problem, here: ClusterFile, sites: Sequence[int], batch: int, systems: Sequence[System], near: float
) -> Iterator[SystemAnswer]:
    """The answers of those that choose how devices share layers, where the network between these is known."""
    if any(site.network_gbps is None for site in here.sites):
        return
    training = here.training.model_copy(update={"data": 1, "microbatches": batch})
    setup = replace(here, training=training)
    for system in systems:
        try:
            if system is System.SPANTRAIN:
                yield asked_spantrain(setup)
            elif system is System.SCALEACROSS:
                yield asked_scaleacross(setup)
        except ConfigError:
            continue  # the other systems have an answer, or the pipelines' reason is told


def asked_spantrain(setup: ClusterFile) -> SystemAnswer:
    """SpanTrain's answer for the batch of a file. Raises ConfigError."""
    found = report_of_best_groups(setup)
    chain, grouping = found.best.chain, found.grouping
    what = (
        f"{count(len(grouping.groups), 'group')} ({grouping.threshold_gbps:.3g} Gbit/s), "
        f"{count(len(chain.stages), 'stage')}, {count(chain.microbatches, 'microbatch')} of {chain.sequences}"
    )
    return SystemAnswer.of_batch(System.SPANTRAIN, what, setup, found.iteration_s, found)


def asked_scaleacross(setup: ClusterFile) -> SystemAnswer:
    """ScaleAcross Explorer's answer for the batch of a file. Raises ConfigError."""
    found = report_of(of_problem(setup), links=True)
    choice = found.explored.best[0]
    what = (
        f"{name_of(choice)}, TP-CP-EP-PP-DP {choice.case.split}, "
        f"{count(choice.case.split.microbatch_sequences, 'sequence')}"
    )
    return SystemAnswer.of_batch(System.SCALEACROSS, what, setup, choice.links_s, found)


def count(number: int, word: str) -> str:
    """1 stage, 2 stages."""
    return f"{number} {word}{'' if number == 1 else 'es' if word.endswith('h') else 's'}"
