"""Predicts asynchronous clusters under Di-PS for a planner's problem: each site trains by itself and pushes what it
has learned to parameter servers at one of the sites.

A cluster's inner step is the best plan for the devices of its site; it takes the part of the batch that these are of
all devices. The servers' site is the one that docs/algorithm.md's rule chooses (dips.core.server_site). Push,
update, pull and what of them nothing hides are those of `dips size`, when all clusters push at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dips.core.protocol import MAX_RANKS
from dips.core.server_site import choose_server_site
from dips.local.sizing import SizeKnobs, size
from dips.planner.cluster import MOST_MESSAGES, Site, check_parallelism
from dips.planner.errors import PlanError
from dips.planner.plan import Plan, make_plan
from dips.planner.problem import Problem, regrouped
from dips.planner.tradeoff import with_scaled_profile

INSIDE_A_SITE = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "cross_ud/1")
"""The schedules that are compared inside of a site, whose messages are short: those without solver."""


@dataclass(frozen=True)
class ClusterRound:
    """One cluster: its inner step, and a round of it when all clusters push at the same time."""

    site: str
    plan: Plan  # of an inner step
    tokens: int  # of an inner step
    compute_s: float  # the inner steps between two pushes
    exchange_s: float  # push, update and pull
    stall_s: float  # the part of it in which the cluster waits

    @property
    def round_s(self) -> float:
        return self.compute_s + self.stall_s

    @property
    def step_s(self) -> float:
        return self.plan.chosen.iteration_s

    def tokens_per_s(self, sync_every: int) -> float:
        """With so many inner steps in a round."""
        return self.tokens * sync_every / self.round_s


@dataclass(frozen=True)
class AsynchronousClusters:
    """All clusters, and where their servers are."""

    problem: Problem
    servers_at: str
    clusters: tuple[ClusterRound, ...]

    @property
    def tokens_per_s(self) -> float:
        every = self.problem.setup.asynchronous.sync_every
        return sum(cluster.tokens_per_s(every) for cluster in self.clusters)

    @property
    def share_of_ideal(self) -> float:
        """The part of the tokens that the same clusters would train without any exchange."""
        return self.tokens_per_s / sum(cluster.tokens / cluster.step_s for cluster in self.clusters)

    def to_json(self) -> dict[str, Any]:
        setup = self.problem.setup
        return {
            "servers_at": self.servers_at,
            "sync_every": setup.asynchronous.sync_every,
            "overlap": setup.asynchronous.overlap,
            "tokens_per_s": self.tokens_per_s,
            "share_of_ideal": self.share_of_ideal,
            "clusters": [
                {
                    "site": one.site,
                    "pipeline": one.plan.problem.setup.training.pipeline,
                    "data": one.plan.problem.setup.training.data,
                    "schedule": one.plan.chosen.name,
                    "step_s": one.step_s,
                    "step_tokens": one.tokens,
                    "exchange_s": one.exchange_s,
                    "stall_s": one.stall_s,
                    "round_s": one.round_s,
                }
                for one in self.clusters
            ],
        }


def asynchronous_clusters(
    problem: Problem, sites: Sequence[int] | None = None, known: Mapping[int, Plan] | None = None
) -> AsynchronousClusters:
    """Predict the clusters of a problem. sites: those that train, with the inner steps that they have where all do;
    None: all. known: best_inside() of sites.

    Raises PlanError for one site, and for a site that cannot hold the model."""
    setup = problem.setup
    trained_at = range(len(setup.sites)) if sites is None else sites
    if len(trained_at) < 2:
        raise PlanError(f"{setup.file}: asynchronous clusters need at least two [[sites]]")
    alike = {_kind_of(setup.sites[number]): plan for number, plan in (known or {}).items()}
    for number in trained_at:
        if (kind := _kind_of(setup.sites[number])) not in alike:  # others differ by their names alone
            alike[kind] = best_inside(problem, number)
    plans = [alike[_kind_of(setup.sites[number])] for number in trained_at]
    trained = [_tokens(plan) for plan in plans]
    speeds = [tokens / plan.chosen.iteration_s for tokens, plan in zip(trained, plans, strict=True)]
    gbps = _bandwidths(problem, trained_at)
    servers, fastest = choose_server_site(gbps, speeds).index, max(map(max, gbps))
    rounds = tuple(
        _round(problem, setup.sites[number], len(plans), plan, tokens, gbps[servers][at], fastest)
        for at, (number, plan, tokens) in enumerate(zip(trained_at, plans, trained, strict=True))
    )
    return AsynchronousClusters(problem, setup.sites[trained_at[servers]].name, rounds)


def _kind_of(site: Site) -> str:
    return site.model_dump_json(exclude={"name", "source", "since", "stages"})


def best_inside(problem: Problem, site: int) -> Plan:
    """The best plan of an inner step at a site alone, which takes the part of the batch that its devices are of all.

    Raises PlanError with the reason of the split with the most stages when none is possible."""
    setup, training = problem.setup, problem.setup.training
    whole = sum(one.devices for one in setup.sites)
    batch = max(1, round(training.microbatches * training.data * setup.sites[site].devices / whole))
    return best_split(problem, [site], batch, INSIDE_A_SITE)


def best_split(
    problem: Problem, sites: Sequence[int], batch: int, schedules: Sequence[str], most: int = MOST_MESSAGES
) -> Plan:
    """The best plan at these sites alone, of all splits of all their devices into stages and replicas that share so
    many microbatches; at several sites pipelines cross all of them, or each site has whole ones. most: of stages x
    microbatches x replicas that are tried.

    Raises PlanError with the reason of the split with the most stages when none is possible."""
    setup, training = problem.setup, problem.setup.training
    chosen = tuple(setup.sites[site].model_copy(update={"stages": 0}) for site in sites)
    names = [site.name for site in chosen]
    links = tuple(link for link in setup.links if link.sender in names and link.receiver in names)
    here = replace(setup, sites=chosen, links=links)
    places = sum(site.devices for site in chosen) // (training.tensor * training.context)
    timed, found, reasons = _as_measured_at(problem, sites[0]), list[Plan](), list[str]()
    deepest = setup.model.layers + training.extra_layers
    for data in range(1, places + 1):
        stages = places // data
        if places % data or batch % data or stages > deepest or stages * batch > most:
            continue
        for groups in dict.fromkeys((1, len(sites))):
            try:
                inner = replace(problem, setup=here, paces=())
                inner = inner.with_training(pipeline=stages, data=data, microbatches=batch // data)
                inner = regrouped(inner, groups)
                check_parallelism(inner.setup)
                inner = with_scaled_profile(timed, inner).with_options(schedules=list(schedules))
                found.append(make_plan(inner, sensitivity=False))
            except PlanError as error:
                reasons.append(str(error))
    if not found:
        unsplit = (
            f"{setup.file}: its {places} groups of tensor x context devices do not divide into at most {deepest} "
            f"stages and replicas that share {batch} microbatches evenly"
        )
        alone = " alone" if len(sites) < len(setup.sites) else ""
        raise PlanError(f"{' and '.join(names)}{alone} cannot train the model: {(reasons or [unsplit])[0]}")
    return min(found, key=lambda plan: plan.chosen.iteration_s)


def _as_measured_at(problem: Problem, site: int) -> Problem:
    """The problem with the times of a stage at a site; its profile has those of the first one, as in all plans."""
    profile, sites = problem.setup.profile, problem.setup.sites
    times_ms = None if profile is None else profile.times_of_stage_ms
    first, here = sites[0].sustained_tflops, sites[site].sustained_tflops
    if profile is None or times_ms is None or first is None or here is None or first == here:
        return problem
    names = ("forward_ms", "input_gradient_ms", "weight_gradient_ms")
    slower = {name: time_ms * first / here for name, time_ms in zip(names, times_ms, strict=True)}
    return replace(problem, setup=replace(problem.setup, profile=profile.model_copy(update=slower)))


def _tokens(plan: Plan) -> int:
    training = plan.problem.setup.training
    return training.microbatches * training.data * training.microbatch_sequences * training.sequence_tokens


def _bandwidths(problem: Problem, trained_at: Sequence[int]) -> list[list[float]]:
    """Gbit/s from the servers at each site (rows) to each cluster: the slower of both ways; inside of a site the
    network of its devices, and where that is not given, the fastest link of the file, so that it does not decide."""
    setup, sites = problem.setup, [problem.setup.sites[number] for number in trained_at]
    needed = "over which clusters would push to servers at another site"
    found = [[0.0] * len(sites) for _ in sites]
    for a, here in enumerate(sites):
        for b, there in enumerate(sites):
            if a != b:
                ways = (setup.link(*ends, needed) for ends in ((here.name, there.name), (there.name, here.name)))
                found[a][b] = min(link.bytes_per_s for link in ways) * 8 / 1e9
    fastest = max(map(max, found))
    for a, here in enumerate(sites):
        found[a][a] = here.network_gbps or fastest
    return found


def _round(
    problem: Problem, site: Site, clusters: int, plan: Plan, tokens: int, gbps: float, slave_gbps: float
) -> ClusterRound:
    """gbps: of the link to the servers. slave_gbps: of a slave's network card, as fast as anything in the file."""
    setup, assumed = problem.setup, problem.setup.asynchronous
    ranks = min(site.devices, MAX_RANKS)
    sizes = size(
        SizeKnobs(
            params=setup.model.parameters(),
            clusters=clusters,
            slaves=assumed.slaves,
            ranks=ranks,
            link=gbps * 1e9 / ranks,  # the site's, in equal parts
            slave_link=slave_gbps * 1e9,
            wire=assumed.wire,
            sync_every=assumed.sync_every,
            overlap=assumed.overlap,
            tokens_per_step=tokens,
            tokens_per_s=tokens / plan.chosen.iteration_s,
        )
    )
    stall_s, exchange_s = sizes["stall_together_s"].value, sizes["exchange_together_s"].value
    return ClusterRound(site.name, plan, tokens, sizes["compute_s"].value, exchange_s, stall_s)


def rounds_text(found: AsynchronousClusters) -> Sequence[str]:
    """One line for each cluster."""
    every = found.problem.setup.asynchronous.sync_every
    return [
        f"{one.site}: {one.plan.problem.setup.training.pipeline} stages x {one.plan.problem.setup.training.data} "
        f"replicas, {one.plan.chosen.name}; a step {one.step_s:.4g} s, a round of {every} steps {one.round_s:.4g} s, "
        f"of it {one.stall_s:.4g} s waiting; {one.tokens_per_s(every):,.0f} tokens/s"
        for one in found.clusters
    ]
