"""The service Operator: the calls of a person or a script. Watch computes one status for each interval."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import (
    DrainRequest,
    EvictRequest,
    ExtendRequest,
    OperatorRequest,
    ReshardRequest,
    StatusReply,
    StatusRequest,
    WatchRequest,
)
from dips.core.net.codec_protobuf import encode
from dips.core.observe.failpoints import failpoint
from dips.master.access import Access
from dips.master.rpc.calls import Context, lose, refuse, service, unary, understood
from dips.master.shell import MasterShell, ReplyBody
from dips.master.state.events import OperatorAction, OperatorCall, Pause, Resume, Stop

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
            interval_s = _interval_s(request)
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


def _interval_s(request: WatchRequest) -> float:
    """The requested interval; 0, which an absent field reads as, means 1 s."""
    interval_s = request.interval_s or 1.0
    if not math.isfinite(interval_s) or not MIN_WATCH_S <= interval_s <= MAX_WATCH_S:
        raise Refused(
            RefusalCode.MALFORMED,
            f"WatchRequest.interval_s is {interval_s}: ask for {MIN_WATCH_S} to {MAX_WATCH_S:.0f} seconds",
        )
    return interval_s
