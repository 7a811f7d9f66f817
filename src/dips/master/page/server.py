"""The page's thread: its own event loop that listens, keeps bounds, and never uses the control loop.

The control loop must answer heartbeats in time whatever browsers do, so nothing of the page runs on it but one sample
of the state each second: TLS handshakes, JSON, slow and hostile readers are handled on this thread. The control loop
passes an immutable view and forgets it; when this thread falls behind, it misses views.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from aiohttp import web

from dips.core.errors import ConfigError
from dips.core.net.keys import CERT_FILE, KEY_FILE, reloaded, stamp_of
from dips.core.net.security import Identity, Security
from dips.master.page.bounds import MAX_CONNECTIONS, SILENT_S
from dips.master.page.web import PageApplication

HANDSHAKE_S = 10.0
START_S = 20.0
STOP_S = 5.0

_logger = logging.getLogger(__name__)

MakeSite = Callable[[int], PageApplication]
"""The bound port -> the application served there; called on the page's thread, in its event loop."""


class PageTls:
    """The server's side of TLS: the master's certificate, and a client's if it shows one. Renewed keys are used from
    the next connection on."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._stamp = stamp_of(identity.directory)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.verify_mode = ssl.CERT_OPTIONAL
        self._load()

    def look(self) -> None:
        """Loads renewed keys, if there are any."""
        stamp = stamp_of(self._identity.directory)
        if stamp != self._stamp:
            self._stamp, self._identity = stamp, reloaded(self._identity)
            self._load()

    def _load(self) -> None:
        directory = self._identity.directory
        self.context.load_cert_chain(directory / CERT_FILE, directory / KEY_FILE)
        self.context.load_verify_locations(cadata=self._identity.ca_pem.decode("ascii", "replace"))


@dataclass
class _Serving:
    """The objects of the serving thread."""

    site: PageApplication
    loop: asyncio.AbstractEventLoop
    ended: asyncio.Event


class PageServer:
    """Listens from start() to stop(). Both are called on the control thread and wait for the page's thread."""

    def __init__(self, host: str, port: int, last_port: int, security: Security, make_site: MakeSite) -> None:
        """port 0: last_port if it is free, else any."""
        self._host, self._wanted = host, [port] if port or not last_port else [last_port, 0]
        self._tls = PageTls(security) if isinstance(security, Identity) else None
        self._make_site = make_site
        self._thread = threading.Thread(target=self._run, name="dips-page", daemon=True)
        self._started: Future[int] = Future()
        self._serving: _Serving | None = None
        self._behind = threading.Event()

    def start(self) -> int:
        """Starts to listen; returns the port. Raises ConfigError when it is taken."""
        self._thread.start()
        return self._started.result(START_S)

    def give(self, take: Callable[[PageApplication], None]) -> None:
        """Passes a task on the site to the page's thread; dropped while the last task still waits."""
        serving = self._serving
        if serving is None or self._behind.is_set():
            return
        self._behind.set()
        with contextlib.suppress(RuntimeError):  # the thread has just ended
            serving.loop.call_soon_threadsafe(self._take, serving.site, take)

    def stop(self) -> None:
        """Tells open pages that the master has ended, and ends the thread. May be called twice."""
        serving, self._serving = self._serving, None
        if serving is not None:
            with contextlib.suppress(RuntimeError):
                serving.loop.call_soon_threadsafe(serving.ended.set)
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    # ---- on the page's thread ----

    def _take(self, site: PageApplication, take: Callable[[PageApplication], None]) -> None:
        try:
            site.gate.look()
            if self._tls is not None:
                self._tls.look()
            take(site)
        except Exception:
            _logger.exception("the status page could not be updated; the run continues without it")
        finally:
            self._behind.clear()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            if not self._started.done():
                self._started.set_exception(error)
                return
            _logger.exception("the status page has ended; the run continues without it")

    async def _serve(self) -> None:
        bound = _bound(self._host, self._wanted)
        try:
            port = int(bound.getsockname()[1])
            site = self._make_site(port)
            runner = web.AppRunner(site.application(), access_log=None, handle_signals=False, keepalive_timeout=30)
            await runner.setup()
        except BaseException:
            bound.close()
            raise
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        assert runner.server is not None, "set up"
        server = await loop.create_server(
            _bounded(runner.server, site),
            sock=bound,
            ssl=self._tls.context if self._tls else None,
            ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
        )
        self._serving = _Serving(site, loop, ended)
        self._started.set_result(port)
        await ended.wait()
        site.hub.end("the master has ended")
        server.close()
        await asyncio.sleep(0)  # streams send their last message
        await runner.shutdown()
        await runner.cleanup()


def _bound(host: str, ports: list[int]) -> socket.socket:
    """A listening socket on the first of these ports that is free. Raises ConfigError."""
    for port in ports:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            why = error.strerror or str(error)
    raise ConfigError(
        f"the status page cannot listen on {host}:{ports[-1]} ({why}): stop the process that holds the port, choose "
        "another one with --page-listen, or use port 0 to get a free one"
    )


def _bounded(server: web.Server, site: PageApplication) -> Callable[[], asyncio.Protocol]:
    """A factory for connections that limits their number and closes each one without a request in time."""

    def connected() -> asyncio.Protocol:
        if len(site.silent.union(server.connections)) >= MAX_CONNECTIONS:
            return _TurnedAway()
        protocol = server()
        site.silent.add(protocol)
        asyncio.get_running_loop().call_later(SILENT_S, _close_if_silent, protocol, site)
        return protocol

    return connected


def _close_if_silent(protocol: web.RequestHandler, site: PageApplication) -> None:
    if protocol in site.silent:
        site.silent.discard(protocol)
        protocol.force_close()


class _TurnedAway(asyncio.Protocol):
    """Closes a connection at once, because there are too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
