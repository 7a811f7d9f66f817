"""The ranks of a cluster in a search: each carries its share of every transfer.

The leader (rank 0) is the cluster's session. A follower hears the leader's orders one after another, each at any later
time, and the leader hears of its ends as late, so a follower may carry an attempt that the leader has given up. Who
owns what (shares_of_ranks) and how ends become one (combined) are the real code. A cluster of one process is one rank
that owns all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dips.core.ids import PushId, RoundId
from dips.core.layout import Chunk, chunks_of
from dips.core.messages import PlacementSpec, PullGrant, Ticket
from dips.worker.parallel.meetings import PartEnd, combined
from dips.worker.parallel.ownership import Piece, shares_of_ranks
from dips.worker.state.effects import Done, Failed
from search.bounds import LAYOUT, Bounds
from search.slave_part import PieceNames, blocks_of, sums_of
from search.state import SearchViolation

TOOK_S = 1.0
"""The time that every transfer says it took."""


@dataclass(frozen=True)
class OpenTransfer:
    """A push that is being sent, or one rank's part of it."""

    id: int
    push: PushId
    ticket: Ticket
    epoch: int
    payload: PieceNames
    # (slave, chunk) that are known to be there, chunks by their numbers in the slave's shard
    landed: frozenset[tuple[str, int]] = frozenset()

    @property
    def placement(self) -> PlacementSpec:
        return self.ticket.placement


@dataclass(frozen=True)
class Pull:
    """A version that is being fetched, or one rank's part of it."""

    id: int
    grant: PullGrant
    read: tuple[tuple[RoundId, PieceNames], ...] = ()  # by one process, slave by slave: what has arrived

    @property
    def placement(self) -> PlacementSpec:
        return self.grant.placement


Job = OpenTransfer | Pull

GIVE_UP = None
"""The order to stop what a rank carries; every other order is the job that it begins."""


@dataclass(frozen=True)
class RankEnd:
    """How one rank's part of a job ended. moved: what it sent to, or read from, each slave, with the round that made
    what was read.
    """

    job: int
    rank: int
    moved: tuple[tuple[str, RoundId | None, PieceNames], ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class JobEnd:
    """How a job of all ranks ended, and its parts, as far as the leader knew them."""

    job: Job
    how: Done | Failed
    parts: tuple[RankEnd, ...]


@dataclass(frozen=True)
class Shares:
    """The chunks that each rank owns."""

    of_rank: tuple[frozenset[Chunk], ...]


def shares_of(n_ranks: int, chunk_bytes: int) -> Shares:
    """Each rank holds its part of every tensor's rows, as under tensor parallelism."""
    pieces: list[list[Piece]] = [[] for _ in range(n_ranks)]
    for index, span in enumerate(LAYOUT.spans):
        n_rows, *rest = span.parameter.shape
        for rank, held in enumerate(pieces):
            first, last = n_rows * rank // n_ranks, n_rows * (rank + 1) // n_ranks
            held.append(Piece(index, (first, *(0 for _ in rest)), (last - first, *rest)))
    shares = shares_of_ranks(LAYOUT, pieces, chunk_bytes)
    return Shares(tuple(frozenset(share.chunks(LAYOUT, chunk_bytes)) for share in shares))


class Ranks:
    """All ranks of one life of a cluster."""

    def __init__(self, bounds: Bounds) -> None:
        n_ranks = bounds.ranks
        self.chunk_bytes = bounds.chunk_bytes
        self.shares = shares_of(n_ranks, bounds.chunk_bytes)
        self.job: Job | None = None
        """What the leader has begun, and not ended."""

        self.carries: list[Job | None] = [None] * n_ranks
        """What each rank carries; at most one job."""

        self.orders: list[tuple[Job | None, ...]] = [()] * n_ranks
        """What each follower has not heard yet, oldest first; none for the leader."""

        self.said: tuple[RankEnd, ...] = ()
        """Ends of followers' parts, on their way to the leader."""

        self.ends: tuple[RankEnd, ...] = ()
        """Those of the job that the leader knows."""

        self.dead = 0
        """A follower that has died, which no one has noticed; 0: none."""

    @property
    def followers(self) -> range:
        return range(1, len(self.carries))

    def sends(self) -> Iterator[tuple[int, OpenTransfer]]:
        """What ranks are sending."""
        for rank, job in enumerate(self.carries):
            if isinstance(job, OpenTransfer):
                yield rank, job

    def fetches(self) -> Iterator[tuple[int, Pull]]:
        """What ranks are fetching."""
        for rank, job in enumerate(self.carries):
            if isinstance(job, Pull):
                yield rank, job

    @property
    def pushes(self) -> bool:
        """Whether a push is being sent, as the leader knows."""
        return isinstance(self.job, OpenTransfer)

    def job_ids(self) -> set[int]:
        """Numbers of jobs that a rank still knows."""
        jobs = [self.job, *self.carries, *(order for orders in self.orders for order in orders)]
        return {job.id for job in jobs if job is not None} | {end.job for end in (*self.said, *self.ends)}

    # ---- what the leader does, all ranks do ----

    def begin(self, job: Job) -> None:
        self.job, self.carries[0], self.ends = job, job, ()
        for rank in self.followers:
            if rank != self.dead:
                self.orders[rank] = (*self.orders[rank], job)

    def cancel(self) -> None:
        """The job is over for the leader. What a follower still fetches of it, or says of its end, has no effect on
        anybody, and is left out.
        """
        job, self.job, self.carries[0], self.ends, self.said = self.job, None, None, (), ()
        if job is None:
            return
        for rank in self.followers:
            unheard, carries = self.orders[rank], self.carries[rank]
            if isinstance(job, Pull):
                self.orders[rank] = tuple(order for order in unheard if order != job)
                self.carries[rank] = None if carries is not None and carries.id == job.id else carries
            elif job in unheard:
                self.orders[rank] = _one_given_up((*unheard, GIVE_UP))
            elif carries is not None and carries.id == job.id:
                self.orders[rank] = (*unheard, GIVE_UP)

    def hear(self, rank: int) -> None:
        """A follower hears the oldest order; what it carried before is not wanted any more."""
        self.carries[rank], *rest = self.orders[rank]
        self.orders[rank] = tuple(rest)

    # ---- parts ----

    def chunks_on(self, rank: int, job: Job, slave: str) -> tuple[int, ...]:
        """The rank's chunks of a transfer on this slave, by their numbers in the slave's shard."""
        owned = self.shares.of_rank[rank]
        chunks = chunks_of([LAYOUT.blocks[block] for block in blocks_of(job.placement, slave)], self.chunk_bytes)
        return tuple(number for number, chunk in enumerate(chunks) if chunk in owned)

    def lacks(self, rank: int, transfer: OpenTransfer, slave: str) -> tuple[int, ...]:
        """Those that are not known to be there."""
        return tuple(n for n in self.chunks_on(rank, transfer, slave) if (slave, n) not in transfer.landed)

    def landed(self, rank: int, slave: str, numbers: Sequence[int]) -> JobEnd | None:
        """These of the rank's chunks are on this slave. Returns the end of the job, if this is it."""
        transfer = self.carries[rank]
        assert isinstance(transfer, OpenTransfer), "it sends"
        transfer = replace(transfer, landed=transfer.landed | {(slave, number) for number in numbers})
        self.carries[rank] = transfer
        names = [address.slave_id for address in transfer.placement.slaves]
        if any(self.lacks(rank, transfer, name) for name in names):
            return None
        return self.ended(RankEnd(transfer.id, rank, tuple((name, None, transfer.payload) for name in sorted(names))))

    def ended(self, end: RankEnd) -> JobEnd | None:
        """A rank's part is over. Returns the end of the job, if this is it and the leader knows."""
        self.carries[end.rank] = None
        if end.rank == 0:
            return self._take(end)
        if self.job is not None and self.job.id == end.job:
            self.said = (*self.said, end)
        return None

    def hear_end(self) -> JobEnd | None:
        """The leader hears of the oldest end of a follower's part. Returns the end of the job, if this is it."""
        end, *rest = self.said
        self.said = tuple(rest)
        return self._take(end)

    def _take(self, end: RankEnd) -> JobEnd | None:
        job = self.job
        assert job is not None, "ends of what was given up are left out"
        ends = self.ends = (*self.ends, end)
        parts = [self._part_end(job, part) for part in ends]
        # Each chunk is moved by one rank.
        owners: dict[Chunk, int] = {}
        for part in parts:
            for chunk in part.checksums:
                if (owner := owners.setdefault(chunk, part.rank)) != part.rank:
                    raise SearchViolation("OWNERS", f"ranks {owner} and {part.rank} of a cluster both own {chunk}")
        promised = dict(job.grant.digest_of_slave) if isinstance(job, Pull) else None
        how = combined(parts, len(self.carries), self._chunks_of_slave(job), promised)
        if how is None:
            return None
        self.cancel()
        return JobEnd(job, how, ends)

    def _part_end(self, job: Job, end: RankEnd) -> PartEnd:
        owned = self.shares.of_rank[end.rank]
        sums: dict[Chunk, int] = {}
        for slave, _, content in end.moved:
            blocks = blocks_of(job.placement, slave)
            chunks = chunks_of([LAYOUT.blocks[block] for block in blocks], self.chunk_bytes)
            all_sums = zip(chunks, sums_of(blocks, self.chunk_bytes, content), strict=True)
            sums |= {chunk: checksum for chunk, checksum in all_sums if chunk in owned}
        return PartEnd(end.job, end.rank, end.failure, checksums=sums, seconds=TOOK_S)

    def _chunks_of_slave(self, job: Job) -> dict[str, list[Chunk]]:
        names = sorted(address.slave_id for address in job.placement.slaves)
        found = {name: [LAYOUT.blocks[block] for block in blocks_of(job.placement, name)] for name in names}
        return {name: chunks_of(blocks, self.chunk_bytes) for name, blocks in found.items() if blocks}

    # ---- processes ----

    def die(self, rank: int) -> None:
        """kill -9 of one follower."""
        self.dead, self.carries[rank], self.orders[rank] = rank, None, ()

    def left_behind(self, rank: int) -> OpenTransfer | None:
        """What a follower goes on sending when all other ranks are gone: what it sends, or else hears next."""
        return next((job for job in (self.carries[rank], *self.orders[rank]) if isinstance(job, OpenTransfer)), None)


def _one_given_up(orders: tuple[Job | None, ...]) -> tuple[Job | None, ...]:
    """Orders of which one job at most was given up before it was heard, the newest: ranks meet at every step while a
    push is under way, so that a follower is not further behind.
    """
    given_up = [n for n, order in enumerate(orders[:-1]) if order is not None and orders[n + 1] is None]
    for n in reversed(given_up[:-1]):
        orders = orders[:n] + orders[n + 2 :]
    return orders
