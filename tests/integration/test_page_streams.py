"""The status page where there is nothing to send, where a reader takes nothing, and where there are too many."""

from __future__ import annotations

import asyncio
import asyncio.constants
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer
from support.waiting import NO_LIMIT_S

from dips.core.net.keys import load_identity
from dips.core.net.newcomers import Bounds
from dips.core.net.security import INSECURE
from dips.local.authority import ensure_keys
from dips.master.access import Access
from dips.master.page import server as pages
from dips.master.page.access import PageAccess
from dips.master.page.server import PageServer
from dips.master.page.snapshot import Hub

ASK = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"


class LongMessages(Hub):
    """Messages that fill every buffer between the master and a reader."""

    def message_after(self, number: int) -> str:
        return "x" * (64 << 20)


def site(hub: Hub) -> pages.PageApplication:
    return pages.PageApplication(hub, PageAccess(Access(INSECURE, None), "no token", 1), pages.static_files())


def served(hub: Hub) -> TestServer:
    return TestServer(site(hub).application())


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - aiohttp has no event for it
        await asyncio.sleep(0)


async def test_a_stream_without_samples_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "WAIT_S", 0.01)
    async with served(Hub(deque())) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(ASK)
        for _ in range(2):
            await reader.readuntil(b"event: waiting\ndata: ")
        writer.close()


async def test_the_connection_of_a_reader_that_takes_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "WRITE_S", 0.01)
    hub = LongMessages(deque())
    hub.number = 1
    async with served(hub) as server:
        _, writer = await asyncio.open_connection(server.host, server.port, limit=1)  # it stops to read at once
        try:
            writer.write(ASK)
            await until(lambda: bool(server.handler and server.handler.connections))
            await until(lambda: not (server.handler and server.handler.connections))
        finally:
            writer.transport.abort()  # else the server's end waits for it


async def test_a_stream_beyond_the_most_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_STREAMS", 1)
    async with served(Hub(deque())) as server:
        ends = [await asyncio.open_connection(server.host, server.port) for _ in range(2)]
        for (reader, writer), status in zip(ends, (b"200", b"503"), strict=True):
            writer.write(ASK)
            assert (await reader.readline()).split()[1] == status
        for _, writer in ends:
            writer.close()


def test_a_silent_connection_beyond_the_most_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_CONNECTIONS", 1)
    page = PageServer("127.0.0.1", 0, 0, INSECURE, lambda port: site(Hub(deque())))
    here = ("127.0.0.1", page.start())
    try:
        with socket.create_connection(here) as silent, socket.create_connection(here, timeout=NO_LIMIT_S) as beyond:
            assert beyond.recv(1) == b""
            silent.setblocking(False)
            with pytest.raises(BlockingIOError):
                silent.recv(1)
    finally:
        page.stop()


@pytest.mark.parametrize("bound", ["newcomers", "connections"])
def test_a_silent_reader_with_tls_is_closed_for_the_next_whatever_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """One that goes on reading, and answers no message of TLS, would keep its place as long as it likes."""
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", NO_LIMIT_S)
    monkeypatch.setattr(pages, "MAX_CONNECTIONS", 1 if bound == "connections" else 9)
    monkeypatch.setattr(pages, "Bounds", lambda *_: Bounds(1, 1, NO_LIMIT_S, patience_s=0.0))
    ensure_keys(tmp_path / "keys", [], [], [])
    identity = load_identity(tmp_path / "keys" / "master")
    page = PageServer("127.0.0.1", 0, 0, identity, lambda port: site(Hub(deque())))
    here = ("127.0.0.1", page.start())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(here, timeout=NO_LIMIT_S) as silent:
            with context.wrap_socket(silent.dup()), socket.create_connection(here, timeout=NO_LIMIT_S):
                until_ended(silent)
    finally:
        page.stop()


async def test_connections_that_have_ended_make_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_NEWCOMERS", 2)
    monkeypatch.setattr(pages, "MAX_NEWCOMERS_OF_ADDRESS", 1)
    page = PageServer("127.0.0.1", 0, 0, INSECURE, lambda port: site(Hub(deque())))
    port = page.start()
    try:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"ok\n")
            writer.close()
    finally:
        page.stop()


def until_ended(end: socket.socket) -> None:
    """Reads until the peer has closed the connection, or reset it."""
    with contextlib.suppress(ConnectionError):
        while end.recv(1 << 16):
            pass
