"""Models links with rates: how long a datagram of some size takes, and which ones wait.

Each named process may have an up and a down rate. A datagram leaves its sender's up link and enters its receiver's
down link; each link carries one datagram at a time, first come, first served. Cut-through: the receiving link begins
with the first bit that arrives, so one datagram alone takes its size over the slower of the two rates, plus the delay.
A fast receiver is not kept busy by a slow sender: it is occupied only for the size over its own rate.

It uses no randomness and does not interpret messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dips.sim.kernel import Action, Kernel, SimulatedProcess


@dataclass(frozen=True)
class ProcessRates:
    """Rates of one process, in bits/s; infinite: no limit."""

    up_bits_per_s: float = math.inf
    down_bits_per_s: float = math.inf


NO_LIMIT = ProcessRates()


@dataclass(frozen=True)
class LinkPlan:
    """The rates of a run, by the name of the process.

    wire_factor: what a datagram's size is multiplied with, when a small model represents a large one.
    """

    rates: Mapping[str, ProcessRates]
    wire_factor: float = 1.0


class LinkOccupancy:
    """Until when each link is occupied."""

    def __init__(self, kernel: Kernel, plan: LinkPlan) -> None:
        self._kernel = kernel
        self._rates = dict(plan.rates)
        self._wire_factor = plan.wire_factor
        self._up_free_s: dict[str, float] = {}
        self._down_free_s: dict[str, float] = {}

    def change(self, name: str, rates: ProcessRates) -> None:
        """Set a process's rates from now on; datagrams already on its links keep their times."""
        self._rates[name] = rates

    def carry(
        self, source: str, target: str, size_bytes: int, delay_s: float, process: SimulatedProcess | None, action:
        Action, *args: Any,
    ) -> None:  # fmt: skip
        """Do `action` in this incarnation of `process` when the last bit has arrived. delay_s: the link's delay."""
        now_s, bits = self._kernel.now_s, 8.0 * size_bytes * self._wire_factor
        begins_s = max(now_s, self._up_free_s.get(source, 0.0))
        sent_s = begins_s + bits / self._rates.get(source, NO_LIMIT).up_bits_per_s
        self._up_free_s[source] = sent_s
        arrival = (target, bits, sent_s + delay_s, process, action, args)
        self._kernel.after(begins_s - now_s + delay_s, process, self._arrives, *arrival)

    def _arrives(
        self, target: str, bits: float, last_bit_s: float, process: SimulatedProcess | None, action: Action,
        args: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """The first bit has reached the receiver."""
        begins_s = max(self._kernel.now_s, self._down_free_s.get(target, 0.0))
        ends_s = begins_s + bits / self._rates.get(target, NO_LIMIT).down_bits_per_s
        self._down_free_s[target] = ends_s
        self._kernel.at(max(ends_s, last_bit_s), process, action, *args)


def all_reduce_s(
    n_bytes: float, up_bits_per_s: Sequence[float], down_bits_per_s: Sequence[float], latency_s: float
) -> float:
    """Seconds of a ring all-reduce of `n_bytes` among K clusters without servers; 0 for one cluster.

    Each of the ring's 2 (K-1) steps moves n_bytes / K from every cluster to the next one, so every link carries
    2 (K-1) / K n_bytes, and the slowest one sets the pace (Patarasu and Yuan 2009; the Di-PS paper, section 3.1: "The
    communication performance of AllReduce is bottlenecked by the slowest network link"). Rates: cluster by cluster; 0
    means no limit.
    """
    k = len(up_bits_per_s)
    if k < 2:
        return 0.0
    slowest = min((rate for rate in (*up_bits_per_s, *down_bits_per_s) if rate > 0), default=math.inf)
    return 2 * (k - 1) * (8.0 * n_bytes / k / slowest + latency_s)
