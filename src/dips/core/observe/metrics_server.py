"""Serves one process's metrics to Prometheus, on threads of its own: prometheus_client's server, with limits and TLS.

A scrape must never touch a role's state from these threads: its collector takes a snapshot that the owner of the state
has made (LoopSnapshots, or one that was left for it). Plain HTTP is for loopback; beyond it the peer must show a
certificate of this run. A client that is slow, or many of them, cost a bounded number of threads for a bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar
from wsgiref.simple_server import WSGIRequestHandler
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from dips.core.errors import ConfigError, of_disk
from dips.core.files import closed, make_folder
from dips.core.net.addresses import dialable, format_address, is_loopback, parse_address
from dips.core.net.keys import CERT_FILE, KEY_FILE, REVOKED_FILE, UsedKeys, parse_certificate, read_revoked
from dips.core.net.newcomers import Bounds, Newcomers, origin_of
from dips.core.net.security import Identity, ProcessKnobs, Security, check_reach

# ---- metrics tls -----------------------------------------------------------------------------------------------------
#
# TLS of the metrics server: the process's own keys on this side, a certificate of the same run on the other.


_logger = logging.getLogger("dips.metrics")


class MetricsTls:
    """Mutual TLS with the role's own keys: whoever shows a certificate of this run's authorities may read.

    Renewed keys and a changed list of revoked certificates count from the next connection on.
    """

    def __init__(self, identity: Identity, revoked: Path | None) -> None:
        """Raises ConfigError for a certificate that may not serve, as those of slaves and clusters once were made."""
        file = identity.directory / CERT_FILE
        certificate = parse_certificate(identity.cert_pem, str(file))
        if not certificate.serves:
            raise ConfigError(
                f"{file} is for clients only, and metrics beyond loopback need one that serves: renew it (`dips keys "
                f"renew KEYS {certificate.name}`), or give metrics_listen a loopback address"
            )
        self._keys = UsedKeys(identity)
        self._revoked = revoked or identity.directory / REVOKED_FILE
        self._lock = threading.Lock()
        self._context = server_context(identity, ssl.CERT_REQUIRED)

    def wrapped(self, connection: socket.socket) -> ssl.SSLSocket:
        """The connection, before its handshake."""
        with self._lock:
            renewed = self._keys.news()
            try:
                self._context = self._context if renewed is None else server_context(renewed, ssl.CERT_REQUIRED)
            except (OSError, ConfigError) as error:
                _logger.warning("the renewed keys cannot serve metrics, the old ones stay: %s", error)
            return self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def shake_hands(self, connection: ssl.SSLSocket) -> None:
        """Raises OSError or ConfigError unless the peer has a certificate of this run that still holds."""
        connection.do_handshake()
        der = connection.getpeercert(binary_form=True)
        peer = parse_certificate(der or b"", "the scraper's certificate")
        if self._revoked.exists() and peer.serial in read_revoked(self._revoked):
            raise ConfigError(f"the certificate of {peer} was revoked")


def server_context(identity: Identity, verify: ssl.VerifyMode) -> ssl.SSLContext:
    """TLS of a server with these keys. verify: what it asks of its clients."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = verify
    context.load_verify_locations(cadata=identity.ca_pem.decode("ascii", "replace"))
    context.load_cert_chain(identity.directory / CERT_FILE, identity.directory / KEY_FILE)
    return context


# ---- metrics server --------------------------------------------------------------------------------------------------


PATH = "/metrics"

MOST_CONNECTIONS, MOST_OF_ADDRESS = 16, 8
"""At the same time, in all and, beyond loopback, from one address; further ones are closed, or take the place of one
that is a few seconds old. Prometheus has one open for each server that scrapes, for milliseconds."""

CONNECTION_S = 20.0
"""A connection is over after this, however slowly its client speaks."""

STOP_LOOK_S = 0.1
"""How soon stop() is noticed."""

SNAPSHOT_S = 2.0
"""How long a scrape waits for the owner of the state. A loop that needs longer is stuck, and that must show."""

T = TypeVar("T")


class NotNow(Exception):
    """The values cannot be had at the moment; the scrape is answered with the sentence and 503."""


class LoopSnapshots(Generic[T]):
    """Snapshots of what an event loop owns, made on that loop for a scrape on another thread.

    Asked for and not left ready, since there may be no scrape for hours; with a deadline, since a loop can be stuck.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, make: Callable[[], T], deadline_s: float = SNAPSHOT_S
    ) -> None:  # fmt: skip
        self._loop = loop
        self._make = make
        self._deadline_s = deadline_s

    def take(self) -> T:
        """From any thread but the loop's own. Raises NotNow, or what making the snapshot raised."""
        future: Future[T] = Future()
        try:
            self._loop.call_soon_threadsafe(self._answer, future)
        except RuntimeError as error:  # the loop is closed
            raise NotNow("this process is ending") from error
        try:
            return future.result(self._deadline_s)
        except TimeoutError as error:
            future.cancel()
            raise NotNow(f"this process's event loop did not answer for {self._deadline_s:g} s") from error

    def _answer(self, future: Future[T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self._make())
        except Exception as error:  # the scrape's business; the loop goes on
            future.set_exception(error)


class MetricsServer:
    """An HTTP server for metrics, bound when it is made, serving from start() to stop(). Also a context manager."""

    def __init__(
        self, listen: str, collect: Callable[[], Iterable[Metric]], security: Security, revoked: Path | None = None
    ) -> None:
        """collect: called on a thread of this server at each scrape. revoked: else revoked.json next to the keys.

        Raises ConfigError for an address that cannot be bound, or is not loopback without keys, or keys that cannot
        serve.
        """
        host, port = parse_address(listen, "metrics_listen")
        check_reach(listen, "metrics_listen", security)
        tls = None
        if isinstance(security, Identity) and not is_loopback(host):
            tls = MetricsTls(security, revoked)
        made = _Server6 if ":" in host else _Server
        try:
            server = made((host, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"metrics cannot be served at {format_address(host, port)} (metrics_listen): {why}; stop the process "
                "that holds the port, choose another one, or use port 0 to get a free one"
            ) from error
        server.tls = tls
        self._server = server
        self._server.set_app(_app(collect))
        self.tls = tls is not None
        self.address = format_address(host, self._server.server_port)
        """With the port that was bound."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(STOP_LOOK_S,), name="dips-metrics", daemon=True
        )
        self._file: Path | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop serving, and release the address. May be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None

    def announce(self, file: Path | None, role: str, name: str, run: str) -> None:
        """Log the address, and write it into a file in the form of Prometheus' file_sd_configs.

        Raises ConfigError for a file that cannot be written.
        """
        scheme = "https" if self.tls else "http"
        _logger.info("metrics are served at %s://%s%s", scheme, self.address, PATH)
        if file is not None:
            # instance: by itself Prometheus takes the address, whose port is another one after each start: the series
            # would begin again, and an alarm that counts restarts or rollbacks would never see two of them in one.
            labels = {"role": role, "name": name, "run": run, "instance": f"{run}/{name}"}
            # In place: nothing is lost where a process dies in between, since the next start writes it again, and
            # Prometheus reads a file again that it found half written.
            try:
                make_folder(file.parent)
                with open(file, "w", encoding="utf-8", opener=closed) as stream:
                    stream.write(json.dumps([{"targets": [dialable(self.address)], "labels": labels}]) + "\n")
            except OSError as error:
                why = f"{file} (metrics_file) cannot be written: {error.strerror}"
                raise of_disk(error, f"{why}; give a path that this process may write") from error
            self._file = file


def serve_metrics(
    knobs: ProcessKnobs,
    security: Security,
    collect: Callable[[], Iterable[Metric]],
    *,
    role: str,
    name: str,
    run: str,
    file: Path | None = None,
    revoked: Path | None = None,
) -> MetricsServer | None:
    """Start a server as the settings say; None when they ask for none. file: used where no metrics_file is set.

    Raises ConfigError as MetricsServer does.
    """
    if knobs.metrics_listen is None:
        return None
    server = MetricsServer(knobs.metrics_listen, collect, security, revoked)
    try:
        server.announce(knobs.metrics_file or file, role, name, run)
    except BaseException:
        server.stop()
        raise
    server.start()
    return server


@contextlib.contextmanager
def served(server: MetricsServer | None) -> Iterator[None]:
    """Stop the server, if there is one, when the block is left."""
    try:
        yield
    finally:
        if server is not None:
            server.stop()


# ---- answers ----


class _Collected(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def _app(collect: Callable[[], Iterable[Metric]]) -> WSGIApplication:
    """prometheus_client's application over these families and the process's own; other paths are not there."""
    registry = CollectorRegistry(support_collectors_without_names=True)
    registry.register(_Collected(collect))
    ProcessCollector(registry=registry)
    metrics: WSGIApplication = make_wsgi_app(registry)

    def app(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        def start_response(status: str, headers: list[tuple[str, str]], *error: Any) -> Any:
            return start(status, [*headers, ("Server", "dips")], *error)  # else wsgiref names its version and Python's

        if environ.get("PATH_INFO") != PATH:
            return _say(start_response, "404 Not Found", f"metrics are at {PATH}")
        try:
            return metrics(environ, start_response)
        except NotNow as error:
            return _say(start_response, "503 Service Unavailable", str(error))
        except Exception as error:
            _logger.exception("the metrics could not be read")
            return _say(start_response, "500 Internal Server Error", f"a bug: {type(error).__name__}: {error}")

    return app


def _say(start_response: StartResponse, status: str, sentence: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{sentence}\n".encode()]


# ---- the socket ----


class _Server(ThreadingWSGIServer):
    """One thread for each connection, up to MOST_CONNECTIONS, and each no longer than CONNECTION_S."""

    request_queue_size = 128
    tls: MetricsTls | None = None

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        of_one = MOST_CONNECTIONS if is_loopback(address[0]) else MOST_OF_ADDRESS
        self._open = Newcomers[socket.socket](Bounds(MOST_CONNECTIONS, of_one, CONNECTION_S))
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # http.server's would ask the network for this machine's name
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.tls is not None:
            request = self.tls.wrapped(request)  # which alone has the connection from now on
        with self._lock:
            closed: Any = self._open.came(request, origin_of(client_address[0]), time.monotonic())
        if closed is request:
            self.shutdown_request(request)
            return
        if closed is not None:
            _cut(closed)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.settled(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(CONNECTION_S)
        cut = threading.Timer(CONNECTION_S, _cut, [request])
        cut.daemon = True
        cut.start()
        try:
            if self.tls is not None:
                self.tls.shake_hands(request)
            super().finish_request(request, client_address)
        finally:
            cut.cancel()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _logger.debug("a scrape from %s failed: %s", client_address, sys.exc_info()[1])


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        _logger.debug(format, *args)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
