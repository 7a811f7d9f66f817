"""Sends a push to the slaves and fetches a version from them: decides what to send next, and takes the answers.

Pure: time is an argument, messages are values, no sockets. Every chunk is idempotent, so whatever is doubtful is
requested or sent again; nothing counts as moved before the other side (push) or the digest (pull) has confirmed it.

A transfer has all chunks of the model, or those of a share (core/layout.py): then the cluster's other ranks carry the
rest at the same time, over connections of their own.

core/net/steps.py does what is done for each chunk, here and in compiled loops, which work on the same columns; here is
what is unusual. core/net/flow.py decides how much is unanswered at any moment; `window_chunks` bounds it for each
slave.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import NamedTuple

from dips.core.errors import RefusalCode
from dips.core.layout import Chunk, Layout, Share, chunks_of, shard_digest
from dips.core.messages import PlacementSpec, Refusal
from dips.core.net.data_header import MAX_MISSING, MissingChunk
from dips.core.net.flow import N_OPEN, NONE, WindowRule, note_done, note_lost, slot_of
from dips.core.net.steps import (
    ASKED_S,
    MAX_SILENCE_S,
    PROGRESS_S,
    PUSHES,
    QUERY,
    begin_turns,
    columns_of,
    complete_lane,
    next_deadline_s,
    next_request,
    note_resumed,
    put_first,
    put_last,
    take_ack,
    take_answer,
    take_landed,
)

MAX_SILENCES = 2
"""Silences in a row of one slave before its address is requested again: it may have come back on another port."""

LEAST_BYTES_PER_S = 125_000
"""1 Mbit/s. There is no message while a chunk is under way, so a slow link seems dead for as long as that takes."""

MAX_PAUSE_S = 1.0

TURNED_AWAY_S = 1.0
"""How long a slave may refuse the connection; then the master is asked for its new key, or for this cluster's state.
The list of admitted keys reaches the slaves a few milliseconds after Join was answered."""

UNKNOWN_S = 5.0
"""How long a slave may not know a push that has a ticket; then the master is asked about the push."""

_FOR_THE_MASTER = frozenset(
    {
        RefusalCode.VERSION_GONE,
        RefusalCode.BASE_GONE,
        RefusalCode.STALE_EPOCH,
        RefusalCode.FENCED,
        RefusalCode.RUN_ID,
        RefusalCode.KEY,
    }
)

MAX_MISFITS = 3
"""Chunks of a pull whose differences led to wrong parameters, after which the base counts as another than the slaves':
they are seldom damaged on the way."""

MAX_BAD_SHARDS = 2
"""Times that one slave's whole share is fetched again because its digest is wrong."""


@dataclass(frozen=True)
class TransferSettings:
    """Settings of a transfer, times in seconds; see ClientConfig.data_silence_s and data_stall_s."""

    chunk_bytes: int
    window_chunks: int
    silence_s: float = 3.0
    stall_s: float = 30.0
    windows: WindowRule = WindowRule.MEASURED

    @property
    def first_silence_s(self) -> float:
        """The silence that is allowed on a new link, which may be as slow as any that is supported."""
        return max(self.silence_s, 1.25 * self.chunk_bytes / LEAST_BYTES_PER_S)


class SlaveRequest(NamedTuple):
    """One message to a slave. chunk None: a query for the missing chunks. place: of the chunk in Transfer.chunks."""

    slave: str
    request: int
    chunk: Chunk | None
    place: int


class Reconnect(NamedTuple):
    """The connection to this slave may have lost messages: open a new one; older answers do not count."""

    slave: str


TransferEffect = SlaveRequest | Reconnect


@dataclass(frozen=True)
class SlaveProgress:
    """Progress of a transfer with one slave, in parameter bytes. carried: over the link, now; resumed: there before."""

    carried_bytes: int
    resumed_bytes: int
    reconnects: int
    refusals: Mapping[str, int]  # by code
    round_trip_s: float | None  # the shortest time from a request to its answer; None before the first


@dataclass
class _Trouble:
    """What went wrong with one slave."""

    reconnects: int = 0
    refusals: Counter[str] = field(default_factory=Counter)  # by code
    must_reconnect: bool = False
    bad_shards: int = 0


class Transfer:
    """Common part of push and pull: windows, silence, pauses, stalls. `failure` is a sentence once it failed.

    refusal: the one that ended it; None: it ended otherwise, or goes on. chunks: all of the transfer, as
    core/net/steps.py numbers them. columns: the state; compiled loops work on it between two calls.
    """

    def __init__(
        self, shares: Mapping[str, Sequence[Chunk]], settings: TransferSettings, now_s: float, *, pushes: bool,
        is_share: bool, arrays: bool,
    ) -> None:  # fmt: skip
        """arrays: the columns are numpy arrays, as compiled loops need them; else lists, which are faster here."""
        self._settings = settings
        self.slaves = [slave for slave, chunks in shares.items() if chunks]
        """The slaves that take part, in the order of the schedule; the others have no chunks."""
        self._lanes = {slave: lane for lane, slave in enumerate(self.slaves)}
        self._troubles = [_Trouble() for _ in self.slaves]
        self.columns, self.chunks, self._turns = columns_of(
            [shares[slave] for slave in self.slaves], now_s, pushes=pushes, is_share=is_share,
            chunk_bytes=settings.chunk_bytes, window_chunks=settings.window_chunks, rule=settings.windows,
            silence_s=settings.silence_s, first_silence_s=settings.first_silence_s, stall_s=settings.stall_s,
            arrays=arrays,
        )  # fmt: skip
        self._why = "no slave answered"
        self.failure = ""
        self.corrupt = False
        self.refusal: RefusalCode | None = None
        self.reconnects = 0

    @property
    def done(self) -> bool:
        return not self.columns.flow.counts[N_OPEN] and not self.failure

    @property
    def base_gone(self) -> bool:
        """It failed because a slave does not have the differences' base: that of a push, or of a pull."""
        return self.refusal is RefusalCode.BASE_GONE

    def moved(self) -> dict[str, SlaveProgress]:
        """The progress with each slave that takes part."""
        lanes, trips_s = self.columns.lanes, self.columns.flow.windows.round_trip_s
        return {
            slave: SlaveProgress(
                int(lanes.carried_bytes[lane]),
                int(lanes.resumed_bytes[lane]),
                trouble.reconnects,
                dict(trouble.refusals),
                float(trips_s[lane]) if trips_s[lane] < math.inf else None,
            )
            for lane, (slave, trouble) in enumerate(zip(self.slaves, self._troubles, strict=True))
        }

    def actions(self, now_s: float, *, requests: bool = True) -> list[TransferEffect]:
        """The effects to carry out now: a chunk to each slave in turn, so that all shares end together, within windows.

        The slave that has the least part of its share comes first, and the schedule decides between equals. requests:
        False leaves them to a compiled loop.
        """
        columns = self.columns
        if self._over():
            return []
        columns.times[ASKED_S] = now_s
        if now_s >= columns.times[PROGRESS_S] + self._settings.stall_s:
            self.failure = f"no progress for {self._settings.stall_s:g} s: {self._why}"
            return []
        actions: list[TransferEffect] = []
        lanes, n_in_flight = columns.lanes, columns.flow.windows.n_in_flight
        for lane, trouble in enumerate(self._troubles):
            if trouble.must_reconnect and now_s >= lanes.resume_at_s[lane]:
                trouble.must_reconnect = False
                actions.append(Reconnect(self.slaves[lane]))
            # the same sum as in next_deadline_s()
            if n_in_flight[lane] and now_s >= lanes.last_word_s[lane] + lanes.silence_s[lane]:
                actions.append(self._reconnect(lane, now_s))
        if self.failure:
            return []
        if not requests:
            return actions
        begin_turns(columns, now_s)
        while (slot := next_request(columns, now_s)) != NONE:
            actions.append(self.request_in(slot))
        return actions

    def request_in(self, slot: int) -> SlaveRequest:
        """The request in this slot of the columns."""
        requests = self.columns.flow.requests
        index, slave = int(requests.chunk[slot]), self.slaves[requests.lane[slot]]
        return SlaveRequest(slave, int(requests.request[slot]), None if index == QUERY else self.chunks[index], index)

    def known(self) -> dict[Chunk, int]:
        """The checksums that are known by now: of all chunks once a pull is done."""
        chunks = self.columns.chunks
        return {chunk: int(chunks.checksum[i]) for i, chunk in enumerate(self.chunks) if chunks.known[i]}

    def next_deadline_s(self) -> float:
        """When actions() must be called again although no answer came; once the transfer is over, at once."""
        return float(self.columns.times[ASKED_S] if self._over() else next_deadline_s(self.columns))

    def refused(self, slave: str, request: int, refusal: Refusal, now_s: float) -> None:
        """The slave refuses: pause, then query what is missing. A refusal that only the master can resolve ends the
        transfer."""
        lane, slot = self._find(slave, request)
        if slot == NONE:
            return
        refused = take_answer(self.columns, slot, now_s, 0)
        lanes = self.columns.lanes
        self._troubles[lane].refusals[refusal.code.name] += 1
        self._why = f"slave {slave} refuses: {refusal.sentence}"
        if refusal.code is RefusalCode.UNKNOWN_PUSH:
            lanes.unknown_since_s[lane] = min(lanes.unknown_since_s[lane], now_s)
        if refusal.code in _FOR_THE_MASTER or now_s - lanes.unknown_since_s[lane] >= UNKNOWN_S:
            self.failure, self.refusal = self._why, refusal.code
        self._start_over(lane, refused)
        self._pause(lane, now_s)

    def turned_away(self, slave: str, sentence: str, now_s: float) -> None:
        """No connection was made, for the reason in `sentence`: its requests are lost. Pause, then retry."""
        lane, lanes = self._lanes.get(slave, NONE), self.columns.lanes
        if lane == NONE or not self.columns.flow.windows.open[lane]:
            return
        self._why = sentence
        lanes.away_since_s[lane] = min(lanes.away_since_s[lane], now_s)
        if now_s - lanes.away_since_s[lane] >= TURNED_AWAY_S:
            self.failure = sentence
        self._start_over(lane)
        self._troubles[lane].reconnects += 1
        self._troubles[lane].must_reconnect = True
        self._pause(lane, now_s)

    # ---- parts ----

    def _over(self) -> bool:
        return bool(self.failure) or not self.columns.flow.counts[N_OPEN]

    def _find(self, slave: str, request: int) -> tuple[int, int]:
        """The lane and the slot of a request that is in flight; (NONE, NONE): a late or repeated answer."""
        lane = self._lanes.get(slave, NONE)
        slot = NONE if lane == NONE else slot_of(self.columns.flow, lane, request)
        return (NONE, NONE) if slot == NONE else (lane, slot)

    def _lane_chunks(self, lane: int) -> range:
        lanes = self.columns.lanes
        return range(lanes.first[lane], lanes.first[lane] + lanes.n_chunks[lane])

    def _pause(self, lane: int, now_s: float) -> None:
        lanes = self.columns.lanes
        lanes.resume_at_s[lane] = now_s + lanes.pause_s[lane]
        lanes.pause_s[lane] = min(MAX_PAUSE_S, 2 * lanes.pause_s[lane])

    def _reconnect(self, lane: int, now_s: float) -> Reconnect:
        lanes, slave = self.columns.lanes, self.slaves[lane]
        self._why = f"slave {slave} answered nothing for {now_s - lanes.last_word_s[lane]:.1f} s"
        self.reconnects += 1
        self._troubles[lane].reconnects += 1
        lanes.silences[lane] += 1
        if lanes.silences[lane] >= MAX_SILENCES:
            self.failure = self._why
        self._start_over(lane)
        lanes.last_word_s[lane] = now_s
        lanes.silence_s[lane] = min(MAX_SILENCE_S, 2 * lanes.silence_s[lane])
        return Reconnect(slave)

    def _start_over(self, lane: int, refused: int = QUERY) -> None:
        """Forget all requests in flight to this slave; their chunks are the next, after the refused one."""
        columns = self.columns
        numbers, in_lane = columns.flow.requests.request, columns.flow.requests.lane
        in_flight = sorted((n, slot) for slot, n in enumerate(numbers) if n and in_lane[slot] == lane)
        lost = [refused, *(int(columns.flow.requests.chunk[slot]) for _, slot in in_flight)]
        note_lost(columns.flow, lane)
        columns.lanes.query[lane] = 0
        columns.lanes.must_query[lane] = columns.counts[PUSHES]
        for chunk in reversed(lost):
            if chunk != QUERY and not columns.chunks.moved[chunk]:
                put_first(columns, lane, chunk)

    def _do_again(self, lane: int, chunks: Iterable[int]) -> None:
        """These chunks are not moved; they, and no others, are to do now, in the order of the schedule."""
        columns = self.columns
        lanes, moved, todo = columns.lanes, columns.chunks.moved, columns.chunks.todo
        again = sorted(set(chunks), key=self._turns.__getitem__)
        for place, chunk in enumerate(again, lanes.first[lane]):
            if moved[chunk]:
                moved[chunk] = 0
                lanes.n_moved[lane] -= 1
            todo[place] = chunk
        lanes.next_todo[lane], lanes.n_todo[lane] = 0, len(again)


class PushTransfer(Transfer):
    """Sends a push. Begins at each slave with a query for missing chunks, so that a new attempt sends only those.

    A slave is done when it says that it holds everything; for a share also once it holds all chunks of that.
    """

    def __init__(
        self, shares: Mapping[str, Sequence[Chunk]], settings: TransferSettings, now_s: float, *, is_share: bool =
        False, arrays: bool = False,
    ) -> None:  # fmt: skip
        """is_share: shares hold some of each slave's chunks, and others send the rest."""
        super().__init__(shares, settings, now_s, pushes=True, is_share=is_share, arrays=arrays)
        self._is_share = is_share
        self._places = {chunk[:2]: place for place, chunk in enumerate(self.chunks)}
        self._asked_to = [self._lane_chunks(lane).start for lane in range(len(self.slaves))]
        """Of a share: what its slaves have of the chunks before these places was answered on this connection."""

    def acked(self, slave: str, request: int, complete: bool, now_s: float, *, credit: int = 0) -> None:
        """A chunk is landed and verified. `complete`: the slave holds everything. credit: see core.net.data_header."""
        _, slot = self._find(slave, request)
        if slot != NONE:
            take_ack(self.columns, slot, complete, now_s, credit)

    def missing(
        self, slave: str, request: int, missing: Sequence[MissingChunk], complete: bool, now_s: float, *,
        credit: int = 0,
    ) -> None:  # fmt: skip
        """Take the slave's missing chunks; it names only so many at a time, and is asked again when those are sent."""
        lane, slot = self._find(slave, request)
        if slot == NONE:
            return
        take_answer(self.columns, slot, now_s, credit)
        if complete:
            complete_lane(self.columns, lane, now_s)
            return
        if self._is_share:
            self._take_page(lane, [(item.block, item.offset_bytes) for item in missing], now_s)
            return
        share, places = self._lane_chunks(lane), self._places
        lacking = [places.get((item.block, item.offset_bytes), NONE) for item in missing]
        if not lacking or min(lacking) < share.start or max(lacking) >= share.stop:
            self.failure = f"slave {slave} misses chunks that are not of its blocks: it has another layout or placement"
            return
        self._do_again(lane, lacking)

    def query_from(self, slave: str) -> tuple[int, int]:
        """Block and offset from which on the next query to this slave asks what is missing.

        For a share: its first chunk behind the last answer. Else the start.
        """
        return self.chunks[self._asked_to[self._lanes[slave]]][:2] if self._is_share else (0, 0)

    def _take_page(self, lane: int, missing: Sequence[tuple[int, int]], now_s: float) -> None:
        """Take what a slave misses from query_from() on: of this share and of others, in order, as far as it names it.

        What it passes over it has. A full answer ends with its last entry, any other one covers everything.
        """
        share, begin, slave = self._lane_chunks(lane), self._asked_to[lane], self.slaves[lane]
        lacking = {self._places[chunk] for chunk in missing if chunk in self._places}
        in_order = all(before < after for before, after in pairwise(missing))
        in_order = in_order and (not missing or missing[0] >= self.query_from(slave))
        if not in_order or not lacking.issubset(range(begin, share.stop)):
            self.failure = (
                f"slave {slave} misses chunks that it was not asked for: it has another layout or "
                "placement, or an earlier release of dips"
            )
            return
        end = share.stop
        if len(missing) >= MAX_MISSING:
            end = bisect_right(self.chunks, missing[-1], begin, end, key=lambda chunk: chunk[:2])
        self._asked_to[lane] = end
        for place in range(end, share.stop):  # not named yet: a slave that was started again may have lost them
            if self.columns.chunks.moved[place]:
                self.columns.chunks.moved[place] = 0
                self.columns.lanes.n_moved[lane] -= 1
        for place in range(begin, end):
            if place not in lacking:
                note_resumed(self.columns, lane, place, now_s)
        self._do_again(lane, lacking)
        if self.columns.lanes.n_moved[lane] == len(share):
            complete_lane(self.columns, lane, now_s)

    def _start_over(self, lane: int, refused: int = QUERY) -> None:
        """Also ask again for all of the share: a slave that was started again has nothing of it."""
        super()._start_over(lane, refused)
        self._asked_to[lane] = self._lane_chunks(lane).start

    def know(self, checksums: Mapping[Chunk, int]) -> None:
        """Take checksums that are known already, for a compiled loop: it computes the others."""
        chunks = self.columns.chunks
        for index, chunk in enumerate(self.chunks):
            if chunk in checksums:
                chunks.checksum[index], chunks.known[index] = checksums[chunk], 1


class PullTransfer(Transfer):
    """Fetches a version; done only when every slave's share has the digest that the master gave."""

    def __init__(
        self, shares: Mapping[str, Sequence[Chunk]], digest_of_slave: Mapping[str, bytes] | None, settings:
        TransferSettings, now_s: float, *, arrays: bool = False,
    ) -> None:  # fmt: skip
        """digest_of_slave: of each share; None: of parts of shares, whose digests the caller compares together."""
        super().__init__(shares, settings, now_s, pushes=False, is_share=digest_of_slave is None, arrays=arrays)
        self._promised = None if digest_of_slave is None else dict(digest_of_slave)
        self._misfits = 0

    def wants(self, slave: str, request: int) -> Chunk | None:
        """The chunk that this request asked for; None: it is not expected, do not land it."""
        _, slot = self._find(slave, request)
        return None if slot == NONE else self.chunks[self.columns.flow.requests.chunk[slot]]

    def landed(self, slave: str, request: int, checksum: int, now_s: float, *, credit: int = 0) -> None:
        """A requested chunk is in the buffer, with this checksum."""
        lane, slot = self._find(slave, request)
        if slot != NONE and take_landed(self.columns, slot, checksum, now_s, credit):
            self._verify(lane)

    def damaged(self, slave: str, request: int, sentence: str, now_s: float) -> None:
        """The payload for this request does not fit its header: ask again."""
        lane, slot = self._find(slave, request)
        if slot != NONE:
            self._why = sentence
            put_last(self.columns, lane, take_answer(self.columns, slot, now_s, 0))

    def misfit(self, slave: str, request: int, sentence: str, now_s: float) -> None:
        """The differences for this request do not lead to what their header says: ask again. After a few the base is
        taken for the reason, and the transfer fails."""
        self.damaged(slave, request, sentence, now_s)
        self._misfits += 1
        if self._misfits >= MAX_MISFITS:
            self.failure, self.refusal = sentence, RefusalCode.BASE_GONE

    def verify(self) -> None:
        """Compare the digests of all shares that are whole and not yet verified: a compiled loop leaves it to this."""
        lanes = self.columns.lanes
        for lane, is_open in enumerate(self.columns.flow.windows.open):
            if is_open and lanes.n_moved[lane] == lanes.n_chunks[lane]:
                self._verify(lane)

    def _verify(self, lane: int) -> None:
        if self._promised is None:
            note_done(self.columns.flow, lane)
            return
        share, slave, trouble = self._lane_chunks(lane), self.slaves[lane], self._troubles[lane]
        digest = shard_digest(self.columns.chunks.checksum[share.start : share.stop])
        if digest == self._promised.get(slave):
            note_done(self.columns.flow, lane)
            return
        trouble.bad_shards += 1
        sentence = f"the share of slave {slave} does not have the digest that its COMMIT record names"
        if trouble.bad_shards > MAX_BAD_SHARDS:
            self.failure, self.corrupt = sentence, True
            return
        self._why = sentence
        self._do_again(lane, share)


def chunks_by_slave(
    layout: Layout, placement: PlacementSpec, block_order: Iterable[int], chunk_bytes: int, share: Share | None = None,
    rank: int = 0,
) -> dict[str, list[Chunk]]:  # fmt: skip
    """Each slave's chunks, slaves and blocks in the order of the schedule; blocks that it does not name come last.

    share: of these the chunks that this rank owns; None: all. rank: its number; the order of slaves begins that many
    later, so that the ranks of a cluster begin at different slaves (paper, Figure 5). The placement must fit the
    layout. Slaves that hold no block have no chunks. Raises ValueError for a share that does not consist of chunks.
    """
    order = list(dict.fromkeys(b for b in block_order if b < len(layout.blocks)))
    order += sorted(set(range(len(layout.blocks))).difference(order))
    names = [address.slave_id for address in placement.slaves]
    shares: dict[str, list[Chunk]] = {}
    for block_id in order:
        slave = names[placement.slave_of_block[block_id]]
        shares.setdefault(slave, []).extend(chunks_of([layout.blocks[block_id]], chunk_bytes))
    if rank:
        in_order = list(shares)
        first = rank % len(in_order)
        shares = {slave: shares[slave] for slave in (*in_order[first:], *in_order[:first])}
    if share is not None:
        own = frozenset(share.chunks(layout, chunk_bytes))
        shares = {slave: [chunk for chunk in chunks if chunk in own] for slave, chunks in shares.items()}
    return shares | {name: [] for name in names if name not in shares}


def digests_of(
    layout: Layout, placement: PlacementSpec, chunk_bytes: int, checksums: Mapping[Chunk, int], block_order:
    Iterable[int] = (),
) -> tuple[tuple[str, bytes], ...]:  # fmt: skip
    """The digest of each slave's shard, slaves in the order of the schedule; `checksums`: of all chunks of the model.

    Raises ValueError where one is missing.
    """
    shards = chunks_by_slave(layout, placement, block_order, chunk_bytes)
    for chunk in chain.from_iterable(shards.values()):
        if chunk not in checksums:
            raise ValueError(f"no checksum of the chunk at {chunk.offset_bytes} of block {chunk.block_id}")
    return tuple(
        (slave, shard_digest([checksums[chunk] for chunk in sorted(shard)])) for slave, shard in shards.items()
    )
