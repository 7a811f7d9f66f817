"""The three gRPC services of the master: for clusters, for operators, and for slaves, each of which has one stream."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from dips.core import messages
from dips.core.errors import RefusalCode, Refused
from dips.core.messages import (
    Caller,
    ClusterRequest,
    DrainRequest,
    EvictRequest,
    ExtendRequest,
    OperatorRequest,
    ReshardRequest,
    SlaveMessage,
    StatusReply,
    StatusRequest,
    WatchRequest,
)
from dips.core.net.codec_protobuf import decode, encode
from dips.core.net.grpc_calls import abort
from dips.core.observe.failpoints import copies, failpoint
from dips.master.access import Access, check_is_own
from dips.master.shell import MasterShell, ReplyBody, SlaveLink
from dips.master.state.events import BeatsEnded, ClusterCall, OperatorAction, OperatorCall, Pause, Resume, Stop

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
        if isinstance(caller := getattr(request, "caller", None), Caller):
            check_is_own(caller.name, method)
        return request
    except Refused as refused:
        shell.note_refusal(method, refused)
        raise


# ---- clusters --------------------------------------------------------------------------------------------------------
#
# The service Clusters: the calls of training clusters and readers. Every call and every beat is one event.


CALLS: Mapping[str, type[ClusterRequest]] = {
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

    async def ask(request: ClusterRequest) -> ReplyBody:
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
        if isinstance(reply, StatusReply):
            return replace(reply, refused_calls=access.refused.total(), refused_call=access.last_refused)
        return reply

    def asking(
        action: Callable[[OperatorRequest], OperatorAction],
    ) -> Callable[[OperatorRequest], Awaitable[ReplyBody]]:
        return lambda request: ask(action(request))

    async def watch(data: bytes, context: Context) -> None:
        try:
            request = understood(shell, "Watch", data, WatchRequest)
            # The requested interval; 0, which an absent field reads as, means 1 s.
            interval_s = request.interval_s or 1.0
            if not math.isfinite(interval_s) or not MIN_WATCH_S <= interval_s <= MAX_WATCH_S:
                raise Refused(
                    RefusalCode.MALFORMED,
                    f"WatchRequest.interval_s is {interval_s}: ask for {MIN_WATCH_S} to {MAX_WATCH_S:.0f} seconds",
                )
            while True:
                failpoint("master.rpc.before_Watch")
                answer = encode(await ask(StatusRequest(request.run_id)))
                if failpoint("master.rpc.after_Watch"):
                    await lose(context, "Watch")
                await context.write(answer)
                await asyncio.wait([shell.outcome], timeout=interval_s)
        except Refused as refused:
            await refuse(shell, "Watch", context, refused)

    methods = {
        "Status": unary(shell, "Status", StatusRequest, ask),
        "Evict": unary(shell, "Evict", EvictRequest, ask),
        "Drain": unary(shell, "Drain", DrainRequest, ask),
        "Reshard": unary(shell, "Reshard", ReshardRequest, ask),
        "Extend": unary(shell, "Extend", ExtendRequest, ask),
        "Pause": unary(shell, "Pause", OperatorRequest, asking(Pause)),
        "Resume": unary(shell, "Resume", OperatorRequest, asking(Resume)),
        "Stop": unary(shell, "Stop", OperatorRequest, asking(Stop)),
        "Watch": grpc.unary_stream_rpc_method_handler(watch),
    }
    return service("Operator", methods)


# ---- slaves ----------------------------------------------------------------------------------------------------------


_logger = logging.getLogger(__name__)

LAST_COMMANDS_S = 2.0
"""The time for a closing link to send the waiting commands; a slave that does not read gets fewer."""


def slaves_service(shell: MasterShell) -> grpc.GenericRpcHandler:
    """The handler of dips.v1.Slaves."""

    async def attach(messages: AsyncIterator[bytes], context: Context) -> None:
        link = shell.open_link()
        receive = asyncio.create_task(_receive(shell, link, messages), name=f"slave-link-{link.number}-up")
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


async def _receive(shell: MasterShell, link: SlaveLink, messages: AsyncIterator[bytes]) -> None:
    """Passes on the slave's messages until it hangs up; closes the link after a message that cannot be decoded."""
    try:
        async for data in messages:
            for _ in range(copies(failpoint("master.slave_stream.before_hear"))):
                shell.slave_said(link, understood(shell, "Attach", data, SlaveMessage))
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
