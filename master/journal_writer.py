"""Durable writes off the event loop: in the order given, on one thread, many entries to one flush.

The loop must never wait for a disk, and JournalWritten must never be said before the disk has the entry and
every earlier one. While one flush runs, what arrives waits and goes with the next, so that a slow disk makes
batches larger, not the queue of flushes longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from dips.master.journal import Entry

THREAD_NAME = "dips-journal"


class JournalWriter:
    """Hands entries to `append` and tells `written` each entry's number once it is durable.

    After an error `failed` is told once, and nothing more is written: an entry must not overtake a lost one.
    What waits is bounded by the calls and rounds that are in flight, for each entry answers one of them.
    """

    def __init__(
        self,
        append: Callable[[Sequence[Entry]], None],
        written: Callable[[int], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._append = append
        self._written = written
        self._failed = failed
        self._waiting: list[Entry] = []
        self._flush: asyncio.Task[None] | None = None
        self._broken = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREAD_NAME)

    def put(self, entry: Entry) -> None:
        """Queue one entry; returns at once."""
        self._waiting.append(entry)
        if self._flush is None and not self._broken:
            self._flush = asyncio.create_task(self._run(), name="master-journal")

    async def close(self) -> None:
        """Write what waits, then end the thread."""
        if self._flush is not None:
            await self._flush
        self._thread.shutdown(wait=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and not self._broken:
            batch, self._waiting = self._waiting, []
            try:
                await loop.run_in_executor(self._thread, self._append, batch)
            except Exception as error:
                self._broken = True
                self._failed(error)
            else:
                for entry in batch:
                    self._written(entry.entry_id)
        self._flush = None
