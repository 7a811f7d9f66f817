"""What a pipeline's operations, messages and links cost: the numbers that a schedule is made for and simulated with.

Times are integer nanoseconds, so that sums are exact and two equal times compare equal. Memory is counted in units
that the caller chooses (bytes, or activations of one microbatch on one device), as integers too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from dips.core.errors import ConfigError
from dips.planner.exchange import Exchange, ShardExchange, gates, layered, least_ns
from dips.planner.ir import Kind

NS = 1_000_000_000
"""Nanoseconds in a second; also what one unit of time is where times are ratios."""


@dataclass(frozen=True)
class StageCost:
    """Costs of one stage of the model for one microbatch."""

    f_ns: int
    d_ns: int
    w_ns: int
    activation: int  # charged when F starts
    d_release: int  # of it, D releases so much at its end, and W (or B) the rest

    def __post_init__(self) -> None:
        if min(self.f_ns, self.d_ns, self.w_ns, self.activation, self.d_release) < 0:
            raise ConfigError(f"{self} has a negative cost: times and sizes are at least 0")
        if self.d_release > self.activation:
            raise ConfigError(f"D releases {self.d_release}, more than the activation of {self.activation}")

    def compute_ns(self, kind: Kind) -> int:
        """Time of the whole operation."""
        if kind is Kind.F:
            return self.f_ns
        if kind is Kind.D:
            return self.d_ns
        return self.w_ns if kind is Kind.W else self.d_ns + self.w_ns

    def released(self, kind: Kind) -> int:
        """Memory that is free again at its end."""
        if kind is Kind.F:
            return 0
        if kind is Kind.D:
            return self.d_release
        return self.activation - self.d_release if kind is Kind.W else self.activation


OWN_WIRES = 1 << 32
"""The first resource number of wires that only overheads make: each pair of devices has its own."""

REPLICAS_APART = 1 << 40
"""The distance between the resource numbers of two replicas that do not share a link."""


class Wire(NamedTuple):
    """The cost of one message between two devices."""

    resource: int  # messages with the same resource share a link, which serves one at a time
    busy_ns: int  # time on the link
    latency_ns: int  # does not occupy the link
    # so much longer the next message waits than for the link: for the acknowledgement, where senders block
    hold_ns: int = 0
    shared: bool = True  # with the other replicas of a pipeline; else each has a link of its own

    def of(self, replica: int) -> Wire:
        """The wire as a replica has it."""
        return self if self.shared or not replica else self._replace(resource=self.resource + replica * REPLICAS_APART)

    def take(self, link_free: dict[int, int], ready_ns: int) -> int:
        """Take the link for a message that is ready at ready_ns; returns when it starts. link_free: since when the
        link of each resource is free."""
        if not (self.busy_ns or self.hold_ns):
            return ready_ns
        start_ns = max(ready_ns, link_free.get(self.resource, 0))
        link_free[self.resource] = start_ns + self.busy_ns + self.hold_ns
        return start_ns


@dataclass(frozen=True)
class Costs:
    """All costs of a pipeline."""

    stages: tuple[StageCost, ...]  # of the model
    # by (from, to), between devices; none where messages take no time
    wires: Mapping[tuple[int, int], Wire] = field(default_factory=dict)
    exchanges: tuple[Exchange, ...] = ()  # what replicas send each other of each stage; empty: they cost nothing
    shards: tuple[ShardExchange, ...] = ()  # what they send each other for every microbatch, with ZeRO 2 and 3
    overlapped: bool = True  # they do so while the pipeline computes; else before all of it and after all of it
    operation_ns: int = 0  # overhead of each operation, of each part of one too, beyond the stages' times
    send_ns: int = 0  # overhead of each message: a part of the latency of every wire

    def __post_init__(self) -> None:
        if len(self.exchanges) not in (0, len(self.stages)):
            raise ConfigError(f"exchanges of {len(self.exchanges)} stages for {len(self.stages)} stages: give one each")
        if len(self.shards) not in (0, len(self.stages)):
            raise ConfigError(f"shards of {len(self.shards)} stages for {len(self.stages)} stages: give one each")

    def compute_ns(self, stage: int, kind: Kind, part: int = 0, parts: int = 1) -> int:
        """Time of one part of an operation; the first parts get the nanoseconds that do not divide."""
        whole, rest = divmod(self.stages[stage].compute_ns(kind), parts)
        return whole + (part < rest) + self.operation_ns

    def least_ns(self, stage: int, kind: Kind, part: int = 0, parts: int = 1) -> int:
        """The least time of one part of an operation with the exchanges of its layers; without any, its computation."""
        lasts = self.compute_ns(stage, kind, part, parts)
        if not self.shards:
            return lasts
        return least_ns(layered(stage, kind, part, parts, self.shards[stage]), lasts, self.overlapped)

    def gates_ns(self, parts: int = 1) -> list[int]:
        """When the first F of each stage may start, for its weights; empty where replicas exchange nothing before."""
        first_ns = [self.compute_ns(stage, Kind.F, 0, parts) for stage in range(len(self.exchanges))]
        return gates(self.exchanges, first_ns if self.overlapped else None)

    def with_overheads(self, operation_ns: int, send_ns: int, places: Sequence[int]) -> Costs:
        """The same costs with other overheads, also of messages that else take no time. places[s]: device of stage
        s."""
        pairs = {pair for a, b in pairwise(places) if a != b for pair in ((a, b), (b, a))}
        wires = dict(self.wires)
        for number, pair in enumerate(sorted(pairs - set(wires)) if send_ns else ()):
            wires[pair] = Wire(OWN_WIRES + number, 0, self.send_ns, shared=False)
        latencies = {pair: wire.latency_ns - self.send_ns + send_ns for pair, wire in wires.items()}
        changed = {
            pair: wire._replace(latency_ns=latencies[pair])
            for pair, wire in wires.items()
            if latencies[pair] or wire.busy_ns or wire.hold_ns
        }
        return replace(self, wires=changed, operation_ns=operation_ns, send_ns=send_ns)


def uniform(
    n_stages: int,
    chunks: int,
    times: tuple[float, float, float] = (1.0, 1.0, 1.0),
    release_of_d: float = 0.5,
    wires: Mapping[tuple[int, int], Wire] | None = None,
    activation: int = 1 << 20,
) -> Costs:
    """Costs of equal devices. times: (T_F, T_D, T_W) in seconds for one microbatch on one device, shared by its
    `chunks` stages, as is the activation of one microbatch on one device."""
    f_ns, d_ns, w_ns = (round(t * NS / chunks) for t in times)
    whole = activation // chunks
    stage = StageCost(f_ns, d_ns, w_ns, whole, round(whole * release_of_d))
    return Costs((stage,) * n_stages, wires or {})


def site_wires(
    sites: Sequence[int], busy_s: float, latency_s: float, wraps: bool = False
) -> dict[tuple[int, int], Wire]:
    """Wires between all devices of different sites; sites[d]: of device d, in the order of the pipeline.

    Each ordered pair of neighbouring devices is a link of its own. wraps: with exactly two sites, the message from
    the last device to the first (and back) crosses the same link as those of the boundary in the middle (CrossPipe's
    convention for loop placements).
    """
    if busy_s < 0 or latency_s < 0:
        raise ConfigError(f"a link has bandwidth time {busy_s:g} s and latency {latency_s:g} s: neither is negative")
    n, wires = len(sites), {}
    busy_ns, latency_ns = round(busy_s * NS), round(latency_s * NS)
    boundaries = [d for d in range(n - 1) if sites[d] != sites[d + 1]]
    for a in range(n):
        for b in range(n):
            if sites[a] == sites[b]:
                continue
            pair = (a, b)
            if wraps and len(boundaries) == 1 and {a, b} == {0, n - 1} and n > 2:
                middle = boundaries[0]
                pair = (middle + 1, middle) if a == n - 1 else (middle, middle + 1)
            wires[a, b] = Wire(pair[0] * n + pair[1], busy_ns, latency_ns)
    return wires


def equal_sites(n_devices: int, n_sites: int) -> tuple[int, ...]:
    """The site of each device when neighbours share one and all sites are alike. Raises ConfigError if they cannot
    be."""
    if n_sites < 1 or n_devices % n_sites:
        raise ConfigError(f"{n_devices} devices do not divide into {n_sites} equal sites: choose numbers that do")
    return tuple(d * n_sites // n_devices for d in range(n_devices))


# ---- costs file ------------------------------------------------------------------------------------------------------
#
# Writes and reads costs as JSON, with the schedule that was made for them: a plan can be simulated and run again.


def costs_json(costs: Costs) -> dict[str, Any]:
    """Costs as JSON: times in nanoseconds, activations in bytes (or the units of the costs). What replicas exchange is
    not written, only whether they do: replicas_exchange."""
    return {
        "stages": [
            {"f_ns": s.f_ns, "d_ns": s.d_ns, "w_ns": s.w_ns, "activation": s.activation, "d_release": s.d_release}
            for s in costs.stages
        ],
        "wires": [
            {
                "sender": sender,
                "receiver": receiver,
                "resource": wire.resource,
                "busy_ns": wire.busy_ns,
                "latency_ns": wire.latency_ns,
                "hold_ns": wire.hold_ns,
            }
            for (sender, receiver), wire in sorted(costs.wires.items())
        ],
        "replicas_exchange": bool(costs.exchanges or costs.shards),
        "operation_ns": costs.operation_ns,
        "send_ns": costs.send_ns,
    }


def read_costs(found: Any) -> Costs:
    """Inverse of costs_json(), without exchanges. Raises KeyError, TypeError or ValueError for anything else, and
    ConfigError for a negative cost."""
    stages = tuple(
        StageCost(*(int(one[key]) for key in ("f_ns", "d_ns", "w_ns", "activation", "d_release")))
        for one in found["stages"]
    )
    wires = {
        (int(one["sender"]), int(one["receiver"])): Wire(
            int(one["resource"]), int(one["busy_ns"]), int(one["latency_ns"]), int(one["hold_ns"])
        )
        for one in found["wires"]
    }
    operation_ns, send_ns = int(found.get("operation_ns", 0)), int(found.get("send_ns", 0))
    if operation_ns < 0 or any(not 0 <= send_ns <= wire.latency_ns for wire in wires.values()):
        raise ConfigError(f"overheads of {operation_ns} and {send_ns} ns are negative, or more than a message takes")
    return Costs(stages, wires, operation_ns=operation_ns, send_ns=send_ns)
