"""Calls the master: blocking gRPC stubs on a small pool of threads, "dips-control".

Every call has a deadline, and its outcome is an event for the session. Decides nothing, retries nothing, and never
touches the data flow or a parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc

from dips.core import messages
from dips.core.errors import RefusalCode, Refused, RetryLater
from dips.core.messages import ClusterReply, ClusterRequest
from dips.core.net.codec_protobuf import from_message, to_message
from dips.core.net.grpc_channel import open_channel
from dips.core.net.grpc_refusal import is_unreachable, refused_from
from dips.core.net.keys import UsedKeys
from dips.core.net.security import Security
from dips.core.net.tls_probe import why_not_let_in
from dips.core.observe.failpoints import failpoint
from dips.protos import clusters_pb2_grpc
from dips.worker.state.effects import CallMaster
from dips.worker.state.events import CallDone, CallFailed, CallRefused, Event

_logger = logging.getLogger("dips.worker.control")

N_THREADS = 3
"""Threads: one for each lane of the session (the exchange, leases, and small calls)."""

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message. A Join carries the layout: about 60 bytes for each parameter, so this allows a million of them."""

_METHODS: Mapping[type[Any], tuple[str, type[Any]]] = {
    messages.JoinRequest: ("Join", messages.JoinReply),
    messages.BeginPushRequest: ("BeginPush", messages.BeginPushReply),
    messages.FinishPushRequest: ("FinishPush", messages.FinishPushReply),
    messages.AwaitVerdictRequest: ("AwaitVerdict", messages.AwaitVerdictReply),
    messages.BeginPullRequest: ("BeginPull", messages.BeginPullReply),
    messages.FinishPullRequest: ("FinishPull", messages.FinishPullReply),
    messages.LeaseDataRequest: ("LeaseData", messages.LeaseDataReply),
    messages.ReturnDataRequest: ("ReturnData", messages.ReturnDataReply),
    messages.LeaveRequest: ("Leave", messages.LeaveReply),
}


def channel_to(master: str, security: Security) -> grpc.Channel:
    """A channel to the master; connects when first used. Raises ConfigError for an address that cannot be dialled."""
    return open_channel(master, security, MAX_MESSAGE_BYTES)


class MasterStubs:
    """Typed blocking calls over one channel."""

    def __init__(self, channel: grpc.Channel, explain: Callable[[], str] = lambda: "") -> None:
        """explain: called when the master cannot be reached; returns why it may not admit this process, or ""."""
        self._stub: Any = clusters_pb2_grpc.ClustersStub(channel)
        self._explain = explain

    def call(self, request: ClusterRequest, deadline_s: float) -> ClusterReply:
        """Call and wait. Raises Refused, or RetryLater when no answer came in time."""
        method, kind = _METHODS[type(request)]
        try:
            failpoint(f"worker.rpc.before_{method}")
            answer = getattr(self._stub, method)(to_message(request), timeout=deadline_s)
            if failpoint(f"worker.rpc.after_{method}"):
                raise RetryLater(f"a failpoint loses the answer to {method}")
        except grpc.RpcError as error:
            raise self._meaning(error) from error
        except OSError as error:
            raise RetryLater(f"{method} failed: {error.strerror or error}") from error
        reply: ClusterReply = from_message(answer, kind)
        return reply

    def _meaning(self, error: grpc.RpcError) -> Refused | RetryLater:
        """The error for a failed call. Wrong keys can be replaced while this process runs, so it waits for that."""
        why = self._explain() if is_unreachable(error) else ""
        return RetryLater(why) if why else refused_from(error)


class MasterClient:
    """Runs the session's Call effects; `deliver` is called on a pool thread with each outcome."""

    def __init__(self, master: str, security: Security, deliver: Callable[[Event], None]) -> None:
        """Raises ConfigError for an address that cannot be dialled."""
        self._master = master
        self._security = security
        self._channels: list[grpc.Channel] = []
        self._used = UsedKeys(security)
        self._stubs = self._connected()
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(N_THREADS, "dips-control")
        self._closed = False

    def start(self, call: CallMaster) -> None:
        if self._used.renewed:
            self._stubs = self._connected()
        used = self._used
        future = self._pool.submit(self._stubs.call, call.request, call.deadline_s)
        future.add_done_callback(lambda done: self._ended(call, done, used))

    def close(self) -> None:
        """Cancel the calls and end the threads."""
        self._closed = True
        for channel in self._channels:
            channel.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _connected(self) -> MasterStubs:
        """Stubs over a new connection with the present keys; calls on earlier connections go on to their end."""
        self._used = UsedKeys(self._security)
        self._channels.append(channel_to(self._master, self._security))
        return MasterStubs(self._channels[-1], partial(why_not_let_in, self._master, self._security))

    def _ended(self, call: CallMaster, done: Future[ClusterReply], used: UsedKeys) -> None:
        if self._closed or done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._deliver(CallDone(call.call_id, done.result()))
        elif isinstance(error, Refused) and not (error.code is RefusalCode.IDENTITY and used.renewed):
            self._deliver(CallRefused(call.call_id, error))
        else:
            _logger.debug("call %s: %s", type(call.request).__name__, error)
            self._deliver(CallFailed(call.call_id, str(error) or type(error).__name__))
