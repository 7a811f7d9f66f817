"""State machines for the real master's process and shell, with the interface of the MasterMachine.

`ScriptedMachine` does what a test tells it, in the test's process; `Leaves` runs in support.master_process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from dips.core import messages as m
from dips.core.errors import RefusalCode
from dips.core.ids import Incarnation
from dips.master.state.effects import BeginAgain, Effect, Reply, WriteJournal
from dips.master.state.events import ClusterCall, Event, JournalWritten
from dips.master.state.shared import RunConfig

E = TypeVar("E")

HELLO = m.Hello(1, 1)
AGAIN = "begin again at "


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

    def settings(self) -> m.Settings:
        return m.Settings()

    def run_is_over(self) -> bool:
        return False

    def progress(self) -> dict[str, object]:
        return {}

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


class Leaves:
    """Journals every Leave before it answers; the reasons of all Leaves are its whole state.

    A Leave whose reason is "begin again at N" begins an epoch that is at least N instead.
    """

    def __init__(self, config: RunConfig, epoch: int, snapshot_json: str | None, wall_offset_s: float) -> None:
        self._reasons: list[str] = json.loads(snapshot_json or "[]")
        self._entry_ids = itertools.count(1)
        self._token_of_entry: dict[int, int] = {}

    def start(self, now_s: float) -> Sequence[Effect]:
        return ()

    def next_deadline_s(self) -> float | None:
        return None

    def settings(self) -> m.Settings:
        return m.Settings()

    def run_is_over(self) -> bool:
        return False

    def progress(self) -> dict[str, object]:
        return {}

    def handle(self, event: Event, now_s: float) -> Sequence[Effect]:
        match event:
            case ClusterCall(_, m.LeaveRequest(_, reason)) if reason.startswith(AGAIN):
                return [BeginAgain(int(reason.removeprefix(AGAIN)), reason)]
            case ClusterCall(token, m.LeaveRequest(_, reason)):
                entry_id = next(self._entry_ids)
                self._token_of_entry[entry_id] = token
                self._reasons.append(reason)
                return [WriteJournal(entry_id, "LEAVE", json.dumps(reason), json.dumps(self._reasons))]
            case JournalWritten(entry_id):
                return [Reply(self._token_of_entry.pop(entry_id), m.LeaveReply())]
        return ()
