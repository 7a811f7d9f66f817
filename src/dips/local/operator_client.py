"""Asks the master for its status and sends an operator's requests: the Operator service as plain calls.

Blocking, each call with a deadline. It must never retry by itself: the caller decides whether to wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from dips.core.errors import ConfigError, RefusalCode, Refused, RetryLater
from dips.core.messages import (
    DrainRequest,
    EvictRequest,
    ExtendRequest,
    OperatorReply,
    OperatorRequest,
    ReshardRequest,
    StatusReply,
    StatusRequest,
)
from dips.core.net import codec_protobuf
from dips.core.net.addresses import parse_address
from dips.core.net.grpc_calls import open_channel, refused_from
from dips.core.net.security import Security
from dips.core.net.tls_probe import why_not_let_in
from dips.master.directory import read_address
from dips.protos import operator_pb2_grpc

CALL_S = 5.0

T = TypeVar("T")


class OperatorClient:
    """A connection to one master. Every call raises Refused, or RetryLater when the master cannot be reached."""

    def __init__(self, address: str, run_id: str = "", call_s: float = CALL_S, *, security: Security) -> None:
        """Raises ConfigError for an address that cannot be dialled."""
        self.address = address
        self._run_id = run_id
        self._security = security
        self._call_s = call_s
        self._channel = open_channel(address, security)
        self._stub = operator_pb2_grpc.OperatorStub(self._channel)

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def status(self) -> StatusReply:
        return self._call(self._stub.Status, StatusRequest(self._run_id), StatusReply)

    def pause(self, reason: str) -> str:
        """The master's sentence about what it did; so for the other requests."""
        return self._operate(self._stub.Pause, OperatorRequest(self._run_id, reason))

    def resume(self, reason: str) -> str:
        return self._operate(self._stub.Resume, OperatorRequest(self._run_id, reason))

    def stop(self, reason: str) -> str:
        return self._operate(self._stub.Stop, OperatorRequest(self._run_id, reason))

    def evict(self, cluster_id: str, reason: str) -> str:
        return self._operate(self._stub.Evict, EvictRequest(self._run_id, cluster_id, reason))

    def drain(self, cluster_id: str, reason: str) -> str:
        return self._operate(self._stub.Drain, DrainRequest(self._run_id, cluster_id, reason))

    def reshard(self, add: Sequence[str], remove: Sequence[str], reason: str) -> str:
        return self._operate(self._stub.Reshard, ReshardRequest(self._run_id, tuple(add), tuple(remove), False, reason))

    def take_back_reshard(self) -> str:
        return self._operate(self._stub.Reshard, ReshardRequest(self._run_id, cancel=True))

    def extend(self, tk_max_tokens: int, no_limit: bool, reason: str) -> str:
        """tk_max_tokens 0: the limit stays."""
        return self._operate(self._stub.Extend, ExtendRequest(self._run_id, tk_max_tokens, no_limit, reason))

    def _operate(self, method: Callable[..., Message], request: object) -> str:
        return self._call(method, request, OperatorReply).sentence

    def _call(self, method: Callable[..., Message], request: object, kind: type[T]) -> T:
        try:
            reply = method(codec_protobuf.to_message(request), timeout=self._call_s)
        except grpc.RpcError as error:
            refused = refused_from(error)
            if isinstance(refused, Refused):
                raise refused from error
            # gRPC does not say why a handshake failed; a probe of our own does.
            if words := why_not_let_in(self.address, self._security):
                raise Refused(RefusalCode.IDENTITY, words) from error
            why = f"the master at {self.address} does not answer: start it, or check the address ({refused})"
            raise RetryLater(why, refused.retry_after_s) from error
        return codec_protobuf.from_message(reply, kind)


@dataclass(frozen=True)
class NamedRun:
    """A run as a person names it: by its directory, or by its master's address. One of the two is None."""

    directory: Path | None
    address: str | None

    @classmethod
    def of(cls, text: str | None) -> NamedRun:
        """RUN of a command line, else DIPS_MASTER. Raises ConfigError where it is neither, or nothing is given."""
        text = text or os.environ.get("DIPS_MASTER", "")
        if not text:
            raise ConfigError(
                "no run is named: give its directory, such as runs/mine, or its master's HOST:PORT, or set "
                "DIPS_MASTER=HOST:PORT"
            )
        if Path(text).is_dir():
            return cls(Path(text), None)
        try:
            parse_address(text, "RUN")
        except ConfigError as error:
            raise ConfigError(f"{text} is neither a directory nor a master's address: write HOST:PORT") from error
        return cls(None, text)

    def master(self) -> str:
        """The address of its master. Raises ConfigError when no master runs there."""
        if self.directory is None:
            return self.address or ""
        written = read_address(self.directory / "master") or read_address(self.directory)
        if written is None:
            raise ConfigError(f"no master runs in {self.directory}: start the run, or check the directory")
        return written.address
