"""Chooses the order in which the parts of a transfer go to the slaves (paper 3.1, Figure 5).

Every transfer visits all slaves in turn, chunk by chunk, so that each link carries its share at every moment and all
shares end together. Transfers at the same time begin at different slaves, so that in each step they use different ones.
A transfer begins at the slave with the least load of begun transfers, weighted by measurements: a cluster whose
transfers take ten times as long counts a tenth. A slave with a low measured rate comes first in every turn, because its
share ends last. A cluster of several ranks has as many pushers: each rank rotates the order by its number, so that its
transfer begins at as many slaves, and counts at each of them for its part.

The master decides only the order. How much is in flight to each slave is the worker's decision (dips.core.net.flow),
updated with what each slave takes; how many streams a slave serves at full rate is the slave's
(dips.slave.state.admission). Both know the present state of a link, the master only the past. Pure: time is an
argument.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from dips.core.layout import Layout
from dips.core.placement import Placement
from dips.core.wire import Codec, encoded_bytes

EQUAL_SHARE = 0.5
"""A slave with at least this share of the fastest one's measured rate counts as equally fast: the measured rate depends
on what was sent there, and that varies."""

FADING = 0.9
"""A slave's rate follows a higher measurement at once, and falls by a tenth with each lower one."""


class Way(Enum):
    """The direction of a transfer; pushes and pulls use different directions of a link."""

    PUSH = "push"
    PULL = "pull"


@dataclass(frozen=True)
class TransferRequest:
    """A transfer that is about to begin."""

    owner: str  # a cluster or a reader, which has one transfer at a time
    way: Way
    slot: int  # its number among the clusters
    # own_s, fastest_s: the measured time of a whole transfer in this direction, of this owner and of the fastest
    # cluster; 0: unknown
    own_s: float = 0.0
    fastest_s: float = 0.0
    pushers: int = 1  # ranks; each begins at another slave of the order

    @property
    def load(self) -> float:
        """Its load: its rate as a share of the fastest cluster's."""
        return min(1.0, self.fastest_s / self.own_s) if self.own_s > 0 and self.fastest_s > 0 else 1.0


class TransferScheduler:
    """The slaves at which open transfers began, and the slaves' measured rates."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[Way, dict[int, float]]] = {}
        self._bytes_per_s: dict[tuple[str, Way], float] = {}
        self._served: dict[str, tuple[float, int]] = {}

    # ---- measurements ----

    def beat(self, slave: str, landed_bytes: int, served_bytes: int, now_s: float) -> None:
        """Takes a slave's beat: bytes received there since the last one, and bytes served in all since its start."""
        before_s, before = self._served.get(slave, (now_s, served_bytes))
        self._served[slave] = (now_s, served_bytes)
        if now_s > before_s:
            self._measured(slave, Way.PUSH, landed_bytes / (now_s - before_s))
            self._measured(slave, Way.PULL, max(0, served_bytes - before) / (now_s - before_s))

    def _measured(self, slave: str, way: Way, bytes_per_s: float) -> None:
        """Updates a rate; a slave that moved nothing had nothing to do, which is no measurement."""
        if bytes_per_s > 0:
            old = self._bytes_per_s.get((slave, way), 0.0)
            self._bytes_per_s[slave, way] = max(bytes_per_s, FADING * old)

    def speed(self, slave: str, way: Way) -> float:
        """A slave's rate as a share of the fastest slave's; 1 where it is not known."""
        rate = self._bytes_per_s.get((slave, way))
        fastest = max((r for (_, w), r in self._bytes_per_s.items() if w is way), default=0.0)
        return 1.0 if rate is None or rate >= EQUAL_SHARE * fastest else rate / fastest

    # ---- orders ----

    @property
    def n_under_way(self) -> int:
        """The number of transfers that began and are not known to be over."""
        return len(self._begun)

    def begin(self, request: TransferRequest, placement: Placement) -> tuple[int, ...]:
        """The order of all block ids for this transfer, one of each slave in turn; it ends the owner's previous one."""
        self.end(request.owner)
        n = len(placement.slaves)
        begun = [0.0] * n
        for way, loads in self._begun.values():
            for slave, load in loads.items() if way is request.way else ():
                if slave < n:
                    begun[slave] += load
        start = min(range(n), key=lambda slave: (_met(begun, slave, request.pushers), (slave - request.slot) % n))
        loads = dict.fromkeys(((start + rank) % n for rank in range(request.pushers)), 0.0)
        for rank in range(request.pushers):
            loads[(start + rank) % n] += request.load / request.pushers
        self._begun[request.owner] = (request.way, loads)
        around = [(start + step) % n for step in range(n)]
        return _in_turn(placement, sorted(around, key=lambda slave: self.speed(placement.slaves[slave], request.way)))

    def end(self, owner: str) -> None:
        """Ends this owner's transfer; unknown owners are ignored."""
        self._begun.pop(owner, None)

    def keep(self, owners: Collection[str]) -> None:
        """Ends the transfers of all other owners: some end without a message, and readers choose their names."""
        for owner in self._begun.keys() - owners:
            del self._begun[owner]


def _met(begun: Sequence[float], start: int, pushers: int) -> float:
    """The load that the pushers of a transfer meet where they begin, if the first one begins at this slave."""
    return sum(begun[(start + rank) % len(begun)] for rank in range(pushers))


def _in_turn(placement: Placement, slaves: Sequence[int]) -> tuple[int, ...]:
    """One block of each of these slaves in turn, each slave's in the order of their ids."""
    queues: dict[int, list[int]] = {slave: [] for slave in slaves}
    for block_id, slave in enumerate(placement.slave_of_block):
        queues[slave].append(block_id)
    longest = max(map(len, queues.values()), default=0)
    return tuple(queue[step] for step in range(longest) for queue in queues.values() if step < len(queue))


# ---- link rates ------------------------------------------------------------------------------------------------------
#
# Measures each link between a cluster and a slave: the mean rate of its last whole push and pull.
#
# A push is measured from its ticket until the slave holds all of its part, a pull from its grant until the cluster
# reports that it has everything. Whole transfers are measured because those of a small model end before the next beat.
# For people only: no decision uses it. Pure: time is an argument.


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


@dataclass(frozen=True)
class _Pull:
    wire: Codec
    transfers: int  # 1, or the differences that lead from the cluster's base to the version
    began_s: float


@dataclass(frozen=True)
class _Pulled:
    pull: _Pull
    took_s: float
    at_s: float


class LinkRates:
    """The last transfer of each link. Not thread-safe: it belongs to the state."""

    def __init__(self) -> None:
        self._pushed: dict[tuple[str, str], _Measured] = {}
        self._pulled: dict[str, _Pulled] = {}
        self._began: dict[str, _Pull] = {}
        self._elems: tuple[bytes, dict[str, int]] = (b"", {})

    def staged(self, cluster: str, slave: str, part_bytes: int, took_s: float, now_s: float) -> None:
        """Records that the slave holds its part of a push that it began to receive took_s ago."""
        self._pushed[cluster, slave] = _Measured(part_bytes / max(took_s, LEAST_S), now_s)

    def pull_began(self, cluster: str, wire: Codec, transfers: int, now_s: float) -> None:
        """Records a grant; transfers: 1, or the number of differences that are granted."""
        self._began[cluster] = _Pull(wire, transfers, now_s)

    def pull_ended(self, cluster: str, now_s: float) -> None:
        """Records that the cluster has the whole model; does nothing when the start of the pull is not known."""
        pull = self._began.pop(cluster, None)
        if pull is not None:
            self._pulled[cluster] = _Pulled(pull, max(now_s - pull.began_s, LEAST_S), now_s)

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
        return tuple(islice(found, MAX_LINKS))

    def _link(self, cluster: str, slave: str, elems: dict[str, int], now_s: float) -> LinkRate:
        pushed, pulled = self._pushed.get((cluster, slave)), self._pulled.get(cluster)
        pull_bytes = pulled.pull.transfers * encoded_bytes(pulled.pull.wire, elems.get(slave, 0)) if pulled else 0
        return LinkRate(
            cluster,
            slave,
            pushed.bytes_per_s if pushed else None,
            now_s - pushed.at_s if pushed else None,
            pull_bytes / pulled.took_s if pulled else None,
            now_s - pulled.at_s if pulled else None,
        )

    def _held(self, layout: Layout, placement: Placement) -> dict[str, int]:
        """The number of elements on each slave, computed once for each placement."""
        if self._elems[0] != placement.placement_hash:
            held = dict.fromkeys(map(str, placement.slaves), 0)
            for block, index in zip(layout.blocks, placement.slave_of_block, strict=True):
                held[placement.slaves[index]] += block.n_elems
            self._elems = (placement.placement_hash, held)
        return self._elems[1]
