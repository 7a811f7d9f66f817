"""A master's state machine that does what a test tells it, in the test's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from dips.core import messages as m
from dips.core.errors import RefusalCode
from dips.core.ids import Incarnation
from dips.master.state.effects import Effect, Event, WriteJournal
from dips.master.state.ledger import Ledger
from dips.master.state.shared import RunConfig, SharedState

E = TypeVar("E")

HELLO = m.Hello(1, 1)


def caller(name: str = "a", cause_id: str = "c1") -> m.Caller:
    return m.Caller("demo", 1, name, Incarnation(1, 1), cause_id)


def leave(reason: str = "done") -> m.LeaveRequest:
    return m.LeaveRequest(caller(), reason)


def slave_message(body: m.SlaveBody | None = None) -> m.SlaveMessage:
    return m.SlaveMessage(caller("s0"), body or m.SlaveBeat(staging_bytes=7))


def slave_hello() -> m.SlaveMessage:
    return slave_message(m.SlaveHello(HELLO, "tcp://127.0.0.1:5000", 1 << 30, 0))


def command(reason: str) -> m.SlaveCommand:
    return m.SlaveCommand("demo", 1, Incarnation(1, 1), "c1", m.StopSlave(reason))


def refusal(sentence: str = "because of a test") -> m.Refusal:
    return m.Refusal(RefusalCode.FENCED, sentence, 2.5)


class ScriptedMachine:
    def __init__(self, react: Callable[[Event], Sequence[Effect]] = lambda event: ()) -> None:
        self.react = react
        self.shared = SharedState(RunConfig("demo", 1), 1, Ledger("demo"), 0.0)
        self.first: Sequence[Effect] = ()
        self.deadline_s: float | None = None
        self.seen: list[tuple[Event, float]] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, now_s: float) -> Sequence[Effect]:
        return self.first

    def handle(self, event: Event, now_s: float) -> Sequence[Effect]:
        self.seen.append((event, now_s))
        task = asyncio.get_running_loop().create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return self.react(event)

    def next_deadline_s(self) -> float | None:
        return self.deadline_s

    def of(self, kind: type[E]) -> list[E]:
        return [event for event, _ in self.seen if isinstance(event, kind)]

    async def until(self, kind: type[E], n: int = 1) -> E:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.of(kind)) >= n)
        return self.of(kind)[n - 1]

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class MemoryJournal:
    """Takes entries like Journal.append_all; `fail_with` makes it fail."""

    def __init__(self) -> None:
        self.batches: list[list[WriteJournal]] = []
        self.fail_with: Exception | None = None

    def append_all(self, entries: Sequence[WriteJournal]) -> None:
        if self.fail_with is not None:
            raise self.fail_with
        self.batches.append(list(entries))
