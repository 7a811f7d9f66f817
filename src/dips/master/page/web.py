"""Answers the page's HTTP requests: paths, authorisation and headers.

Every path but /healthz and the page's own files needs an authorised viewer (access.py). It must never answer with
content of a request, never let another site read or frame it, and change nothing unless that is enabled.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING

from aiohttp import web

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import OperatorReply, OperatorRequest
from dips.core.observe.logs import ChangeLogger
from dips.master.page.access import LINK_PARAMETER, PageAccess, Visitor
from dips.master.page.history import MAX_STREAMS, WAIT_S, WRITE_S, cut
from dips.master.page.snapshot import Hub
from dips.master.shell import MasterShell
from dips.master.state.effects import OperatorAction, OperatorCall, Pause, Resume

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


def static_files() -> Mapping[str, StaticFile]:
    """Path below /static/ -> file, for all files in the package's folder static."""
    return dict(_walk(files("dips.master.page") / "static", ""))


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, StaticFile]]:
    found: list[tuple[str, StaticFile]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _walk(entry, f"{prefix}{entry.name}/")
            continue
        kind = next((kind for end, kind in _TYPES.items() if entry.name.endswith(end)), None)
        if kind is not None:
            body = entry.read_bytes()
            tag = hashlib.sha256(body).hexdigest()[:32]
            found.append((f"{prefix}{entry.name}", StaticFile(body, kind, tag)))
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


@dataclass(frozen=True)
class _Following:
    shell: MasterShell
    loop: asyncio.AbstractEventLoop


class Steering:
    """Passes requests from the page's thread to the shell that it shows."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._following: _Following | None = None

    def follow(self, shell: MasterShell) -> None:
        """Sends requests to this shell from now on, on the loop that calls this."""
        self._following = _Following(shell, asyncio.get_running_loop())

    async def ask(self, action: object, reason: object) -> str:
        """Makes a request, on the page's thread; returns the master's answer. Raises Refused or TimeoutError."""
        request = self._request(action, reason)
        following = self._following
        if following is None:
            raise Refused(RefusalCode.BUSY, "the master begins: ask again", retry_after_s=1.0)
        asked = asyncio.run_coroutine_threadsafe(_carried_out(following.shell, request), following.loop)
        return await asyncio.wait_for(asyncio.wrap_future(asked), CALL_S)

    def _request(self, action: object, reason: object) -> OperatorAction:
        request = OperatorRequest(self._run_id, cut(reason, MAX_REASON) if isinstance(reason, str) else "")
        match action:
            case "pause":
                return Pause(request)
            case "resume":
                return Resume(request)
        raise Refused(RefusalCode.MALFORMED, "the status page can only ask to pause and to resume")


async def _carried_out(shell: MasterShell, request: OperatorAction) -> str:
    reply = await shell.call(lambda token: OperatorCall(token, request))
    assert isinstance(reply, OperatorReply), "pause and resume are answered with a sentence"
    return reply.sentence


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
