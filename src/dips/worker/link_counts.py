"""Counts the traffic on the links to the slaves in all transfers of this process, on the thread that transfers.

Owned by the data thread, which makes a new immutable view a few times a second during a transfer; readers get the
last one. Bytes are those on the wire: differences have fewer than parameters. Of a cluster of several
ranks the leader also counts what each of them has moved, on the training thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from dips.core.layout import FLOAT32_BYTES
from dips.core.net.transfer import SlaveProgress
from dips.core.wire import Codec, encoded_bytes


class TransferDirection(Enum):
    PUSH = "push"
    PULL = "pull"


@dataclass(frozen=True)
class SlaveLinkCounts:
    """Counts of one slave."""

    # n_bytes, bytes_per_s: by direction; the rate is the newest transfer's, NaN before the first
    n_bytes: Mapping[TransferDirection, int] = field(default_factory=dict)
    bytes_per_s: Mapping[TransferDirection, float] = field(default_factory=dict)
    resumed_bytes: int = 0  # bytes that the slave held already when an attempt of a push began
    reconnects: int = 0
    refusals: Mapping[str, int] = field(default_factory=dict)  # by code
    round_trip_s: float | None = None


@dataclass(frozen=True)
class RankCounts:
    """Counts of one rank of this cluster, of transfers that are done. n_bytes, seconds: by direction; the seconds are
    those of its part of the newest transfer.
    """

    n_bytes: Mapping[TransferDirection, int] = field(default_factory=dict)
    seconds: Mapping[TransferDirection, float] = field(default_factory=dict)

    def with_part(self, direction: TransferDirection, n_bytes: int, seconds: float) -> RankCounts:
        moved = self.n_bytes.get(direction, 0) + n_bytes
        return RankCounts({**self.n_bytes, direction: moved}, {**self.seconds, direction: seconds})


@dataclass(frozen=True)
class Transferring:
    """Adds the progress of one transfer to the counts. For the data thread."""

    counts: LinkCounts
    direction: TransferDirection
    wire: Codec
    began_s: float
    before: Mapping[str, SlaveLinkCounts]
    n_parts: int = 1  # payloads of each chunk: of a pull of differences several may follow each other

    def tell(self, moved: Mapping[str, SlaveProgress], now_s: float) -> None:
        """Take the transfer's progress since its beginning."""
        links = {
            slave: self._link(self.before.get(slave, SlaveLinkCounts()), part, now_s) for slave, part in moved.items()
        }
        self.counts.show({**self.before, **links})

    def _link(self, before: SlaveLinkCounts, part: SlaveProgress, now_s: float) -> SlaveLinkCounts:
        way, n_bytes = self.direction, self.n_parts * encoded_bytes(self.wire, part.carried_bytes // FLOAT32_BYTES)
        refusals = dict(before.refusals)
        for code, count in part.refusals.items():
            refusals[code] = refusals.get(code, 0) + count
        moves = (
            {**before.bytes_per_s, way: n_bytes / max(now_s - self.began_s, 1e-6)} if n_bytes else before.bytes_per_s
        )
        return replace(
            before,
            n_bytes={**before.n_bytes, way: before.n_bytes.get(way, 0) + n_bytes},
            bytes_per_s=moves,
            resumed_bytes=before.resumed_bytes + encoded_bytes(self.wire, part.resumed_bytes // FLOAT32_BYTES),
            reconnects=before.reconnects + part.reconnects,
            refusals=refusals,
            round_trip_s=part.round_trip_s if part.round_trip_s is not None else before.round_trip_s,
        )


class LinkCounts:
    """All links; `keep` bounds them to the slaves of the placement of the newest transfer."""

    def __init__(self) -> None:
        self._view: Mapping[str, SlaveLinkCounts] = {}
        self.ranks: Mapping[int, RankCounts] = {}
        """Of each rank, on the leader of several; from any thread, never changed afterwards."""

    @property
    def view(self) -> Mapping[str, SlaveLinkCounts]:
        """The newest view; from any thread, never changed afterwards."""
        return self._view

    def show(self, links: Mapping[str, SlaveLinkCounts]) -> None:
        self._view = links

    def ranks_moved(self, direction: TransferDirection, parts: Mapping[int, tuple[int, float]]) -> None:
        """A transfer of all ranks is done. parts: bytes and seconds of each."""
        known = {rank: self.ranks.get(rank, RankCounts()) for rank in parts}
        self.ranks = {rank: known[rank].with_part(direction, *part) for rank, part in parts.items()}

    def begin(
        self, direction: TransferDirection, wire: Codec, slaves: Iterable[str], now_s: float, n_parts: int = 1
    ) -> Transferring:
        """A transfer with these slaves begins; those of an earlier placement are forgotten."""
        before = {slave: self._view[slave] for slave in slaves if slave in self._view}
        return Transferring(self, direction, wire, now_s, before, n_parts)
