"""Predicts asynchronous clusters under Di-PS for a planner's problem: each site trains by itself and pushes what it
has learned to parameter servers at one of the sites.

A cluster's inner step is the best plan for the devices of its site. Its batch is about the part of the file's batch
that these are of all devices, as many microbatches as suit its replicas. The servers' site is the one that
docs/algorithm.md's rule chooses (dips.core.server_site). Push, update, pull and what of them nothing hides are those
of `dips size`, when all clusters push at the same time.

Clusters need more tokens than synchronous training for the same loss. How many more was measured with a small model
(local_steps.toml, which benchmarks/bench_outer_gain.py makes), unless the file says it (`[asynchronous] more_tokens`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from statistics import fmean
from typing import Any

from dips.core.config import read_toml
from dips.core.errors import ConfigError
from dips.core.protocol import MAX_RANKS
from dips.core.server_site import choose_server_site
from dips.local.sizing import SizeKnobs, SizeTable
from dips.planner.cluster import Asynchronous, Site
from dips.planner.commands.plan_best import System, SystemAnswer, best
from dips.planner.problem import Problem

NEAR_SHARE = 0.25
"""How much a cluster's batch may differ from its share of the file's: the loss hardly depends on that, and a cluster
whose replicas do not divide the share would lose far more of its speed."""


@dataclass(frozen=True)
class ClusterRound:
    """One cluster: its inner step, and a round of it when all clusters push at the same time."""

    site: str
    step: SystemAnswer  # an inner step
    compute_s: float  # the inner steps between two pushes
    exchange_s: float  # push, update and pull
    stall_s: float  # the part of it in which the cluster waits

    @property
    def round_s(self) -> float:
        return self.compute_s + self.stall_s

    def tokens_per_s(self, sync_every: int) -> float:
        """With so many inner steps in a round."""
        return self.step.tokens * sync_every / self.round_s


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
        return self.tokens_per_s / sum(cluster.step.tokens_per_s for cluster in self.clusters)

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
                    "step": one.step.what,
                    "step_s": one.step.iteration_s,
                    "step_tokens": one.step.tokens,
                    "exchange_s": one.exchange_s,
                    "stall_s": one.stall_s,
                    "round_s": one.round_s,
                }
                for one in self.clusters
            ],
        }


def asynchronous_clusters(
    problem: Problem, sites: Sequence[int] | None = None, steps: Mapping[int, SystemAnswer] | None = None
) -> AsynchronousClusters:
    """Predict the clusters of a problem. sites: those that train; None: all. steps: inner_steps(), which is asked here
    where it is not given.

    Raises ConfigError for one site, and for a site that cannot hold the model."""
    setup = problem.setup
    trained_at = range(len(setup.sites)) if sites is None else sites
    if len(trained_at) < 2:
        raise ConfigError(f"{setup.file}: asynchronous clusters need at least two [[sites]]")
    known = inner_steps(problem) if steps is None else steps
    for number in trained_at:
        if number not in known:
            inner_step(problem, number)  # says why
    plans = [known[number] for number in trained_at]
    gbps = _bandwidths(problem, trained_at)
    servers, fastest = choose_server_site(gbps, [plan.tokens_per_s for plan in plans]).index, max(map(max, gbps))
    rounds = tuple(
        _round(problem, setup.sites[number], len(plans), plan, gbps[servers][at], fastest)
        for at, (number, plan) in enumerate(zip(trained_at, plans, strict=True))
    )
    return AsynchronousClusters(problem, setup.sites[trained_at[servers]].name, rounds)


def inner_steps(problem: Problem, systems: Sequence[System] = tuple(System)) -> dict[int, SystemAnswer]:
    """The inner step of each site that can hold the model."""
    alike, found = dict[str, SystemAnswer | None](), dict[int, SystemAnswer]()
    for number, site in enumerate(problem.setup.sites):
        kind = site.model_dump_json(exclude={"name", "source", "since", "stages"})  # others differ by names alone
        if kind not in alike:
            try:
                alike[kind] = inner_step(problem, number, systems)
            except ConfigError:
                alike[kind] = None
        if (step := alike[kind]) is not None:
            found[number] = step
    return found


def inner_step(problem: Problem, site: int, systems: Sequence[System] = tuple(System)) -> SystemAnswer:
    """The best inner step of a site alone. Raises ConfigError where it cannot hold the model."""
    setup, training = problem.setup, problem.setup.training
    whole = sum(one.devices for one in setup.sites)
    batch = max(1, round(training.microbatches * training.data * setup.sites[site].devices / whole))
    return best(problem, [site], batch, (System.CROSSPIPE, *systems), NEAR_SHARE)  # pipelines whatever is asked


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
    problem: Problem, site: Site, clusters: int, step: SystemAnswer, gbps: float, slave_gbps: float
) -> ClusterRound:
    """gbps: of the link to the servers. slave_gbps: of a slave's network card, as fast as anything in the file."""
    setup, assumed = problem.setup, problem.setup.asynchronous
    ranks = min(site.devices, MAX_RANKS)
    sizes = SizeTable(
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
            tokens_per_step=step.tokens,
            tokens_per_s=step.tokens_per_s,
        )
    )
    stall_s, exchange_s = sizes["stall_together_s"].value, sizes["exchange_together_s"].value
    return ClusterRound(site.name, step, sizes["compute_s"].value, exchange_s, stall_s)


def rounds_text(found: AsynchronousClusters) -> Sequence[str]:
    """One line for each cluster."""
    every = found.problem.setup.asynchronous.sync_every
    return [
        f"{one.site}: {one.step.what}; a step {one.step.iteration_s:.4g} s, a round of {every} steps "
        f"{one.round_s:.4g} s, of it {one.stall_s:.4g} s waiting; {one.tokens_per_s(every):,.0f} tokens/s"
        for one in found.clusters
    ]


# ---- what a token of clusters is worth -------------------------------------------------------------------------------


Losses = Mapping[str, float]
"""Of equal runs, by seed."""


@dataclass(frozen=True)
class MeasuredLosses:
    """Losses of one small model after equally many tokens, over H, and of data parallel over tokens."""

    source: str
    preset: str
    parameters: int
    clusters: int
    step_tokens: int  # of a cluster; data parallel's step has those of all clusters
    tokens: int  # of every run with local steps
    slow_link_steps: float  # of one cluster, which its push and pull take in the set-up slow-link
    data_parallel: Mapping[int, Losses]  # by the tokens of a whole run; the fewest first
    local_steps: Mapping[int, Losses]  # by H; the smallest first
    slow_link: Mapping[int, Losses]  # as local_steps, in the set-up slow-link

    def more_tokens(self, losses: Losses) -> dict[str, float]:
        """By seed: the tokens of these runs over those after which data parallel ends at the same loss.

        The learning rate of a run falls until its end, so that only ends of runs are compared. Between the ends of two
        the loss is a line over the logarithm of tokens.
        """
        return {seed: self.tokens / self._data_parallel_tokens(seed, loss) for seed, loss in losses.items()}

    def _data_parallel_tokens(self, seed: str, loss: float) -> float:
        ends = [(tokens, found[seed]) for tokens, found in self.data_parallel.items() if seed in found]
        for (fewer, above), (more, below) in pairwise(ends):
            if above >= loss >= below:
                return fewer * math.pow(more / fewer, (above - loss) / (above - below))
        raise ConfigError(
            f"no two measured runs of data parallel end around a loss of {loss:g}: it needs other lengths"
        )


@dataclass(frozen=True)
class MoreTokens:
    """How many times as many tokens as synchronous training clusters need for the same loss."""

    times: float  # mean of the seeds
    low: float
    high: float
    seeds: int = 0  # 0: the file says the number

    def to_json(self) -> dict[str, Any]:
        """With what was measured, and where it holds."""
        if not self.seeds:
            return {"more_tokens": self.times, "more_tokens_from": "[asynchronous] more_tokens"}
        was = measured_losses()
        return {
            "more_tokens": self.times,
            "more_tokens_low": self.low,
            "more_tokens_high": self.high,
            "more_tokens_from": {
                "source": was.source,
                "preset": was.preset,
                "parameters": was.parameters,
                "clusters": was.clusters,
                "step_tokens": was.step_tokens,
                "tokens": was.tokens,
                "sync_every": [min(was.local_steps), max(was.local_steps)],
                "seeds": self.seeds,
            },
        }


@cache
def measured_losses() -> MeasuredLosses:
    """The measurements that come with the planner."""
    with resources.as_file(resources.files("dips.planner") / "local_steps.toml") as file:
        tables = read_toml(file)
    over_h = {
        setup: {row["sync_every"]: row["losses"] for row in tables["local_steps"] if row["setup"] == setup}
        for setup in ("small", "slow-link")
    }
    return MeasuredLosses(
        **tables["measured"],
        data_parallel={row["tokens"]: row["losses"] for row in tables["data_parallel"]},
        local_steps=over_h["small"],
        slow_link=over_h["slow-link"],
    )


def more_tokens(assumed: Asynchronous) -> MoreTokens:
    """The file's number, or what was measured: exactly for a measured H, between two of them on a line over the
    logarithm of H, seed by seed.

    Raises ConfigError for another H: nothing says how the number goes on there.
    """
    if assumed.more_tokens is not None:
        return MoreTokens(assumed.more_tokens, assumed.more_tokens, assumed.more_tokens)
    was, every = measured_losses(), assumed.sync_every
    known = sorted(was.local_steps)
    if not known[0] <= every <= known[-1]:
        raise ConfigError(
            f"[asynchronous] sync_every = {every}: how many more tokens clusters need was measured for {known[0]} to "
            f"{known[-1]} only: give more_tokens, measured with your model"
        )
    below = max(steps for steps in known if steps <= every)
    above = min(steps for steps in known if steps >= every)
    part = math.log(every / below) / math.log(above / below) if above > below else 0.0
    fewer, more = was.more_tokens(was.local_steps[below]), was.more_tokens(was.local_steps[above])
    times = [(1 - part) * fewer[seed] + part * more[seed] for seed in fewer if seed in more]
    return MoreTokens(fmean(times), min(times), max(times), len(times))
