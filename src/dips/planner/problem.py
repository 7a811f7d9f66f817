"""Computes what a schedule is made for from sites, model and way of splitting: stage costs, wires, memory limits.

A model is a row of units (dips.planner.units), which are divided into stages. Replicas are equal; one is planned.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from pydantic import BaseModel

from dips.core.config import SettingsFile
from dips.core.errors import ConfigError
from dips.planner.cluster import ClusterFile, Link, Site, layer_times_ms, setup_of, stages_of_sites
from dips.planner.costs import NS, Costs, StageCost, Wire
from dips.planner.exchange import Exchange, ShardExchange
from dips.planner.ir import straight
from dips.planner.units import (
    Division,
    Unit,
    even_division,
    pipeline_message_bytes,
    tflops_of,
    units_of,
    with_layer_times,
)

RELEASED_BY_INPUT_GRADIENT = 2 / 34
"""The part of an activation that is released when D ends; the rest when W ends: with flash attention a layer holds 34 s
b h bytes, and W needs 32 of them (Zero Bubble, arXiv:2401.10241, Table 1)."""

TimesPerLayer = tuple[float, float, float]
"""Measured time / planned time of a device's forward passes, gradients of inputs and gradients of weights."""


class ReplicaRing(NamedTuple):
    """The link, or the slowest of the links, between sites that hold the same stages."""

    # those sites, as the file numbers them; gradients and weights go round from each to the next
    members: tuple[int, ...]
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be planned. Each device of the pipeline represents all devices of one replica that share a stage."""

    setup: ClusterFile
    # the part of an activation that is free after the gradient of the input
    released: float = RELEASED_BY_INPUT_GRADIENT
    # by position: where replicas are at different sites, those between which its stages exchange (setup.sites has all
    # of them as one site); empty: all replicas of a stage are at one site
    rings: tuple[ReplicaRing, ...] = ()
    paces: tuple[TimesPerLayer, ...] = ()  # of each device as measured; empty: as planned

    @cached_property
    def n_devices(self) -> int:
        return self.setup.training.pipeline

    @cached_property
    def n_microbatches(self) -> int:
        return self.setup.training.microbatches

    @cached_property
    def groups(self) -> int:
        """The number of groups of sites that hold whole pipelines."""
        return len(self.rings[0].members) if self.rings else 1

    @cached_property
    def replicas(self) -> int:
        """The number of replicas that use the same links."""
        return self.setup.training.data // self.groups

    @cached_property
    def shares_links(self) -> bool:
        """Whether several replicas meet on a link between sites."""
        return self.replicas > 1 and len(set(self.site_of)) > 1

    @cached_property
    def site_in_file(self) -> tuple[int, ...]:
        """The site of each device of the first replica."""
        return tuple(self.members(site)[0] for site in self.site_of)

    def members(self, site: int) -> tuple[int, ...]:
        """The sites, as the file numbers them, that a site of this problem represents."""
        return self.rings[site].members if self.rings else (site,)

    @property
    def calibration_error(self) -> float | None:
        """The error of predicted times, as a fraction; None: they are not calibrated."""
        return None if self.setup.profile is None else self.setup.profile.error

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        return units_of(self.setup, self.groups)

    @cached_property
    def site_of(self) -> tuple[int, ...]:
        """The site of each device."""
        return tuple(site for site, n in enumerate(stages_of_sites(self.setup)) for _ in range(n))

    @cached_property
    def message_bytes(self) -> float:
        """Bytes of the message of one microbatch of one replica between two stages."""
        profile = self.setup.profile
        if profile is not None and profile.message_mb is not None:
            return profile.message_mb * 1e6
        return pipeline_message_bytes(self.setup.model, self.setup.training)

    @cached_property
    def units_at(self) -> tuple[tuple[Unit, ...], ...]:
        """The units with the times of each site, where a profile has them for each layer; else those of the first."""
        profile, sites = self.setup.profile, range(len(self.setup.sites))
        if profile is None or not profile.layers:
            return tuple(self.units for _ in sites)
        return tuple(self.units if site == 0 else with_layer_times(self.setup, site, self.units) for site in sites)

    def slowness_at(self, site: int) -> float:
        """Time on a device of this site / the time of its site's units: of a device of the first site, or of each
        layer. Raises ConfigError where one site has a rate and this one has none."""
        sites, profile = self.setup.sites, self.setup.profile
        if profile is not None and profile.layers:
            return 1.0
        if site == 0 or (sites[0].sustained_tflops is None and sites[site].sustained_tflops is None):
            return 1.0
        return tflops_of(self.setup, 0) / tflops_of(self.setup, site)

    # ---- stages ----

    def uniform(self, n_stages: int | None = None) -> Division:
        """The division that is as even as possible; the remainder goes to later stages, which hold fewer microbatches.
        Raises ConfigError when there are more stages than units."""
        n = self.n_devices if n_stages is None else n_stages
        whole, rest = divmod(len(self.units), n)
        if not whole:
            raise ConfigError(f"{self.setup.file}: {n} stages are more than {len(self.units)} layers: use fewer stages")
        return tuple(whole + (stage >= n - rest) for stage in range(n))

    def balanced(self, places: Sequence[int]) -> Division:
        """The division with stage times as equal as possible (least squares), where units or sites differ; places[s]:
        device of stage s."""
        first_s = sum(unit.total_s for unit in self.units)
        slower = [
            self.slowness_at(self.site_of[device])
            * sum(unit.total_s for unit in self.units_at[self.site_of[device]])
            / first_s
            for device in places
        ]
        if self.paces:  # measured on a layer of the middle
            unit = self.units[len(self.units) // 2]
            parts = (unit.forward_s, unit.input_gradient_s, unit.weight_gradient_s)
            measured = [sum(map(operator.mul, self.paces[device], parts)) for device in places]
            slower = [slow * time / unit.total_s for slow, time in zip(slower, measured, strict=True)]
        return even_division([unit.total_s for unit in self.units], slower)

    def costs(self, division: Division, places: Sequence[int] | None = None, together: float | None = None) -> Costs:
        """The costs of a division. places[s]: device of stage s; straight if not given. together: replicas whose
        messages one wire carries as one (a fair share of the link for each); all of them if not given."""
        placed = straight(self.n_devices) if places is None else tuple(places)
        starts = [0, *accumulate(division)]
        stages = tuple(
            self._stage(self.units_at[self.site_of[placed[s]]][starts[s] : starts[s + 1]], placed[s])
            for s in range(len(division))
        )
        wires = self.wires(placed, self.replicas if together is None else together)
        exchanges, shards = self.exchanges(division, placed), self.shards(division, placed)
        costs = Costs(stages, wires, exchanges, shards, self.setup.options.overlap)
        profile = self.setup.profile
        if profile is None or not (profile.operation_us or profile.send_us):
            return costs
        return costs.with_overheads(round(profile.operation_us * 1e3), round(profile.send_us * 1e3), placed)

    def _stage(self, units: Sequence[Unit], device: int) -> StageCost:
        slowness, paces = self.slowness_at(self.site_of[device]), self.paces[device] if self.paces else (1.0, 1.0, 1.0)
        columns = zip(*((u.forward_s, u.input_gradient_s, u.weight_gradient_s) for u in units), strict=True)
        f_ns, d_ns, w_ns = (
            round(sum(times) * slowness * pace * NS) for times, pace in zip(columns, paces, strict=True)
        )
        held = round(sum(unit.activation_bytes for unit in units))
        return StageCost(f_ns, d_ns, w_ns, held, round(held * self.released))

    def wires(self, placed: Sequence[int], together: float) -> dict[tuple[int, int], Wire]:
        """The wires between devices that are neighbours in the model. All messages of a link share it, in each
        direction."""
        n, sites, found = self.n_devices, self.setup.sites, {}
        for a, b in {
            pair for s in range(1, len(placed)) for pair in (placed[s - 1 : s + 1], placed[s - 1 : s + 1][::-1])
        }:
            here, there = self.site_of[a], self.site_of[b]
            if here != there:
                link = self.setup.link(sites[here].name, sites[there].name)
                busy_ns = round(self.message_bytes * together / link.bytes_per_s * NS)
                latency_ns = round(link.latency_ms * 1e6)
                hold_ns = 2 * latency_ns if self.setup.options.blocking else 0
                found[a, b] = Wire(here * len(sites) + there, busy_ns, latency_ns, hold_ns)
                continue
            # Inside a site each pair of devices of one replica has a link of its own, and sends its part.
            gbps, latency_ns = sites[here].network_gbps, round(sites[here].network_latency_us * 1e3)
            busy_ns = 0 if gbps is None else round(self.message_bytes * 8 / gbps / self.setup.training.devices_of_stage)
            if a != b and (gbps is not None or latency_ns):
                found[a, b] = Wire(len(sites) ** 2 + n * a + b, busy_ns, latency_ns, shared=False)
        return found

    # ---- between replicas ----

    def exchanges(self, division: Division, placed: Sequence[int]) -> tuple[Exchange, ...]:
        """The exchanges of each stage, once in an iteration; empty when they cost nothing: one replica, or a site whose
        network is not given. With ZeRO stage 2 these are the weights, and with stage 3 none: see shards()."""
        stage = self.setup.training.zero_stage
        found = []
        for units, device in self._stages(division, placed):
            resource, busy_ns, latency_ns = self._ring(units, device)
            each_bytes = sum(unit.weight_bytes for unit in units) / self.setup.training.devices_of_stage
            bucket_bytes = self.setup.training.bucket_mb * 1e6
            buckets = max(1, math.ceil(each_bytes / max(1.0, bucket_bytes))) if bucket_bytes else 1
            if stage == 0:
                found.append(Exchange(resource, 0, 2 * busy_ns, 0, 2 * latency_ns, buckets))
            elif stage == 1:
                found.append(Exchange(resource, busy_ns, busy_ns, latency_ns, latency_ns, buckets))
            else:
                gathers = stage == 2
                found.append(Exchange(resource, busy_ns * gathers, 0, latency_ns * gathers, 0, buckets))
        return tuple(found) if any(one.gathers or one.reduces for one in found) else ()

    def shards(self, division: Division, placed: Sequence[int]) -> tuple[ShardExchange, ...]:
        """What the layers of each stage exchange for every microbatch, with ZeRO stages 2 and 3; else empty, and where
        it costs nothing. Between sites each stage has an equal share of the link."""
        stage, found = self.setup.training.zero_stage, []
        if stage < 2:
            return ()
        for units, device in self._stages(division, placed):
            resource, busy_ns, latency_ns = self._ring(units, device, len(units))
            if self.rings:
                busy_ns *= self.site_of.count(self.site_of[device])
                resource = self.n_devices + len(self.rings) + device
            gathers = stage == 3
            found.append(
                ShardExchange(resource, len(units), busy_ns * gathers, busy_ns, latency_ns * gathers, latency_ns)
            )
        return tuple(found) if any(one.reduce_ns or one.reduce_latency_ns for one in found) else ()

    def _stages(self, division: Division, placed: Sequence[int]) -> Iterable[tuple[Sequence[Unit], int]]:
        """The units and the device of each stage."""
        starts = [0, *accumulate(division)]
        return [(self.units[starts[s] : starts[s + 1]], device) for s, device in enumerate(placed)]

    def _ring(self, units: Sequence[Unit], device: int, equal: int = 1) -> tuple[int, int, int]:
        """One of so many equal exchanges that carry the weights of a stage: its resource, its time there and its
        latency, in nanoseconds. A ring inside the site, then (for weights: before) one between sites. Of these two it
        occupies the latter where there is one: the link is what stages share."""
        position = self.site_of[device]
        site = self.setup.sites[position]
        members = self.replicas * self.setup.training.context
        busy_s, latency_s, resource = 0.0, (members - 1) * site.network_latency_us / 1e6, device
        if site.network_gbps is not None:
            each_bytes = sum(unit.inside_bytes for unit in units) / self.setup.training.devices_of_stage
            busy_s = each_bytes * 8 / site.network_gbps / 1e9 / equal
        if self.rings:
            ring, k = self.rings[position], self.groups
            latency_s += busy_s + (k - 1) * ring.latency_s
            busy_s = sum(unit.weight_bytes for unit in units) * (k - 1) / k / ring.bytes_per_s / equal
            resource = self.n_devices + position
        return resource, round(busy_s * NS), round(latency_s * NS)

    @cached_property
    def ring_passes(self) -> int:
        """How often the weights of the model, or gradients of the same size, go round a ring in an iteration: ZeRO's 2
        for each microbatch of an iteration with one; with stage 3, 3 for each microbatch."""
        stage, n = self.setup.training.zero_stage, self.n_microbatches
        return 2 if stage < 2 else 1 + n if stage == 2 else 3 * n

    def ring_bytes(self, division: Division, placed: Sequence[int]) -> dict[tuple[int, int], float]:
        """Weights and gradients of an iteration over each directed link between sites, as the file numbers them."""
        found: dict[tuple[int, int], float] = {}
        starts, k = [0, *accumulate(division)], self.groups
        for stage, device in enumerate(placed if self.rings else ()):
            whole = sum(unit.weight_bytes for unit in self.units[starts[stage] : starts[stage + 1]])
            each = self.members(self.site_of[device])
            for pair in zip(each, (*each[1:], each[0]), strict=True):
                found[pair] = found.get(pair, 0.0) + self.ring_passes * (k - 1) / k * whole
        return found

    # ---- memory ----

    def state_bytes(self, division: Division, places: Sequence[int] | None = None) -> list[int]:
        """Weights, gradients and optimizer state on each device. Where they are sharded, two layers are whole at a
        time: gradients with ZeRO stage 2, and weights too with stage 3."""
        training, found = self.setup.training, [0.0] * self.n_devices
        sharded = 2 * max(0, training.zero_stage - 1) if training.data * training.context > 1 else 0
        largest = [0.0] * self.n_devices
        for units, device in self._stages(division, straight(self.n_devices) if places is None else places):
            found[device] += sum(unit.state_bytes for unit in units)
            largest[device] = max(largest[device], *(unit.whole_bytes for unit in units))
        return [round(state + sharded * whole) for state, whole in zip(found, largest, strict=True)]

    def limits(self, division: Division, places: Sequence[int] | None = None) -> list[int]:
        """Bytes of activations that each device may hold. Raises ConfigError when nothing is left for them."""
        profile = self.setup.profile
        if profile is not None and profile.memory_microbatches is not None:
            share = len(self.units) / self.n_devices
            held = max(unit.activation_bytes for unit in self.units)
            return [round(profile.memory_microbatches * share * held)] * self.n_devices
        found = []
        for device, state in enumerate(self.state_bytes(division, places)):
            site = self.setup.sites[self.site_of[device]]
            if site.memory_gib is None:
                raise ConfigError(
                    f"{self.setup.file} [[sites]] {self.site_of[device] + 1}: memory_gib is not given, and no "
                    "[profile] has "
                    "memory_microbatches: add one of them"
                )
            left = round(site.memory_gib * 2**30) - state
            if left <= 0:
                raise ConfigError(
                    f"{self.setup.file}: memory_gib = {site.memory_gib:g} of {site.name} holds less than the "
                    f"{state / 2**30:.1f} "
                    f"GiB of weights and optimizer state of stage {device}: use more stages, a larger tensor or "
                    "zero_stage"
                )
            found.append(left)
        return found

    # ---- other problems ----

    def with_links(self, bandwidth: float = 1.0, latency: float = 1.0) -> Problem:
        """The same problem with the bandwidth and latency of all links between sites multiplied."""
        links = tuple(
            link.model_copy(
                update={"bandwidth_gbps": link.bandwidth_gbps * bandwidth, "latency_ms": link.latency_ms * latency}
            )
            for link in self.setup.links
        )
        return replace(self, setup=replace(self.setup, links=links))

    def with_memory(self, factor: float) -> Problem:
        profile, sites = self.setup.profile, self.setup.sites
        if profile is not None and profile.memory_microbatches is not None:
            profile = profile.model_copy(update={"memory_microbatches": profile.memory_microbatches * factor})
        sites = tuple(
            site if site.memory_gib is None else site.model_copy(update={"memory_gib": site.memory_gib * factor})
            for site in sites
        )
        return replace(self, setup=replace(self.setup, profile=profile, sites=sites))

    def with_paces(self, paces: tuple[TimesPerLayer, ...]) -> Problem:
        return replace(self, paces=paces)

    def with_training(self, **changes: object) -> Problem:
        return replace(self, setup=replace(self.setup, training=self.setup.training.model_copy(update=changes)))

    def with_options(self, **changes: object) -> Problem:
        return replace(self, setup=replace(self.setup, options=self.setup.options.model_copy(update=changes)))

    def with_delays(self, latency_s: float, busy_s: float) -> Problem:
        """The same problem with links between sites that have these delays for a message of all replicas."""
        gbps = self.message_bytes * self.replicas * 8 / busy_s / 1e9 if busy_s else 1e15
        links = tuple(
            link.model_copy(update={"bandwidth_gbps": gbps, "latency_ms": latency_s * 1e3, "oversubscription": 1.0})
            for link in self.setup.links
        )
        return replace(self, setup=replace(self.setup, links=links))


# ---- groups of sites -------------------------------------------------------------------------------------------------
#
# Whole pipelines at several places: groups of sites with a part of the replicas each, which exchange gradients. With
# one group for each site this is data parallelism across sites (CrossPipe, arXiv:2507.00217, appendix E); with fewer,
# a pipeline crosses the sites of its group. Stages of equal position exchange over the links between their sites, in
# a ring: among k groups an all-gather or a reduce-scatter sends (k - 1) / k of the weights over each link.


def regrouped(problem: Problem, groups: int) -> Problem:
    """The problem of one replica, where each group of neighbouring sites holds whole pipelines; 1 group: unchanged.

    A site of the new problem is all those of one position in their groups, with the least speed and memory of them.
    Raises ConfigError where sites or replicas do not divide so.
    """
    setup, k = problem.setup, len(problem.setup.sites)
    training = setup.training
    if groups == 1:
        return problem
    if k % groups or training.data % groups:
        raise ConfigError(
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
            raise ConfigError(
                f"{' and '.join(site.name for site in places)} has {have} devices, an equal share of the replicas "
                f"needs {needed}"
            )
    sites = tuple(_together(setup, each, width == 1) for each in members)
    inner = replace(setup, sites=sites, links=tuple(_links_of(setup, members, sites)))
    rings = []
    for each in members:
        pairs = zip(each, (*each[1:], each[0]), strict=True)
        ways = [setup.link(setup.sites[a].name, setup.sites[b].name) for a, b in pairs]
        rings.append(ReplicaRing(each, min(way.bytes_per_s for way in ways), max(way.latency_ms for way in ways) / 1e3))
    return replace(problem, setup=inner, rings=tuple(rings))


def _together(setup: ClusterFile, each: Sequence[int], alone: bool) -> Site:
    """All sites of one position as one site. alone: there is no other position, so it takes all stages."""
    sites = [setup.sites[index] for index in each]
    slowest = sites[0].device
    if setup.profile is not None and setup.profile.layers:
        slowest = setup.sites[max(each, key=lambda site: sum(map(sum, layer_times_ms(setup, site))))].device
    networks = [site.network_gbps for site in sites if site.network_gbps is not None]
    return sites[0].model_copy(
        update={
            "name": " / ".join(site.name for site in sites),
            "device": slowest,
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


def _links_of(setup: ClusterFile, members: Sequence[Sequence[int]], sites: Sequence[Site]) -> Iterable[Link]:
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
    except ConfigError:
        return None
    latency_ms = max(link.latency_ms for link in found)
    return min(found, key=lambda link: link.bytes_per_s).model_copy(update={"latency_ms": latency_ms})


# ---- problem file ----------------------------------------------------------------------------------------------------
#
# Writes and reads a problem as JSON inside of a plan.json, so that it can be planned again with measured numbers; and
# lists the assumptions.


def problem_json(problem: Problem) -> dict[str, Any]:
    """The tables of the file that was read, with the numbers of a shipped model, and how fast devices were measured."""
    setup = problem.setup
    tables: dict[str, Any] = {
        "model": _table(setup.model),
        "sites": [_table(site) for site in setup.sites],
        "links": [_table(link) for link in setup.links],
        "training": _table(setup.training),
        "options": _table(setup.options),
    }
    if setup.profile is not None:
        tables["profile"] = _table(setup.profile)
    return {"tables": tables, "released": problem.released, "paces": [list(pace) for pace in problem.paces]}


def _table(knobs: BaseModel) -> dict[str, Any]:
    return knobs.model_dump(mode="json", exclude_unset=True)


def read_problem(found: Mapping[str, Any], file: str) -> Problem:
    """Inverse of problem_json(). Raises ConfigError."""
    try:
        setup = setup_of(SettingsFile(file, dict(found["tables"])))
        paces = tuple((float(f), float(d), float(w)) for f, d, w in found["paces"])
        problem = Problem(setup, float(found["released"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f'{file}: "problem" is not what dips plan writes ({type(error).__name__}: {error}): make the plan again'
        ) from error
    if paces and len(paces) != problem.n_devices:
        raise ConfigError(f"{file}: paces of {len(paces)} devices for {problem.n_devices}: make the plan again")
    return problem.with_paces(paces)


def assumptions(problem: Problem) -> list[str]:
    """What a plan of this problem does not count, as sentences without a full stop."""
    training, sites = problem.setup.training, problem.setup.sites
    found = ["a sender computes while it sends, and a receiver while it receives"]
    if training.data * training.context > 1:
        if any(site.network_gbps is None for site in sites):
            found.append("the exchange of weights and gradients inside a site without network_gbps costs no time")
        if training.zero_stage >= 2:
            found.append(
                f"with zero_stage = {training.zero_stage} the layers of a stage count as equal in what they exchange "
                "for every microbatch, and all replicas as equally far"
            )
            if len(sites) > 1:
                found.append(
                    f"whole pipelines at each site (dp): with zero_stage = {training.zero_stage} each stage has an "
                    "equal share of the link for what it exchanges for every microbatch"
                )
    found.append(
        "after the gradient of the input 2/34 of an activation are released, the rest after that of the weights"
    )
    return found
