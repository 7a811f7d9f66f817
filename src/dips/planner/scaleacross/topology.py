"""Reads a file for `dips plan explore`: accelerators in zones, buildings and regions, the model, and the batch.

Distances are kilometres of fibre, 5 us each (10 km are 50 us). A pair of accelerators in different zones or buildings
gets the network's bandwidth divided by the oversubscription ratio of the way between them, as in the testbed of the
paper (appendix A.1); what other pairs leave unused is not lent.

Zones and buildings may have different numbers of accelerators: whole groups (tensor x context) are numbered in each
zone, and what is left over is not used. Where they differ in speed or memory the least counts for all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dips.core.config import Knobs
from dips.core.errors import ConfigError
from dips.planner.cluster import ClusterFile
from dips.planner.model import (
    Amount,
    DurationOrNone,
    Model,
    Name,
    PositiveCount,
    Sourced,
    model_of,
    read_own_or_shipped,
)

US_PER_KM = 5.0
"""Light in fibre, one way."""

TABLES = ("model", "accelerators", "zones", "buildings", "routes", "batch", "network", "search", "present")

Ratio = Annotated[float, Field(ge=1, le=1e4)]
Kilometres = Annotated[float, Field(ge=0, le=200_000)]
"""Up to a second, one way: routes of a problem's file have the kilometres of their latency, queues included."""

Ints = NDArray[np.int64]


class Accelerators(Sourced):
    """What all accelerators are, but for those of zones that say otherwise."""

    memory_gib: Amount = Field(description="memory of one")
    sustained_tflops: Amount = Field(description="10^12 operations a second that one reaches with a large microbatch")
    half_speed_tokens: Annotated[float, Field(ge=0, le=1e6)] = Field(
        default=0.0, description="tokens of a microbatch with which one reaches half of sustained_tflops"
    )
    per_server: PositiveCount = Field(description="accelerators of a server")
    server_gbps: Amount = Field(description="bandwidth of one to others in its server, 10^9 bit/s")
    network_gbps: Amount = Field(description="bandwidth of one to other servers in its zone, 10^9 bit/s")
    network_latency_us: DurationOrNone = Field(default=0.0, description="latency between two servers of a zone")
    zbv_overhead: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="part by which all operations are longer in interleaved ZBV than in DoraPP"
    )


class Zone(Sourced):
    """Accelerators behind one network without oversubscription."""

    name: Name = Field(description="name of the zone")
    building: Name = Field(description="building that it is in")
    accelerators: PositiveCount = Field(description="number of accelerators")
    sustained_tflops: Amount | None = Field(default=None, description="that of its accelerators, where it differs")
    memory_gib: Amount | None = Field(default=None, description="memory of one of them, where it differs")


class Building(Sourced):
    """A building, with the network between its zones."""

    name: Name = Field(description="name of the building")
    region: Name = Field(description="region that it is in")
    oversubscription: Ratio = Field(default=1.0, description="ratio 1:N of the network between its zones: N")
    distance_km: Kilometres = Field(default=0.0, description="fibre between two of its zones")


class Route(Sourced):
    """The way between two buildings or two regions, equal in both directions. One between buildings precedes that
    between their regions; with twice the same region it is that between the buildings of the region."""

    ends: tuple[Name, Name] = Field(description="two buildings, or two regions, or twice the same region")
    oversubscription: Ratio = Field(description="ratio 1:N: N")
    distance_km: Kilometres = Field(description="fibre from one end to the other")
    total_gbps: Amount | None = Field(
        default=None,
        description="bandwidth of the way as a whole, each direction; accelerators that send at a time share it evenly",
    )


class Batch(Sourced):
    """One iteration."""

    sequences: PositiveCount = Field(description="sequences of an iteration")
    sequence_tokens: PositiveCount = Field(description="tokens of a sequence")
    recompute: Literal["none", "full"] = Field(
        default="none", description="whether backward passes compute layers again"
    )


class Network(Sourced):
    """What is known of the network cards and of the long links, for recommendations."""

    queue_pairs: PositiveCount = Field(description="queue pairs of two accelerators that send to each other")
    loss_rate: Annotated[float, Field(ge=0, lt=1)] = Field(description="part of the packets that long links lose")
    usual_oversubscription: Ratio = Field(
        description="ratio 1:N between buildings for which the network was built: N; the paper's default"
    )
    in_flight_packets: PositiveCount = Field(
        default=512, description="packets of a queue pair on their way, with packet spraying"
    )
    packet_bytes: PositiveCount = Field(default=4096, description="payload of a packet")


class Search(Knobs):
    """Limits and sizes of the search. The defaults are those of the paper, where it has one."""

    tensor: tuple[PositiveCount, ...] = Field(
        default=(), description="tensor-parallel degrees; empty: the accelerators of a server"
    )
    microbatches: tuple[PositiveCount, ...] = Field(
        default=(), description="sequences of a microbatch; empty: 1, 2, 4, 8"
    )
    least_context_tokens: PositiveCount = Field(default=2048, description="tokens that a part of a sequence has")
    chunk_ratio: Annotated[float, Field(ge=1, le=100)] = Field(
        default=3.0, description="layers of the largest chunk / layers of the smallest one, at most"
    )
    samples: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=100, description="divisions of the layers that are tried for each way to split"
    )
    top: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1000, description="the fastest of these, which are varied"
    )
    variations: Annotated[int, Field(ge=0, le=1000)] = Field(default=100, description="of each of them")
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(default=0, description="of the random choices")


class Present(Sourced):
    """A configuration to compare with: the one in use."""

    tensor: PositiveCount = Field(description="devices that share each layer")
    context: PositiveCount = Field(default=1, description="devices that share each sequence")
    expert: PositiveCount = Field(default=1, description="devices that share the experts of a layer")
    pipeline: PositiveCount = Field(description="stages")
    data: PositiveCount = Field(description="replicas")
    microbatch_sequences: PositiveCount = Field(description="sequences of a microbatch")
    chunk_layers: PositiveCount = Field(description="layers of a chunk")


class Way(NamedTuple):
    """What one accelerator has to another one."""

    bytes_per_s: float
    latency_s: float

    def message_s(self, n_bytes: float) -> float:
        """One message alone. Its throughput is below n_bytes / latency_s, however fast the way is (section 5.1)."""
        return n_bytes / self.bytes_per_s + self.latency_s


@dataclass(frozen=True, eq=False)
class Topology:
    """The content of a whole file. Accelerators are numbered by building and zone, in the order of the file."""

    file: str
    model: Model
    accelerators: Accelerators
    zones: tuple[Zone, ...]  # by building
    buildings: tuple[Building, ...]
    routes: tuple[Route, ...]
    batch: Batch
    network: Network | None  # None: nothing is known of it, and nothing is recommended
    search: Search
    present: Present | None
    notes: tuple[str, ...] = ()  # what of the file counts otherwise than it says, as sentences without a full stop

    @cached_property
    def n_accelerators(self) -> int:
        return sum(zone.accelerators for zone in self.zones)

    @cached_property
    def zone_starts(self) -> list[int]:
        """The number of each zone's first accelerator."""
        return [0, *accumulate(zone.accelerators for zone in self.zones)][:-1]

    @cached_property
    def building_of_zone(self) -> list[int]:
        names = [building.name for building in self.buildings]
        return [names.index(zone.building) for zone in self.zones]

    @cached_property
    def even(self) -> bool:
        """Whether all zones have as many accelerators, and all buildings as many zones."""
        zones = [self.building_of_zone.count(building) for building in range(len(self.buildings))]
        return len({zone.accelerators for zone in self.zones}) == len(set(zones)) == 1

    def zone_of(self, number: int) -> int:
        """The zone of an accelerator."""
        return bisect_right(self.zone_starts, number) - 1

    def first_of(self, building: int) -> int:
        """The number of a building's first accelerator."""
        return self.zone_starts[self.building_of_zone.index(building)]

    def groups(self, accelerators: int) -> list[Ints]:
        """For each building, the first accelerators of whole groups of so many, none of which leaves its zone."""
        found = [np.empty(0, np.int64)] * len(self.buildings)
        for start, zone, building in zip(self.zone_starts, self.zones, self.building_of_zone, strict=True):
            whole = zone.accelerators // accelerators
            more = start + accelerators * np.arange(whole, dtype=np.int64)
            found[building] = np.concatenate((found[building], more))
        return found

    def route(self, here: int, there: int) -> Route:
        """The route between two buildings. Raises ConfigError where none is given."""
        a, b = self.buildings[here], self.buildings[there]
        for pair in ({a.name, b.name}, {a.region, b.region}):
            for route in self.routes:
                if set(route.ends) == pair:
                    return route
        raise ConfigError(
            f'{self.file}: no [[routes]] from {a.name} to {b.name}: add one with ends = ["{a.name}", "{b.name}"], or '
            f'["{a.region}", "{b.region}"] for all buildings of their regions'
        )

    def way(self, here: int, there: int, senders: int = 1) -> Way:
        """What a pair of accelerators has, by their numbers. senders: that send at the same time, with it, over a way
        whose whole bandwidth is given."""
        given = self.accelerators
        if here // given.per_server == there // given.per_server:
            return Way(given.server_gbps * 1e9 / 8, 0.0)
        ratio, distance_km, total_gbps = 1.0, 0.0, None
        zone, other = self.zone_of(here), self.zone_of(there)
        building, elsewhere = self.building_of_zone[zone], self.building_of_zone[other]
        if building != elsewhere:
            route = self.route(building, elsewhere)
            ratio, distance_km, total_gbps = route.oversubscription, route.distance_km, route.total_gbps
        elif zone != other:
            ratio, distance_km = self.buildings[building].oversubscription, self.buildings[building].distance_km
        latency_s = (given.network_latency_us + US_PER_KM * distance_km) / 1e6
        bytes_per_s = given.network_gbps * 1e9 / 8 / ratio
        if total_gbps is not None:
            bytes_per_s = min(bytes_per_s, total_gbps * 1e9 / 8 / senders)
        return Way(bytes_per_s, latency_s)

    def slowest(self, here: Ints, there: Ints, senders: int = 1) -> Way:
        """The least bandwidth and the greatest latency of these pairs of accelerators."""
        given, starts = self.accelerators, self.zone_starts
        # One pair of each kind is enough: they differ by servers, zones and buildings only.
        zones = np.searchsorted(starts, here, "right"), np.searchsorted(starts, there, "right")
        same_server = here // given.per_server == there // given.per_server
        _, first = np.unique((zones[0] * (len(starts) + 1) + zones[1]) * 2 + same_server, return_index=True)
        ways = [self.way(int(here[at]), int(there[at]), senders) for at in first]
        return Way(min(way.bytes_per_s for way in ways), max(way.latency_s for way in ways))

    def longest(self) -> Route | None:
        """The route with the longest distance, and of these with the highest ratio; None for one building."""
        n = len(self.buildings)
        routes = [self.route(a, b) for a in range(n) for b in range(a + 1, n)]
        return max(routes, key=lambda route: (route.distance_km, route.oversubscription), default=None)

    def with_routes(self, oversubscription: float | None = None, distance_km: float | None = None) -> Topology:
        """The same topology with other numbers on each route between buildings."""
        named = (("oversubscription", oversubscription), ("distance_km", distance_km))
        changes = {name: value for name, value in named if value is not None}
        return replace(self, routes=tuple(route.model_copy(update=changes) for route in self.routes))

    def with_bandwidth(self, factor: float) -> Topology:
        """The same topology with so many times the bandwidth on each route, at most that inside a zone."""

        def wider(route: Route) -> Route:
            total = None if route.total_gbps is None else route.total_gbps * factor
            changes = {"oversubscription": max(1.0, route.oversubscription / factor), "total_gbps": total}
            return route.model_copy(update=changes)

        return replace(self, routes=tuple(map(wider, self.routes)))


def read_topology(name: str | Path) -> Topology:
    """Read a file, or a shipped one by its name. Raises ConfigError, which names file and key."""
    file = read_own_or_shipped(name, "topologies", "topologies", TABLES)
    found = Topology(
        file=file.name,
        model=model_of(file),
        accelerators=file.settings(Accelerators, "accelerators"),
        zones=file.settings_of_rows(Zone, "zones", required=True),
        buildings=file.settings_of_rows(Building, "buildings", required=True),
        routes=file.settings_of_rows(Route, "routes"),
        batch=file.settings(Batch, "batch"),
        network=file.settings(Network, "network"),
        search=file.settings(Search, "search"),
        present=file.settings(Present, "present") if "present" in file.tables else None,
    )
    _check(found)
    order = {building.name: number for number, building in enumerate(found.buildings)}
    return _with_the_least(replace(found, zones=tuple(sorted(found.zones, key=lambda zone: order[zone.building]))))


def _with_the_least(found: Topology) -> Topology:
    """The same topology with the least speed and memory of any zone, and a note where that is another one."""
    notes, changes = [], {}
    for key, unit in (("sustained_tflops", "TFLOP/s"), ("memory_gib", "GiB")):
        general = getattr(found.accelerators, key)
        each = {zone.name: getattr(zone, key) or general for zone in found.zones}
        least = min(each, key=lambda name: each[name])
        if max(each.values()) > each[least]:
            notes.append(f"all accelerators count with the least {key}, {each[least]:g} {unit} of zone {least}")
        changes[key] = each[least]
    accelerators = found.accelerators.model_copy(update=changes)
    return replace(found, accelerators=accelerators, notes=(*found.notes, *notes))


def _check(found: Topology) -> None:
    file, buildings = found.file, [building.name for building in found.buildings]
    regions = list(dict.fromkeys(building.region for building in found.buildings))
    for table, names in (("zones", [zone.name for zone in found.zones]), ("buildings", buildings)):
        twice = [a for a, b in pairwise(sorted(names)) if a == b]
        if twice:
            raise ConfigError(f"{file} [[{table}]]: name = {twice[0]!r} is there twice: give each a name of its own")
    shared = sorted(set(buildings) & set(regions))
    if shared:
        raise ConfigError(f"{file}: {shared[0]!r} is a building and a region: give them different names")
    for number, zone in enumerate(found.zones, 1):
        where = f"{file} [[zones]] {number}"
        if zone.building not in buildings:
            raise ConfigError(f"{where}: building = {zone.building!r} is none: choose one of {', '.join(buildings)}")
        if zone.accelerators % found.accelerators.per_server:
            raise ConfigError(
                f"{where}: accelerators = {zone.accelerators} are no whole servers of {found.accelerators.per_server}: "
                "give a multiple of [accelerators] per_server"
            )
    empty = [name for name in buildings if name not in {zone.building for zone in found.zones}]
    if empty:
        raise ConfigError(f"{file} [[buildings]]: {empty[0]} has no zones: add one, or remove the building")
    given: set[frozenset[str]] = set()
    for number, route in enumerate(found.routes, 1):
        where, ends = f"{file} [[routes]] {number}", route.ends
        if not (set(ends) <= set(buildings) and ends[0] != ends[1]) and not set(ends) <= set(regions):
            raise ConfigError(
                f"{where}: ends = {list(ends)} are neither two buildings ({', '.join(buildings)}) nor regions "
                f"({', '.join(regions)}): choose among these"
            )
        if frozenset(ends) in given:
            raise ConfigError(f"{where}: ends = {list(ends)} have a route already: remove one")
        given.add(frozenset(ends))
    for here in range(len(buildings)):
        for there in range(here):
            found.route(there, here)


# ---- a problem's file ------------------------------------------------------------------------------------------------

FREE_GBPS = 1e6
"""In place of the bandwidth of a network that costs no time in a plan: a message of 100 MB takes less than a us."""


def of_problem(setup: ClusterFile) -> Topology:
    """The topology that a problem's file describes: each site is a building with one zone, in a region of its own. The
    accelerators that send at the same time share a link; a latency of 5 us is a kilometre; the slower direction counts.

    A group of [training] tensor devices is a server, inside of which messages cost nothing, as in plans, and so they do
    in a site without network_gbps. The search keeps `tensor`, the batch and `recompute`, and looks for all else.
    Raises ConfigError, which names the key, for what the search cannot count.
    """
    training, where = setup.training, setup.file
    _check_problem(setup)
    stated = "the file of the problem, see there"
    zones, notes = [], []
    for site in setup.sites:
        whole = site.devices - site.devices % training.tensor
        if not whole:
            raise ConfigError(
                f"{where} [[sites]]: {site.name} has devices = {site.devices}, a group of tensor = {training.tensor} "
                "does not fit there: give more devices, or a smaller tensor"
            )
        if whole < site.devices:
            notes.append(
                f"{site.devices - whole} devices of {site.name} are not used: no whole group of {training.tensor}"
            )
        zones.append(
            Zone(
                name=site.name, building=site.name, accelerators=whole, sustained_tflops=site.sustained_tflops,
                memory_gib=site.memory_gib, source=stated,
            )
        )  # fmt: skip
    known = [site.network_gbps for site in setup.sites if site.network_gbps is not None]
    first = setup.sites[0]
    assert first.memory_gib is not None
    assert first.sustained_tflops is not None
    accelerators = Accelerators(
        memory_gib=first.memory_gib, sustained_tflops=first.sustained_tflops, per_server=training.tensor,
        server_gbps=FREE_GBPS, network_gbps=min(known) if known else FREE_GBPS,
        network_latency_us=max(site.network_latency_us for site in setup.sites), source=stated,
    )  # fmt: skip
    found = Topology(
        file=where,
        model=setup.model,
        accelerators=accelerators,
        zones=tuple(zones),
        buildings=tuple(Building(name=s.name, region=f"region of {s.name}", source=stated) for s in setup.sites),
        routes=_routes_of(setup, accelerators.network_latency_us),
        batch=Batch(
            sequences=training.data * training.microbatches * training.microbatch_sequences,
            sequence_tokens=training.sequence_tokens,
            recompute=training.recompute,
            source=stated,
        ),
        network=None,
        search=Search(tensor=(training.tensor,)),
        present=None,
        notes=tuple(notes),
    )
    return _with_the_least(found)


def _routes_of(setup: ClusterFile, inside_us: float) -> tuple[Route, ...]:
    """A route for each pair of sites, with the slower one of its two directions."""
    found = []
    for number, site in enumerate(setup.sites):
        for other in setup.sites[:number]:
            ends = other.name, site.name
            needed = "which ScaleAcross Explorer needs of every pair of sites"
            ways = [setup.link(*pair, needed) for pair in (ends, ends[::-1])]
            latency_us = 1e3 * max(link.latency_ms for link in ways)
            if latency_us > US_PER_KM * 200_000:
                raise ConfigError(
                    f"{setup.file} [[links]]: latency_ms = {latency_us / 1e3:g} from {ends[0]} to {ends[1]}: "
                    "ScaleAcross Explorer takes 1000 at most"
                )
            found.append(
                Route(
                    ends=ends, oversubscription=1.0, total_gbps=min(link.bytes_per_s for link in ways) * 8 / 1e9,
                    distance_km=max(0.0, latency_us - inside_us) / US_PER_KM, source="[[links]] of the problem's file",
                )
            )  # fmt: skip
    return tuple(found)


def _check_problem(setup: ClusterFile) -> None:
    """Refuse what the search would leave out. Raises ConfigError."""
    training, options = setup.training, setup.options
    for number, site in enumerate(setup.sites, 1):
        for key in ("sustained_tflops", "memory_gib"):
            if getattr(site, key) is None:
                raise ConfigError(
                    f"{setup.file} [[sites]] {number}: {key} of {site.name} is not given, which ScaleAcross Explorer "
                    "needs: add it"
                )
    refused = (
        ("[profile]", setup.profile is not None, "it computes times from sustained_tflops"),
        ("[training]: activation_bytes", training.activation_bytes != 2, "it sends numbers of two bytes"),
        ("[training]: flash_attention", not training.flash_attention, "it never stores attention scores"),
        ("[options]: overlap", not options.overlap, "its replicas exchange while pipelines compute"),
        ("[options]: blocking", options.blocking, "its senders do not wait for acknowledgements"),
    )
    for key, given, why in refused:
        if given:
            raise ConfigError(f"{setup.file} {key} cannot be counted by ScaleAcross Explorer: {why}: leave it out")
