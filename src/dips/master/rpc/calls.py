"""Converts between gRPC's bytes and the shell's calls: decode, call, encode; a refusal ends the call with a reason.

Handlers get raw bytes, so that invalid bytes become a MALFORMED refusal with a sentence, not gRPC's own error.
Must never check more of a request than the name of its sender: the state does the rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from dips.core.errors import Refused
from dips.core.messages import Caller
from dips.core.net.codec_protobuf import decode, encode
from dips.core.net.grpc_calls import abort
from dips.core.observe.failpoints import failpoint
from dips.master.access import check_is_own
from dips.master.shell import MasterShell

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
