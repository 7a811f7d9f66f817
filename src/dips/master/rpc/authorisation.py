"""Checks every call of the master's server with Access, and ends calls whose certificate is no longer valid.

One wrapper around all handlers, so that no method can be forgotten. Must never decode a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from dips.core.errors import Refused
from dips.core.net.grpc_refusal import abort
from dips.master.access import LOOKING_METHODS, Access
from dips.master.rpc.calls import Context

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
