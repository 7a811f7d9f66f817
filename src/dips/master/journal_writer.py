"""Writes journal entries durably on a thread of its own: in the given order, with many entries in one flush.

The event loop must never wait for a disk, and JournalWritten must never be sent before the disk has the entry and
every earlier one. Entries that arrive during a flush are written with the next one, so that a slow disk makes
batches larger, not the queue of flushes longer. Old records are moved on the same thread, step by step, and only
while no entry waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dips.master.journal import JournalEntry

THREAD_NAME = "dips-journal"

T = TypeVar("T")


class JournalWriter:
    """Passes entries to `append` and calls `written` with each entry's number once it is durable.

    After an error `failed` is called once, and nothing more is written: an entry must not follow a lost one.
    The number of waiting entries is bounded by the calls and rounds in flight, because each entry answers one of them.
    `tidy` does one short step of moving old records and returns whether there is another.
    """

    def __init__(
        self,
        append: Callable[[Sequence[JournalEntry]], None],
        written: Callable[[int], None],
        failed: Callable[[Exception], None],
        tidy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._append = append
        self._written = written
        self._failed = failed
        self._tidy = tidy
        self._closing = False
        self._waiting: list[JournalEntry] = []
        self._flush: asyncio.Task[None] | None = None
        self._broken = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREAD_NAME)

    def put(self, entry: JournalEntry) -> None:
        """Queues one entry; returns at once."""
        self._waiting.append(entry)
        if self._flush is None and not self._broken:
            self._flush = asyncio.create_task(self._run(), name="master-journal")

    async def close(self) -> None:
        """Writes the waiting entries, then ends the thread; old records are moved further at the next start."""
        self._closing = True
        if self._flush is not None:
            await self._flush
        self._thread.shutdown(wait=True)

    async def _run(self) -> None:
        untidy = True
        try:
            while self._waiting or (untidy and not self._closing):
                if self._waiting:
                    await self._write()
                    untidy = True
                else:
                    untidy = await self._on_thread(self._tidy)
        except Exception as error:
            self._broken = True
            self._failed(error)
        self._flush = None

    async def _write(self) -> None:
        batch, self._waiting = self._waiting, []
        await self._on_thread(lambda: self._append(batch))
        for entry in batch:
            self._written(entry.entry_id)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
