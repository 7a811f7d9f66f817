"""Plans whole pipelines at several places: groups of sites with a part of the replicas each, which exchange gradients.

With one group for each site this is data parallelism across sites (CrossPipe, arXiv:2507.00217, appendix E); with
fewer, a pipeline crosses the sites of its group. Stages of equal position exchange over the links between their
sites, in a ring: among k groups an all-gather or a reduce-scatter sends (k - 1) / k of the weights over each link.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dips.planner.candidates import Candidate, those_that_fit
from dips.planner.cluster import ClusterFile, Link, Site
from dips.planner.errors import PlanError
from dips.planner.problem import Problem, ReplicaRing

STATIC_AND_GREEDY = ("1f1b", "zb_h1", "zb_v", "cross_ud/1")


def data_parallel(problem: Problem, names: Iterable[str] = STATIC_AND_GREEDY) -> Candidate:
    """The best of these schedules with a whole pipeline at each site. Raises PlanError when sites cannot hold that."""
    if len(problem.setup.sites) < 2:
        raise PlanError("whole pipelines at several sites need at least two of them")
    best = min(those_that_fit(regrouped(problem, len(problem.setup.sites)), names), key=lambda c: c.makespan_ns)
    return replace(best, name=f"dp/{best.name}")


def regrouped(problem: Problem, groups: int) -> Problem:
    """The problem of one replica, where each group of neighbouring sites holds whole pipelines; 1 group: unchanged.

    A site of the new problem is all those of one position in their groups, with the least speed and memory of them.
    Raises PlanError where sites or replicas do not divide so.
    """
    setup, k = problem.setup, len(problem.setup.sites)
    training = setup.training
    if groups == 1:
        return problem
    if k % groups or training.data % groups:
        raise PlanError(
            f"data = {training.data} does not divide among {groups} {'sites' if groups == k else 'groups of sites'}: "
            "each takes as many replicas"
        )
    width = k // groups
    members = [tuple(position + group * width for group in range(groups)) for position in range(width)]
    needed = training.pipeline * setup.devices_of_a_stage // groups
    for group in range(groups):
        places = setup.sites[group * width : group * width + width]
        have = sum(site.devices for site in places)
        if have < needed:
            raise PlanError(
                f"{' and '.join(site.name for site in places)} has {have} devices, an equal share of the replicas "
                f"needs {needed}"
            )
    sites = tuple(_together([setup.sites[index] for index in each], width == 1) for each in members)
    inner = replace(setup, sites=sites, links=tuple(_links(setup, members, sites)))
    return replace(problem, setup=inner, rings=tuple(_ring(setup, each) for each in members))


def _together(sites: Sequence[Site], alone: bool) -> Site:
    """All sites of one position as one site. alone: there is no other position, so it takes all stages."""
    networks = [site.network_gbps for site in sites if site.network_gbps is not None]
    return sites[0].model_copy(
        update={
            "name": " / ".join(site.name for site in sites),
            "devices": len(sites) * min(site.devices for site in sites),
            "memory_gib": min((s.memory_gib for s in sites if s.memory_gib is not None), default=None),
            "sustained_tflops": min(
                (s.sustained_tflops for s in sites if s.sustained_tflops is not None), default=None
            ),
            "network_gbps": min(networks, default=None),
            "network_latency_us": max(site.network_latency_us for site in sites),
            "stages": 0 if alone or not all(site.stages for site in sites) else sites[0].stages,
        }
    )


def _links(setup: ClusterFile, members: Sequence[Sequence[int]], sites: Sequence[Site]) -> Iterable[Link]:
    """The links between positions: the least bandwidth and the longest latency of the groups' links."""
    for here, senders in enumerate(members):
        for there, receivers in enumerate(members):
            pairs = zip(senders, receivers, strict=True)
            if here != there and (found := _slowest(setup, list(pairs))) is not None:
                yield found.model_copy(
                    update={"sender": sites[here].name, "receiver": sites[there].name, "both_ways": False}
                )


def _slowest(setup: ClusterFile, pairs: Sequence[tuple[int, int]]) -> Link | None:
    """The slowest of the links; None when a group has no such link, which only matters where stages there are
    neighbours."""
    try:
        found = [setup.link(setup.sites[a].name, setup.sites[b].name) for a, b in pairs]
    except PlanError:
        return None
    latency_ms = max(link.latency_ms for link in found)
    return min(found, key=lambda link: link.bytes_per_s).model_copy(update={"latency_ms": latency_ms})


def _ring(setup: ClusterFile, members: tuple[int, ...]) -> ReplicaRing:
    pairs = zip(members, (*members[1:], members[0]), strict=True)
    links = [setup.link(setup.sites[a].name, setup.sites[b].name) for a, b in pairs]
    return ReplicaRing(members, min(link.bytes_per_s for link in links), max(link.latency_ms for link in links) / 1e3)
