"""What `dips plan explore` reports: the search's result, the reasons for it, and how to use long links (load balancing,
congestion control, tolerance of loss).

Each recommendation has the rule that it follows, with its threshold, and where the rule comes from. The paper measured
at 50, 100 and 1,000 us one way; where a rule fills in between these, it says so.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dips.core.units import format_seconds
from dips.planner.scaleacross.iteration import Outermost, Pipelining, Sharding, layer_costs, shares_of, sums_of
from dips.planner.scaleacross.search import Choice, Explored, Parts, catches_up, explore, parts_of
from dips.planner.scaleacross.topology import Topology, Way

NEAR_US, FAR_US, VERY_FAR_US = 50.0, 100.0, 1000.0
"""Latencies one way at which the paper compares: 10, 20 and 200 km."""

FEW_QUEUE_PAIRS = 4
"""With so many or fewer, spraying was slower than ECMP at VERY_FAR_US (section 5.3)."""

CONGESTED = 8.0
"""Times the usual oversubscription from which congestion control made a difference (section 5.4)."""


def sprayed_bytes_per_s(latency_s: float, packets: int = 512, packet_bytes: int = 4096) -> float:
    """The most of one queue pair with packet spraying: so many packets are on their way at most (section 5.3)."""
    return packets * packet_bytes / latency_s if latency_s else math.inf


def retransmission_s(messages: int, message_bytes: float, loss_rate: float, packet_bytes: int, rtt_s: float) -> float:
    """What lost packets cost an iteration with Go-Back-N: a round trip for each message that loses one, if none of
    them is hidden."""
    packets = max(1, math.ceil(message_bytes / packet_bytes))
    return messages * -math.expm1(packets * math.log1p(-loss_rate)) * rtt_s


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
        # A microbatch crosses the boundary between two sites once each way for each chunk of a stage where chunks go to
        # the last stage and back, since the turns stay inside a site; in a loop also from the last stage to the first.
        crossings = case.chunks if case.pipelining is Pipelining.ZBV else 2 * case.chunks - 1
        return split.microbatches(topology) * crossings, split.message_bytes(topology)
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


@dataclass(frozen=True, eq=False)
class ScaleAcrossReport:
    explored: Explored
    parts: Parts  # of the best
    advice: tuple[NetworkAdvice, ...]
    why: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Times in seconds; null where a configuration does not fit."""
        found = self.explored
        return {
            "topology": Path(found.topology.file).name,
            "model": found.topology.model.name,
            "searched_with_links": found.links,
            "cases": found.n_cases,
            "cases_played": found.n_played,
            "divisions_played": found.n_divisions,
            "best_of_each_kind": [_choice_json(choice) for choice in found.best],
            "present": None if found.present is None else _choice_json(found.present),
            "parts": self.parts._asdict(),
            "why": list(self.why),
            "network": [asdict(one) for one in self.advice],
        }


def _choice_json(choice: Choice) -> dict[str, Any]:
    case = choice.case
    return {
        **case.split._asdict(),
        "outermost": case.outermost.value,
        "sharding": case.sharding.value,
        "schedule": case.pipelining.value,
        "chunks_of_a_stage": case.chunks,
        "microbatches_together": case.together,
        "layers": list(choice.division),
        "algorithm_1_s": choice.printed_s if math.isfinite(choice.printed_s) else None,
        "links_s": choice.links_s if math.isfinite(choice.links_s) else None,
        "memory_bytes": choice.used_bytes,
    }


def report_of(topology: Topology, links: bool = False) -> ScaleAcrossReport:
    """Explore a topology. Raises ConfigError where nothing fits."""
    found = explore(topology, links)
    parts = parts_of(topology, found.best[0], links)
    return ScaleAcrossReport(found, parts, tuple(recommend(topology, found.best[0])), tuple(_why(found, parts)))


def name_of(choice: Choice) -> str:
    return f"{choice.case.outermost}, {choice.case.sharding}, {choice.case.pipelining}"


def _why(found: Explored, parts: Parts) -> list[str]:
    links, best = found.links, found.best[0]
    whole = best.seconds(links)
    shares = (
        ("computing on the busiest accelerator", parts.computing_s),
        ("bubble", parts.bubble_s),
        ("messages between stages that nothing hides", parts.messages_s),
        ("weights and gradients that nothing hides", parts.collectives_s),
    )
    listed = ", ".join(f"{what} {format_seconds(seconds)} ({seconds / whole:.1%})" for what, seconds in shares)
    sentences = [*found.topology.notes, f"best: {name_of(best)}: {format_seconds(whole)}: {listed}"]
    split = best.case.split
    used, there = split.tensor * split.context * split.pipeline * split.data, found.topology.n_accelerators
    if used < there:
        given = shares_of(found.topology, best.case.outermost, split)
        what = "replicas" if best.case.outermost is Outermost.DP else "stages"
        named = zip(found.topology.buildings, given, strict=True)
        listed = ", ".join(f"{share} {what} in {building.name}" for building, share in named)
        sentences.append(f"it uses {used} of {there} accelerators: {listed}")
    if len(found.best) > 1:
        sentences.append(_next(found, best, found.best[1]))
    if found.present is not None and math.isfinite(found.present.seconds(links)):
        sentences.append(f"the present configuration takes {found.present.seconds(links) / whole - 1:.1%} longer")
    return sentences


def _next(found: Explored, best: Choice, other: Choice) -> str:
    spent = parts_of(found.topology, other, found.links)
    slower = f"next: {name_of(other)}: {other.seconds(found.links) / best.seconds(found.links) - 1:.1%} slower"
    where = (
        f"its messages and collectives that nothing hides take {format_seconds(spent.messages_s + spent.collectives_s)}"
    )
    if len(found.topology.buildings) == 1:
        return f"{slower}; {where}"
    change = catches_up(found.topology, best, other, found.links)
    if change is None:
        need = "no bandwidth between buildings up to 64 times more or less makes it as fast"
    else:
        factor, more = change
        need = (
            f"it would be as fast with {factor:.3g} times the bandwidth between buildings"
            if more
            else f"it would be as fast with the bandwidth between buildings divided by {factor:.3g}"
        )
    return f"{slower}; {where}; {need}"
