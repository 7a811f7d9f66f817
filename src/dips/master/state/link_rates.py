"""Measures each link between a cluster and a slave: the mean rate of its last whole push and pull.

A push is measured from its ticket until the slave holds all of its part, a pull from its grant until the cluster
reports that it has everything. Whole transfers are measured because those of a small model end before the next beat.
For people only: no decision uses it. Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from dips.core.layout import Layout
from dips.core.placement import Placement
from dips.core.wire import Codec, encoded_bytes

MAX_LINKS = 4096
"""The most links in a report, a few hundred KB: 64 clusters by 64 slaves. The last names are left out beyond it."""

LEAST_S = 1e-4
"""The shortest transfer time that is assumed: clocks do not resolve less."""


@dataclass(frozen=True)
class LinkRate:
    """Mean bytes a second of the last transfer each way, and how long ago it ended; None where there was none."""

    cluster: str
    slave: str
    push_bytes_per_s: float | None = None
    push_age_s: float | None = None
    pull_bytes_per_s: float | None = None
    pull_age_s: float | None = None


@dataclass(frozen=True)
class _Measured:
    bytes_per_s: float
    at_s: float


class LinkRates:
    """The last transfer of each link. Not thread-safe: it belongs to the state."""

    def __init__(self) -> None:
        self._pushed: dict[tuple[str, str], _Measured] = {}
        self._pulled: dict[str, tuple[float, float]] = {}
        self._began: dict[str, float] = {}
        self._elems: tuple[bytes, dict[str, int]] = (b"", {})

    def staged(self, cluster: str, slave: str, part_bytes: int, took_s: float, now_s: float) -> None:
        """Records that the slave holds its part of a push that it began to receive took_s ago."""
        self._pushed[cluster, slave] = _Measured(part_bytes / max(took_s, LEAST_S), now_s)

    def pull_began(self, cluster: str, now_s: float) -> None:
        self._began[cluster] = now_s

    def pull_ended(self, cluster: str, now_s: float) -> None:
        """Records that the cluster has the whole model; does nothing when the start of the pull is not known."""
        began_s = self._began.pop(cluster, None)
        if began_s is not None:
            self._pulled[cluster] = (max(now_s - began_s, LEAST_S), now_s)

    def gone(self, cluster: str) -> None:
        """Forgets a cluster that is gone; its next incarnation may have another link."""
        self._began.pop(cluster, None)
        self._pulled.pop(cluster, None)
        for link in [link for link in self._pushed if link[0] == cluster]:
            del self._pushed[link]

    def part_bytes(self, slave: str, layout: Layout, placement: Placement, wire: Codec) -> int:
        """Bytes of this slave's blocks in the wire codec; exact enough for a rate."""
        return encoded_bytes(wire, self._held(layout, placement).get(slave, 0))

    def links(
        self, clusters: Collection[str], layout: Layout | None, placement: Placement | None, now_s: float
    ) -> tuple[LinkRate, ...]:
        """The measured links between these clusters and the slaves that hold blocks."""
        if layout is None or placement is None:
            return ()
        pairs = ((cluster, slave) for cluster in sorted(clusters) for slave in placement.slaves)
        found = (self._link(cluster, slave, self._held(layout, placement), now_s) for cluster, slave in pairs)
        return tuple(_first(found, MAX_LINKS))

    def _link(self, cluster: str, slave: str, elems: dict[str, int], now_s: float) -> LinkRate:
        pushed, pulled = self._pushed.get((cluster, slave)), self._pulled.get(cluster)
        pull_bytes = encoded_bytes(Codec.F32, elems.get(slave, 0))
        return LinkRate(
            cluster,
            slave,
            pushed.bytes_per_s if pushed else None,
            now_s - pushed.at_s if pushed else None,
            pull_bytes / pulled[0] if pulled else None,
            now_s - pulled[1] if pulled else None,
        )

    def _held(self, layout: Layout, placement: Placement) -> dict[str, int]:
        """The number of elements on each slave, computed once for each placement."""
        if self._elems[0] != placement.placement_hash:
            held = dict.fromkeys(map(str, placement.slaves), 0)
            for block, index in zip(layout.blocks, placement.slave_of_block, strict=True):
                held[placement.slaves[index]] += block.n_elems
            self._elems = (placement.placement_hash, held)
        return self._elems[1]


def _first(links: Iterator[LinkRate], most: int) -> Iterator[LinkRate]:
    for _, link in zip(range(most), links, strict=False):
        yield link
