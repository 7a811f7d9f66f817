"""The control flow to the master: blocking gRPC stubs on a small pool of threads, "dips-control".

Every call has a deadline, and its outcome is an event for the session. Decides nothing, retries nothing, and never
touches the data flow or a parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc

from dips.core import messages
from dips.core.codec_protobuf import from_message, to_message
from dips.core.errors import Refused, RetryLater
from dips.core.failpoints import failpoint
from dips.core.grpc_refusal import channel_options, refused_from
from dips.core.messages import ClusterReply, ClusterRequest
from dips.core.net import format_address, parse_address, require_loopback
from dips.protos import clusters_pb2_grpc
from dips.worker.state.effects import Call
from dips.worker.state.events import CallDone, CallFailed, CallRefused, Event

_logger = logging.getLogger("dips.worker.control")

N_THREADS = 3
"""One for each lane of the session: the exchange, leases, and small calls."""

MAX_MESSAGE_BYTES = 64 << 20
"""A Join carries the layout: about 60 bytes for each parameter, so this allows a million of them."""

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


def open_channel(master: str) -> grpc.Channel:
    """A channel to the master; connects when first used. Raises ConfigError for an address that is not loopback."""
    require_loopback(master, "the master's address")
    return grpc.insecure_channel(
        format_address(*parse_address(master, "master")), options=channel_options(MAX_MESSAGE_BYTES)
    )


class MasterStubs:
    """Typed blocking calls over one channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub: Any = clusters_pb2_grpc.ClustersStub(channel)

    def call(self, request: ClusterRequest, deadline_s: float) -> ClusterReply:
        """Ask and wait. Raises Refused, or RetryLater when nobody answered in time."""
        method, kind = _METHODS[type(request)]
        try:
            failpoint(f"worker.rpc.before_{method}")
            answer = getattr(self._stub, method)(to_message(request), timeout=deadline_s)
            if failpoint(f"worker.rpc.after_{method}"):
                raise RetryLater(f"a failpoint loses the answer to {method}")
        except grpc.RpcError as error:
            raise refused_from(error) from error
        except OSError as error:
            raise RetryLater(f"{method} failed: {error.strerror or error}") from error
        reply: ClusterReply = from_message(answer, kind)
        return reply


class MasterClient:
    """Runs the session's Call effects; `deliver` is called on a pool thread with each outcome."""

    def __init__(self, master: str, deliver: Callable[[Event], None]) -> None:
        """Raises ConfigError for an address that is not loopback."""
        self._channel = open_channel(master)
        self._stubs = MasterStubs(self._channel)
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(N_THREADS, "dips-control")
        self._closed = False

    def start(self, call: Call) -> None:
        future = self._pool.submit(self._stubs.call, call.request, call.deadline_s)
        future.add_done_callback(lambda done: self._ended(call, done))

    def close(self) -> None:
        """Cut calls short and end the threads."""
        self._closed = True
        self._channel.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _ended(self, call: Call, done: Future[ClusterReply]) -> None:
        if self._closed or done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._deliver(CallDone(call.call_id, done.result()))
        elif isinstance(error, Refused):
            self._deliver(CallRefused(call.call_id, error))
        else:
            _logger.debug("call %s: %s", type(call.request).__name__, error)
            self._deliver(CallFailed(call.call_id, str(error) or type(error).__name__))
