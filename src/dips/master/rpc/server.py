"""The master's gRPC server: its address, limits and services.

All peers dial the master; the master dials no one. It must never serve an address that others can reach unless they
are authenticated (by mutual TLS and Access), and never share its port with a second master.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from dips.core.errors import ConfigError, Refused
from dips.core.net.addresses import format_address, parse_address
from dips.core.net.grpc_calls import abort, channel_options
from dips.core.net.keys import reloaded, stamp_of
from dips.core.net.security import Identity, Security, check_reach
from dips.master.access import LOOKING_METHODS, Access
from dips.master.rpc.services import Context, clusters_service, operator_service, slaves_service
from dips.master.shell import MasterShell

# ---- authorisation ---------------------------------------------------------------------------------------------------
#
# Checks every call of the master's server with Access, and ends calls whose certificate is no longer valid.
#
# One wrapper around all handlers, so that no method can be forgotten. Must never decode a request.


CERTIFICATE_KEY = "x509_pem_cert"
"""The key under which gRPC gives the peer's certificate."""

_logger = logging.getLogger(__name__)

Behaviour = Callable[[Any, Any], Awaitable[Any]]
"""An asynchronous method; gRPC's annotations contain only synchronous ones."""
Refusing = Callable[[str, Refused], None]
"""Called with the method's name and the refusal, for log and tape."""


def guarded(
    handler: grpc.RpcMethodHandler[Any, Any], path: str, access: Access, refusing: Refusing
) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler, behind the check of its callers."""
    behaviour: Any
    if handler.unary_unary is not None:
        behaviour, make = handler.unary_unary, grpc.unary_unary_rpc_method_handler
    elif handler.unary_stream is not None:
        behaviour, make = handler.unary_stream, grpc.unary_stream_rpc_method_handler
    else:
        behaviour, make = handler.stream_stream, grpc.stream_stream_rpc_method_handler
    return make(_before(behaviour, path, access, refusing))


def _before(behaviour: Behaviour, path: str, access: Access, refusing: Refusing) -> Any:
    method = path.rpartition("/")[2]

    async def serve(request: Any, context: Context) -> Any:
        try:
            certificate = access.admit(path, _certificate_of(context))
        except Refused as refused:
            refusing(method, refused)
            await abort(context, refused)
        if "Operator" in path and method not in LOOKING_METHODS:
            _logger.info("%s is asked for by %s", method, certificate)
        with access.serving(certificate) as call:
            work = asyncio.ensure_future(behaviour(request, context))
            try:
                await asyncio.wait([work, call.ended], return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    refusing(method, call.ended.result())
            finally:
                await _ended(work)
            if work.cancelled():
                await abort(context, call.ended.result())
            return work.result()

    return serve


async def _ended(work: asyncio.Future[Any]) -> None:
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


def _certificate_of(context: Context) -> bytes | None:
    found = context.auth_context().get(CERTIFICATE_KEY)
    return next(iter(found), None) if found else None


# ---- server ----------------------------------------------------------------------------------------------------------


STOP_GRACE_S = 0.5
"""The time for open calls to end once their answers are given; heartbeat streams are cut."""

LAST_STEPS = 16
"""Steps of the loop that gRPC's tasks get to end after the server has stopped. It needs a few."""

HANDSHAKE_MS = 10_000
"""A connection without a complete handshake by then is closed (gRPC's own default is two minutes). A handshake with
keys over a far and slow link takes a few round trips and 10 KB: 2 s at 100 kbit/s and 300 ms."""

CALLS_FOR_EACH_PEER = 64
SPARE_CALLS = 1024
"""A peer has one stream and one or two calls open. Above 64 for each and 1024 for readers, gRPC refuses calls,
so that a faulty client costs 100 KB of memory for each of a few thousand calls and no more."""


class _Current(grpc.GenericRpcHandler):
    """The services of the shell that is served now; none until the first."""

    def __init__(self, access: Access) -> None:
        self.services: Sequence[grpc.GenericRpcHandler] = ()
        self.refusing: Refusing = lambda method, refused: None
        self._access = access

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        for service in self.services:
            handler = service.service(handler_call_details)
            if handler is not None:
                if not self._access.checks:
                    return handler
                return guarded(handler, handler_call_details.method, self._access, self.refusing)
        return None


class _Certificates:
    """The server's side of mutual TLS; a renewed key or list of authorities is used from the next connection on."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._stamp = stamp_of(identity.directory)
        self._lock = threading.Lock()

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._identity), self._changed, require_client_authentication=True
        )

    def _changed(self) -> Any:
        """Called by gRPC on its own thread before each handshake: a new configuration, or None for no change."""
        with self._lock:
            stamp = stamp_of(self._identity.directory)
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            self._identity = reloaded(self._identity)
            return _configuration(self._identity)


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key_pem, identity.cert_pem)], identity.ca_pem)


class MasterServer:
    """A bound server; start() makes it answer, for one shell after the other on the same port."""

    def __init__(self, max_message_bytes: int, peers: int, security: Security, access: Access) -> None:
        """`max_message_bytes` bounds every message, `peers` is the most clusters and slaves to expect."""
        self._security = security
        self._current = _Current(access)
        self._access = access
        self._started = False
        self._server = grpc.aio.server(
            options=[*channel_options(max_message_bytes), ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS)],
            maximum_concurrent_rpcs=CALLS_FOR_EACH_PEER * peers + SPARE_CALLS,
        )

    def bind(self, address: str) -> str:
        """Binds the port of `address` ("host:port", port 0: any that is free) and returns the address with it.

        Raises ConfigError when its port is taken, or it is not on loopback and there are no keys.
        """
        check_reach(address, "the master's listen address", self._security)
        host, asked_port = parse_address(address, "the master's listen address")
        try:
            port = self._add_port(format_address(host, asked_port))
        except RuntimeError:
            port = 0
        if port == 0:
            raise ConfigError(
                f"the master cannot listen on {address}: port {asked_port} is in use; stop the process that "
                "holds it, choose another port with --listen, or use port 0 to get a free one"
            )
        return format_address(host, port)

    def _add_port(self, address: str) -> int:
        if isinstance(self._security, Identity):
            return self._server.add_secure_port(address, _Certificates(self._security).credentials())
        return self._server.add_insecure_port(address)

    async def start(self, shell: MasterShell) -> None:
        """Starts to answer calls, or passes new calls to another shell from now on."""
        self._current.refusing = shell.turned_away
        operators = operator_service(shell, self._access)
        self._current.services = (clusters_service(shell), slaves_service(shell), operators)
        if not self._started:
            self._started = True
            self._server.add_generic_rpc_handlers((self._current,))
            await self._server.start()

    async def stop(self) -> None:
        """Sends the given answers, then cuts the open calls. Also frees a port that was only bound."""
        await self._server.stop(STOP_GRACE_S)
        # gRPC's own tasks end a few steps of the loop after their calls. One that the loop's end cancels in
        # between is reported by gRPC as an error, with a stack trace.
        for _ in range(LAST_STEPS):
            await asyncio.sleep(0)
