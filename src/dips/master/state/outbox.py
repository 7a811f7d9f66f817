"""The queue of outgoing effects, with the journal as a barrier."""

from __future__ import annotations

from collections import deque

from dips.master.state.effects import Effect, Halt, Log, Record, WriteJournal


class Outbox:
    """Outgoing effects. An effect that may depend on a journal entry is released only once the entry is durable."""

    def __init__(self) -> None:
        self._ready: list[Effect] = []
        self._held: deque[tuple[int, list[Effect]]] = deque()
        self._next_entry = 1

    def put(self, effect: Effect) -> None:
        urgent = isinstance(effect, Log | Record) or (isinstance(effect, Halt) and effect.exit_code != 0)
        if self._held and not urgent:
            self._held[-1][1].append(effect)
        else:
            self._ready.append(effect)

    def journal(self, kind: str, record_json: str, snapshot_json: str) -> None:
        entry = self._next_entry
        self._next_entry += 1
        self._ready.append(WriteJournal(entry, kind, record_json, snapshot_json))
        self._held.append((entry, []))

    def written(self, entry_id: int) -> None:
        while self._held and self._held[0][0] <= entry_id:
            self._ready.extend(self._held.popleft()[1])

    @property
    def waiting(self) -> bool:
        """Whether an entry is not durable yet."""
        return bool(self._held)

    def take(self) -> list[Effect]:
        ready, self._ready = self._ready, []
        return ready
