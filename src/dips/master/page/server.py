"""The page's thread: its own event loop that listens, keeps bounds, and never uses the control loop.

The control loop must answer heartbeats in time whatever browsers do, so nothing of the page runs on it but one sample
of the state each second: TLS handshakes, JSON, slow and hostile readers are handled on this thread. The control loop
passes an immutable view and forgets it; when this thread falls behind, it misses views.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from aiohttp import web

from dips.core.clock import Clock
from dips.core.errors import ConfigError
from dips.core.net.addresses import dialable, format_address, parse_address
from dips.core.net.keys import CERT_FILE, KEY_FILE, reloaded, stamp_of
from dips.core.net.newcomers import Bounds, Newcomers, origin_of
from dips.core.net.security import Identity, Security, check_reach
from dips.master.access import Access
from dips.master.config import MasterConfig
from dips.master.directory import TAPE_NAME
from dips.master.page.access import (
    LINK_PARAMETER,
    PageAccess,
    Secret,
    load_secret,
    remove_page_address,
    save_secret,
    write_page_address,
)
from dips.master.page.history import (
    MAX_CONNECTIONS,
    MAX_NEWCOMERS,
    MAX_NEWCOMERS_OF_ADDRESS,
    SAMPLE_S,
    SILENT_S,
    HeldoutTail,
    TapeEvent,
    earlier_events,
)
from dips.master.page.snapshot import Hub
from dips.master.page.web import PageApplication, Steering, static_files
from dips.master.shell import MasterShell
from dips.master.state.status import RunView

HANDSHAKE_S = 10.0
ACCEPT_AGAIN_S = 0.1
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
        acceptor = _Acceptor(bound, runner.server, self._tls)
        site.on_viewer = acceptor.viewed
        accepting = asyncio.create_task(acceptor.run())
        self._serving = _Serving(site, loop, ended)
        self._started.set_result(port)
        await ended.wait()
        site.hub.end("the master has ended")
        accepting.cancel()
        bound.close()
        acceptor.end()
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


class _Acceptor:
    """Accepts connections, so that the bounds of the page hold before TLS begins."""

    def __init__(self, listener: socket.socket, server: web.Server, tls: PageTls | None) -> None:
        self._listener, self._server, self._tls = listener, server, tls
        self._newcomers = Newcomers[web.RequestHandler](Bounds(MAX_NEWCOMERS, MAX_NEWCOMERS_OF_ADDRESS, SILENT_S))
        self._handshakes: dict[web.RequestHandler, asyncio.Task[None]] = {}
        """Of each connection whose handshake is under way."""

    def viewed(self, protocol: web.RequestHandler) -> None:
        """An authorised viewer has made a request on this connection."""
        self._newcomers.settled(protocol)

    async def run(self) -> None:
        """Accepts until cancelled."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._look()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:  # no file is left, or the peer has gone
                _logger.debug("a connection to the status page could not be accepted: %s", error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            self._take(connection, address[0])

    def end(self) -> None:
        """Ends the handshakes that are under way."""
        for handshake in self._handshakes.values():
            handshake.cancel()

    def _take(self, connection: socket.socket, host: str) -> None:
        self._forget_ended()
        protocol = self._server()
        closed = self._newcomers.came(protocol, origin_of(host), time.monotonic())
        if closed is not None:
            self._close(closed)
        if closed is protocol or len(self._handshakes) + len(self._server.connections) >= MAX_CONNECTIONS:
            self._newcomers.settled(protocol)
            connection.close()
            return
        handshake = self._handshakes[protocol] = asyncio.create_task(self._shake_hands(connection, protocol))
        handshake.add_done_callback(lambda ended: self._ended(protocol, connection, ended))

    def _ended(self, protocol: web.RequestHandler, connection: socket.socket, handshake: asyncio.Task[None]) -> None:
        del self._handshakes[protocol]
        if handshake.cancelled():
            connection.close()  # one that was cancelled before it began would leave it open

    async def _shake_hands(self, connection: socket.socket, protocol: web.RequestHandler) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._tls.context if self._tls else None,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
            )
        except OSError as error:  # also what TLS raises
            _logger.debug("a handshake with the status page failed: %s", error)

    def _look(self) -> None:
        """Closes those whose time is over; calls itself again."""
        for protocol in self._newcomers.late(time.monotonic()):
            self._close(protocol)
        asyncio.get_running_loop().call_later(SAMPLE_S, self._look)

    def _close(self, protocol: web.RequestHandler) -> None:
        """At once: an orderly end of TLS waits up to 30 s for the peer."""
        if protocol in self._handshakes:
            self._handshakes[protocol].cancel()
        if protocol.transport is not None:
            protocol.transport.abort()

    def _forget_ended(self) -> None:
        if len(self._newcomers) >= MAX_NEWCOMERS_OF_ADDRESS:
            there = {*self._handshakes, *self._server.connections}
            for protocol in [protocol for protocol in self._newcomers if protocol not in there]:
                self._newcomers.settled(protocol)


# ---- page ------------------------------------------------------------------------------------------------------------
#
# The status page of one master: opened before the first epoch, updated in each, closed at the end.


@runtime_checkable
class Looked(Protocol):
    """A state machine that gives a view of the run between two events."""

    def look(self) -> RunView: ...


class Page:
    """The status page. Use it on the control loop's thread."""

    def __init__(
        self, config: MasterConfig, listen: str, security: Security, events: deque[TapeEvent], clock: Clock
    ) -> None:
        """Listens at once. events: as in Hub. Raises ConfigError for an address that is taken, or that others can reach
        although there are no keys, and for a token that others can read."""
        check_reach(listen, "the status page's address", security)
        self._config, self._security, self._events, self._clock = config, security, events, clock
        self._steering = Steering(config.run_id)
        self._secret = load_secret(config.directory)
        self._host, port = parse_address(listen, "the status page's address")
        self._server = PageServer(self._host, port, self._secret.port, security, self._site)
        port = self._server.start()
        self.url = self._write(port)

    def close(self) -> None:
        """Tells open pages that the master has ended. May be called twice."""
        self._server.stop()
        remove_page_address(self._config.directory)

    async def follow(self, shell: MasterShell) -> None:
        """Takes samples of this shell's state until cancelled."""
        machine = shell.machine
        assert isinstance(machine, Looked), "the state machine of a run has look()"
        self._steering.follow(shell)
        while True:
            self._look(machine)
            await asyncio.sleep(SAMPLE_S)

    def _look(self, machine: Looked) -> None:
        view, wall_s = machine.look(), self._clock.wall_s()
        lag_s = max(0.0, self._clock.monotonic_s() - view.as_of_s)
        self._server.give(lambda site: site.hub.take(view, wall_s, lag_s))

    def _site(self, port: int) -> PageApplication:
        """Makes the application, on the page's thread."""
        config = self._config
        hub = Hub(self._events, HeldoutTail(config.page_heldout), earlier_events(config.directory / TAPE_NAME))
        names = {self._host, socket.gethostname(), *config.page_hosts}
        hosts = names if isinstance(self._security, Identity) else {*config.page_hosts}
        gate = PageAccess(Access(self._security, config.revoked), self._secret.token, port, hosts)
        return PageApplication(hub, gate, static_files(), self._steering if config.page_steer else None)

    def _write(self, port: int) -> str:
        """Writes the link to a file that only this user can read; returns it."""
        address = dialable(format_address(self._host, port))
        keyed = isinstance(self._security, Identity)
        directory = self._config.directory
        secret = Secret(self._secret.token, port)
        if secret != load_secret(directory):
            save_secret(directory, secret)
        url = f"https://{address}/?{LINK_PARAMETER}={self._secret.token}" if keyed else f"http://{address}/"
        write_page_address(directory, url, os.getpid())
        who = f"for operators, by certificate or by the link in {directory}/page.json" if keyed else "for this machine"
        _logger.info("the status page is at %s://%s, %s", "https" if keyed else "http", address, who)
        return url
