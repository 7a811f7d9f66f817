"""Asks the master for its status and sends an operator's requests: the Operator service as plain calls.

Blocking, each call with a deadline. It must never retry by itself: the caller decides whether to wait.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from dips.core.errors import ConfigError, RefusalCode, Refused, RetryLater
from dips.core.messages import (
    Caller,
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
from dips.core.net.addresses import MasterAddresses, parse_address, split_addresses
from dips.core.net.grpc_calls import is_unreachable, newer_master, open_channel, refused_from
from dips.core.net.security import Security
from dips.core.net.tls_probe import why_not_let_in
from dips.local.run_directory import read_mark
from dips.local.view import where
from dips.master.directory import ADDRESS_NAME, LOCK_NAME, read_address
from dips.protos import operator_pb2_grpc

CALL_S = 5.0
CONNECT_S = 2.0

T = TypeVar("T")


class OperatorClient:
    """A connection to one master, at the first of its addresses that answers, or where a newer one does. Every call
    raises Refused, or RetryLater when the master cannot be reached."""

    def __init__(self, address: str, run_id: str = "", call_s: float = CALL_S, *, security: Security) -> None:
        """Raises ConfigError for an address that cannot be dialled."""
        self._masters = MasterAddresses(address)
        self._run_id = run_id
        self._security = security
        self._call_s = call_s
        self._open()

    @property
    def address(self) -> str:
        """The address in use."""
        return self._masters.now

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def status(self) -> StatusReply:
        return self._call("Status", StatusRequest(self._run_id), StatusReply)

    def pause(self, reason: str) -> str:
        """The master's sentence about what it did; so for the other requests."""
        return self._operate("Pause", OperatorRequest(self._run_id, reason))

    def resume(self, reason: str) -> str:
        return self._operate("Resume", OperatorRequest(self._run_id, reason))

    def stop(self, reason: str) -> str:
        return self._operate("Stop", OperatorRequest(self._run_id, reason))

    def evict(self, cluster_id: str, reason: str) -> str:
        return self._operate("Evict", EvictRequest(self._run_id, cluster_id, reason))

    def drain(self, cluster_id: str, reason: str) -> str:
        return self._operate("Drain", DrainRequest(self._run_id, cluster_id, reason))

    def reshard(self, add: Sequence[str], remove: Sequence[str], reason: str) -> str:
        return self._operate("Reshard", ReshardRequest(self._run_id, tuple(add), tuple(remove), False, reason))

    def take_back_reshard(self) -> str:
        return self._operate("Reshard", ReshardRequest(self._run_id, cancel=True))

    def extend(self, tk_max_tokens: int, no_limit: bool, reason: str) -> str:
        """tk_max_tokens 0: the limit stays."""
        return self._operate("Extend", ExtendRequest(self._run_id, tk_max_tokens, no_limit, reason))

    def _operate(self, method: str, request: object) -> str:
        return self._call(method, request, OperatorReply).sentence

    def _open(self) -> None:
        self._channel = open_channel(self.address, self._security)
        self._is_new = True

    def _call(self, method: str, request: object, kind: type[T]) -> T:
        """Each address once. A call that was not answered in time goes to no other: it may have been carried out."""
        away: list[str] = []
        while True:
            sent = False
            try:
                stub = operator_pb2_grpc.OperatorStub(self._channel)
                if self._is_new and self._masters.several:
                    # Not the time of a call for a host that is gone.
                    socket.create_connection(parse_address(self.address), CONNECT_S).close()
                    if self._is_taken_over(stub):
                        self._channel.close()
                        self._open()
                        continue
                sent = True
                reply = getattr(stub, method)(codec_protobuf.to_message(request), timeout=self._call_s)
                self._is_new = False
                return codec_protobuf.from_message(reply, kind)
            except (OSError, UnicodeError) as error:
                cause: Exception = error
                failed = RetryLater(_why_not(self.address, str(error)))
            except grpc.RpcError as error:
                refused = refused_from(error)
                if isinstance(refused, Refused):
                    raise refused from error
                # gRPC does not say why a handshake failed; a probe of our own does.
                if words := why_not_let_in(self.address, self._security):
                    raise Refused(RefusalCode.IDENTITY, words) from error
                failed = RetryLater(_why_not(self.address, str(refused)), refused.retry_after_s)
                if sent and not is_unreachable(error):
                    raise failed from error
                cause = error
            away.append(str(failed))
            if self._masters.leave(self.address):
                self._channel.close()
                self._open()
            if len(away) == len(self._masters.all):
                raise RetryLater("; ".join(away), failed.retry_after_s) from cause

    def _is_taken_over(self, stub: operator_pb2_grpc.OperatorStub) -> bool:
        """Whether another address has the run's master now: one that was taken over from may not know it yet."""
        answer = stub.Status(codec_protobuf.to_message(StatusRequest(self._run_id)), timeout=self._call_s)
        epoch = codec_protobuf.from_message(answer, StatusReply).epoch
        return newer_master(self._masters, self._security, Caller(self._run_id, epoch, ""))


def _why_not(address: str, words: str) -> str:
    """Why no master answers; words: gRPC's."""
    host, port = parse_address(address)
    try:
        socket.getaddrinfo(host, port)
    except OSError:
        return (
            f"no address is known for the name {host!r} of {address}: the run has ended and its master's host or "
            "container is gone, it is not started yet, or the name is wrong"
        )
    return f"the master at {address} does not answer: start it, or check the address ({words})"


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
            split_addresses(text, "RUN")
        except ConfigError as error:
            if "," in text:
                raise  # it names the faulty one
            raise ConfigError(f"{text} is neither a directory nor a master's address: write HOST:PORT") from error
        return cls(None, text)

    @property
    def masters(self) -> Path:
        """The directory of its master: the folder `master` of the run's, or this one. Raises ConfigError when it holds
        no run, or a run is named by its master's address."""
        if self.directory is None:
            raise ConfigError(f"{self.address} is an address: give the directory of a run on this machine")
        folder = self.directory / "master"
        folder = folder if folder.is_dir() else self.directory
        if read_mark(self.directory) is None and not any(
            (folder / name).exists() for name in (LOCK_NAME, ADDRESS_NAME)
        ):
            raise ConfigError(f"{self.directory} holds no run: give the directory of a run of `dips demo` or `dips up`")
        return folder

    def master(self) -> str:
        """The address of its master. Raises ConfigError as `masters` does, RetryLater when no master runs there."""
        if self.directory is None:
            return self.address or ""
        written = read_address(self.masters)
        if written is None:
            raise self._away()
        return written.address

    def check_alive(self) -> None:
        """Raises as master() does, and RetryLater for an address that a killed master left behind."""
        address, written = self.master(), read_address(self.masters)
        try:
            os.kill(written.pid if written is not None else 0, 0)
        except ProcessLookupError:  # or it is in a container, where processes have other numbers
            try:
                socket.create_connection(parse_address(address), CONNECT_S).close()
            except OSError as error:
                raise self._away() from error
        except PermissionError:
            pass  # another user's process

    def _away(self) -> RetryLater:
        left, why = self.at_rest(), ""
        if left is not None and left.stopped:
            why = f" ({left.waiting_for}; `dips status {self.directory}` shows it)"
        elif left is not None:
            why = f" (the run has not ended: it is {where(left)})"
        return RetryLater(f"no master runs in {self.directory}{why}: start the run")

    def at_rest(self) -> StatusReply | None:
        """What the journal says of a run whose master is gone; None for an address, or before the first decision."""
        from dips.master.archive import FILE_NAME  # the master's state: not for --help
        from dips.master.journal import read_newest
        from dips.master.state.ledger import ledger_from_journal
        from dips.master.state.status import at_rest

        if self.directory is None or not (self.masters / FILE_NAME).is_file():
            return None
        epoch, ledger = read_newest(self.masters)
        return at_rest(ledger_from_journal(ledger), epoch) if ledger is not None else None
