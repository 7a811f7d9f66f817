"""Reads a file for `dips plan explore`: accelerators in zones, buildings and regions, the model, and the batch.

Distances are kilometres of fibre, 5 us each (10 km are 50 us). A pair of accelerators in different zones or buildings
gets the network's bandwidth divided by the oversubscription ratio of the way between them, as in the testbed of the
paper (appendix A.1); what other pairs leave unused is not lent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from dips.core.config import Knobs, SettingsFile
from dips.planner.errors import PlanError
from dips.planner.model import Amount, DurationOrNone, Model, Name, PositiveCount, Sourced, model_of, shipped

US_PER_KM = 5.0
"""Light in fibre, one way."""

TABLES = ("model", "accelerators", "zones", "buildings", "routes", "batch", "network", "search", "present")

Ratio = Annotated[float, Field(ge=1, le=1e4)]
Kilometres = Annotated[float, Field(ge=0, le=40_000)]


class Accelerators(Sourced):
    """What all accelerators are. They are equal."""

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
    network: Network
    search: Search
    present: Present | None

    @property
    def n_accelerators(self) -> int:
        return sum(zone.accelerators for zone in self.zones)

    @property
    def of_a_building(self) -> int:
        return self.n_accelerators // len(self.buildings)

    @property
    def of_a_zone(self) -> int:
        return self.zones[0].accelerators

    def route(self, here: int, there: int) -> Route:
        """The route between two buildings. Raises PlanError where none is given."""
        a, b = self.buildings[here], self.buildings[there]
        for pair in ({a.name, b.name}, {a.region, b.region}):
            for route in self.routes:
                if set(route.ends) == pair:
                    return route
        raise PlanError(
            f'{self.file}: no [[routes]] from {a.name} to {b.name}: add one with ends = ["{a.name}", "{b.name}"], or '
            f'["{a.region}", "{b.region}"] for all buildings of their regions'
        )

    def way(self, here: int, there: int) -> Way:
        """What a pair of accelerators has, by their numbers."""
        given = self.accelerators
        if here // given.per_server == there // given.per_server:
            return Way(given.server_gbps * 1e9 / 8, 0.0)
        ratio, distance_km = 1.0, 0.0
        building, other = here // self.of_a_building, there // self.of_a_building
        if building != other:
            route = self.route(building, other)
            ratio, distance_km = route.oversubscription, route.distance_km
        elif here // self.of_a_zone != there // self.of_a_zone:
            ratio, distance_km = self.buildings[building].oversubscription, self.buildings[building].distance_km
        latency_s = (given.network_latency_us + US_PER_KM * distance_km) / 1e6
        return Way(given.network_gbps * 1e9 / 8 / ratio, latency_s)

    def slowest(self, pairs: Sequence[tuple[int, int]]) -> Way:
        """The least bandwidth and the greatest latency of these pairs of accelerators."""
        given = self.accelerators
        # One pair of each kind is enough: they differ by servers, zones and buildings only.
        kinds = {
            (a // given.per_server == b // given.per_server, a // self.of_a_zone, b // self.of_a_zone): (a, b)
            for a, b in pairs
        }
        ways = [self.way(a, b) for a, b in kinds.values()]
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
        return replace(
            self,
            routes=tuple(
                route.model_copy(update={"oversubscription": max(1.0, route.oversubscription / factor)})
                for route in self.routes
            ),
        )


def shipped_topologies() -> list[str]:
    """Names of the topologies that come with the planner."""
    return shipped("topologies")


def read_topology(name: str | Path) -> Topology:
    """Read a file, or a shipped one by its name. Raises PlanError or ConfigError, which name file and key."""
    if isinstance(name, str) and name in shipped_topologies():
        with resources.as_file(resources.files("dips.planner") / "topologies" / f"{name}.toml") as file:
            return topology_of(SettingsFile.read(file, TABLES))
    if not Path(name).is_file():
        raise PlanError(
            f"{name} is not a file that can be read, and none of the shipped topologies "
            f"({', '.join(shipped_topologies())}): give one of these"
        )
    return topology_of(SettingsFile.read(Path(name), TABLES))


def topology_of(file: SettingsFile) -> Topology:
    """Check the tables of a file. Raises PlanError or ConfigError."""
    for name in ("model", "accelerators", "zones", "buildings", "batch", "network"):
        if name not in file.tables:
            brackets = f"[[{name}]]" if name in ("zones", "buildings") else f"[{name}]"
            raise PlanError(
                f"{file}: the table {brackets} is missing: add it (docs/planner/scaleacross.md says what it holds)"
            )
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
    return replace(found, zones=tuple(sorted(found.zones, key=lambda zone: order[zone.building])))


def _check(found: Topology) -> None:
    file, buildings = found.file, [building.name for building in found.buildings]
    regions = list(dict.fromkeys(building.region for building in found.buildings))
    for table, names in (("zones", [zone.name for zone in found.zones]), ("buildings", buildings)):
        twice = [a for a, b in pairwise(sorted(names)) if a == b]
        if twice:
            raise PlanError(f"{file} [[{table}]]: name = {twice[0]!r} is there twice: give each a name of its own")
    shared = sorted(set(buildings) & set(regions))
    if shared:
        raise PlanError(f"{file}: {shared[0]!r} is a building and a region: give them different names")
    for number, zone in enumerate(found.zones, 1):
        where = f"{file} [[zones]] {number}"
        if zone.building not in buildings:
            raise PlanError(f"{where}: building = {zone.building!r} is none: choose one of {', '.join(buildings)}")
        if zone.accelerators != found.of_a_zone:
            raise PlanError(
                f"{where}: accelerators = {zone.accelerators}, those before have {found.of_a_zone}: give all zones the "
                "same number; parts of a cluster of unequal zones cannot be compared yet"
            )
        if zone.accelerators % found.accelerators.per_server:
            raise PlanError(
                f"{where}: accelerators = {zone.accelerators} are no whole servers of {found.accelerators.per_server}: "
                "give a multiple of [accelerators] per_server"
            )
    counts = {name: sum(zone.building == name for zone in found.zones) for name in buildings}
    for name, count in counts.items():
        if count != counts[buildings[0]] or not count:
            raise PlanError(
                f"{file} [[buildings]]: {name} has {count} zones, {buildings[0]} has {counts[buildings[0]]}: give each "
                "building the same number, at least one"
            )
    given: set[frozenset[str]] = set()
    for number, route in enumerate(found.routes, 1):
        where, ends = f"{file} [[routes]] {number}", route.ends
        if not (set(ends) <= set(buildings) and ends[0] != ends[1]) and not set(ends) <= set(regions):
            raise PlanError(
                f"{where}: ends = {list(ends)} are neither two buildings ({', '.join(buildings)}) nor regions "
                f"({', '.join(regions)}): choose among these"
            )
        if frozenset(ends) in given:
            raise PlanError(f"{where}: ends = {list(ends)} have a route already: remove one")
        given.add(frozenset(ends))
    for here in range(len(buildings)):
        for there in range(here):
            found.route(there, here)
