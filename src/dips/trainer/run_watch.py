"""Asks the master for its run's status: one blocking call with a deadline."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import grpc

from dips.core.errors import RetryLater
from dips.core.messages import StatusReply, StatusRequest
from dips.core.net.codec_protobuf import from_message, to_message
from dips.core.net.grpc_refusal import refused_from
from dips.core.net.security import Security
from dips.core.observe.failpoints import failpoint
from dips.protos import operator_pb2_grpc
from dips.worker.control import channel_to


class RunWatch:
    """A channel to the master of one run ("": any run that it serves)."""

    def __init__(self, master: str, run_id: str, deadline_s: float, security: Security) -> None:
        """Raises ConfigError for an address that cannot be used."""
        self._channel = channel_to(master, security)
        self._stub: Any = operator_pb2_grpc.OperatorStub(self._channel)
        self._run_id = run_id
        self._deadline_s = deadline_s

    def status(self) -> StatusReply:
        """The run's status. Raises Refused, or RetryLater when no answer comes in time."""
        try:
            failpoint("worker.status.before_call")
            answer = self._stub.Status(to_message(StatusRequest(self._run_id)), timeout=self._deadline_s)
            if failpoint("worker.status.after_call"):
                raise RetryLater("a failpoint loses the answer to Status")
        except grpc.RpcError as error:
            raise refused_from(error) from error
        except OSError as error:
            raise RetryLater(f"the request for the status failed: {error}") from error
        return from_message(answer, StatusReply)

    def __enter__(self) -> RunWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
