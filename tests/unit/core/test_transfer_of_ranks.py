"""Transfers of several ranks of one cluster to the same slaves, under virtual time: each carries its own share.

The slaves are the real staging tables. They lose messages, forget everything in the middle, and name few missing chunks
at a time.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dips.core.errors import Refused
from dips.core.ids import ClusterId, Incarnation, PushId
from dips.core.layout import FLOAT32_BYTES, Chunk, Layout, Parameter, Share, chunks_of
from dips.core.messages import PlacementSpec, SlaveAddress
from dips.core.net import transfer as transfer_module
from dips.core.net.data_header import MAX_MISSING, DataHeader, DataOp, MissingChunk
from dips.core.net.transfer import (
    PullTransfer,
    PushTransfer,
    Reconnect,
    SlaveRequest,
    Transfer,
    TransferSettings,
    chunks_by_slave,
    digests_of,
)
from dips.core.wire import Codec
from dips.slave.state import staging as staging_module
from dips.slave.state.shard import to_refusal
from dips.slave.state.staging import ShardMap, Slot, Staging, StagingTable

CHUNK_BYTES = 16
LAYOUT = Layout(
    tuple(Parameter(f"layers.{i}.w", (n,), "float32", f"layers.{i}") for i, n in enumerate((10, 33, 3, 21))), 12
)
"""67 elements in 7 blocks, 19 chunks."""
CHUNKS = chunks_of(LAYOUT.blocks, CHUNK_BYTES)
ORDER = (5, 2, 0, 1, 3, 6, 4)
SETTINGS = TransferSettings(CHUNK_BYTES, 3, silence_s=2.0, stall_s=60.0)
PUSH = PushId(ClusterId("a"), Incarnation(1, 1), 1)
RTT_S = 0.1
MOST_NAMED = 4
"""Entries of an answer here, instead of MAX_MISSING."""


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "MAX_MISSING", MOST_NAMED)
    monkeypatch.setattr(transfer_module, "MAX_MISSING", MOST_NAMED)


def placement_over(n_slaves: int) -> PlacementSpec:
    slaves = tuple(SlaveAddress(f"s{i}", "x") for i in range(n_slaves))
    return PlacementSpec(slaves, tuple(block.block_id % n_slaves for block in LAYOUT.blocks), b"")


def share_of(chunks: Sequence[Chunk]) -> Share:
    begins = [LAYOUT.blocks[c.block_id].start_elem + c.offset_bytes // FLOAT32_BYTES for c in chunks]
    return Share.of_runs(
        (begin, begin + c.length_bytes // FLOAT32_BYTES) for begin, c in zip(begins, chunks, strict=True)
    )


def shares_by(owners: Sequence[int], n_ranks: int) -> list[Share]:
    return [share_of([c for c, owner in zip(CHUNKS, owners, strict=True) if owner == rank]) for rank in range(n_ranks)]


def sum_of(chunk: Chunk) -> int:
    return hash(chunk[:2]) & 0xFFFF


@dataclass
class Slave:
    """A slave that may forget everything, and then does not know the push for a while."""

    blocks: tuple[int, ...]
    opens_at_s: float = 0.0
    table: StagingTable = field(init=False)
    staging: Staging | None = None

    def __post_init__(self) -> None:
        self.forget(0.0)

    def forget(self, opens_at_s: float) -> None:
        self.table = StagingTable(ShardMap([LAYOUT.blocks[b] for b in self.blocks], CHUNK_BYTES))
        self.staging, self.opens_at_s = None, opens_at_s

    def answer(self, header: DataHeader, now_s: float) -> DataHeader:
        if self.staging is None and now_s >= self.opens_at_s:
            (self.staging,) = self.table.hold([Slot(PUSH, 1, 0)])
        try:
            if header.op is DataOp.QUERY_MISSING:
                staging = self.table.find(header.push, header.attempt)
                missing = self.table.missing(staging, header.block, header.offset_bytes)
                return replace(header, op=DataOp.MISSING, missing=missing, complete=staging.complete)
            staging, landing, has_landed = self.table.admit(header, header.length_bytes)
        except Refused as refused:
            return replace(header, op=DataOp.REFUSED, refusal=to_refusal(refused))
        if not has_landed:
            self.table.land(staging, landing, header.checksum)
        return replace(header, op=DataOp.ACK, complete=staging.complete)


class Cluster:
    def __init__(self, owners: Sequence[int], n_ranks: int, n_slaves: int, seed: int = 0, loss: float = 0.0) -> None:
        self.random, self.loss, self.jitter, self.now_s = random.Random(seed), loss, 1.0, 0.0
        self.placement = placement_over(n_slaves)
        names = [address.slave_id for address in self.placement.slaves]
        self.slaves = {
            name: Slave(tuple(b for b, holder in enumerate(self.placement.slave_of_block) if holder == at))
            for at, name in enumerate(names)
        }
        self.shares = shares_by(owners, n_ranks)
        self.sent: list[Counter[Chunk]] = [Counter() for _ in self.shares]
        self.queries: list[list[tuple[str, tuple[int, int]]]] = [[] for _ in self.shares]
        self.strikes: list[tuple[float, str]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._posted = 0

    @property
    def staged(self) -> bool:
        return all(
            slave.staging is not None and slave.staging.complete for slave in self.slaves.values() if slave.blocks
        )

    def transfer(self, rank: int, *, arrays: bool) -> PushTransfer:
        shares = chunks_by_slave(LAYOUT, self.placement, ORDER, CHUNK_BYTES, self.shares[rank], rank)
        return PushTransfer(shares, SETTINGS, self.now_s, is_share=True, arrays=arrays)

    def attempt(self, ranks: Sequence[int], *, arrays: bool = False) -> dict[int, PushTransfer]:
        transfers = {rank: self.transfer(rank, arrays=arrays) for rank in ranks}
        while running := [rank for rank, t in transfers.items() if not (t.done or t.failure)]:
            for rank in running:
                for action in transfers[rank].actions(self.now_s):
                    if isinstance(action, SlaveRequest):
                        self._send(rank, transfers[rank], action)
            self._advance([t for t in transfers.values() if not (t.done or t.failure)])
        self._queue.clear()
        return transfers

    def push(self, ranks: Sequence[int], *, arrays: bool = False, most: int = 60) -> list[PushTransfer]:
        """Attempts until every slave has everything, as the cluster's machine makes them; the last one's transfers."""
        for _ in range(most):
            transfers = self.attempt(ranks, arrays=arrays)
            if self.staged and all(transfer.done for transfer in transfers.values()):
                return list(transfers.values())
        return []

    def _send(self, rank: int, transfer: PushTransfer, ask: SlaveRequest) -> None:
        if ask.chunk is None:
            block, offset_bytes = transfer.query_from(ask.slave)
            self.queries[rank].append((ask.slave, (block, offset_bytes)))
            header = DataHeader("run", 1, DataOp.QUERY_MISSING, ask.request, PUSH, 1, None, block, offset_bytes)
        else:
            self.sent[rank][ask.chunk] += 1
            header = DataHeader(
                "run", 1, DataOp.PUT_CHUNK, ask.request, PUSH, 1, None, *ask.chunk, Codec.F32, sum_of(ask.chunk)
            )

        def arrive() -> None:
            reply = self.slaves[ask.slave].answer(header, self.now_s)
            self._post(lambda: take(transfer, ask.slave, reply, self.now_s))

        self._post(arrive)

    def _post(self, deliver: Callable[[], None]) -> None:
        if self.random.random() >= self.loss:
            self._posted += 1
            delay_s = RTT_S / 2 * (1 + self.jitter * self.random.random())
            heapq.heappush(self._queue, (self.now_s + delay_s, self._posted, deliver))

    def _advance(self, transfers: Sequence[Transfer]) -> None:
        if self.strikes and self.strikes[0][0] <= self.now_s:
            _, name = self.strikes.pop(0)
            self.slaves[name].forget(self.now_s + 0.3)
        wake_s = min((transfer.next_deadline_s() for transfer in transfers), default=self.now_s)
        if self._queue and self._queue[0][0] <= wake_s:
            at_s, _, deliver = heapq.heappop(self._queue)
            self.now_s = max(self.now_s, at_s)
            deliver()
        else:
            self.now_s = max(self.now_s, wake_s)


def take(transfer: PushTransfer, slave: str, reply: DataHeader, now_s: float) -> None:
    if reply.op is DataOp.ACK:
        transfer.acked(slave, reply.request, reply.complete, now_s)
    elif reply.op is DataOp.MISSING:
        transfer.missing(slave, reply.request, reply.missing, reply.complete, now_s)
    else:
        assert reply.refusal is not None
        transfer.refused(slave, reply.request, reply.refusal, now_s)


owners = {n: st.lists(st.integers(0, n - 1), min_size=len(CHUNKS), max_size=len(CHUNKS)) for n in range(1, 5)}
clusters = st.integers(1, 4).flatmap(lambda n_ranks: st.tuples(st.just(n_ranks), owners[n_ranks]))


@settings(max_examples=60)
@given(clusters, st.integers(1, 3), st.integers(0, 2**32), st.booleans())
def test_each_rank_sends_its_chunks_once_and_together_they_are_staged(
    cluster: tuple[int, list[int]], n_slaves: int, seed: int, arrays: bool
) -> None:
    n_ranks, owners = cluster
    world = Cluster(owners, n_ranks, n_slaves, seed)
    transfers = world.attempt(range(n_ranks), arrays=arrays)
    assert all(transfer.done for transfer in transfers.values())
    assert world.staged
    for rank, share in enumerate(world.shares):
        assert world.sent[rank] == Counter(share.chunks(LAYOUT, CHUNK_BYTES)), f"rank {rank}"
        assert all(transfers[rank].columns.chunks.moved)
    digests = digests_of(LAYOUT, world.placement, CHUNK_BYTES, {chunk: sum_of(chunk) for chunk in CHUNKS})
    for name, digest in digests:
        staging = world.slaves[name].staging
        assert staging is not None
        assert staging.digest() == digest


@settings(max_examples=60)
@given(
    clusters, st.integers(1, 3), st.integers(0, 2**32), st.floats(0, 0.3), st.booleans(),
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 2)), max_size=3),
)  # fmt: skip
def test_losses_and_slaves_that_forget_only_delay(
    cluster: tuple[int, list[int]],
    n_slaves: int,
    seed: int,
    loss: float,
    arrays: bool,
    strikes: list[tuple[float, int]],
) -> None:
    """One attempt may give up, or end before a slave forgot; the attempts together get there, each with its own."""
    n_ranks, owners = cluster
    world = Cluster(owners, n_ranks, n_slaves, seed, loss)
    world.strikes = sorted((at_s, f"s{slave % n_slaves}") for at_s, slave in strikes)
    transfers = world.push(range(n_ranks), arrays=arrays)
    assert transfers
    for rank, share in enumerate(world.shares):
        assert set(world.sent[rank]) == set(share.chunks(LAYOUT, CHUNK_BYTES)), f"rank {rank}"


@settings(max_examples=40)
@given(clusters, st.integers(1, 3), st.data())
def test_a_later_attempt_sends_only_what_is_missing(
    cluster: tuple[int, list[int]], n_slaves: int, data: st.DataObject
) -> None:
    n_ranks, owners = cluster
    world = Cluster(owners, n_ranks, n_slaves)
    world.jitter = 0.0  # an acknowledgement that overtakes others and says "complete" has theirs counted as resumed
    held = data.draw(st.sets(st.sampled_from(CHUNKS)))
    for chunk in held:
        slave = world.slaves[world.placement.slaves[world.placement.slave_of_block[chunk.block_id]].slave_id]
        slave.answer(DataHeader("run", 1, DataOp.PUT_CHUNK, 1, PUSH, 1, None, *chunk, Codec.F32, sum_of(chunk)), 0.0)
    transfers = world.attempt(range(n_ranks))
    assert world.staged
    for rank, share in enumerate(world.shares):
        own = set(share.chunks(LAYOUT, CHUNK_BYTES))
        assert world.sent[rank] == Counter(own - held)
        progress = transfers[rank].moved().values()
        assert sum(slave.resumed_bytes for slave in progress) == sum(c.length_bytes for c in own & held)
        assert sum(slave.carried_bytes for slave in progress) == sum(c.length_bytes for c in own - held)


def test_a_query_begins_at_the_first_chunk_that_may_be_lacking() -> None:
    """Rank 1 owns the last chunks of the only slave: it never asks for what comes before."""
    n_own = 7
    world = Cluster([0] * (len(CHUNKS) - n_own) + [1] * n_own, 2, 1)
    own = CHUNKS[-n_own:]
    world.attempt([1])
    assert [place for _, place in world.queries[1]] == [own[0][:2], own[MOST_NAMED][:2]]
    world.slaves["s0"].forget(world.now_s)
    world.attempt([0])
    assert world.queries[0][0] == ("s0", (0, 0))


@pytest.mark.parametrize(
    "named",
    [
        [MissingChunk(1, 16), MissingChunk(1, 0)],  # not in order
        [MissingChunk(1, 16), MissingChunk(1, 16)],
        [MissingChunk(0, 0)],  # before the place that was asked for, as a slave of an earlier release answers
        [MissingChunk(2, 0)],  # this rank's, but on another slave
    ],
)
def test_an_answer_that_does_not_fit_the_question_fails_the_push(named: list[MissingChunk]) -> None:
    placement = replace(placement_over(2), slave_of_block=(0, 0, 1, 1, 1, 1, 1))
    own = share_of([chunk for chunk in CHUNKS if chunk.block_id in (1, 2)])
    transfer = PushTransfer(chunks_by_slave(LAYOUT, placement, ORDER, CHUNK_BYTES, own), SETTINGS, 0.0, is_share=True)
    ask = next(a for a in transfer.actions(0.0) if isinstance(a, SlaveRequest) and a.slave == "s0")
    assert transfer.query_from("s0") == (1, 0)
    transfer.missing("s0", ask.request, named, False, 0.1)
    assert "misses chunks that it was not asked for" in transfer.failure


@settings(max_examples=40)
@given(clusters, st.integers(1, 3))
def test_a_pull_of_shares_gives_all_checksums_and_leaves_digests_to_their_owner(
    cluster: tuple[int, list[int]], n_slaves: int
) -> None:
    n_ranks, owners = cluster
    placement, checksums = placement_over(n_slaves), dict[Chunk, int]()
    for rank, share in enumerate(shares_by(owners, n_ranks)):
        of_slaves = chunks_by_slave(LAYOUT, placement, ORDER, CHUNK_BYTES, share, rank)
        transfer = PullTransfer(of_slaves, None, SETTINGS, 0.0)
        while asks := [a for a in transfer.actions(0.0) if isinstance(a, SlaveRequest)]:
            for ask in asks:
                assert ask.chunk is not None
                transfer.landed(ask.slave, ask.request, sum_of(ask.chunk), 0.0)
        assert transfer.done
        assert list(transfer.known()) == list(transfer.chunks)
        checksums |= transfer.known()
    assert checksums == {chunk: sum_of(chunk) for chunk in CHUNKS}


@pytest.mark.parametrize("n_slaves", [1, 2, 3])
@pytest.mark.parametrize("n_ranks", [1, 2, 4, 5])
def test_ranks_begin_at_different_slaves(n_slaves: int, n_ranks: int) -> None:
    placement = placement_over(n_slaves)
    orders = [list(chunks_by_slave(LAYOUT, placement, ORDER, CHUNK_BYTES, rank=rank)) for rank in range(n_ranks)]
    firsts = Counter(order[0] for order in orders)
    assert max(firsts.values()) - min(firsts.get(f"s{i}", 0) for i in range(n_slaves)) <= 1
    begins = f"s{ORDER[0] % n_slaves}"
    assert orders[0][0] == begins, "rank 0 begins where the ticket says"
    for order in orders:
        at = order.index(begins)
        assert [*order[at:], *order[:at]] == orders[0], "and every rank goes on as the ticket does"


def test_a_slave_that_starts_again_is_done_only_when_it_has_all_chunks_again() -> None:
    """It names only a part of what it lacks at a time, while nearly all of it had been acknowledged before."""
    length, n_chunks = 1024, 3 * MAX_MISSING
    own = [Chunk(0, place * length, length) for place in range(0, n_chunks, 2)]
    transfer = PushTransfer({"s0": own}, TransferSettings(length, 64, 5.0, 600.0), 0.0, is_share=True)
    holds = set(range(1, n_chunks, 2))  # what other ranks own
    now_s, first_is_late = 0.0, True
    while not transfer.done:
        now_s += 0.1
        assert now_s < 1000
        for ask in transfer.actions(now_s):
            if isinstance(ask, Reconnect):
                continue
            if ask.chunk is None:
                first = transfer.query_from("s0")[1] // length
                lacks = [MissingChunk(0, place * length) for place in range(first, n_chunks) if place not in holds]
                transfer.missing("s0", ask.request, lacks[:MAX_MISSING], not lacks, now_s)
            elif ask.chunk.offset_bytes or not first_is_late:
                holds.add(ask.chunk.offset_bytes // length)
                transfer.acked("s0", ask.request, len(holds) == n_chunks, now_s)
        if first_is_late and transfer.columns.lanes.n_moved[0] == len(own) - 1:
            holds, first_is_late, now_s = set(), False, now_s + 10
    assert transfer.failure == ""
    assert holds == set(range(0, n_chunks, 2))
