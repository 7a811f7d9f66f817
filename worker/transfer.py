"""Moving a push to the slaves and a version from them: what to send next, and what an answer means.

Pure: time is an argument, messages are values, no sockets. Every chunk is idempotent, so whatever is doubtful is
asked or sent again; nothing counts as moved before the other side (push) or the digest (pull) has confirmed it.

At most `window_chunks` requests to one slave are unanswered: W = rate x round-trip time / chunk size; the default 16
of 1 MiB keep a 1 Gbit/s link of 130 ms full, and bound what a peer must buffer to 16 MiB.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dips.core.chunks import Chunk, chunks_of, shard_digest
from dips.core.data_header import MissingChunk
from dips.core.errors import RefusalCode
from dips.core.layout import Layout
from dips.core.messages import PlacementSpec, Refusal

MAX_SILENCE_S = 60.0
MAX_SILENCES = 2
"""Silences in a row of one slave, before its address is asked for anew: it may have come back on another port."""

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
UNKNOWN_S = 5.0
"""How long a slave may know nothing of a push whose ticket we have; then the master is asked what became of it."""

_FOR_THE_MASTER = frozenset({RefusalCode.VERSION_GONE, RefusalCode.STALE_EPOCH, RefusalCode.FENCED, RefusalCode.RUN_ID})

MAX_BAD_SHARDS = 2
"""Times that one slave's whole share is fetched again because its digest is wrong."""


@dataclass(frozen=True)
class TransferSettings:
    """Times in seconds; see ClientConfig.data_silence_s and data_stall_s."""

    chunk_bytes: int
    window_chunks: int
    silence_s: float = 3.0
    stall_s: float = 30.0


@dataclass(frozen=True)
class Ask:
    """One message to a slave. chunk None: which chunks are missing?"""

    slave: str
    request: int
    chunk: Chunk | None


@dataclass(frozen=True)
class Reconnect:
    """The connection to this slave may have lost messages: open a new one; older answers do not count."""

    slave: str


Action = Ask | Reconnect


@dataclass
class _Peer:
    """What is to be moved to or from one slave. `chunks` as the digest counts them, `todo` as the schedule wants."""

    slave: str
    chunks: tuple[Chunk, ...]
    rank: Mapping[Chunk, int]
    todo: deque[Chunk]
    last_word_s: float
    silence_s: float
    moved: set[Chunk] = field(default_factory=set)
    in_flight: dict[int, Chunk | None] = field(default_factory=dict)
    resume_at_s: float = -math.inf
    pause_s: float = FIRST_PAUSE_S
    must_query: bool = False
    silences: int = 0
    unknown_since_s: float = math.inf
    done: bool = False
    bad_shards: int = 0
    checksums: dict[Chunk, int] = field(default_factory=dict)

    @property
    def querying(self) -> bool:
        return None in self.in_flight.values()


class Transfer(ABC):
    """What push and pull have in common: windows, silence, pauses, stalls. `failure` is a sentence once it failed."""

    def __init__(self, shares: Mapping[str, Sequence[Chunk]], settings: TransferSettings, now_s: float) -> None:
        self._settings = settings
        silence_s = settings.silence_s
        self._peers = {
            slave: _Peer(slave, tuple(sorted(c)), dict(zip(c, range(len(c)), strict=True)), deque(c), now_s, silence_s)
            for slave, c in shares.items()
        }
        for peer in self._peers.values():
            peer.done = not peer.chunks
        self._last_request = 0
        self._progress_s = now_s
        self._why = "no slave answered"
        self.failure = ""
        self.corrupt = False
        self.reconnects = 0

    @property
    def slaves(self) -> list[str]:
        """Those that take part, in the order of the placement."""
        return [slave for slave, peer in self._peers.items() if peer.chunks]

    @property
    def done(self) -> bool:
        return not self.failure and all(peer.done for peer in self._peers.values())

    @property
    def moved_bytes(self) -> int:
        return sum(chunk.length_bytes for peer in self._peers.values() for chunk in peer.moved)

    @property
    def total_bytes(self) -> int:
        return sum(chunk.length_bytes for peer in self._peers.values() for chunk in peer.chunks)

    def actions(self, now_s: float) -> list[Action]:
        """What to do now, one message to each slave in turn, so that all links are busy from the start."""
        if self.failure or self.done:
            return []
        if now_s >= self._progress_s + self._settings.stall_s:
            self.failure = f"no progress for {self._settings.stall_s:g} s: {self._why}"
            return []
        silent = [peer for peer in self._peers.values() if self._is_silent(peer, now_s)]
        actions: list[Action] = [self._reconnect(peer, now_s) for peer in silent]
        if self.failure:
            return []
        return actions + list(_in_turn([self._asks(peer, now_s) for peer in self._peers.values()]))

    def next_deadline_s(self) -> float:
        """When actions() may have something new to do though no answer came."""
        times_s = [self._progress_s + self._settings.stall_s]
        for peer in self._peers.values():
            if peer.in_flight:
                times_s.append(peer.last_word_s + peer.silence_s)
            elif not peer.done:
                times_s.append(peer.resume_at_s)
        return min(times_s)

    def refused(self, slave: str, request: int, refusal: Refusal, now_s: float) -> None:
        """The slave refuses: pause, then ask what is missing. What only the master can settle ends the transfer."""
        answered = self._answered(slave, request, now_s)
        if answered is None:
            return
        peer = answered[0]
        self._why = f"slave {slave} refuses: {refusal.sentence}"
        if refusal.code is RefusalCode.UNKNOWN_PUSH:
            peer.unknown_since_s = min(peer.unknown_since_s, now_s)
        if refusal.code in _FOR_THE_MASTER or now_s - peer.unknown_since_s >= UNKNOWN_S:
            self.failure = self._why
        self._start_over(peer)
        peer.resume_at_s = now_s + peer.pause_s
        peer.pause_s = min(MAX_PAUSE_S, 2 * peer.pause_s)

    # ---- parts ----

    def _answered(self, slave: str, request: int, now_s: float) -> tuple[_Peer, Chunk | None] | None:
        """The peer and the chunk of a request that is in flight; None: a late or doubled answer."""
        peer = self._peers.get(slave)
        if peer is None or request not in peer.in_flight:
            return None
        # A slow link earns a longer patience: four times the longest recent gap between two answers.
        gap_s = now_s - peer.last_word_s
        peer.silence_s = min(MAX_SILENCE_S, max(self._settings.silence_s, 4 * gap_s, 0.9 * peer.silence_s))
        peer.last_word_s, peer.silences = now_s, 0
        return peer, peer.in_flight.pop(request)

    def _is_silent(self, peer: _Peer, now_s: float) -> bool:
        return bool(peer.in_flight) and now_s >= peer.last_word_s + peer.silence_s  # the sum next_deadline_s() names

    def _reconnect(self, peer: _Peer, now_s: float) -> Reconnect:
        self._why = f"slave {peer.slave} answered nothing for {now_s - peer.last_word_s:.1f} s"
        self.reconnects += 1
        peer.silences += 1
        if peer.silences >= MAX_SILENCES:
            self.failure = self._why
        self._start_over(peer)
        peer.last_word_s = now_s
        peer.silence_s = min(MAX_SILENCE_S, 2 * peer.silence_s)
        return Reconnect(peer.slave)

    def _start_over(self, peer: _Peer) -> None:
        """Nothing in flight counts any more."""
        lost = [chunk for chunk in peer.in_flight.values() if chunk is not None and chunk not in peer.moved]
        peer.in_flight.clear()
        peer.todo.extendleft(reversed(lost))
        peer.must_query = True

    def _next_chunk(self, peer: _Peer) -> Chunk | None:
        while peer.todo:
            chunk = peer.todo.popleft()
            if chunk not in peer.moved:
                return chunk
        return None

    def _ask(self, peer: _Peer, chunk: Chunk | None, now_s: float) -> Ask:
        if not peer.in_flight:
            peer.last_word_s = now_s  # silence is counted from the first unanswered request
        self._last_request += 1
        peer.in_flight[self._last_request] = chunk
        return Ask(peer.slave, self._last_request, chunk)

    @abstractmethod
    def _asks(self, peer: _Peer, now_s: float) -> Iterator[Ask]:
        """What to ask of this slave now."""

    def _moved(self, peer: _Peer, chunk: Chunk, now_s: float) -> None:
        peer.moved.add(chunk)
        self._progress_s = now_s
        peer.pause_s, peer.unknown_since_s = FIRST_PAUSE_S, math.inf


class PushTransfer(Transfer):
    """Sends a push. Begins at each slave by asking what is missing there, so that a new attempt sends only that."""

    def __init__(self, shares: Mapping[str, Sequence[Chunk]], settings: TransferSettings, now_s: float) -> None:
        super().__init__(shares, settings, now_s)
        for peer in self._peers.values():
            peer.must_query = True

    def acked(self, slave: str, request: int, complete: bool, now_s: float) -> None:
        """A chunk is landed and verified. `complete`: the slave holds everything."""
        answered = self._answered(slave, request, now_s)
        if answered is None:
            return
        peer, chunk = answered
        if chunk is not None:
            self._moved(peer, chunk, now_s)
        if complete:
            self._complete(peer, now_s)

    def missing(self, slave: str, request: int, missing: Sequence[MissingChunk], complete: bool, now_s: float) -> None:
        """The slave says what it lacks; it names only so many at a time, and is asked again when those are sent."""
        answered = self._answered(slave, request, now_s)
        if answered is None:
            return
        peer = answered[0]
        if complete:
            self._complete(peer, now_s)
            return
        wanted = {(item.block, item.offset_bytes) for item in missing}
        lacking = [chunk for chunk in peer.chunks if (chunk.block_id, chunk.offset_bytes) in wanted]
        if len(lacking) != len(wanted) or not wanted:
            self.failure = f"slave {slave} misses chunks that are not of its blocks: it has another layout or placement"
            return
        peer.moved.difference_update(lacking)
        peer.todo = deque(sorted(lacking, key=peer.rank.__getitem__))

    def digests(self, checksums: Mapping[Chunk, int]) -> tuple[tuple[str, bytes], ...]:
        """Of what each slave was sent; `checksums` of all chunks of the push."""
        return tuple(
            (slave, shard_digest([checksums[chunk] for chunk in peer.chunks])) for slave, peer in self._peers.items()
        )

    def _complete(self, peer: _Peer, now_s: float) -> None:
        peer.moved.update(peer.chunks)
        peer.todo.clear()
        peer.in_flight.clear()
        peer.done = True
        self._progress_s = now_s

    def _asks(self, peer: _Peer, now_s: float) -> Iterator[Ask]:
        """A query goes alone: nothing else is in flight, so its answer is about everything sent before."""
        if peer.done or now_s < peer.resume_at_s or peer.querying:
            return
        if not peer.must_query:
            while len(peer.in_flight) < self._settings.window_chunks and (chunk := self._next_chunk(peer)) is not None:
                yield self._ask(peer, chunk, now_s)
        if not peer.in_flight:
            peer.must_query = False
            yield self._ask(peer, None, now_s)


class PullTransfer(Transfer):
    """Fetches a version; done only when every slave's share has the digest that the master promised."""

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
        """The chunk that this request asked for; None: nobody waits for it, do not land it."""
        peer = self._peers.get(slave)
        return None if peer is None else peer.in_flight.get(request)

    def landed(self, slave: str, request: int, checksum: int, now_s: float) -> None:
        """A chunk that was wanted lies in the buffer, with this checksum."""
        answered = self._answered(slave, request, now_s)
        if answered is None or answered[1] is None:
            return
        peer, chunk = answered[0], answered[1]
        peer.checksums[chunk] = checksum
        self._moved(peer, chunk, now_s)
        if len(peer.moved) == len(peer.chunks):
            self._verify(peer)

    def damaged(self, slave: str, request: int, sentence: str, now_s: float) -> None:
        """What arrived for this request is not what its header says: ask again."""
        answered = self._answered(slave, request, now_s)
        if answered is not None and answered[1] is not None:
            self._why = sentence
            answered[0].todo.append(answered[1])

    def _verify(self, peer: _Peer) -> None:
        digest = shard_digest([peer.checksums[chunk] for chunk in peer.chunks])
        if digest == self._promised.get(peer.slave):
            peer.done = True
            return
        peer.bad_shards += 1
        sentence = f"the share of slave {peer.slave} does not have the digest that its COMMIT record names"
        if peer.bad_shards > MAX_BAD_SHARDS:
            self.failure, self.corrupt = sentence, True
            return
        self._why = sentence
        peer.moved.clear()
        peer.checksums.clear()
        peer.todo = deque(sorted(peer.chunks, key=peer.rank.__getitem__))

    def _asks(self, peer: _Peer, now_s: float) -> Iterator[Ask]:
        if peer.done or now_s < peer.resume_at_s:
            return
        while len(peer.in_flight) < self._settings.window_chunks and (chunk := self._next_chunk(peer)) is not None:
            yield self._ask(peer, chunk, now_s)


def shares_of(
    layout: Layout, placement: PlacementSpec, block_order: Iterable[int], chunk_bytes: int
) -> dict[str, list[Chunk]]:
    """Each slave's chunks, blocks in the order of the schedule (unnamed blocks last). placement must fit the layout."""
    shares: dict[str, list[Chunk]] = {address.slave_id: [] for address in placement.slaves}
    order = list(dict.fromkeys(b for b in block_order if b < len(layout.blocks)))
    rest = sorted(set(range(len(layout.blocks))) - set(order))
    for block_id in order + rest:
        slave = placement.slaves[placement.slave_of_block[block_id]].slave_id
        shares[slave].extend(chunks_of([layout.blocks[block_id]], chunk_bytes))
    return shares


def _in_turn(queues: Sequence[Iterator[Ask]]) -> Iterator[Ask]:
    waiting = list(queues)
    while waiting:
        for queue in list(waiting):
            ask = next(queue, None)
            if ask is None:
                waiting.remove(queue)
            else:
                yield ask
