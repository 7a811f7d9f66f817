"""Recommends how long links are used: load balancing, congestion control, tolerance of loss.

Each recommendation has the rule that it follows, with its threshold, and where the rule comes from. The paper measured
at 50, 100 and 1,000 us one way; where a rule fills in between these, it says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dips.planner.scaleacross.iteration import Outermost, Pipelining, Sharding, layer_costs, shares_of, sums_of
from dips.planner.scaleacross.search import Choice
from dips.planner.scaleacross.topology import Topology, Way
from dips.planner.scaleacross.traffic import (
    crossings_in_a_loop,
    crossings_in_a_v,
    message_bytes,
    retransmission_s,
    sprayed_bytes_per_s,
)

NEAR_US, FAR_US, VERY_FAR_US = 50.0, 100.0, 1000.0
"""Latencies one way at which the paper compares: 10, 20 and 200 km."""

FEW_QUEUE_PAIRS = 4
"""With so many or fewer, spraying was slower than ECMP at VERY_FAR_US (section 5.3)."""

CONGESTED = 8.0
"""Times the usual oversubscription from which congestion control made a difference (section 5.4)."""


@dataclass(frozen=True)
class NetworkAdvice:
    """One recommendation."""

    about: str
    use: str
    why: str  # with this topology's numbers
    rule: str  # with its threshold
    source: str


def recommend(topology: Topology, choice: Choice) -> list[NetworkAdvice]:
    """Recommendations for the longest route between buildings; none for one building, or an unknown network."""
    longest = topology.longest()
    if longest is None or topology.network is None:
        return []
    case, n = choice.case, len(topology.buildings)
    firsts = np.array([topology.first_of(building) for building in range(n)])
    here, there = np.nonzero(~np.eye(n, dtype=bool))
    way = topology.slowest(firsts[here], firsts[there])
    latency_us = way.latency_s * 1e6
    ratio = max(topology.route(a, b).oversubscription for a in range(n) for b in range(a))
    messages, size = crossing(topology, choice)
    return [
        _balancing(topology, way, latency_us),
        _congestion(topology, latency_us, ratio),
        _loss(topology, latency_us, messages, size, case.outermost),
    ]


def crossing(topology: Topology, choice: Choice) -> tuple[int, float]:
    """Messages of an iteration that one accelerator at the edge of a building sends over the long link and whose loss
    is waited for, and the bytes of one. With DP-out only the first chunk's collectives are not hidden (section 3.1)."""
    case, split = choice.case, choice.case.split
    if case.outermost is Outermost.PP:
        in_a_v = case.pipelining is Pipelining.ZBV
        crossings = crossings_in_a_v(case.chunks) if in_a_v else crossings_in_a_loop(case.chunks)
        size = message_bytes(
            topology.model, topology.batch.sequence_tokens, split.microbatch_sequences, split.tensor, split.context
        )
        # Half of the crossings go each way.
        return split.microbatches(topology) * crossings // 2, size
    rows = np.array([choice.division], np.int64)
    whole = float(sums_of(layer_costs(topology, split).exchanged_bytes, rows)[0, 0])
    if case.sharding is Sharding.HSDP:
        buildings = sum(share > 0 for share in shares_of(topology, case.outermost, split))
        return 2 * (buildings - 1), whole / buildings
    members = split.data * split.context
    return 2 * (members - 1), whole / members


def _balancing(topology: Topology, way: Way, latency_us: float) -> NetworkAdvice:
    network = topology.network
    assert network is not None
    bound = sprayed_bytes_per_s(way.latency_s, network.in_flight_packets, network.packet_bytes)
    needed = max(1, math.ceil(way.bytes_per_s / bound))
    enough = network.queue_pairs >= needed
    if latency_us <= NEAR_US:
        use = "packet spraying"
    elif latency_us >= VERY_FAR_US and network.queue_pairs <= FEW_QUEUE_PAIRS:
        use = "ECMP"
    else:
        use = "packet spraying" if enough else "ECMP"
    limit = "no limit" if math.isinf(bound) else f"{bound * 8 / 1e9:.3g} Gbit/s"
    return NetworkAdvice(
        "load balancing",
        use,
        f"{latency_us:.4g} us one way: a queue pair with packet spraying has {limit}; {needed} of them carry the "
        f"{way.bytes_per_s * 8 / 1e9:.4g} Gbit/s of a pair of accelerators, {network.queue_pairs} are there",
        f"packet spraying up to {NEAR_US:g} us; ECMP from {VERY_FAR_US:g} us on with {FEW_QUEUE_PAIRS} queue pairs or "
        f"fewer; else (not in the paper) packet spraying if the queue pairs' {network.in_flight_packets} packets in "
        "flight each carry what a pair of accelerators gets",
        "section 5.3, figure 20",
    )


def _congestion(topology: Topology, latency_us: float, ratio: float) -> NetworkAdvice:
    assert topology.network is not None
    usual = topology.network.usual_oversubscription
    off = latency_us >= FAR_US and ratio >= CONGESTED * usual
    return NetworkAdvice(
        "congestion control",
        "none" if off else "as it is: ECN-based or none",
        f"{latency_us:.4g} us one way, 1:{ratio:g} is {ratio / usual:.3g} times the usual 1:{usual:g}",
        f"none from {FAR_US:g} us and {CONGESTED:g} times the usual oversubscription on (0.89 and 1.52 % faster at 100 "
        "and 1000 us there); else it makes no difference",
        "section 5.4, figure 21; one training alone on the network",
    )


def _loss(topology: Topology, latency_us: float, messages: int, size: float, outermost: Outermost) -> NetworkAdvice:
    network = topology.network
    assert network is not None
    lost_s = retransmission_s(messages, size, network.loss_rate, network.packet_bytes, 2 * latency_us / 1e6)
    far = latency_us > FAR_US
    return NetworkAdvice(
        "loss of packets",
        "redundancy (selective repetition or erasure coding)" if far else "retransmission (Go-Back-N)",
        f"at a loss of {network.loss_rate:.3%} {messages} messages of {size / 1e6:.3g} MB, which {outermost} does not "
        f"hide, cost up to {lost_s * 1e3:.3g} ms an iteration, a round trip for each that loses a packet",
        f"redundancy beyond {FAR_US:g} us, that is 20 km",
        "section 5.2, figure 18; the estimate is this planner's",
    )
