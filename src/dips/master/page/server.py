"""The page's thread: its own event loop that listens, answers requests, keeps bounds, and never uses the control loop.

The control loop must answer heartbeats in time whatever browsers do, so nothing of the page runs on it but one sample
of the state each second: TLS handshakes, JSON, slow and hostile readers are handled on this thread. The control loop
passes an immutable view and forgets it; when this thread falls behind, it misses views.

Every path but /healthz and the page's own files needs an authorised viewer (access.py). No answer has content of a
request, no other site may read or frame it, and nothing is changed unless that is enabled.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import os
import re
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING

from aiohttp import web

from dips.core.clock import Clock
from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.messages import OperatorReply, OperatorRequest
from dips.core.net.addresses import dialable, format_address, parse_address
from dips.core.net.keys import UsedKeys
from dips.core.net.newcomers import Bounds, Newcomers, origin_of
from dips.core.net.security import Identity, Security, check_reach
from dips.core.observe.logs import ChangeLogger
from dips.core.observe.metrics_server import server_context
from dips.master.access import Access
from dips.master.config import MasterConfig
from dips.master.directory import TAPE_NAME, remove_file
from dips.master.page.access import (
    ADDRESS_NAME,
    LINK_PARAMETER,
    PageAccess,
    Secret,
    Visitor,
    load_secret,
    save_secret,
    write_page_address,
)
from dips.master.page.history import (
    MAX_CONNECTIONS,
    MAX_NEWCOMERS,
    MAX_NEWCOMERS_OF_ADDRESS,
    MAX_STREAMS,
    SAMPLE_S,
    SILENT_S,
    TAPE_TAIL_BYTES,
    WAIT_S,
    WRITE_S,
    TapeEvent,
    TapeTail,
    cut,
)
from dips.master.page.snapshot import Hub
from dips.master.shell import MasterShell
from dips.master.state.effects import OperatorCall, Pause, Resume
from dips.master.state.status import RunView, look

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware


# ---- files -----------------------------------------------------------------------------------------------------------
#
# The page's own files, read once from the package: no requested path can lead to any other file.


_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    "LICENSE": "text/plain; charset=utf-8",
}


@dataclass(frozen=True)
class StaticFile:
    """A file of the page."""

    body: bytes
    content_type: str
    tag: str  # changes with the content, so that a browser can check its copy with a short request


def static_files(folder: Traversable | None = None, prefix: str = "") -> Mapping[str, StaticFile]:
    """Path below /static/ -> file, for all files in a folder; without one in the package's folder static."""
    found: dict[str, StaticFile] = {}
    for entry in (folder or files("dips.master.page") / "static").iterdir():
        if entry.is_dir():
            found.update(static_files(entry, f"{prefix}{entry.name}/"))
            continue
        kind = next((kind for end, kind in _TYPES.items() if entry.name.endswith(end)), None)
        if kind is not None:
            body = entry.read_bytes()
            tag = hashlib.sha256(body).hexdigest()[:32]
            found[f"{prefix}{entry.name}"] = StaticFile(body, kind, tag)
    return found


# ---- steering --------------------------------------------------------------------------------------------------------
#
# Carries out the requests of the status page, if the master's settings allow them: pause and resume rounds.
#
# Nothing else: requests that remove something from a run (evict, drain, stop, reshard) need an operator's keys at the
# service Operator. A request comes from the page's thread and is carried out on the control loop, like any operator's.


MAX_REASON = 200
"""Characters."""

CALL_S = 10.0


class Steering:
    """Passes requests from the page's thread to the shell that it shows."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._following: tuple[MasterShell, asyncio.AbstractEventLoop] | None = None

    def follow(self, shell: MasterShell) -> None:
        """Sends requests to this shell from now on, on the loop that calls this."""
        self._following = shell, asyncio.get_running_loop()

    async def ask(self, action: object, reason: object) -> str:
        """Makes a request, on the page's thread; returns the master's answer. Raises Refused or TimeoutError."""
        if action not in ("pause", "resume"):
            raise Refused(RefusalCode.MALFORMED, "the status page can only ask to pause and to resume")
        asked_for = OperatorRequest(self._run_id, cut(reason, MAX_REASON) if isinstance(reason, str) else "")
        request = Pause(asked_for) if action == "pause" else Resume(asked_for)
        following = self._following
        if following is None:
            raise Refused(RefusalCode.BUSY, "the master begins: ask again", retry_after_s=1.0)
        shell, loop = following

        async def carried_out() -> str:
            reply = await shell.call(lambda token: OperatorCall(token, request))
            assert isinstance(reply, OperatorReply), "pause and resume are answered with a sentence"
            return reply.sentence

        asked = asyncio.run_coroutine_threadsafe(carried_out(), loop)
        return await asyncio.wait_for(asyncio.wrap_future(asked), CALL_S)


# ---- web -------------------------------------------------------------------------------------------------------------


HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Server": "dips",  # aiohttp would name its version and Python's
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}

RETRY_MS = 1500
"""The time after which a browser connects again when its stream was cut."""

COOKIE_S = 30 * 24 * 3600
"""How long a browser keeps the token."""

OPEN_PATHS = frozenset({"/healthz"})
"""Paths that are answered to everyone, with every host name: they reveal only that a server is here."""


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_logger = logging.getLogger(__name__)


@dataclass
class PageApplication:
    """The web application of one master. Runs on the page's thread."""

    hub: Hub
    gate: PageAccess
    files: Mapping[str, StaticFile]
    steering: Steering | None = None

    def __post_init__(self) -> None:
        self._streams = 0
        self._changes = ChangeLogger(_logger)
        self.hub.steers = self.steering is not None
        self.on_viewer: Callable[[web.RequestHandler], None] = lambda protocol: None
        """Called with the connection of each request that an authorised viewer makes."""
        # The policy for a page with scripts in its text: exactly these are allowed, by their hashes.
        scripts = re.findall(rb"<script>(.*?)</script>", self.files["index.html"].body, re.DOTALL)
        hashes = "".join(
            f" 'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'" for script in scripts
        )
        self._index_policy = HEADERS["Content-Security-Policy"].replace(
            "script-src 'self'", f"script-src 'self'{hashes}"
        )

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guarded], client_max_size=1024)
        app.router.add_get("/", self._index)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/events", self._events, allow_head=False)
        app.router.add_get("/snapshot.json", self._snapshot)
        app.router.add_get("/favicon.ico", self._icon)
        if self.steering is not None:
            app.router.add_post("/steer", self._steer)
        app.router.add_get("/static/{path:[A-Za-z0-9._/-]+}", self._static)
        return app

    # ---- before every handler ----

    @property
    def _guarded(self) -> Middleware:
        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                response = await self._answered(request, handler)
            except web.HTTPException as error:  # raised by aiohttp: no such path, no such method
                response = web.Response(status=error.status, text=f"{error.status} {error.reason}\n")
            if not response.prepared:
                _add_headers(response)
            return response

        return guarded

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN_PATHS:
            return await handler(request)
        if not self.gate.host_is_ours(request.headers.get("Host")):
            return web.Response(
                status=421,
                text="421: this page is not served under that name; use its address, or name it with page_hosts\n",
            )
        if request.path.startswith("/static/") or request.path == "/favicon.ico":
            return await handler(request)
        try:
            admitted = self._admitted(request)
        except Refused as refused:
            self._changes.report("page", f"the status page was not shown: {refused.sentence}")
            if request.path != "/":
                return web.Response(
                    status=401, text="401: open the page with its link, or show an operator's certificate\n"
                )
            return _sent(self.files["locked.html"], status=401)
        self.on_viewer(request.protocol)
        if admitted.by_link:
            # Moves the token into a cookie that no script can read and no other site can send.
            response = web.Response(status=303, headers={"Location": "/"})
            response.set_cookie(
                self.gate.cookie,
                self.gate.token,
                max_age=COOKIE_S,
                path="/",
                secure=True,
                httponly=True,
                samesite="Strict",
            )
            return response
        return await handler(request)

    def _admitted(self, request: web.Request) -> Visitor:
        link = request.query.get(LINK_PARAMETER) if request.path == "/" else None
        # The client's certificate, which TLS has verified; None when it showed none.
        tls = request.get_extra_info("ssl_object")
        shown = tls.getpeercert(binary_form=True) if tls is not None else None
        return self.gate.admit(bytes(shown) if shown else None, link, request.cookies)

    # ---- handlers ----

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _index(self, request: web.Request) -> web.Response:
        response = _sent(self.files["index.html"])
        response.headers["Content-Security-Policy"] = self._index_policy
        return response

    async def _icon(self, request: web.Request) -> web.Response:
        return _sent(self.files["icon.svg"])

    async def _static(self, request: web.Request) -> web.Response:
        found = self.files.get(request.match_info["path"])
        if found is None:
            raise web.HTTPNotFound
        if request.headers.get("If-None-Match") == f'"{found.tag}"':
            return web.Response(status=304, headers={"ETag": f'"{found.tag}"', "Cache-Control": "no-cache"})
        return _sent(found)

    async def _snapshot(self, request: web.Request) -> web.Response:
        if not self.hub.number:
            return web.Response(status=503, text="503: the master has not looked at the run yet\n")
        return web.Response(text=self.hub.full(), content_type="application/json")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: `run` for each sample, `waiting` while there is none, `ended` once."""
        if self._streams >= MAX_STREAMS:
            return web.Response(status=503, text=f"503: {MAX_STREAMS} pages are open already; close one\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        _add_headers(response)
        self._streams += 1
        try:
            await response.prepare(request)
            await response.write(f"retry: {RETRY_MS}\n\n".encode())
            await self._follow(request, response)
        except (ConnectionError, TimeoutError):
            # The viewer has gone or no longer reads: a browser connects again by itself. Without this, aiohttp would
            # wait, without a limit, until the rest was read.
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._streams -= 1
        return response

    async def _steer(self, request: web.Request) -> web.Response:
        """Handles a request of the page's own script; no form and no script of another site can send one."""
        origin = f"{'https' if self.gate.checks else 'http'}://{request.headers.get('Host', '')}"
        if request.headers.get("Origin") != origin or request.content_type != "application/json":
            return web.Response(status=403, text="403: only the page itself asks for this\n")
        assert self.steering is not None, "the path is there only with it"
        try:
            sent = json.loads(await request.text())
            asked = sent if isinstance(sent, dict) else {}
            sentence = await self.steering.ask(asked.get("action"), asked.get("reason"))
        except (ValueError, RecursionError):
            return web.Response(status=400, text="400: this is not JSON\n")
        except Refused as refused:
            return web.json_response({"sentence": refused.sentence}, status=409)
        except TimeoutError:
            return web.json_response({"sentence": "the master does not answer: try again later"}, status=504)
        who = self._admitted(request).who
        _logger.warning("%s was asked for on the status page by %s: %s", asked.get("action"), who, sentence)
        return web.json_response({"sentence": sentence})

    async def _follow(self, request: web.Request, response: web.StreamResponse) -> None:
        number = 0
        while True:
            try:
                async with asyncio.timeout(WAIT_S):
                    await self.hub.after(number)
            except TimeoutError:
                await _write(response, "waiting", "for the master")
            if self.hub.number > number:
                message, number = self.hub.message_after(number), self.hub.number
                await _write(response, "run", message)
            if self.hub.ended:
                await _write(response, "ended", self.hub.ended)
                return
            try:
                self._admitted(request)  # the certificate may have been revoked since
            except Refused:
                return


async def _write(response: web.StreamResponse, kind: str, data: str) -> None:
    """Writes one event; the data has no line breaks. Raises TimeoutError when the reader takes nothing."""
    async with asyncio.timeout(WRITE_S):
        await response.write(f"event: {kind}\ndata: {data}\n\n".encode())


def _sent(file: StaticFile, status: int = 200) -> web.Response:
    headers = {"Content-Type": file.content_type, "ETag": f'"{file.tag}"', "Cache-Control": "no-cache"}
    return web.Response(status=status, body=file.body, headers=headers)


def _add_headers(response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


HANDSHAKE_S = 10.0
ACCEPT_AGAIN_S = 0.1
START_S = 20.0
STOP_S = 5.0

MakeSite = Callable[[int], PageApplication]
"""The bound port -> the application served there; called on the page's thread, in its event loop."""


class PageTls:
    """The server's side of TLS: the master's certificate, and a client's if it shows one. Renewed keys are used from
    the next connection on."""

    def __init__(self, identity: Identity) -> None:
        self._keys = UsedKeys(identity)
        self.context = server_context(identity, ssl.CERT_OPTIONAL)

    def look(self) -> None:
        """Loads renewed keys, if there are any."""
        if (renewed := self._keys.news()) is not None:
            self.context = server_context(renewed, ssl.CERT_OPTIONAL)


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

    def give(self, view: RunView, wall_s: float) -> None:
        """Passes a sample of the run to the page's thread; dropped while the last one still waits."""
        serving = self._serving
        if serving is None or self._behind.is_set():
            return
        self._behind.set()
        with contextlib.suppress(RuntimeError):  # the thread has just ended
            serving.loop.call_soon_threadsafe(self._take, serving.site, view, wall_s)

    def stop(self) -> None:
        """Tells open pages that the master has ended, and ends the thread. May be called twice."""
        serving, self._serving = self._serving, None
        if serving is not None:
            with contextlib.suppress(RuntimeError):
                serving.loop.call_soon_threadsafe(serving.ended.set)
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    # ---- on the page's thread ----

    def _take(self, site: PageApplication, view: RunView, wall_s: float) -> None:
        try:
            site.gate.look()
            if self._tls is not None:
                self._tls.look()
            site.hub.take(view, wall_s)
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
        remove_file(self._config.directory / ADDRESS_NAME)

    async def follow(self, shell: MasterShell) -> None:
        """Takes samples of this shell's state until cancelled."""
        self._steering.follow(shell)
        while True:
            view = look(shell.machine.shared, self._clock.monotonic_s())
            self._server.give(view, self._clock.wall_s())
            await asyncio.sleep(SAMPLE_S)

    def _site(self, port: int) -> PageApplication:
        """Makes the application, on the page's thread."""
        config = self._config
        heldout = TapeTail(config.page_heldout) if config.page_heldout is not None else None
        hub = Hub(self._events, heldout, TapeTail(config.directory / TAPE_NAME, TAPE_TAIL_BYTES).events())
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
