"""A slow link that several connections share: a relay in this process, one queue for each direction.

What is sent waits in one line, whoever sent it, and leaves at the link's rate, as in a router with a buffer: so control
and data are as far apart as they are on a real link that both must use. Reading stops while the line is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

PIECE_BYTES = 4096


class _Line:
    """One direction. bytes_per_s: its rate; queue_bytes: what may wait."""

    def __init__(self, bytes_per_s: float, queue_bytes: int) -> None:
        self.bytes_per_s = bytes_per_s
        self.n_bytes = 0
        self._queue: asyncio.Queue[tuple[asyncio.StreamWriter, bytes]] = asyncio.Queue(
            max(1, queue_bytes // PIECE_BYTES)
        )

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(PIECE_BYTES):
                await self._queue.put((writer, piece))
        await self._queue.put((writer, b""))

    async def drain(self) -> None:
        free_s = time.monotonic()
        while True:
            writer, piece = await self._queue.get()
            free_s = max(free_s, time.monotonic()) + len(piece) / self.bytes_per_s
            await asyncio.sleep(max(0.0, free_s - time.monotonic()))
            self.n_bytes += len(piece)
            with contextlib.suppress(ConnectionError, RuntimeError, OSError):
                if writer.is_closing():
                    continue
                if piece:
                    writer.write(piece)
                else:
                    writer.close()


class SharedLink:
    """In a thread of its own. `with` ends it; add() gives a port that leads to a target over the link."""

    def __init__(self, bits_per_s: float, queue_bytes: int) -> None:
        self._rate = (bits_per_s / 8, queue_bytes)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)

    def __enter__(self) -> SharedLink:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._lines = [_Line(*self._rate), _Line(*self._rate)]
        self._drains = [asyncio.create_task(line.drain()) for line in self._lines]

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Towards the servers, and back."""
        return self._lines[0].n_bytes, self._lines[1].n_bytes

    def add(self, target: str, port: int = 0) -> str:
        """Lead 127.0.0.1:port to target ("host:port"); returns the address."""
        return asyncio.run_coroutine_threadsafe(self._add(target, port), self._loop).result()

    async def _add(self, target: str, port: int) -> str:
        host, target_port = target.rsplit(":", 1)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                there, back = await asyncio.open_connection(host, int(target_port), limit=PIECE_BYTES)
            except OSError:
                writer.close()
                return
            await asyncio.gather(self._lines[0].carry(reader, back), self._lines[1].carry(there, writer))

        server = await asyncio.start_server(serve, "127.0.0.1", port, limit=PIECE_BYTES)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
