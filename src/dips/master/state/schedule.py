"""Chooses the order in which the parts of a transfer go to the slaves (paper 3.1, Figure 5).

Every transfer visits all slaves in turn, chunk by chunk, so that each link carries its share at every moment and all
shares end together. Transfers at the same time begin at different slaves, so that in each step they use different ones.
A transfer begins at the slave with the least load of begun transfers, weighted by measurements: a cluster whose
transfers take ten times as long counts a tenth. A slave with a low measured rate comes first in every turn, because its
share ends last.

The master decides only the order. How much is in flight to each slave is the worker's decision (dips.worker.flow),
updated with what each slave takes; how many streams a slave serves at full rate is the slave's
(dips.slave.state.credits). Both know the present state of a link, the master only the past. Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from dips.core.placement import Placement

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
    """A transfer that is about to begin. owner: a cluster or a reader, which has one transfer at a time.

    slot: its number among the clusters. own_s, fastest_s: the measured time of a whole transfer in this direction, of
    this owner and of the fastest cluster; 0: unknown.
    """

    owner: str
    way: Way
    slot: int
    own_s: float = 0.0
    fastest_s: float = 0.0

    @property
    def load(self) -> float:
        """Its load: its rate as a share of the fastest cluster's."""
        return min(1.0, self.fastest_s / self.own_s) if self.own_s > 0 and self.fastest_s > 0 else 1.0


class TransferScheduler:
    """The slaves at which open transfers began, and the slaves' measured rates."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[Way, int, float]] = {}
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
        for way, slave, load in self._begun.values():
            if way is request.way and slave < n:
                begun[slave] += load
        start = min(range(n), key=lambda slave: (begun[slave], (slave - request.slot) % n))
        self._begun[request.owner] = (request.way, start, request.load)
        around = [(start + step) % n for step in range(n)]
        return _in_turn(placement, sorted(around, key=lambda slave: self.speed(placement.slaves[slave], request.way)))

    def end(self, owner: str) -> None:
        """Ends this owner's transfer; unknown owners are ignored."""
        self._begun.pop(owner, None)

    def keep(self, owners: Collection[str]) -> None:
        """Ends the transfers of all other owners: some end without a message, and readers choose their names."""
        for owner in self._begun.keys() - owners:
            del self._begun[owner]


def _in_turn(placement: Placement, slaves: Sequence[int]) -> tuple[int, ...]:
    """One block of each of these slaves in turn, each slave's in the order of their ids."""
    queues: dict[int, list[int]] = {slave: [] for slave in slaves}
    for block_id, slave in enumerate(placement.slave_of_block):
        queues[slave].append(block_id)
    longest = max(map(len, queues.values()), default=0)
    return tuple(queue[step] for step in range(longest) for queue in queues.values() if step < len(queue))
