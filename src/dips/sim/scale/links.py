"""Simulates transfers over fairly shared links: each cluster has its own, and all share the slaves' network cards.

One Direction holds the flows of one direction. A flow is a cluster's transfer to or from all slaves at once; blocks
are staggered over the slaves (paper 3.1, Figure 5), so their cards count as one.
"""

from __future__ import annotations

from collections.abc import Mapping

from dips.sim.scale.kernel import Future, Timer, VirtualClock
from dips.sim.scale.rates import fair_shares

_DONE_BYTES = 1e-3


class SharedTransfer:
    """One transfer under way. parts: bytes for each slave to send or receive, at the beginning."""

    def __init__(self, cluster: str, parts: Mapping[str, float], outcome: Future) -> None:
        self.cluster = cluster
        self.parts = dict(parts)
        self.total_bytes = sum(parts.values())
        self.left_bytes = self.total_bytes
        self.rate_bytes_per_s = 0.0
        self.done = outcome

    def left_of(self, slave: str) -> float:
        """Bytes still to be sent between the cluster and this slave."""
        return self.parts[slave] * (self.left_bytes / self.total_bytes if self.total_bytes else 0.0)


class SharedDirection:
    """Flows in one direction. Capacities in bits/s; a capacity of 0 lets nothing through."""

    def __init__(self, clock: VirtualClock, capacities: Mapping[str, float], servers_bits_per_s: float) -> None:
        self._clock = clock
        self._capacity = dict(capacities)
        self._open: dict[str, bool] = dict.fromkeys(capacities, True)
        self._servers_bits_per_s = servers_bits_per_s
        self._flows: list[SharedTransfer] = []
        self._settled_s = clock.now_s
        self._timer: Timer | None = None
        self.bytes_of_cluster: dict[str, float] = dict.fromkeys(capacities, 0.0)
        self.bytes_of_slave: dict[str, float] = {}
        self.busy_s: dict[str, float] = dict.fromkeys(capacities, 0.0)

    def start(self, cluster: str, parts: Mapping[str, float]) -> SharedTransfer:
        """Begin a transfer; flow.done becomes True at its end, or False when it is broken."""
        flow = SharedTransfer(cluster, parts, Future(self._clock))
        self._settle()
        self._flows.append(flow)
        self._plan()
        return flow

    def settle(self) -> None:
        """Bring left_bytes of all flows up to now."""
        self._settle()

    def of(self, cluster: str) -> SharedTransfer | None:
        return next((flow for flow in self._flows if flow.cluster == cluster), None)

    def break_flow(self, flow: SharedTransfer) -> None:
        if flow in self._flows:
            self._settle()
            self._flows.remove(flow)
            self._plan()
        flow.done.set(False)

    def break_all(self) -> None:
        for flow in list(self._flows):
            self.break_flow(flow)

    def set_open(self, cluster: str, is_open: bool) -> None:
        """Cut or restore a cluster's link."""
        self._settle()
        self._open[cluster] = is_open
        self._plan()

    def _settle(self) -> None:
        """Move bytes for the time that has passed at the rates that held."""
        passed_s = self._clock.now_s - self._settled_s
        self._settled_s = self._clock.now_s
        if passed_s <= 0:
            return
        for flow in self._flows:
            moved = min(flow.left_bytes, flow.rate_bytes_per_s * passed_s)
            flow.left_bytes -= moved
            self.bytes_of_cluster[flow.cluster] += moved
            self.busy_s[flow.cluster] += passed_s
            for slave, part in flow.parts.items():
                share = moved * part / flow.total_bytes
                self.bytes_of_slave[slave] = self.bytes_of_slave.get(slave, 0.0) + share

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wanted = [self._capacity[f.cluster] if self._open[f.cluster] else 0.0 for f in self._flows]
        for flow, bits_per_s in zip(self._flows, fair_shares(wanted, self._servers_bits_per_s), strict=True):
            flow.rate_bytes_per_s = bits_per_s / 8.0
        ends_s = [f.left_bytes / f.rate_bytes_per_s for f in self._flows if f.rate_bytes_per_s > 0]
        if ends_s:
            self._timer = self._clock.after(min(ends_s), self._ended)

    def _ended(self) -> None:
        self._timer = None
        self._settle()
        # The rest of a flow that ends now is rounding; the clock cannot show less than a nanosecond's worth.
        ended = [f for f in self._flows if f.left_bytes <= max(_DONE_BYTES, f.rate_bytes_per_s * 1e-6)]
        for flow in ended:
            self._flows.remove(flow)
        self._plan()
        for flow in ended:
            flow.left_bytes = 0.0
            flow.done.set(True)
