"""The master's gRPC server: its address, limits and three services, for clusters, operators and slaves.

All peers dial the master; the master dials no one. It must never serve an address that others can reach unless they
are authenticated (by mutual TLS and Access), never share its port with a second master, and never let those who are not
authenticated fill its memory.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from dips.core import messages
from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.net.addresses import format_address, parse_address
from dips.core.net.codec_protobuf import decode, encode
from dips.core.net.grpc_calls import abort, channel_options
from dips.core.net.keys import UsedKeys
from dips.core.net.newcomers import LOOK_S, Bounds, Connection, PortWatch, files_of_process, plain_host
from dips.core.net.security import Identity, Security, check_reach
from dips.core.observe.failpoints import copies, failpoint
from dips.core.observe.logs import ChangeLogger
from dips.master.access import LOOKING_METHODS, Access, check_is_own
from dips.master.shell import MasterShell, ReplyBody, SlaveLink
from dips.master.state.effects import BeatsEnded, ClusterCall, OperatorAction, OperatorCall, Pause, Resume, Stop

# ---- calls -----------------------------------------------------------------------------------------------------------
#
# Converts between gRPC's bytes and the shell's calls: decode, call, encode; a refusal ends the call with a reason.
#
# Handlers get raw bytes, so that invalid bytes become a MALFORMED refusal with a sentence, not gRPC's own error.
# Must never check more of a request than the name of its sender: the state does the rest.


T = TypeVar("T")

Context = grpc.aio.ServicerContext[bytes, bytes]
AskMachine = Callable[[T], Awaitable[object]]


def service(name: str, methods: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> grpc.GenericRpcHandler:
    """All methods of the service dips.v1.`name`, as one handler for a server."""
    return grpc.method_handlers_generic_handler(f"dips.v1.{name}", dict(methods))


def unary(shell: MasterShell, method: str, kind: type[T], ask: AskMachine[T]) -> grpc.RpcMethodHandler[Any, Any]:
    """A method with one request of `kind` and the reply that `ask` gives."""

    async def serve(data: bytes, context: Context) -> bytes:
        failpoint(f"master.rpc.before_{method}")
        try:
            answer = encode(await ask(understood(shell, method, data, kind)))
        except Refused as refused:
            await refuse(shell, method, context, refused)
        if failpoint(f"master.rpc.after_{method}"):
            await lose(context, method)
        return answer

    return grpc.unary_unary_rpc_method_handler(serve)


def lockstep(
    shell: MasterShell, method: str, kind: type[T], ask: AskMachine[T], ended: Callable[[T], None]
) -> grpc.RpcMethodHandler[Any, Any]:
    """A method with a stream of requests of `kind`, each answered before the next is read.

    `ended` is called at the end of each stream that had an answer, with the last request that was answered.
    """

    async def serve(requests: AsyncIterator[bytes], context: Context) -> None:
        last: T | None = None
        try:
            async for data in requests:
                failpoint(f"master.rpc.before_{method}")
                request = understood(shell, method, data, kind)
                answer = encode(await ask(request))
                last = request
                if failpoint(f"master.rpc.after_{method}"):
                    await lose(context, method)
                await context.write(answer)
        except Refused as refused:
            await refuse(shell, method, context, refused)
        finally:
            if last is not None:
                ended(last)

    return grpc.stream_stream_rpc_method_handler(serve)


async def refuse(shell: MasterShell, method: str, context: Context, refused: Refused) -> NoReturn:
    """Ends the call with a refusal, counted. Does not return."""
    shell.counts.refused(method, refused.code.name)
    await abort(context, refused)


async def lose(context: Context, method: str) -> NoReturn:
    """Ends the call as a broken connection does, at a failpoint with the action drop. Does not return."""
    await context.abort(grpc.StatusCode.UNAVAILABLE, f"a failpoint loses the answer of {method}")
    raise AssertionError("ServicerContext.abort returned")


def understood(shell: MasterShell, method: str, data: bytes, kind: type[T]) -> T:
    """Decodes a request; logs and raises the refusal if that fails or if it names another sender than the caller."""
    shell.counts.called(method)
    try:
        request = decode(data, kind)
        if isinstance(caller := getattr(request, "caller", None), messages.Caller):
            check_is_own(caller.name, method)
        return request
    except Refused as refused:
        shell.note_refusal(method, refused)
        raise


# ---- clusters --------------------------------------------------------------------------------------------------------
#
# The service Clusters: the calls of training clusters and readers. Every call and every beat is one event.


CALLS: Mapping[str, type[messages.ClusterRequest]] = {
    "Join": messages.JoinRequest,
    "BeginPush": messages.BeginPushRequest,
    "FinishPush": messages.FinishPushRequest,
    "AwaitVerdict": messages.AwaitVerdictRequest,
    "BeginPull": messages.BeginPullRequest,
    "FinishPull": messages.FinishPullRequest,
    "LeaseData": messages.LeaseDataRequest,
    "ReturnData": messages.ReturnDataRequest,
    "Leave": messages.LeaveRequest,
}
"""Methods with one request and one reply, by name."""


def clusters_service(shell: MasterShell) -> grpc.GenericRpcHandler:
    """The handler of dips.v1.Clusters."""

    async def ask(request: messages.ClusterRequest) -> ReplyBody:
        return await shell.call(lambda token: ClusterCall(token, request))

    # A cluster that dials again may open its next stream before the master knows that the previous one is over.
    newest: dict[str, messages.HeartbeatRequest] = {}

    async def beat(request: messages.HeartbeatRequest) -> ReplyBody:
        reply = await ask(request)
        newest[request.caller.name] = request
        return reply

    def ended(last: messages.HeartbeatRequest) -> None:
        name = last.caller.name
        if newest.get(name) is last:
            del newest[name]
            shell.dispatch(BeatsEnded(name, last.caller.incarnation))

    methods = {name: unary(shell, name, kind, ask) for name, kind in CALLS.items()}
    methods["Heartbeat"] = lockstep(shell, "Heartbeat", messages.HeartbeatRequest, beat, ended)
    return service("Clusters", methods)


# ---- operator --------------------------------------------------------------------------------------------------------
#
# The service Operator: the calls of a person or a script. Watch computes one status for each interval.


MIN_WATCH_S = 0.1
MAX_WATCH_S = 3600.0
"""Watch intervals outside these limits are refused: a shorter one is a busy loop, a longer one a forgotten stream."""


def operator_service(shell: MasterShell, access: Access) -> grpc.GenericRpcHandler:
    """The handler of dips.v1.Operator. access: has the counts of refused callers."""

    async def ask(action: OperatorAction) -> ReplyBody:
        reply = await shell.call(lambda token: OperatorCall(token, action))
        if isinstance(reply, messages.StatusReply):
            return replace(reply, refused_calls=access.refused.total(), refused_call=access.last_refused)
        return reply

    def asking(
        action: Callable[[messages.OperatorRequest], OperatorAction],
    ) -> Callable[[messages.OperatorRequest], Awaitable[ReplyBody]]:
        return lambda request: ask(action(request))

    async def watch(data: bytes, context: Context) -> None:
        try:
            request = understood(shell, "Watch", data, messages.WatchRequest)
            # The requested interval; 0, which an absent field reads as, means 1 s.
            interval_s = request.interval_s or 1.0
            if not math.isfinite(interval_s) or not MIN_WATCH_S <= interval_s <= MAX_WATCH_S:
                raise Refused(
                    RefusalCode.MALFORMED,
                    f"WatchRequest.interval_s is {interval_s}: ask for {MIN_WATCH_S} to {MAX_WATCH_S:.0f} seconds",
                )
            while True:
                failpoint("master.rpc.before_Watch")
                answer = encode(await ask(messages.StatusRequest(request.run_id)))
                if failpoint("master.rpc.after_Watch"):
                    await lose(context, "Watch")
                await context.write(answer)
                await asyncio.wait([shell.outcome], timeout=interval_s)
        except Refused as refused:
            await refuse(shell, "Watch", context, refused)

    methods = {
        "Status": unary(shell, "Status", messages.StatusRequest, ask),
        "Evict": unary(shell, "Evict", messages.EvictRequest, ask),
        "Drain": unary(shell, "Drain", messages.DrainRequest, ask),
        "Reshard": unary(shell, "Reshard", messages.ReshardRequest, ask),
        "Extend": unary(shell, "Extend", messages.ExtendRequest, ask),
        "Pause": unary(shell, "Pause", messages.OperatorRequest, asking(Pause)),
        "Resume": unary(shell, "Resume", messages.OperatorRequest, asking(Resume)),
        "Stop": unary(shell, "Stop", messages.OperatorRequest, asking(Stop)),
        "Watch": grpc.unary_stream_rpc_method_handler(watch),
    }
    return service("Operator", methods)


# ---- slaves ----------------------------------------------------------------------------------------------------------


_logger = logging.getLogger(__name__)

LAST_COMMANDS_S = 2.0
"""The time for a closing link to send the waiting commands; a slave that does not read gets fewer."""


def slaves_service(shell: MasterShell) -> grpc.GenericRpcHandler:
    """The handler of dips.v1.Slaves."""

    async def attach(said: AsyncIterator[bytes], context: Context) -> None:
        link = shell.open_link()
        receive = asyncio.create_task(_receive(shell, link, said), name=f"slave-link-{link.number}-up")
        command = asyncio.create_task(_command(link, context), name=f"slave-link-{link.number}-down")
        try:
            refused = await link.closed()
            await asyncio.wait([command], timeout=LAST_COMMANDS_S)
        finally:
            for task in (receive, command):
                task.cancel()
            try:
                ends = await asyncio.gather(receive, command, return_exceptions=True)
                for error in ends:
                    if isinstance(error, Exception):
                        kind = type(error).__name__
                        _logger.warning("the stream of slave link %d broke: %s: %s", link.number, kind, error)
            finally:
                shell.link_down(link)  # also when gRPC cancels this task meanwhile, as it does once the slave is gone
        if refused is not None:
            await refuse(shell, "Attach", context, refused)

    return service("Slaves", {"Attach": grpc.stream_stream_rpc_method_handler(attach)})


async def _receive(shell: MasterShell, link: SlaveLink, said: AsyncIterator[bytes]) -> None:
    """Passes on the slave's messages until it hangs up; closes the link after a message that cannot be decoded."""
    try:
        async for data in said:
            for _ in range(copies(failpoint("master.slave_stream.before_hear"))):
                shell.slave_said(link, understood(shell, "Attach", data, messages.SlaveMessage))
    except Refused as refused:
        link.close(refused)
    finally:
        link.close(None)


async def _command(link: SlaveLink, context: Context) -> None:
    """Sends the commands in their order until the link is closed and none is left."""
    try:
        while (command := await link.next_command()) is not None:
            for _ in range(copies(failpoint("master.slave_stream.before_send"))):
                await context.write(encode(command))
    finally:
        link.close(None)


# ---- authorisation ---------------------------------------------------------------------------------------------------
#
# Checks every call of the master's server with Access, and ends calls whose certificate is no longer valid.
#
# One wrapper around all handlers, so that no method can be forgotten. Must never decode a request.


CERTIFICATE_KEY = "x509_pem_cert"
"""The key under which gRPC gives the peer's certificate."""

Refusing = Callable[[str, Refused], None]
"""Called with the method's name and the refusal, for log and tape."""


Admitted = Callable[[str], None]
"""Called with the peer of each call that was admitted."""


def guarded(
    handler: grpc.RpcMethodHandler[Any, Any], path: str, access: Access, refusing: Refusing, admitted: Admitted
) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler, behind the check of its callers."""
    behaviour: Any
    if handler.unary_unary is not None:
        behaviour, make = handler.unary_unary, grpc.unary_unary_rpc_method_handler
    elif handler.unary_stream is not None:
        behaviour, make = handler.unary_stream, grpc.unary_stream_rpc_method_handler
    else:
        behaviour, make = handler.stream_stream, grpc.stream_stream_rpc_method_handler
    method = path.rpartition("/")[2]

    async def checked(request: Any, context: Context) -> Any:
        try:
            found = context.auth_context().get(CERTIFICATE_KEY)
            certificate = access.admit(path, next(iter(found), None) if found else None)
        except Refused as refused:
            refusing(method, refused)
            await abort(context, refused)
        admitted(context.peer())
        if "Operator" in path and method not in LOOKING_METHODS:
            _logger.info("%s is asked for by %s", method, certificate)
        with access.serving(certificate) as call:
            work = asyncio.ensure_future(behaviour(request, context))
            try:
                await asyncio.wait([work, call.ended], return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    refusing(method, call.ended.result())
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            if work.cancelled():
                await abort(context, call.ended.result())
            return work.result()

    return make(checked)


# ---- connections -----------------------------------------------------------------------------------------------------
#
# Bounds what strangers can make gRPC keep: it accepts by itself, and takes 70 KB for a connection before its handshake.


NEWCOMERS, NEWCOMERS_OF_ADDRESS = 256, 64
"""Connections that have made no admitted call, in all and from one address, in addition to twice the peers: all of them
may come back at once, behind one router."""

BETWEEN_LOOKS = 512
"""Further newcomers, for what gRPC accepts until the next look closes it."""

CONNECTIONS_FOR_EACH_PEER, SPARE_CONNECTIONS = 4, 64
"""Connections that have made a call: a process's own, and those of its tools; readers and operators."""

HANDSHAKE_S = 10.0
"""A connection without a complete handshake by then is closed (gRPC's own default is two minutes), and so is one that
has made no call and sends none. A handshake with keys over a far and slow link takes a few round trips and 10 KB: 2 s
at 100 kbit/s and 300 ms."""

SENDING_S = 120.0
"""gRPC passes a call on when its whole request has come: a layout of 2.4 MB over 1 Mbit/s takes 19 s."""

REPORT_S = 30.0

NO_FILES = (
    "/proc/self/fd cannot be read: connections that make no call are bounded in all, but not for each address; let "
    "only the run's own machines reach the master's port"
)


def newcomer_bounds(peers: int) -> Bounds:
    return Bounds(NEWCOMERS + 2 * peers, NEWCOMERS_OF_ADDRESS + 2 * peers, HANDSHAKE_S, sending_s=SENDING_S)


def most_connections(peers: int) -> int:
    """gRPC closes what comes above; docs/capacity.md has the memory."""
    return newcomer_bounds(peers).most + BETWEEN_LOOKS + CONNECTIONS_FOR_EACH_PEER * peers + SPARE_CONNECTIONS


class CallerWatch:
    """A thread that closes connections which make no call, when there are too many or they take too long."""

    def __init__(self, port: int, peers: int) -> None:
        self._watch = PortWatch(port, newcomer_bounds(peers))
        self._came: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._callers: set[tuple[str, int] | None] = set()
        """Who has made a call since the last look."""
        self._n_closed, self._reported_s = 0, -REPORT_S
        self._changes = ChangeLogger(_logger)
        self.crashed: Callable[[Exception], object] = lambda error: None
        """Called with the error that ended the thread."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dips-newcomers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def admitted(self, peer: str) -> None:
        """This peer, as gRPC writes it, has made a call; from any thread."""
        self._came.put(peer)

    def look(self) -> None:
        """Called by the thread, each LOOK_S."""
        # Before the files: every caller that is known by now is among them, or has gone.
        while not self._came.empty():
            # Host and port of "ipv4:127.0.0.1:1" or "ipv6:%5B::1%5D:1"; None where gRPC writes something else.
            host, _, port = urllib.parse.unquote(self._came.get().partition(":")[2]).rpartition(":")
            self._callers.add((plain_host(host.strip("[]")), int(port)) if port.isdecimal() else None)
        files = files_of_process()
        if files is None:
            self._changes.report("files", NO_FILES, logging.WARNING)
            return
        self._n_closed += self._watch.look(files, self._has_called, time.monotonic())
        self._callers.clear()
        if self._n_closed and time.monotonic() - self._reported_s >= REPORT_S:
            _logger.warning(
                "%d connections that had made no call were closed: there were more than this port may have of them, or "
                "they took %g s (docs/security.md, Strangers); let only the run's own machines reach it",
                self._n_closed,
                HANDSHAKE_S,
            )
            self._n_closed, self._reported_s = 0, time.monotonic()

    def _has_called(self, connection: Connection) -> bool:
        return (connection.host, connection.port) in self._callers

    def _run(self) -> None:
        try:
            while not self._stopped.wait(LOOK_S):
                self.look()
        except Exception as error:
            self.crashed(error)


# ---- server ----------------------------------------------------------------------------------------------------------


STOP_GRACE_S = 0.5
"""The time for open calls to end once their answers are given; heartbeat streams are cut."""

LAST_STEPS = 16
"""Steps of the loop that gRPC's tasks get to end after the server has stopped. It needs a few."""

CALLS_FOR_EACH_PEER = 64
SPARE_CALLS = 1024
"""A peer has one stream and one or two calls open. Above 64 for each and 1024 for readers, gRPC refuses calls,
so that a faulty client costs 100 KB of memory for each of a few thousand calls and no more."""


class _Current(grpc.GenericRpcHandler):
    """The services of the shell that is served now; none until the first."""

    def __init__(self, access: Access) -> None:
        self.services: Sequence[grpc.GenericRpcHandler] = ()
        self.refusing: Refusing = lambda method, refused: None
        self.admitted: Admitted = lambda peer: None
        self._access = access

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        for service in self.services:
            handler = service.service(handler_call_details)
            if handler is not None:
                if not self._access.checks:
                    return handler
                return guarded(handler, handler_call_details.method, self._access, self.refusing, self.admitted)
        return None


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """The server's side of mutual TLS; a renewed key or list of authorities is used from the next connection on."""
    keys, lock = UsedKeys(identity), threading.Lock()

    def changed() -> Any:
        """Called by gRPC on its own thread before each handshake: a new configuration, or None for no change."""
        with lock:
            renewed = keys.news()
            return None if renewed is None else _configuration(renewed)

    return grpc.dynamic_ssl_server_credentials(_configuration(identity), changed, require_client_authentication=True)


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key_pem, identity.cert_pem)], identity.ca_pem)


class MasterServer:
    """A bound server; start() makes it answer, for one shell after the other on the same port."""

    def __init__(self, max_message_bytes: int, peers: int, security: Security, access: Access) -> None:
        """`max_message_bytes` bounds every message, `peers` is the most clusters and slaves to expect."""
        self._security = security
        self._current = _Current(access)
        self._access = access
        self._peers = peers
        self._watch: CallerWatch | None = None
        self._started = False
        options = [*channel_options(max_message_bytes), ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000))]
        if access.checks:  # else only this machine's processes come here, and no handshake tells them apart
            options.append(("grpc.max_allowed_incoming_connections", most_connections(peers)))
        self._server = grpc.aio.server(
            options=options,
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
        if self._access.checks:
            self._watch = CallerWatch(port, self._peers)
            self._current.admitted = self._watch.admitted
        return format_address(host, port)

    def _add_port(self, address: str) -> int:
        if isinstance(self._security, Identity):
            return self._server.add_secure_port(address, server_credentials(self._security))
        return self._server.add_insecure_port(address)

    async def start(self, shell: MasterShell, *further: grpc.GenericRpcHandler) -> None:
        """Starts to answer calls, or passes new calls to another shell from now on; with further services."""
        self._current.refusing = shell.turned_away
        if self._watch is not None:
            loop = asyncio.get_running_loop()
            self._watch.crashed = lambda error: loop.call_soon_threadsafe(shell.fail, error)
        operators = operator_service(shell, self._access)
        self._current.services = (clusters_service(shell), slaves_service(shell), operators, *further)
        if not self._started:
            self._started = True
            self._server.add_generic_rpc_handlers((self._current,))
            await self._server.start()
            if self._watch is not None:
                self._watch.start()

    async def stop(self) -> None:
        """Sends the given answers, then cuts the open calls. Also frees a port that was only bound. May be called
        twice."""
        if self._watch is not None and self._started:
            self._watch.stop()
        await self._server.stop(STOP_GRACE_S)
        # gRPC's own tasks end a few steps of the loop after their calls. One that the loop's end cancels in
        # between is reported by gRPC as an error, with a stack trace.
        for _ in range(LAST_STEPS):
            await asyncio.sleep(0)
