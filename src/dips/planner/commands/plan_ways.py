"""Compares the ways to use several sites, in tokens a day: one training over all or some of them, one site alone, or a
cluster at each of all or some of them under Di-PS.

Every set of sites is judged, with best() of dips.planner.commands.plan_best: what a set does together with the file's
batch, and what its clusters do, which is what the sites train alone, times the share that exchanges over the links
leave of it. A token of clusters counts for less than one of synchronous training, since they need more tokens for the
same loss (more_tokens() of dips.planner.commands.plan_clusters). Where nothing says how many more, clusters are not
compared.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from dips.core.errors import ConfigError
from dips.local.sizing import MUCH_OF_A_ROUND
from dips.planner.candidates import RefusedCandidate
from dips.planner.commands.plan_best import DECIDE_INSIDE, System, SystemAnswer, best, bound
from dips.planner.commands.plan_clusters import (
    AsynchronousClusters,
    MoreTokens,
    asynchronous_clusters,
    measured_losses,
    more_tokens,
)
from dips.planner.problem import Problem

DAY_S = 86_400

PIPELINE, CLUSTERS = "one pipeline over the sites", "separate clusters under Di-PS"

MOST_JUDGED = 8
"""Sites up to which every set of them is judged."""

SEARCH_S = 60.0
"""Time of a processor for the search among sets of sites; what was found until then is compared."""

NEAR = 0.1
"""Two ways that differ by less are said to: the numbers of a file are seldom better."""

Sites = tuple[int, ...]
"""A set of sites in the order of the file."""


@dataclass(frozen=True)
class SiteWay:
    """One way to use the sites."""

    name: str
    sites: Sites  # those that train
    how: str
    tokens_per_s: float
    synchronous: bool
    split: tuple[int, int, int] | None = None  # stages, replicas, microbatches, where the file says others
    trained_through: float = 0.0  # of the round of one cluster, the part in which it trains through an exchange

    @property
    def tokens_per_day(self) -> float:
        return self.tokens_per_s * DAY_S


@dataclass(frozen=True)
class SiteWays:
    """All ways that were judged, and which to take."""

    problem: Problem
    judged: tuple[SiteWay, ...]  # the best first
    impossible: tuple[RefusedCandidate, ...]
    more: MoreTokens | None  # None: unknown, and no clusters were judged
    unjudged: int = 0  # sets of sites that the search did not come to

    @property
    def take(self) -> SiteWay:
        return self.judged[0]

    @property
    def found(self) -> tuple[SiteWay, ...]:
        """What a reader compares, the best first: what to take, both ways of all sites, and the best site alone."""
        alone = next((way for way in self.judged if len(way.sites) == 1), None)
        return tuple(way for way in self.judged if way is self.take or way is alone or self.of_all(way))

    def of_all(self, way: SiteWay) -> bool:
        return len(way.sites) == len(self.problem.setup.sites)

    @property
    def rivals(self) -> tuple[SiteWay, SiteWay] | None:
        """The best clusters and the best synchronous way, where both were judged."""
        kinds = [next((way for way in self.judged if way.synchronous is kind), None) for kind in (False, True)]
        clusters, other = kinds
        return None if clusters is None or other is None else (clusters, other)

    @property
    def pays_up_to(self) -> float | None:
        """Times as many tokens, up to which clusters are the better way."""
        return None if self.rivals is None else self.rivals[0].tokens_per_s / self.rivals[1].tokens_per_s

    def counted(self, way: SiteWay) -> float:
        """Tokens a day, as those of synchronous training, which needs the fewest for a loss."""
        return _counted(way, self.more) * DAY_S

    def to_json(self) -> dict[str, Any]:
        return {
            "take": self._json(self.take),
            "why": list(reasons(self)),
            **({} if self.more is None else self.more.to_json()),
            "clusters_pay_up_to": self.pays_up_to,
            "judged": [self._json(way) for way in self.judged],
            "not_judged": self.unjudged,
            "not_possible": [{"way": no.name, "why": no.why} for no in self.impossible],
        }

    def _json(self, way: SiteWay) -> dict[str, Any]:
        stages, replicas, microbatches = way.split or (None, None, None)
        return {
            "way": way.name,
            "how": way.how,
            "sites": [self.problem.setup.sites[site].name for site in way.sites],
            "synchronous": way.synchronous,
            "tokens_per_day": way.tokens_per_day,
            "counted_tokens_per_day": self.counted(way),
            "pipeline": stages,
            "data": replicas,
            "microbatches": microbatches,
        }


def _counted(way: SiteWay, more: MoreTokens | None) -> float:
    """Tokens a second, as those of synchronous training."""
    return way.tokens_per_s / (1.0 if way.synchronous or more is None else more.times)


def compare_ways(
    problem: Problem,
    together: SystemAnswer | None,
    steps: Mapping[int, SystemAnswer],
    refused: Iterable[RefusedCandidate],
    systems: Sequence[System] = tuple(System),
    say: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.process_time,
) -> SiteWays | None:
    """Compare the ways of a problem with several sites. together: the best that is known for all of them; steps: the
    inner step of each site that can be a cluster; refused: why a way of all sites is not there; say: is told what is
    judged. None where no way is possible."""
    impossible = list(refused)
    more: MoreTokens | None = None
    try:
        more = more_tokens(problem.setup.asynchronous)
    except ConfigError as error:
        steps, impossible = {}, [*impossible, RefusedCandidate(CLUSTERS, f"{problem.setup.file} {error}")]
    search = _Search(problem, steps, more, systems, say, clock)
    if together is not None:
        search.add(search.together_way(search.all, together))
    search.run()
    if not search.judged:
        return None
    if any(way.synchronous and way.sites == search.all for way in search.judged):
        impossible = [no for no in impossible if no.name != PIPELINE]
    ranked = sorted(search.judged, key=lambda way: -_counted(way, more))
    return SiteWays(problem, tuple(ranked), tuple(impossible), more, search.unjudged)


class _Search:
    """Judges sets of sites: those of one first, then those that could be better than the best so far."""

    def __init__(
        self,
        problem: Problem,
        steps: Mapping[int, SystemAnswer],
        more: MoreTokens | None,
        systems: Sequence[System],
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._problem, self._steps, self._systems, self._say, self._clock = problem, steps, systems, say, clock
        self._more = more
        training = problem.setup.training
        self._batch = training.microbatches * training.data
        self._ends_s = clock() + SEARCH_S
        self._seen: set[Sites] = set()
        self.all: Sites = tuple(range(len(problem.setup.sites)))
        self.judged: list[SiteWay] = []
        self.unjudged = 0
        self._best = 0.0  # of a second, counted

    def run(self) -> None:
        first, *others = sorted(((site,) for site in self.all), key=lambda sites: -max(self._bounds(sites)))
        self._judge(first, surely=True)
        self._judge_all(others)
        self._judge(self.all, surely=True)
        if len(self.all) <= MOST_JUDGED:
            sizes = range(2, len(self.all))
            self._judge_all(sites for size in sizes for sites in combinations(self.all, size))
            return
        # From the best set so far to the best of those with one site more or less, as long as that is better.
        while True:
            before, at = self._best, max(self.judged, key=lambda way: _counted(way, self._more), default=None)
            if at is None:
                return
            self._judge_all(tuple(sorted({*at.sites} ^ {site})) for site in self.all)
            if self._best <= before:
                return

    def _judge_all(self, sets: Iterable[Sites]) -> None:
        """Judge the most promising first, until no other can be better."""
        bounds = [(max(self._bounds(sites)), sites) for sites in sets if sites and sites not in self._seen]
        for _, sites in sorted(bounds, reverse=True):
            self._judge(sites)

    def _bounds(self, sites: Sites) -> tuple[float, float]:
        """What the sites cannot exceed together, and as clusters, in counted tokens a second."""
        clusters = len(sites) > 1 and all(site in self._steps for site in sites)
        apart = sum(self._steps[site].tokens_per_s for site in sites) if clusters else 0.0
        synchronous = any(system is not System.DIPS for system in self._systems)
        together = bound(self._problem, sites, self._batch) if synchronous else 0.0
        return together, apart / (1.0 if self._more is None else self._more.times)

    def _judge(self, sites: Sites, surely: bool = False) -> None:
        """surely: also where another set is better, or the search has ended."""
        together, apart = self._bounds(sites)
        self._seen.add(sites)
        if not surely and max(together, apart) <= self._best:
            return
        if not surely and self._clock() > self._ends_s:
            self.unjudged += 1
            return
        self._say(f"judging {self._names(sites)}")
        with contextlib.suppress(ConfigError):  # no link to the servers at any of these sites
            if apart and (surely or apart > self._best):
                found = asynchronous_clusters(self._problem, sites, self._steps)
                self.add(clusters_way(found, sites, self._name(sites, synchronous=False)))
        with contextlib.suppress(ConfigError):  # a reason is told for all sites; others need not be able to train
            if together and (surely or together > self._best):
                # The systems that choose more than pipelines were asked for all sites.
                asked = [one for one in self._systems if sites != self.all or one not in DECIDE_INSIDE]
                self.add(self.together_way(sites, best(self._problem, sites, self._batch, asked)))

    def add(self, way: SiteWay) -> None:
        """Keep a way, but one of the same sites and kind that is not better."""
        same = next((one for one in self.judged if (one.sites, one.synchronous) == (way.sites, way.synchronous)), None)
        if same is not None and same.tokens_per_s >= way.tokens_per_s:
            return
        self.judged = [one for one in self.judged if one is not same] + [way]
        self._best = max(self._best, _counted(way, self._more))

    def together_way(self, sites: Sites, plan: SystemAnswer) -> SiteWay:
        training = self._problem.setup.training
        same = plan.split == (training.pipeline, training.data, training.microbatches) and sites == self.all
        how = plan.what if plan.system is System.CROSSPIPE else f"{plan.system.value}: {plan.what}"
        split = None if same else plan.split
        return SiteWay(self._name(sites, synchronous=True), sites, how, plan.tokens_per_s, True, split)

    def _name(self, sites: Sites, synchronous: bool) -> str:
        if sites == self.all:
            return PIPELINE if synchronous else CLUSTERS
        if len(sites) == 1:
            return f"{self._names(sites)} alone"
        return f"{'one pipeline over' if synchronous else 'clusters at'} {self._names(sites)}"

    def _names(self, sites: Sites) -> str:
        return listed([self._problem.setup.sites[site].name for site in sites])


def clusters_way(found: AsynchronousClusters, sites: Sites, name: str = CLUSTERS) -> SiteWay:
    """The way that trains in clusters at these sites."""
    how = (
        f"{len(found.clusters)} clusters, H {found.problem.setup.asynchronous.sync_every}, servers at "
        f"{found.servers_at}, exchanges leave {found.share_of_ideal:.1%}"
    )
    through = max((one.exchange_s - one.stall_s) / one.round_s for one in found.clusters)
    return SiteWay(name, sites, how, found.tokens_per_s, False, trained_through=through)


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


# ---- text ------------------------------------------------------------------------------------------------------------


def tokens_text(tokens: float) -> str:
    """35014377600 -> "35 billion"; three digits."""
    for size, word in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if tokens >= size * 0.9995:
            scaled = tokens / size
            return f"{scaled:,.0f}{word}" if scaled >= 99.95 else f"{scaled:.3g}{word}"
    return f"{tokens:,.0f}"


def take_text(ways: SiteWays) -> str:
    """What to take, in tokens a day, what the others would give, and where the worth of clusters' tokens is from."""
    more = ways.more

    def given(way: SiteWay) -> str:
        text = f"{tokens_text(way.tokens_per_day)}{{}}"
        if way.synchronous or more is None:
            return text
        low, high = (tokens_text(way.tokens_per_day / times) for times in (more.high, more.low))
        spread = f"; {low} to {high} over seeds" if more.seeds else ""
        return f"{text} (worth {tokens_text(ways.counted(way))}{spread})"

    take, *others = ways.found
    text = f"take: {take.name}, {given(take).format(' tokens a day')}"
    for number, way in enumerate(others):
        verb = "" if number else " give" if not way.synchronous else " gives"
        text += f"{', ' if number else '; '}{way.name}{verb} {given(way).format('')}"
    if more is None:
        text += f"; {CLUSTERS} are not compared, as sync_every is outside of what was measured"
    elif not all(way.synchronous for way in ways.found):
        was, own = measured_losses(), ways.problem.setup.model.parameters()
        measured = (
            f"measured at {was.parameters / 1e6:.2g} million parameters, H {min(was.local_steps)} to "
            f"{max(was.local_steps)}; not at your {tokens_text(own)}"
        )
        text += f"; worth: {measured if more.seeds else 'by more_tokens of the file'}"
    return text


def _worth(ways: SiteWays) -> Iterator[str]:
    """What clusters' tokens are worth, and from which number on another way would be taken."""
    if ways.more is None or ways.rivals is None or ways.pays_up_to is None:
        return
    more, was, (clusters, other) = ways.more, measured_losses(), ways.rivals
    many = "tokens are not worth the same: for the same loss clusters need"
    if more.seeds:
        yield (
            f"{many} {more.times:.2f} times as many as a pipeline at H {ways.problem.setup.asynchronous.sync_every} "
            f"({more.low:.2f} to {more.high:.2f} over {more.seeds} seeds)"
        )
        yield (
            f"that was measured with AdamW, {was.clusters} clusters, steps of {was.step_tokens} tokens and runs of "
            f"{was.tokens:,}; larger models, larger batches and longer runs were not"
        )
    else:
        yield f"{many} {more.times:g} times as many as a pipeline, by the file ([asynchronous] more_tokens)"
    if ways.pays_up_to < 1:
        text = f"{clusters.name} are behind {other.name} even if their tokens are worth the same"
    else:
        text = f"{clusters.name} are ahead of {other.name} up to {ways.pays_up_to:.2f} times as many"
        if more.seeds and more.low <= ways.pays_up_to <= more.high:
            text += ", so that seeds of the small model disagree about what to take"
    yield text + (": measure it with your model, and give it as [asynchronous] more_tokens" if more.seeds else "")
    if more.seeds and clusters.trained_through > MUCH_OF_A_ROUND:
        ((every, losses),) = was.slow_link.items()
        times = was.more_tokens(losses).values()
        yield (
            f"clusters train through exchanges for {clusters.trained_through:.0%} of a round, and what that costs is "
            f"not in this number: where transfers of one of {was.clusters} took {was.slow_link_steps:g} steps, at H "
            f"{every}, clusters needed {min(times):.2f} to {max(times):.2f} times as many; a smaller wire shortens them"
        )


def reasons(ways: SiteWays) -> Iterator[str]:
    """Why, and what is assumed, as sentences without a full stop."""
    take, setup = ways.take, ways.problem.setup
    if len({way.synchronous for way in ways.found}) > 1:
        yield from _worth(ways)
    if len(ways.found) > 1 and (ahead := ways.counted(take) / ways.counted(ways.found[1]) - 1) < NEAR:
        yield (
            f"{take.name} and {ways.found[1].name} differ by {ahead:.1%}, less than such numbers are sure: measure both"
        )
    names = [site.name for number, site in enumerate(setup.sites) if number not in take.sites]
    if names:
        one = len(names) == 1
        cost = "costs more than it brings: remove its" if one else "cost more than they bring: remove their"
        yield f"{listed(names)} {cost} [[sites]] and [[links]] from the file"
    if take.split is not None:
        stages, replicas, microbatches = take.split
        training = setup.training
        yield (
            f"in [training] give pipeline = {stages}, data = {replicas}, microbatches = {microbatches} (the file has "
            f"{training.pipeline}, {training.data}, {training.microbatches})"
            f"{', remove stages from [[sites]]' if any(site.stages for site in setup.sites) else ''}, and plan again"
        )
    whole = next((way for way in ways.judged if way.synchronous and ways.of_all(way) and way.split is not None), None)
    if whole is not None and whole is not take and whole.split is not None:
        yield (
            f"over all sites {whole.split[0]} x {whole.split[1]} stages x replicas take less time than the file's "
            f"{setup.training.pipeline} x {setup.training.data}"
        )
    if ways.unjudged:
        yield f"the search ended after {SEARCH_S:g} s: {ways.unjudged} sets of sites were not judged"
    elif len(setup.sites) > MOST_JUDGED:
        yield f"of more than {MOST_JUDGED} sites not every set is judged: a better one may exist"
    if any(not way.synchronous for way in ways.found):
        assumed = setup.asynchronous
        yield (
            f"clusters: sync_every {assumed.sync_every}, overlap {assumed.overlap}, wire {assumed.wire}, "
            f"{assumed.slaves} slaves ([asynchronous]), and all exchange at the same time"
        )
