"""A TCP relay between real processes that harms what passes: cuts, silence, delay, throttle, reset, truncation, flipped
bits, duplicates and replays.

One relay stands before one port. All relays of a test share a thread with an event loop. A harm counts each time that
it bites, with the time, so that a planned fault that touched no byte is found out. It knows nothing of what it carries.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")

PIECE_BYTES = 64 << 10
QUEUE_PIECES = 64
"""Pieces on their way in one direction of one connection: 4 MiB, so that a slow side slows the other down."""

RECORDED_BYTES = 4 << 20
RECORDED_CONNECTIONS = 8
"""What a replay can send again: the beginning of the newest connections, 32 MiB in all."""

REPLAY_S = 0.5
"""How long a replayed connection stays open when the server does not end it."""

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing sends RST in place of FIN."""


class Harm(Enum):
    CUT = "cut"
    """Connections end at once, and new ones are closed as soon as they are made."""
    SILENCE = "silence"
    """Connections stay, and nothing passes until the harm is over: a partition that heals."""
    DELAY = "delay"
    THROTTLE = "throttle"
    RESET = "reset"
    """Half of a piece passes, then both sides get RST."""
    TRUNCATE = "truncate"
    """Half of a piece passes, then both sides get an orderly end."""
    FLIP = "flip"
    """One bit in the middle of a piece is another one."""
    DUPLICATE = "duplicate"
    """Connections are cut; of those made next each byte goes to the server twice, over two connections."""
    REPLAY = "replay"
    """What clients said on earlier connections is said again on new ones, from their beginning."""


class Way(Enum):
    UP = "up"
    """From the client to the server."""
    DOWN = "down"


BOTH_WAYS = frozenset(Way)
ONCE = frozenset({Harm.RESET, Harm.TRUNCATE, Harm.FLIP})
"""Harms of one piece each, `times` of them."""


@dataclass(frozen=True)
class NetFault:
    """One harm. delay_s: of DELAY; bytes_per_s: of THROTTLE; least_bytes: pieces below it pass unharmed (ONCE);
    times: how many pieces are harmed (ONCE)."""

    harm: Harm
    ways: frozenset[Way] = BOTH_WAYS
    delay_s: float = 0.2
    bytes_per_s: float = 20_000.0
    least_bytes: int = 256
    times: int = 3


@dataclass(eq=False)
class _Link:
    """One connection of a client, and ours to the server. Sockets are closed once no thread waits for them: a
    descriptor that is closed under the event loop may be another connection's at once."""

    client: socket.socket
    server: socket.socket
    carrier: asyncio.Task[None]
    twin: socket.socket | None = None
    twin_listens: asyncio.Task[None] | None = None
    said: bytearray = field(default_factory=bytearray)
    reset: bool = False

    def end(self, reset: bool) -> None:
        self.reset = reset
        self.carrier.cancel()

    def close(self) -> None:
        for end in (self.client, self.server, self.twin):
            if end is not None:
                if self.reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.close()


class FaultProxy:
    """One relay: listens at `address`, and carries each connection to `target`. To be made by Proxies.add()."""

    def __init__(self, name: str, target: tuple[str, int], loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.target = target
        self.bites: list[float] = []
        """Wall times at which the present fault did something."""
        self.keeps = False
        self.seen: list[bytearray] = []
        """If it keeps what passes: all bytes of each direction of each connection, as a listener would see them."""
        self._loop = loop
        self._fault: NetFault | None = None
        self._left = 0
        self._calm = asyncio.Event()
        self._links: set[_Link] = set()
        self._recorded: list[bytearray] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def start(self) -> None:
        self._calm.set()
        self._spawn(self._accept())

    async def harm(self, fault: NetFault) -> None:
        self.bites = []
        self._fault, self._left = fault, fault.times
        if fault.harm in (Harm.CUT, Harm.DUPLICATE):
            self._end_all(reset=fault.harm is Harm.CUT)
        elif fault.harm is Harm.SILENCE:
            self._calm.clear()
        elif fault.harm is Harm.REPLAY:
            for said in [bytes(said) for said in self._recorded]:
                await self._say_again(said)

    async def heal(self) -> None:
        was = self._fault
        self._fault = None
        self._calm.set()
        if was is not None and was.harm is Harm.DUPLICATE:
            self._end_all(reset=False)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _end_all(self, reset: bool) -> None:
        for link in list(self._links):
            self._bite()
            link.end(reset)

    def _bite(self) -> None:
        self.bites.append(time.time())

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            client.setblocking(False)
            if self._fault is not None and self._fault.harm is Harm.CUT:
                self._bite()
                client.close()
            else:
                self._spawn(self._carry(client))

    async def _dial(self) -> socket.socket:
        server = socket.socket()
        server.setblocking(False)
        try:
            await self._loop.sock_connect(server, self.target)
        except OSError:
            server.close()
            raise
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server

    async def _carry(self, client: socket.socket) -> None:
        carrier = asyncio.current_task()
        assert carrier is not None, "each connection is carried by a task of its own"
        try:
            link = _Link(client, await self._dial(), carrier)
        except OSError:
            client.close()
            return
        if self._fault is not None and self._fault.harm is Harm.DUPLICATE:
            with contextlib.suppress(OSError):
                link.twin = await self._dial()
                link.twin_listens = self._spawn(self._drain(link.twin))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links.add(link)
        self._recorded = [*self._recorded[1 - RECORDED_CONNECTIONS :], link.said]
        try:
            await asyncio.gather(self._pump(link, Way.UP), self._pump(link, Way.DOWN))
        finally:
            self._links.discard(link)
            if link.twin_listens is not None:
                link.twin_listens.cancel()
                await asyncio.gather(link.twin_listens, return_exceptions=True)
            link.close()

    async def _pump(self, link: _Link, way: Way) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUE_PIECES)
        await asyncio.gather(self._read(link, way, pieces), self._write(link, way, pieces))

    async def _read(self, link: _Link, way: Way, pieces: asyncio.Queue[tuple[float, bytes]]) -> None:
        source = link.client if way is Way.UP else link.server
        kept = bytearray()
        if self.keeps:
            self.seen.append(kept)
        while True:
            try:
                data = await self._loop.sock_recv(source, PIECE_BYTES)
            except OSError:
                data = b""
            if self.keeps:
                kept += data
            fault = self._fault
            delay_s = fault.delay_s if fault is not None and fault.harm is Harm.DELAY and way in fault.ways else 0.0
            if delay_s and data:
                self._bite()
            await pieces.put((self._loop.time() + delay_s, data))
            if not data:
                return

    async def _write(self, link: _Link, way: Way, pieces: asyncio.Queue[tuple[float, bytes]]) -> None:
        sink = link.server if way is Way.UP else link.client
        while True:
            due_s, data = await pieces.get()
            await asyncio.sleep(max(0.0, due_s - self._loop.time()))
            if not data:
                with contextlib.suppress(OSError):
                    sink.shutdown(socket.SHUT_WR)
                return
            await self._pass(link, way, sink, data)

    async def _pass(self, link: _Link, way: Way, sink: socket.socket, data: bytes) -> None:
        fault = self._fault
        if fault is not None and way in fault.ways:
            if fault.harm is Harm.SILENCE:
                self._bite()
                await self._calm.wait()
            elif fault.harm is Harm.THROTTLE:
                self._bite()
                await asyncio.sleep(len(data) / fault.bytes_per_s)
            elif fault.harm in ONCE and self._left and len(data) >= fault.least_bytes:
                self._left -= 1
                self._bite()
                data = await self._harmed(link, sink, data, fault.harm)
        if way is Way.UP:
            link.said += data[: max(0, RECORDED_BYTES - len(link.said))]
            await self._send_twin(link, data)
        await self._send(link, sink, data)

    async def _harmed(self, link: _Link, sink: socket.socket, data: bytes, harm: Harm) -> bytes:
        middle = len(data) // 2
        if harm is Harm.FLIP:
            return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]
        await self._send(link, sink, data[:middle])
        link.end(reset=harm is Harm.RESET)
        return b""

    async def _send(self, link: _Link, sink: socket.socket, data: bytes) -> None:
        try:
            await self._loop.sock_sendall(sink, data)
        except OSError:
            link.end(reset=False)

    async def _send_twin(self, link: _Link, data: bytes) -> None:
        if link.twin is None or link.twin_listens is None or link.twin_listens.done():
            return  # the server does not want to hear it twice
        self._bite()
        with contextlib.suppress(OSError):
            await self._loop.sock_sendall(link.twin, data)

    async def _drain(self, end: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while await self._loop.sock_recv(end, PIECE_BYTES):
                pass

    async def _say_again(self, said: bytes) -> None:
        if not said:
            return
        with contextlib.suppress(OSError):
            server = await self._dial()
            self._bite()
            listening = self._spawn(self._drain(server))
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(REPLAY_S):
                    await self._loop.sock_sendall(server, said)
                    await asyncio.shield(listening)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            server.close()


class Proxies:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._proxies: dict[str, FaultProxy] = {}

    def __enter__(self) -> Proxies:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        for proxy in self._proxies.values():
            self._do(proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __getitem__(self, name: str) -> FaultProxy:
        return self._proxies[name]

    def add(self, name: str, target: tuple[str, int]) -> FaultProxy:
        async def make() -> FaultProxy:
            proxy = FaultProxy(name, target, self._loop)
            proxy.start()
            return proxy

        self._proxies[name] = self._do(make())
        return self._proxies[name]

    def harm(self, name: str, fault: NetFault) -> None:
        self._do(self._proxies[name].harm(fault))

    def heal(self, name: str) -> None:
        self._do(self._proxies[name].heal())

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)
