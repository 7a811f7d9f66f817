"""The service Clusters: the calls of training clusters and readers. Every call and every beat is one event."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from dips.core import messages
from dips.core.messages import ClusterRequest
from dips.master.rpc.calls import lockstep, service, unary
from dips.master.shell import MasterShell, ReplyBody
from dips.master.state.events import BeatsEnded, ClusterCall

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
