"""Fetches chunks of one version from another slave: decides what to request next, and takes the answers.

For a RESHARD only (docs/decisions/0019-reshard.md). Pure: time is an argument, messages are values. Every chunk is
idempotent, so whatever is doubtful is requested again; a chunk counts as received only when its checksum fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dips.core.chunks import Chunk
from dips.core.errors import RefusalCode, Refused
from dips.core.messages import MoveBlocks, Refusal

WINDOW_CHUNKS = 16
"""16 MiB on their way with chunks of 1 MiB: 10 Gbit/s at a round trip of 13 ms."""

SILENCE_S = 3.0
"""After this silence everything unanswered is requested again, on a new connection."""

STALL_S = 30.0
"""Without a chunk for so long the move is given up; the master begins it again when it can."""

PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


@dataclass(frozen=True)
class ChunkRequest:
    """Send GET_CHUNK for this chunk under this request number."""

    request: int
    chunk: Chunk


@dataclass(frozen=True)
class Reconnect:
    """The connection may have lost messages: open a new one."""


class Fetch:
    """Fetches these chunks from one slave. Raises nothing; `failure` is a refusal once it cannot go on."""

    def __init__(self, source: str, chunks: Sequence[Chunk], now_s: float) -> None:
        self._source = source
        self._todo = deque(chunks)
        self._in_flight: dict[int, Chunk] = {}
        self._left = len(chunks)
        self._requests = 0
        self._last_answer_s = self._progress_s = now_s
        self._resume_s = now_s
        self._pause_s = PAUSE_S
        self._why = "it answers nothing"
        self.failure: Refused | None = None

    @property
    def done(self) -> bool:
        return not self._left and self.failure is None

    def actions(self, now_s: float) -> list[ChunkRequest | Reconnect]:
        """The requests to send and the reconnects to make now."""
        if self.done or self.failure is not None:
            return []
        if now_s >= self._progress_s + STALL_S:
            why = f"slave {self._source} gave no chunk for {STALL_S:g} s: {self._why}"
            self.failure = Refused(RefusalCode.BUSY, why, 1.0)
            return []
        out: list[ChunkRequest | Reconnect] = []
        if self._in_flight and now_s >= self._last_answer_s + SILENCE_S:
            self._start_over()
            self._last_answer_s = now_s
            out.append(Reconnect())
        if now_s < self._resume_s:
            return out
        while self._todo and len(self._in_flight) < WINDOW_CHUNKS:
            if not self._in_flight:
                self._last_answer_s = now_s  # silence is counted from the first unanswered request
            self._requests += 1
            self._in_flight[self._requests] = self._todo.popleft()
            out.append(ChunkRequest(self._requests, self._in_flight[self._requests]))
        return out

    def next_deadline_s(self) -> float:
        """When actions() must be called again although no answer came."""
        due_s = self._progress_s + STALL_S
        if self._in_flight:
            due_s = min(due_s, self._last_answer_s + SILENCE_S)
        elif self._todo:
            due_s = min(due_s, self._resume_s)
        return due_s

    def wanted(self, request: int) -> Chunk | None:
        """The chunk that was requested under this number; None: a late or repeated answer."""
        return self._in_flight.get(request)

    def landed(self, request: int, now_s: float) -> None:
        """The chunk has arrived, and its checksum fits."""
        self._last_answer_s = self._progress_s = now_s
        self._pause_s = PAUSE_S
        del self._in_flight[request]
        self._left -= 1

    def damaged(self, request: int, sentence: str, now_s: float) -> None:
        """The answer does not fit its header, or is another chunk: request the chunk again."""
        self._last_answer_s, self._why = now_s, sentence
        self._todo.appendleft(self._in_flight.pop(request))

    def refused(self, request: int, refusal: Refusal, now_s: float) -> None:
        """The slave refuses. VERSION_GONE ends the fetch; anything else is tried again after a pause."""
        if request not in self._in_flight:
            return
        self._last_answer_s, self._why = now_s, f"it refuses: {refusal.sentence}"
        if refusal.code in (RefusalCode.VERSION_GONE, RefusalCode.RUN_ID):
            self.failure = Refused(refusal.code, f"slave {self._source} {self._why}")
        self._start_over()
        self._resume_s = now_s + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)

    def _start_over(self) -> None:
        """Forget all requests in flight."""
        self._todo.extendleft(reversed(self._in_flight.values()))
        self._in_flight.clear()


def cancelled(move: MoveBlocks) -> Refused:
    """The refusal with which a move ends that is no longer needed."""
    return Refused(RefusalCode.BUSY, f"round {move.round} was given up", 1.0)
