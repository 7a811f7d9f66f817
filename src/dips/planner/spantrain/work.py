"""What SpanTrain's planner knows of a problem: what layers cost on one device of each site, and the ways between sites.

One device computes everything here: what the file says of tensor, context, expert and data parallelism is not used,
since SpanTrain chooses it. Nothing is sharded as in ZeRO. A device that gets a part of a microbatch, or of each layer,
takes that part of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from dips.core.errors import ConfigError
from dips.planner.cluster import ClusterFile
from dips.planner.problem import Problem
from dips.planner.units import Unit


class MessageWay(NamedTuple):
    """How messages go from a device of one site to one of another, or of the same."""

    bytes_per_s: float  # infinite: messages take no time on it
    latency_s: float
    resource: int  # messages of the same way in the same direction take turns on it
    sender: int
    receiver: int

    def busy_s(self, size_bytes: float) -> float:
        """The time of a message on the way; it arrives later by the latency."""
        return size_bytes / self.bytes_per_s


class UnitTimes(NamedTuple):
    """Seconds of units for one microbatch on one device: forward, gradient of the input, gradient of the weights."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s


@dataclass(frozen=True, eq=False)
class Work:
    """A problem with microbatches of one size. Sums are running sums over the units: sums[k] is of the first k."""

    setup: ClusterFile
    sequences: int  # of a microbatch
    message_bytes: float  # of one microbatch, between two stages
    units: int
    times_s: tuple[tuple[UnitTimes, ...], ...]  # sums on one device, by site
    activation_bytes: tuple[float, ...]  # sums, of one microbatch
    state_bytes: tuple[float, ...]  # sums: weights, gradients and optimizer state
    weight_bytes: tuple[float, ...]  # sums, as gradients are sent
    memory_bytes: tuple[float, ...]  # of a device, by site
    ways: tuple[tuple[MessageWay, ...], ...]  # ways[a][b]: from site a to site b
    # what slowest() found before
    _slowest: dict[tuple[tuple[int, ...], tuple[int, ...]], MessageWay] = field(default_factory=dict, init=False)

    def slowest(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> MessageWay:
        """The way on which a message of one microbatch takes longest, of those between two sets of sites."""
        found = self._slowest.get((senders, receivers))
        if found is None:
            ways = [self.ways[a][b] for a in senders for b in receivers]
            found = max(ways, key=lambda way: way.busy_s(self.message_bytes) + way.latency_s)
            self._slowest[senders, receivers] = found
        return found

    def slowest_within(self, sites: Sequence[int], devices: Sequence[int]) -> MessageWay:
        """The way with the least bandwidth between devices of these sites; devices: of each site."""
        found = [self.ways[a][b] for a in sites for b in sites if a != b]
        found += [self.ways[a][a] for a, count in zip(sites, devices, strict=True) if count > 1]
        return min(found, key=lambda way: (way.bytes_per_s, -way.latency_s))


def work_of(setup: ClusterFile, sequences: int) -> Work:
    """Raises ConfigError where times, memory or a link is missing."""
    training = setup.training
    _check(setup, sequences)
    alone = training.model_copy(
        update={
            "microbatch_sequences": sequences, "tensor": 1, "context": 1, "expert": 1, "data": 1, "zero_stage": 0,
        }
    )  # fmt: skip
    problem = Problem(replace(setup, training=alone))
    units = problem.units
    message_bytes = problem.message_bytes
    if setup.profile is not None and setup.profile.message_mb is not None:  # of the file's microbatch
        message_bytes *= sequences / training.microbatch_sequences
    return Work(
        setup=setup,
        sequences=sequences,
        message_bytes=message_bytes,
        units=len(units),
        times_s=tuple(
            _sums_of_times(at_site, problem.slowness_at(site)) for site, at_site in enumerate(problem.units_at)
        ),
        activation_bytes=_sums(units, lambda unit: unit.activation_bytes),
        state_bytes=_sums(units, lambda unit: unit.state_bytes),
        weight_bytes=_sums(units, lambda unit: unit.weight_bytes),
        memory_bytes=tuple(_memory_bytes(setup, site) for site in range(len(setup.sites))),
        ways=tuple(tuple(_way(setup, a, b) for b in range(len(setup.sites))) for a in range(len(setup.sites))),
    )


def _check(setup: ClusterFile, sequences: int) -> None:
    training, profile = setup.training, setup.profile
    if profile is None or profile.times_of_stage_ms is None:
        return
    if training.tensor * training.context > 1:
        raise ConfigError(
            f"{setup.file} [profile] has times of a stage on tensor x context = {training.tensor * training.context} "
            "devices, and SpanTrain's planner needs those of one device: give [[profile.layers]]"
        )
    if sequences != training.microbatch_sequences:
        raise ConfigError(
            f"{setup.file} [profile] has times of a stage for microbatch_sequences = {training.microbatch_sequences}, "
            f"not for {sequences}: give [[profile.layers]] of this size"
        )


def _sums_of_times(units: Sequence[Unit], slowness: float) -> tuple[UnitTimes, ...]:
    columns = [
        _sums(units, lambda unit, name=name: getattr(unit, name) * slowness)  # type: ignore[misc]
        for name in UnitTimes._fields
    ]
    return tuple(map(UnitTimes._make, zip(*columns, strict=True)))


def _sums(units: Sequence[Unit], value: Callable[[Unit], float]) -> tuple[float, ...]:
    return (0.0, *accumulate(map(value, units)))


def _memory_bytes(setup: ClusterFile, site: int) -> float:
    given = setup.sites[site].memory_gib
    if given is None:
        raise ConfigError(
            f"{setup.file} [[sites]] {site + 1}: memory_gib of {setup.sites[site].name} is not given, which "
            "SpanTrain's planner needs for every site: add it"
        )
    return given * 2**30


def _way(setup: ClusterFile, a: int, b: int) -> MessageWay:
    sites = setup.sites
    resource = a * len(sites) + b
    if a == b:
        gbps = sites[a].network_gbps
        rate = math.inf if gbps is None else gbps * 1e9 / 8
        return MessageWay(rate, sites[a].network_latency_us / 1e6, resource, a, b)
    link = setup.link(sites[a].name, sites[b].name, "which SpanTrain's groups need of every pair of sites")
    return MessageWay(link.bytes_per_s, link.latency_ms / 1e3, resource, a, b)
