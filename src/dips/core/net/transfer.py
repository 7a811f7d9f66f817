"""Sends a push to the slaves and fetches a version from them: decides what to send next, and takes the answers.

Pure: time is an argument, messages are values, no sockets. Every chunk is idempotent, so whatever is doubtful is
requested or sent again; nothing counts as moved before the other side (push) or the digest (pull) has confirmed it.

core/net/flow.py decides how much is unanswered at any moment; `window_chunks` bounds it for each slave.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dips.core.chunks import Chunk, chunks_of, shard_digest
from dips.core.errors import RefusalCode
from dips.core.layout import Layout
from dips.core.messages import PlacementSpec, Refusal
from dips.core.net.data_header import MissingChunk
from dips.core.net.flow import FlowControl

MAX_SILENCE_S = 60.0
MAX_SILENCES = 2
"""Silences in a row of one slave before its address is requested again: it may have come back on another port."""

LEAST_BYTES_PER_S = 125_000
"""1 Mbit/s. There is no message while a chunk is under way, so a slow link seems dead for as long as that takes."""

FIRST_PAUSE_S = 0.005
"""First pause after a refusal. A ticket often reaches the worker a millisecond or two before the slave is informed."""

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

MAX_BAD_SHARDS = 2
"""Times that one slave's whole share is fetched again because its digest is wrong."""


@dataclass(frozen=True)
class TransferSettings:
    """Settings of a transfer, times in seconds; see ClientConfig.data_silence_s and data_stall_s."""

    chunk_bytes: int
    window_chunks: int
    silence_s: float = 3.0
    stall_s: float = 30.0
    # makes the windows of one transfer from its slaves, chunk_bytes and window_chunks; comparisons use others
    flow: Callable[[Iterable[str], int, int], FlowControl] = FlowControl

    @property
    def first_silence_s(self) -> float:
        """The silence that is allowed on a new link, which may be as slow as any that is supported."""
        return max(self.silence_s, 1.25 * self.chunk_bytes / LEAST_BYTES_PER_S)


@dataclass(frozen=True)
class SlaveRequest:
    """One message to a slave. chunk None: a query for the missing chunks."""

    slave: str
    request: int
    chunk: Chunk | None


@dataclass(frozen=True)
class Reconnect:
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
class _Peer:
    """The chunks to be moved to or from one slave, and their state."""

    slave: str
    chunks: tuple[Chunk, ...]  # in the order of the digest; all else names a chunk by its index there
    rank: tuple[int, ...]  # its turn in the schedule
    place: Mapping[tuple[int, int], int]
    todo: deque[int]
    moved: bytearray
    last_word_s: float
    silence_s: float
    n_moved: int = 0
    in_flight: dict[int, int | None] = field(default_factory=dict)
    query: int | None = None  # the request for the missing chunks, while it is in flight
    resume_at_s: float = -math.inf
    pause_s: float = FIRST_PAUSE_S
    must_query: bool = False
    silences: int = 0
    unknown_since_s: float = math.inf
    away_since_s: float = math.inf
    must_reconnect: bool = False
    done: bool = False
    bad_shards: int = 0
    checksums: dict[int, int] = field(default_factory=dict)
    carried_bytes: int = 0
    resumed_bytes: int = 0
    reconnects: int = 0
    refusals: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, slave: str, scheduled: Sequence[Chunk], settings: TransferSettings, now_s: float) -> _Peer:
        """`scheduled`: its chunks in the order of the schedule."""
        chunks = tuple(sorted(scheduled))
        place = {(chunk.block_id, chunk.offset_bytes): i for i, chunk in enumerate(chunks)}
        todo = deque(place[chunk.block_id, chunk.offset_bytes] for chunk in scheduled)
        rank = [0] * len(chunks)
        for turn, index in enumerate(todo):
            rank[index] = turn
        return cls(slave, chunks, tuple(rank), place, todo, bytearray(len(chunks)), now_s, settings.first_silence_s)

    def scheduled(self, indices: Iterable[int]) -> deque[int]:
        """These chunks in the order of the schedule."""
        return deque(sorted(indices, key=self.rank.__getitem__))


class Transfer(ABC):
    """Common part of push and pull: windows, silence, pauses, stalls. `failure` is a sentence once it failed.

    base_gone: it failed because a slave no longer has the base version of this push's differences.
    """

    def __init__(self, shares: Mapping[str, Sequence[Chunk]], settings: TransferSettings, now_s: float) -> None:
        self._settings = settings
        self._peers = {slave: _Peer.of(slave, chunks, settings, now_s) for slave, chunks in shares.items()}
        self._open = 0
        self.moved_bytes = 0
        self.total_bytes = 0
        for peer in self._peers.values():
            peer.done = not peer.chunks
            self._open += not peer.done
            self.total_bytes += sum(chunk.length_bytes for chunk in peer.chunks)
        self._flow = settings.flow(self.slaves, settings.chunk_bytes, settings.window_chunks)
        self._last_request = 0
        self._asked_s = now_s
        self._progress_s = now_s
        self._why = "no slave answered"
        self.failure = ""
        self.corrupt = False
        self.base_gone = False
        self.reconnects = 0

    @property
    def slaves(self) -> list[str]:
        """The slaves that take part, in the order of the schedule."""
        return [slave for slave, peer in self._peers.items() if peer.chunks]

    @property
    def done(self) -> bool:
        return not self._open and not self.failure

    def moved(self) -> dict[str, SlaveProgress]:
        """The progress with each slave that takes part."""
        return {
            peer.slave: SlaveProgress(
                peer.carried_bytes,
                peer.resumed_bytes,
                peer.reconnects,
                dict(peer.refusals),
                self._flow.round_trip_s(peer.slave),
            )
            for peer in self._peers.values()
            if peer.chunks
        }

    def actions(self, now_s: float) -> list[TransferEffect]:
        """The effects to carry out now: a chunk to each slave in turn, so that all shares end together, within windows.

        The slave that has the least part of its share comes first, and the schedule decides between equals.
        """
        if self.failure or not self._open:
            return []
        self._asked_s = now_s
        if now_s >= self._progress_s + self._settings.stall_s:
            self.failure = f"no progress for {self._settings.stall_s:g} s: {self._why}"
            return []
        actions: list[TransferEffect] = []
        for peer in self._peers.values():
            if peer.must_reconnect and now_s >= peer.resume_at_s:
                peer.must_reconnect = False
                actions.append(Reconnect(peer.slave))
            if peer.in_flight and now_s >= peer.last_word_s + peer.silence_s:  # the same sum as in next_deadline_s()
                actions.append(self._reconnect(peer, now_s))
        if self.failure:
            return []
        ready = [peer for peer in self._peers.values() if not peer.done and now_s >= peer.resume_at_s]
        if len(ready) > 1:
            ready.sort(key=_begun_part)
        return actions + list(_in_turn([self._asks(peer, now_s) for peer in ready]))

    def next_deadline_s(self) -> float:
        """When actions() must be called again although no answer came; once the transfer is over, at once."""
        if self.failure or not self._open:
            return self._asked_s
        deadline_s = self._progress_s + self._settings.stall_s
        for peer in self._peers.values():
            if peer.in_flight:
                deadline_s = min(deadline_s, peer.last_word_s + peer.silence_s)
            elif not peer.done and peer.resume_at_s > self._asked_s:  # else it waits for an answer to free its window
                deadline_s = min(deadline_s, peer.resume_at_s)
        return deadline_s

    def refused(self, slave: str, request: int, refusal: Refusal, now_s: float) -> None:
        """The slave refuses: pause, then query what is missing. A refusal that only the master can resolve ends the
        transfer."""
        answered = self._answered(slave, request, now_s)
        if answered is None:
            return
        peer = answered[0]
        peer.refusals[refusal.code.name] = peer.refusals.get(refusal.code.name, 0) + 1
        self._why = f"slave {slave} refuses: {refusal.sentence}"
        if refusal.code is RefusalCode.UNKNOWN_PUSH:
            peer.unknown_since_s = min(peer.unknown_since_s, now_s)
        if refusal.code in _FOR_THE_MASTER or now_s - peer.unknown_since_s >= UNKNOWN_S:
            self.failure = self._why
            self.base_gone = refusal.code is RefusalCode.BASE_GONE
        self._start_over(peer, answered[1])
        peer.resume_at_s = now_s + peer.pause_s
        peer.pause_s = min(MAX_PAUSE_S, 2 * peer.pause_s)

    def turned_away(self, slave: str, sentence: str, now_s: float) -> None:
        """No connection was made, for the reason in `sentence`: its requests are lost. Pause, then retry."""
        peer = self._peers.get(slave)
        if peer is None or peer.done:
            return
        self._why = sentence
        peer.away_since_s = min(peer.away_since_s, now_s)
        if now_s - peer.away_since_s >= TURNED_AWAY_S:
            self.failure = sentence
        self._start_over(peer)
        peer.reconnects += 1
        peer.must_reconnect = True
        peer.resume_at_s = now_s + peer.pause_s
        peer.pause_s = min(MAX_PAUSE_S, 2 * peer.pause_s)

    # ---- parts ----

    def _answered(self, slave: str, request: int, now_s: float, credit: int = 0) -> tuple[_Peer, int | None] | None:
        """The peer and the chunk of a request that is in flight; None: a late or repeated answer."""
        peer = self._peers.get(slave)
        if peer is None or request not in peer.in_flight:
            return None
        # A slow link is allowed a longer silence: four times the longest recent gap between two answers.
        gap_s = now_s - peer.last_word_s
        peer.silence_s = min(MAX_SILENCE_S, max(self._settings.silence_s, 4 * gap_s, 0.9 * peer.silence_s))
        peer.last_word_s, peer.silences, peer.away_since_s = now_s, 0, math.inf
        self._flow.answered(slave, request, now_s, credit)
        if request == peer.query:
            peer.query = None
        return peer, peer.in_flight.pop(request)

    def _reconnect(self, peer: _Peer, now_s: float) -> Reconnect:
        self._why = f"slave {peer.slave} answered nothing for {now_s - peer.last_word_s:.1f} s"
        self.reconnects += 1
        peer.reconnects += 1
        peer.silences += 1
        if peer.silences >= MAX_SILENCES:
            self.failure = self._why
        self._start_over(peer)
        peer.last_word_s = now_s
        peer.silence_s = min(MAX_SILENCE_S, 2 * peer.silence_s)
        return Reconnect(peer.slave)

    def _start_over(self, peer: _Peer, refused: int | None = None) -> None:
        """Forget all requests in flight to this slave."""
        lost = [index for index in peer.in_flight.values() if index is not None and not peer.moved[index]]
        if refused is not None and not peer.moved[refused]:
            lost.insert(0, refused)
        peer.in_flight.clear()
        peer.query = None
        self._flow.lost(peer.slave)
        peer.todo.extendleft(reversed(lost))
        peer.must_query = True

    def _ask_chunks(self, peer: _Peer, now_s: float) -> Iterator[SlaveRequest]:
        """Requests for the next chunks that are not moved, as many as the window takes."""
        todo, moved, flow = peer.todo, peer.moved, self._flow
        while todo and flow.may_send(peer.slave):
            index = todo.popleft()
            if not moved[index]:
                yield self._ask(peer, index, now_s)

    def _ask(self, peer: _Peer, index: int | None, now_s: float) -> SlaveRequest:
        if not peer.in_flight:
            peer.last_word_s = now_s  # silence is counted from the first unanswered request
        self._last_request += 1
        peer.in_flight[self._last_request] = index
        chunk = None if index is None else peer.chunks[index]
        self._flow.sent(peer.slave, self._last_request, 0 if chunk is None else chunk.length_bytes, now_s)
        return SlaveRequest(peer.slave, self._last_request, chunk)

    @abstractmethod
    def _asks(self, peer: _Peer, now_s: float) -> Iterator[SlaveRequest]:
        """The requests to this slave now, which is neither done nor pausing."""

    def _moved(self, peer: _Peer, index: int, now_s: float, *, carried: bool = True) -> None:
        """Note a moved chunk. carried: it came over the link now; else it was there before."""
        if not peer.moved[index]:
            peer.moved[index] = 1
            peer.n_moved += 1
            length_bytes = peer.chunks[index].length_bytes
            self.moved_bytes += length_bytes
            if carried:
                peer.carried_bytes += length_bytes
            else:
                peer.resumed_bytes += length_bytes
        self._progress_s = now_s
        peer.pause_s, peer.unknown_since_s = FIRST_PAUSE_S, math.inf

    def _not_moved(self, peer: _Peer, indices: Iterable[int]) -> None:
        for index in indices:
            if peer.moved[index]:
                peer.moved[index] = 0
                peer.n_moved -= 1
                self.moved_bytes -= peer.chunks[index].length_bytes

    def _finish(self, peer: _Peer) -> None:
        self._open -= not peer.done
        peer.done = True
        self._flow.done(peer.slave)


class PushTransfer(Transfer):
    """Sends a push. Begins at each slave with a query for missing chunks, so that a new attempt sends only those."""

    def __init__(self, shares: Mapping[str, Sequence[Chunk]], settings: TransferSettings, now_s: float) -> None:
        super().__init__(shares, settings, now_s)
        for peer in self._peers.values():
            peer.must_query = True

    def acked(self, slave: str, request: int, complete: bool, now_s: float, *, credit: int = 0) -> None:
        """A chunk is landed and verified. `complete`: the slave holds everything. credit: see core.net.data_header."""
        answered = self._answered(slave, request, now_s, credit)
        if answered is None:
            return
        peer, index = answered
        if index is not None:
            self._moved(peer, index, now_s)
        if complete:
            self._complete(peer, now_s)

    def missing(
        self, slave: str, request: int, missing: Sequence[MissingChunk], complete: bool, now_s: float, *,
        credit: int = 0,
    ) -> None:  # fmt: skip
        """Take the slave's missing chunks; it names only so many at a time, and is asked again when those are sent."""
        answered = self._answered(slave, request, now_s, credit)
        if answered is None:
            return
        peer = answered[0]
        if complete:
            self._complete(peer, now_s)
            return
        lacking = [index for item in missing if (index := peer.place.get((item.block, item.offset_bytes))) is not None]
        if len(lacking) != len(missing) or not lacking:
            self.failure = f"slave {slave} misses chunks that are not of its blocks: it has another layout or placement"
            return
        self._not_moved(peer, lacking)
        peer.todo = peer.scheduled(lacking)

    def every_chunk(self) -> Iterator[Chunk]:
        """All chunks of the push, slave by slave."""
        for peer in self._peers.values():
            yield from peer.chunks

    def digests(self, checksums: Mapping[Chunk, int]) -> tuple[tuple[str, bytes], ...]:
        """The digest of the share of each slave; `checksums`: of all chunks of the push."""
        return tuple(
            (slave, shard_digest([checksums[chunk] for chunk in peer.chunks])) for slave, peer in self._peers.items()
        )

    def _complete(self, peer: _Peer, now_s: float) -> None:
        for index in range(len(peer.chunks)):
            self._moved(peer, index, now_s, carried=False)
        peer.todo.clear()
        peer.in_flight.clear()
        peer.query = None
        self._finish(peer)

    def _asks(self, peer: _Peer, now_s: float) -> Iterator[SlaveRequest]:
        """A query is sent when nothing else is in flight, so its answer covers everything sent before."""
        if peer.query is not None:
            return
        if not peer.must_query:
            yield from self._ask_chunks(peer, now_s)
        if not peer.in_flight and (peer.must_query or not peer.todo):
            peer.must_query = False
            ask = self._ask(peer, None, now_s)
            peer.query = ask.request
            yield ask


class PullTransfer(Transfer):
    """Fetches a version; done only when every slave's share has the digest that the master gave."""

    def __init__(
        self,
        shares: Mapping[str, Sequence[Chunk]],
        digest_of_slave: Mapping[str, bytes],
        settings: TransferSettings,
        now_s: float,
    ) -> None:
        super().__init__(shares, settings, now_s)
        self._promised = dict(digest_of_slave)

    def wants(self, slave: str, request: int) -> Chunk | None:
        """The chunk that this request asked for; None: it is not expected, do not land it."""
        peer = self._peers.get(slave)
        index = None if peer is None else peer.in_flight.get(request)
        return None if peer is None or index is None else peer.chunks[index]

    def landed(self, slave: str, request: int, checksum: int, now_s: float, *, credit: int = 0) -> None:
        """A requested chunk is in the buffer, with this checksum."""
        answered = self._answered(slave, request, now_s, credit)
        if answered is None or answered[1] is None:
            return
        peer, index = answered[0], answered[1]
        peer.checksums[index] = checksum
        self._moved(peer, index, now_s)
        if peer.n_moved == len(peer.chunks):
            self._verify(peer)

    def damaged(self, slave: str, request: int, sentence: str, now_s: float) -> None:
        """The payload for this request does not fit its header: ask again."""
        answered = self._answered(slave, request, now_s)
        if answered is not None and answered[1] is not None:
            self._why = sentence
            answered[0].todo.append(answered[1])

    def _verify(self, peer: _Peer) -> None:
        digest = shard_digest([peer.checksums[index] for index in range(len(peer.chunks))])
        if digest == self._promised.get(peer.slave):
            self._finish(peer)
            return
        peer.bad_shards += 1
        sentence = f"the share of slave {peer.slave} does not have the digest that its COMMIT record names"
        if peer.bad_shards > MAX_BAD_SHARDS:
            self.failure, self.corrupt = sentence, True
            return
        self._why = sentence
        self._not_moved(peer, range(len(peer.chunks)))
        peer.checksums.clear()
        peer.todo = peer.scheduled(range(len(peer.chunks)))

    def _asks(self, peer: _Peer, now_s: float) -> Iterator[SlaveRequest]:
        return self._ask_chunks(peer, now_s)


def shares_of(
    layout: Layout, placement: PlacementSpec, block_order: Iterable[int], chunk_bytes: int
) -> dict[str, list[Chunk]]:
    """Each slave's chunks, slaves and blocks in the order of the schedule; blocks that it does not name come last.

    The placement must fit the layout. Slaves that hold no block have no chunks.
    """
    order = list(dict.fromkeys(b for b in block_order if b < len(layout.blocks)))
    order += sorted(set(range(len(layout.blocks))).difference(order))
    names = [address.slave_id for address in placement.slaves]
    shares: dict[str, list[Chunk]] = {}
    for block_id in order:
        slave = names[placement.slave_of_block[block_id]]
        shares.setdefault(slave, []).extend(chunks_of([layout.blocks[block_id]], chunk_bytes))
    return shares | {name: [] for name in names if name not in shares}


def _begun_part(peer: _Peer) -> float:
    return (peer.n_moved + len(peer.in_flight)) / len(peer.chunks)


def _in_turn(queues: list[Iterator[SlaveRequest]]) -> Iterator[SlaveRequest]:
    while queues:
        for queue in list(queues):
            ask = next(queue, None)
            if ask is None:
                queues.remove(queue)
            else:
                yield ask
