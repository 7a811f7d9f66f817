"""Groups the devices of a problem on two levels, by their network and by their speed (SpanTrain, section 3.2).

First level: devices that messages reach quickly. Second level, inside each of these groups: devices of about the same
speed. Both merge step by step, always the two groups that are nearest, until the nearest are too far apart; only what
is left at the end counts. The same measurements give the same groups.

What the paper prints cannot be computed as it stands. Repaired:

* Section 3.2.1: p_t = alpha + beta / m, where alpha is the time of a large message, beta that of a small one, and m the
  bytes of the large one, adds seconds to seconds for each byte. Here time(m) = alpha + m / bandwidth, alpha being the
  latency, both as measured, and m one microbatch's message of this problem. A pair's time is the mean of both ways.
* Section 3.2.2, step 1: a max-heap of p_t would begin with the slowest pair. Here the pair with the least time is next.
* Section 3.2.2, step 2: groups merge when "the difference between their network capability values" is below a
  threshold, but only pairs have such a value. Here it is the mean time of a message between the devices of the two
  groups, less the time inside of one device, which is 0. (A difference to the time inside of the groups would part
  the servers of setting 2, section 4.1: inside of a server messages are far faster than between them.)
* Section 3.2.1: p_c = sum of w_i / t_i has no weights and no tasks. Here the tasks are the model's layers as profiled,
  t_i the time of one microbatch in layer i, forward and backward, and w_i = 1 / layers. Where no layers were profiled
  the one task is an operation: p_c = sustained_tflops.
* Section 3.2.2 has no threshold for either level: see THRESHOLD_GBPS and ALIKE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import Any, NamedTuple

from dips.core.errors import ConfigError
from dips.planner.cluster import ClusterFile, layer_times_ms
from dips.planner.problem import Problem

THRESHOLD_GBPS = 0.25
"""Groups merge where a message goes at this rate or faster, latency counted. Chosen from what the paper sets apart (0.1
Gbit/s, setting 1) and what it does not (0.5 Gbit/s, setting 2)."""

ALIKE = 0.12
"""Subgroups merge where one is faster by this part at most. Two measurements of equal devices, each off by 5 %, differ
by 1.05 / 0.95 - 1 = 10.5 %."""

MOST_PARTS = 256
"""The largest number of devices and of sites whose devices are one, which are compared pair by pair."""

ROUNDING = 1e-9
"""The part by which a number may exceed a threshold that it is equal to, but for rounding."""


@dataclass(frozen=True)
class Measured:
    """What was measured of the devices. Those of one site are equal."""

    file: str
    sites: tuple[str, ...]  # their names
    devices: tuple[int, ...]  # of each site
    # times_s[a][b]: of one message between a device of site a and one of site b; of [a][a]: between two devices of a
    times_s: tuple[tuple[float, ...], ...]
    powers: tuple[float, ...]  # p_c of a device of each site
    power_unit: str
    message_bytes: float

    def gbps(self, time_s: float) -> float:
        """The rate of a message that takes so long."""
        return self.message_bytes * 8 / 1e9 / time_s if time_s else math.inf


class GroupPart(NamedTuple):
    """Devices of one site, all in the same group."""

    site: int
    devices: int


Parts = tuple[GroupPart, ...]


class MergeStep(NamedTuple):
    """A merge that was made, or refused at the end."""

    left: Parts
    right: Parts  # empty: the devices of `left`, all of one site, with each other
    apart: float  # first level: the mean time between them; second level: the part by which one is faster
    merged: bool


class Subgroup(NamedTuple):
    """Devices of about the same speed, in one group."""

    parts: Parts
    power: float  # of a device, on average


@dataclass(frozen=True)
class Group:
    """Devices with a fast network between them."""

    subgroups: tuple[Subgroup, ...]
    steps: tuple[MergeStep, ...]  # how the subgroups were made

    @property
    def parts(self) -> Parts:
        return tuple(sorted(part for subgroup in self.subgroups for part in subgroup.parts))

    @property
    def devices(self) -> int:
        return sum(part.devices for part in self.parts)


class Margin(NamedTuple):
    """How far measurements may be off before groups can change."""

    error: float  # of each measurement, as a part of it; 0: a pair is on the other side of a threshold than its groups
    level: int  # 1 or 2: where the pair is that decides
    pair: tuple[int, int]  # its sites


@dataclass(frozen=True)
class Grouping:
    """The groups, and how they were made."""

    measured: Measured
    threshold_gbps: float
    alike: float
    groups: tuple[Group, ...]
    steps: tuple[MergeStep, ...]  # of the first level
    margins: tuple[Margin, ...]  # the least of each level; none where it has one device alone


# ---- what was measured -----------------------------------------------------------------------------------------------


def measured_of(setup: ClusterFile) -> Measured:
    """The measurements of a problem. Raises ConfigError for a pair of sites without a link, and for a device without
    times and rate."""
    message_bytes = Problem(setup).message_bytes
    times_s = [[0.0] * len(setup.sites) for _ in setup.sites]
    for a, site in enumerate(setup.sites):
        gbps = site.network_gbps
        times_s[a][a] = site.network_latency_us / 1e6 + (message_bytes * 8 / 1e9 / gbps if gbps else 0.0)
    for a, b in combinations(range(len(setup.sites)), 2):
        ends = setup.sites[a].name, setup.sites[b].name
        ways = [setup.link(*pair, "which groups need of every pair of sites") for pair in (ends, ends[::-1])]
        mean_s = math.fsum(link.latency_ms / 1e3 + message_bytes / link.bytes_per_s for link in ways) / 2
        times_s[a][b] = times_s[b][a] = mean_s
    profiled = setup.profile is not None and bool(setup.profile.layers)
    return Measured(
        file=setup.file,
        sites=tuple(site.name for site in setup.sites),
        devices=tuple(site.devices for site in setup.sites),
        times_s=tuple(map(tuple, times_s)),
        powers=tuple((_profiled if profiled else _stated)(setup, site) for site in range(len(setup.sites))),
        power_unit="layers/s" if profiled else "TFLOP/s",
        message_bytes=message_bytes,
    )


def _profiled(setup: ClusterFile, site: int) -> float:
    """p_c of a device by the times of its layers; rows of an embedding or output layer alone do not count."""
    rows = layer_times_ms(setup, site)
    first = int(setup.training.extra_layers >= 1)
    layers = rows[first : first + setup.model.layers]
    return math.fsum(1e3 / sum(times_ms) for times_ms in layers) / len(layers)


def _stated(setup: ClusterFile, site: int) -> float:
    given = setup.sites[site].sustained_tflops
    if given is None:
        raise ConfigError(
            f"{setup.file} [[sites]] {site + 1}: sustained_tflops of {setup.sites[site].name} is not given, and no "
            f"[profile] has times of layers: give it, or measure them with dips profile device {setup.file}"
        )
    return given


# ---- groups ----------------------------------------------------------------------------------------------------------


def group(measured: Measured, threshold_gbps: float = THRESHOLD_GBPS, alike: float = ALIKE) -> Grouping:
    """Group the devices. alike: the part by which devices of one subgroup may be faster. Raises ConfigError for too
    many devices whose own networks are slow."""
    limit_s = measured.message_bytes * 8 / 1e9 / threshold_gbps
    parts, inside = _first_parts(measured, limit_s)

    def time_s(left: Parts, right: Parts) -> float:
        whole = math.fsum(a.devices * b.devices * measured.times_s[a.site][b.site] for a in left for b in right)
        return whole / (devices_in(left) * devices_in(right))

    found, steps = _merged(parts, time_s, limit_s)
    groups = tuple(_divided(measured, parts, alike) for parts in found)
    margins = sorted(_margins(measured, groups, limit_s, 1 + alike))
    least = {margin.level: margin for margin in reversed(margins)}
    return Grouping(
        measured, threshold_gbps, alike, groups, (*inside, *steps), tuple(least[level] for level in sorted(least))
    )


def _first_parts(measured: Measured, limit_s: float) -> tuple[list[GroupPart], list[MergeStep]]:
    """What the first level begins with: devices. Those of one site are one part from the beginning where they would
    merge before anything else: their own network is within the threshold, and no slower than the site's links."""
    parts, steps = [], []
    for site, (count, times_s) in enumerate(zip(measured.devices, measured.times_s, strict=True)):
        own_s = times_s[site]
        if count > 1 and _within(own_s, limit_s) and own_s <= min(times_s):
            parts.append(GroupPart(site, count))
            steps.append(MergeStep((GroupPart(site, count),), (), own_s, True))
        elif len(parts) + count > MOST_PARTS:
            raise ConfigError(
                f"{measured.file} [[sites]] {site + 1}: devices = {count}, and their network is slower than the "
                f"threshold or than their links: at most {MOST_PARTS} can be compared pair by pair: give fewer, or a "
                "lower --threshold"
            )
        else:
            parts += [GroupPart(site, 1)] * count
    return parts, steps


def _divided(measured: Measured, parts: Parts, alike: float) -> Group:
    """A group of the first level, divided into subgroups."""
    sites = sorted({part.site for part in parts})
    counts = [GroupPart(site, devices_in(tuple(part for part in parts if part.site == site))) for site in sites]

    def power(some: Parts) -> float:
        return math.fsum(part.devices * measured.powers[part.site] for part in some) / devices_in(some)

    def faster_by(left: Parts, right: Parts) -> float:
        low, high = sorted((power(left), power(right)))
        return high / low - 1

    found, steps = _merged(counts, faster_by, alike)
    return Group(tuple(Subgroup(some, power(some)) for some in found), tuple(steps))


def _merged(
    parts: Sequence[GroupPart], apart: Callable[[Parts, Parts], float], limit: float
) -> tuple[list[Parts], list[MergeStep]]:
    """Merge the two groups that are nearest, again and again, while they are no further apart than the limit; of equal
    ones, those that the file has first. Returns the groups at the end, and all merges, then those refused."""
    groups: dict[int, tuple[int, Parts]] = {number: (number, (part,)) for number, part in enumerate(parts)}
    steps: list[MergeStep] = []

    def entry(a: int, b: int) -> tuple[float, int, int, int, int]:
        (first, left), (second, right) = groups[a], groups[b]
        return apart(left, right), first, second, a, b

    heap = [entry(a, b) for a, b in combinations(groups, 2)]
    heapify(heap)
    while heap:
        distance, first, second, a, b = heappop(heap)
        if a not in groups or b not in groups:
            continue
        merged = _within(distance, limit)
        left, right = groups[a][1], groups[b][1]
        steps.append(MergeStep(left, right, distance, merged))
        if merged:
            del groups[a], groups[b]
            number = len(parts) + len(steps)
            others = list(groups)
            groups[number] = min(first, second), tuple(sorted(left + right))
            for other in others:
                heappush(heap, entry(*sorted((other, number), key=lambda one: groups[one][0])))
    return [found for _, found in sorted(groups.values())], steps


def _within(value: float, limit: float) -> bool:
    return value <= limit * (1 + ROUNDING)


def devices_in(parts: Iterable[GroupPart]) -> int:
    """Counts the devices of some parts of a group."""
    return sum(part.devices for part in parts)


# ---- margin ----


def _margins(measured: Measured, groups: Sequence[Group], limit_s: float, most: float) -> Iterator[Margin]:
    """For each pair of devices, the error of every measurement up to which it stays on its side of the threshold. While
    all pairs do, every mean of pairs does, in whatever order groups merge: so the groups cannot change."""
    where = [
        (part.site, number, inner, part.devices)
        for number, found in enumerate(groups)
        for inner, subgroup in enumerate(found.subgroups)
        for part in subgroup.parts
    ]
    for (a, group_a, inner_a, _), (b, group_b, inner_b, _) in combinations(where, 2):
        yield _network_margin(measured.times_s[a][b], limit_s, group_a == group_b, (a, b))
        if group_a == group_b:
            low, high = sorted((measured.powers[a], measured.powers[b]))
            less = (most - high / low) / (most + high / low)
            yield Margin(max(0.0, less if inner_a == inner_b else -less), 2, (a, b))
    for site, _, _, count in where:
        if count > 1:
            yield _network_margin(measured.times_s[site][site], limit_s, True, (site, site))


def _network_margin(time_s: float, limit_s: float, together: bool, pair: tuple[int, int]) -> Margin:
    share = limit_s / time_s if time_s else math.inf
    return Margin(max(0.0, share - 1 if together else 1 - share), 1, pair)


# ---- as JSON ---------------------------------------------------------------------------------------------------------


def grouping_json(found: Grouping) -> dict[str, Any]:
    """The groups and steps as JSON; gbps and error are null where messages take no time."""
    measured = found.measured

    def parts(some: Parts) -> list[dict[str, Any]]:
        return [{"site": measured.sites[part.site], "devices": part.devices} for part in some]

    def step(one: MergeStep) -> dict[str, Any]:
        return {"left": parts(one.left), "right": parts(one.right), "merged": one.merged}

    return {
        "message_bytes": measured.message_bytes,
        "threshold_gbps": found.threshold_gbps,
        "alike": found.alike,
        "power_unit": measured.power_unit,
        "groups": [
            {
                "devices": one.devices,
                "subgroups": [{"parts": parts(inner.parts), "power": inner.power} for inner in one.subgroups],
                "steps": [step(each) | {"faster_by": each.apart} for each in one.steps],
            }
            for one in found.groups
        ],
        "steps": [step(each) | {"gbps": measured.gbps(each.apart) if each.apart else None} for each in found.steps],
        "margins": [
            {
                "level": margin.level,
                "error": margin.error if math.isfinite(margin.error) else None,
                "pair": [measured.sites[site] for site in margin.pair],
            }
            for margin in found.margins
        ],
    }
