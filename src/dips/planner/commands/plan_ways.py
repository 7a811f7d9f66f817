"""Compares the ways to use several sites, in tokens a day: one pipeline over them, a cluster at each of them under
Di-PS, or one of these two without the site that costs more than it brings.

A pipeline is the best that is found, of the file's own split and of all others of the same batch. Clusters are those of
dips.planner.commands.plan_clusters: what the sites train alone, times the share that exchanges over the links leave of
it. A token of clusters counts for less than one of a pipeline, since they need more tokens for the same loss: how many
more is an assumption of the file (`[asynchronous] more_tokens`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dips.planner.commands.plan_clusters import INSIDE_A_SITE, AsynchronousClusters, asynchronous_clusters, best_split
from dips.planner.errors import PlanError
from dips.planner.plan import Plan
from dips.planner.problem import Problem

DAY_S = 86_400

PIPELINE, CLUSTERS = "one pipeline over the sites", "separate clusters under Di-PS"

QUICK = ("1f1b", "zb_h1", "zb_v", "cross_ud/1", "cross_wave")
"""The schedules of a pipeline whose stages and replicas are searched for; the best of them is within a few percent of
the best of all."""

MOST_MESSAGES_TRIED = 1 << 15
"""Stages x microbatches x replicas up to which splits are searched for: larger ones take long."""

MOST_LEFT_OUT = 8
"""Sites up to which each is left out once."""

NEAR = 0.1
"""Two ways that differ by less are said to: the numbers of a file are seldom better."""


@dataclass(frozen=True)
class SiteWay:
    """One way to use the sites."""

    how: str
    tokens_per_s: float
    synchronous: bool
    without: str = ""  # the site that is left out; empty: none
    split: tuple[int, int, int] | None = None  # stages, replicas, microbatches, where the file says others

    @property
    def name(self) -> str:
        if self.without:
            return f"without {self.without}"
        return PIPELINE if self.synchronous else CLUSTERS

    @property
    def tokens_per_day(self) -> float:
        return self.tokens_per_s * DAY_S

    def counted_per_day(self, more_tokens: float) -> float:
        """As tokens of synchronous training, which needs the fewest for a loss."""
        return self.tokens_per_day / (1.0 if self.synchronous else more_tokens)

    def to_json(self, more_tokens: float) -> dict[str, Any]:
        stages, replicas, microbatches = self.split or (None, None, None)
        return {
            "way": self.name,
            "how": self.how,
            "without": self.without or None,
            "synchronous": self.synchronous,
            "tokens_per_day": self.tokens_per_day,
            "counted_tokens_per_day": self.counted_per_day(more_tokens),
            "pipeline": stages,
            "data": replicas,
            "microbatches": microbatches,
        }


@dataclass(frozen=True)
class NoWay:
    """A way that is not possible, and the reason as a sentence."""

    name: str
    why: str


@dataclass(frozen=True)
class SiteWays:
    """All ways that are possible, and which to take."""

    problem: Problem
    found: tuple[SiteWay, ...]  # those of all sites, and the best one without a site; the best first
    left_out: tuple[SiteWay, ...]  # for each site the best way without it, the best first
    impossible: tuple[NoWay, ...]

    @property
    def take(self) -> SiteWay:
        return self.found[0]

    @property
    def more_tokens(self) -> float:
        return self.problem.setup.asynchronous.more_tokens

    def counted(self, way: SiteWay) -> float:
        return way.counted_per_day(self.more_tokens)

    def to_json(self) -> dict[str, Any]:
        return {
            "take": self.take.to_json(self.more_tokens),
            "why": list(reasons(self)),
            "more_tokens": self.more_tokens,
            "found": [way.to_json(self.more_tokens) for way in self.found],
            "left_out": [way.to_json(self.more_tokens) for way in self.left_out],
            "not_possible": [{"way": no.name, "why": no.why} for no in self.impossible],
        }


def compare_ways(
    problem: Problem, together: SiteWay | None, apart: AsynchronousClusters | None, refused: Iterable[NoWay]
) -> SiteWays | None:
    """Compare the ways of a problem with several sites. together: the best pipeline that is known; apart: the clusters;
    refused: why one of them is not there. None where no way is possible."""
    n, more, impossible = len(problem.setup.sites), problem.setup.asynchronous.more_tokens, list(refused)
    try:
        searched = pipeline_over(problem, range(n))
        if together is None or searched.tokens_per_s > together.tokens_per_s:
            together = searched
            impossible = [no for no in impossible if no.name != PIPELINE]
    except PlanError:
        pass  # the file's own split is the only one
    known = {site: cluster.plan for site, cluster in enumerate(apart.clusters if apart is not None else ())}
    left_out: list[SiteWay] = []
    for site in range(n) if n <= MOST_LEFT_OUT else ():
        try:
            left_out.append(best_without(problem, site, known))
        except PlanError as error:
            impossible.append(NoWay(f"without {problem.setup.sites[site].name}", str(error)))
    if n > MOST_LEFT_OUT:
        impossible.append(NoWay("without a site", f"not tried for more than {MOST_LEFT_OUT} sites"))
    left_out.sort(key=lambda way: -way.counted_per_day(more))
    of_clusters = None if apart is None else clusters_way(apart)
    found = [way for way in (together, of_clusters, *left_out[:1]) if way is not None]
    if not found:
        return None
    found.sort(key=lambda way: -way.counted_per_day(more))
    return SiteWays(problem, tuple(found), tuple(left_out), tuple(impossible))


def pipeline_over(problem: Problem, sites: Sequence[int]) -> SiteWay:
    """The best pipeline over these sites, which take the whole batch. Raises PlanError."""
    training, asked = problem.setup.training, problem.setup.options.schedules
    names: Sequence[str] = [name for name in QUICK if name in asked or not asked] or QUICK
    if len(sites) == 1:
        names = INSIDE_A_SITE
    batch = training.microbatches * training.data
    plan = best_split(problem, sites, batch, names, MOST_MESSAGES_TRIED)
    found, tokens = plan.problem.setup.training, batch * training.microbatch_sequences * training.sequence_tokens
    split = found.pipeline, found.data, found.microbatches
    same = split == (training.pipeline, training.data, training.microbatches)
    without = _without(problem, sites)
    how = f"{_sites_of(problem, sites)}{plan.chosen.name}, {_split_text(plan)}"
    return SiteWay(how, tokens / plan.chosen.iteration_s, True, without, None if same else split)


def _split_text(plan: Plan) -> str:
    training, groups = plan.problem.setup.training, plan.problem.groups
    whole = ", whole pipelines at each site" if groups > 1 else ""
    replicas = "1 replica" if training.data == 1 else f"{training.data} replicas"
    return f"{training.pipeline} stages x {replicas}{whole}"


def clusters_way(found: AsynchronousClusters, sites: Sequence[int] | None = None) -> SiteWay:
    """The way that trains in clusters. sites: those that train; None: all."""
    problem = found.problem
    without = "" if sites is None else _without(problem, sites)
    how = (
        f"{len(found.clusters)} clusters, H {problem.setup.asynchronous.sync_every}, servers at {found.servers_at}, "
        f"exchanges leave {found.share_of_ideal:.1%}"
    )
    return SiteWay(how, found.tokens_per_s, False, without)


def best_without(problem: Problem, site: int, known: Mapping[int, Plan]) -> SiteWay:
    """The best way without a site. known: the plans of clusters.

    Raises PlanError, with the reason of the pipeline, where there is none."""
    rest = [number for number in range(len(problem.setup.sites)) if number != site]
    ways, why = list[SiteWay](), PlanError("")
    try:
        ways.append(pipeline_over(problem, rest))
    except PlanError as error:
        why = error
    try:
        if len(rest) > 1:
            ways.append(clusters_way(asynchronous_clusters(problem, rest, known), rest))
    except PlanError:
        pass  # the pipeline's reason says as much
    if not ways:
        raise why
    return max(ways, key=lambda way: way.counted_per_day(problem.setup.asynchronous.more_tokens))


def _without(problem: Problem, sites: Sequence[int]) -> str:
    return next((site.name for number, site in enumerate(problem.setup.sites) if number not in sites), "")


def _sites_of(problem: Problem, sites: Sequence[int]) -> str:
    """Who trains, where that is not each site."""
    if len(sites) == len(problem.setup.sites):
        return ""
    return f"{' and '.join(problem.setup.sites[number].name for number in sites)}: "


# ---- text ------------------------------------------------------------------------------------------------------------


def tokens_text(tokens: float) -> str:
    """35014377600 -> "35 billion"; three digits."""
    for size, word in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if tokens >= size * 0.9995:
            scaled = tokens / size
            return f"{scaled:,.0f}{word}" if scaled >= 99.95 else f"{scaled:.3g}{word}"
    return f"{tokens:,.0f}"


def take_text(ways: SiteWays) -> str:
    """What to take, in tokens a day, and what the others would give."""

    def given(way: SiteWay) -> str:
        worth = "" if way.synchronous else f" (worth {tokens_text(ways.counted(way))})"
        return f"{tokens_text(way.tokens_per_day)}{{}}{worth}"

    take, *others = ways.found
    text = f"take: {take.name}, {given(take).format(' tokens a day')}"
    for number, way in enumerate(others):
        verb = "" if number else " give" if way.name == CLUSTERS else " gives"
        text += f"{', ' if number else '; '}{way.name}{verb} {given(way).format('')}"
    return text


def reasons(ways: SiteWays) -> Iterator[str]:
    """Why, and what is assumed, as sentences without a full stop."""
    take, setup = ways.take, ways.problem.setup
    if len({way.synchronous for way in ways.found}) > 1:
        yield (
            "tokens are not worth the same: clusters need more of them than a pipeline for the same loss, by the file "
            f"{ways.more_tokens:g} times as many ([asynchronous] more_tokens), which is assumed: measure it with your "
            "model"
        )
    if len(ways.found) > 1 and (ahead := ways.counted(take) / ways.counted(ways.found[1]) - 1) < NEAR:
        yield (
            f"{take.name} and {ways.found[1].name} differ by {ahead:.1%}, less than such numbers are sure: measure both"
        )
    if take.without:
        yield f"{take.without} costs more than it brings: remove its [[sites]] and [[links]] from the file"
    if take.split is not None:
        stages, replicas, microbatches = take.split
        training = setup.training
        yield (
            f"in [training] give pipeline = {stages}, data = {replicas}, microbatches = {microbatches} (the file has "
            f"{training.pipeline}, {training.data}, {training.microbatches})"
            f"{', remove stages from [[sites]]' if any(site.stages for site in setup.sites) else ''}, and plan again"
        )
    if any(not way.synchronous for way in ways.found):
        assumed = setup.asynchronous
        yield (
            f"clusters: sync_every {assumed.sync_every}, overlap {assumed.overlap}, wire {assumed.wire}, "
            f"{assumed.slaves} slaves ([asynchronous]), and all exchange at the same time"
        )
