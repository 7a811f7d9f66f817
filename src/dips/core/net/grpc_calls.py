"""gRPC calls between processes of a run: channels to the master, and refusals on both ends of a call."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio

from dips.core.errors import RefusalCode, Refused, RetryLater
from dips.core.messages import Caller, Refusal, StatusReply, StatusRequest
from dips.core.net.addresses import MasterAddresses, format_address, parse_address
from dips.core.net.codec_protobuf import decode, encode, from_message, to_message
from dips.core.net.keys import MASTER_DNS_NAME, reloaded
from dips.core.net.security import Identity, Security, check_reach
from dips.protos import operator_pb2_grpc

# ---- grpc refusal ----------------------------------------------------------------------------------------------------
#
# Converts refusals and unreachable peers between this project's errors and gRPC's.
#
# A refusal ends a call with a status, its sentence as the details, and the whole Refusal in the trailing
# metadata, so that the caller gets back the very error that the callee raised.
# Never puts a stack trace on the wire.


REFUSAL_KEY = "dips-refusal-bin"
"""The trailing-metadata key; gRPC carries the values of keys that end in -bin as raw bytes."""

MAX_SENTENCE_BYTES = 1024
"""gRPC refuses headers past 8 KiB in all. The sentence is there twice: percent-encoded as the details
(3 KiB at worst) and base64-encoded within the Refusal (1.4 KiB)."""

KEEPALIVE_MS = 10_000
"""How long a silent connection may stay unproven. Our own heartbeats evict; this only frees dead sockets."""

MAX_RECONNECT_MS = 500
"""Ceiling of gRPC's reconnect backoff (its own default is 120 s): a restarted master is found within this, and a
thousand clusters that look for one refuse themselves a few thousand times a second."""

CONNECT_MS = 5_000
"""How long one attempt to connect may take, which gRPC calls its least reconnect backoff: a handshake with keys over a
far link takes four round trips, and a server in a storm of connections takes its time. A port where no process listens
refuses at once, so a restarted master is found no later for it."""

STATUS_OF_CODE: Mapping[RefusalCode, grpc.StatusCode] = {
    RefusalCode.UNSPECIFIED: grpc.StatusCode.UNKNOWN,
    RefusalCode.PROTOCOL_VERSION: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalCode.RUN_ID: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalCode.LAYOUT: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalCode.DATA_PLAN: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalCode.FENCED: grpc.StatusCode.ABORTED,
    RefusalCode.STALE_EPOCH: grpc.StatusCode.ABORTED,
    RefusalCode.SEED_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    RefusalCode.TOKENS: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalCode.RANGES: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalCode.SEQ: grpc.StatusCode.ALREADY_EXISTS,
    RefusalCode.MEMORY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalCode.CHUNK: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalCode.UNKNOWN_PUSH: grpc.StatusCode.NOT_FOUND,
    RefusalCode.VERSION_GONE: grpc.StatusCode.NOT_FOUND,
    RefusalCode.NONFINITE: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalCode.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalCode.STOPPING: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalCode.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalCode.NOT_LOOPBACK: grpc.StatusCode.PERMISSION_DENIED,
    RefusalCode.CONFIG: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalCode.DISK: grpc.StatusCode.INTERNAL,
    RefusalCode.DIGEST: grpc.StatusCode.DATA_LOSS,
    RefusalCode.UNKNOWN_NAME: grpc.StatusCode.NOT_FOUND,
    RefusalCode.BASE_GONE: grpc.StatusCode.NOT_FOUND,
    RefusalCode.KEY: grpc.StatusCode.PERMISSION_DENIED,
    RefusalCode.IDENTITY: grpc.StatusCode.PERMISSION_DENIED,
    RefusalCode.FROZEN: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalCode.NAME_TAKEN: grpc.StatusCode.ALREADY_EXISTS,
}
"""The gRPC status that goes with each code, for tools that know only gRPC; ours read the metadata."""

_WORTH_RETRYING = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})

_FAILED_THERE = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL})
"""What gRPC says when the other side's code failed, or bytes were damaged: no decision was made."""

_CODE_OF_STATUS: Mapping[grpc.StatusCode, RefusalCode] = {
    # gRPC itself says these: a message over the size limit, a method the peer lacks, bytes that do not parse.
    grpc.StatusCode.RESOURCE_EXHAUSTED: RefusalCode.MALFORMED,
    grpc.StatusCode.UNIMPLEMENTED: RefusalCode.PROTOCOL_VERSION,
    grpc.StatusCode.INVALID_ARGUMENT: RefusalCode.MALFORMED,
}


def to_refusal(refused: Refused) -> Refusal:
    """The wire form of an error, its sentence cut to what a gRPC header holds."""
    sentence = refused.sentence.encode("utf-8", "replace")[:MAX_SENTENCE_BYTES].decode("utf-8", "ignore")
    return Refusal(refused.code, sentence, refused.retry_after_s)


def to_refused(refusal: Refusal) -> Refused:
    """The error that a wire form stands for."""
    return Refused(refusal.code, refusal.sentence, refusal.retry_after_s)


async def abort(context: grpc.aio.ServicerContext[Any, Any], refused: Refused) -> NoReturn:
    """End the call with a status, the sentence and the whole refusal. Does not return."""
    refusal = to_refusal(refused)
    await context.abort(
        STATUS_OF_CODE[refusal.code],
        refusal.sentence,
        trailing_metadata=((REFUSAL_KEY, encode(refusal)),),
    )
    raise AssertionError("ServicerContext.abort returned")


def refused_from(error: grpc.RpcError) -> Refused | RetryLater:
    """The error that a failed call means to the caller; works for the errors of grpc and of grpc.aio.

    A status without our metadata comes from gRPC itself: a peer that cannot be reached, was too slow or failed is
    RetryLater, anything else a Refused that quotes gRPC.
    """
    status, details = _status_of(error)
    sent = _refusal_in(error)
    if sent is not None:
        return sent
    if status in _WORTH_RETRYING:
        return RetryLater(f"the peer does not answer ({status.name}: {details or 'no details'})")
    if status in _FAILED_THERE:
        return RetryLater(f"the peer failed while it served the call ({status.name}: {details or 'no details'})")
    code = _CODE_OF_STATUS.get(status, RefusalCode.UNSPECIFIED)
    return Refused(code, f"the peer ended the call with {status.name}: {details or 'no details'}")


def is_unreachable(error: grpc.RpcError) -> bool:
    """Whether no connection to the peer came about, or it broke."""
    return _status_of(error)[0] is grpc.StatusCode.UNAVAILABLE and _refusal_in(error) is None


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """gRPC options for channels and servers: messages bounded both ways, dead peers noticed, quick reconnects."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
        # A server drops clients that ping more often than this; its default would call our keepalive a flood.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
        # Two masters must never share a port: the second one has to learn that the port is taken.
        ("grpc.so_reuseport", 0),
        # Loopback never goes through a proxy of the environment.
        ("grpc.enable_http_proxy", 0),
    ]


def _status_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    code = getattr(error, "code", None)
    details = getattr(error, "details", None)
    status = code() if callable(code) else None
    text = details() if callable(details) else None
    return (status or grpc.StatusCode.UNKNOWN), str(text or "")


def _refusal_in(error: grpc.RpcError) -> Refused | None:
    read = getattr(error, "trailing_metadata", None)
    for key, value in (read() if callable(read) else None) or ():
        if key == REFUSAL_KEY and isinstance(value, bytes):
            try:
                return to_refused(decode(value, Refusal))
            except Refused as garbled:
                return Refused(RefusalCode.MALFORMED, f"the peer's refusal cannot be read: {garbled.sentence}")
    return None


# ---- grpc channel ----------------------------------------------------------------------------------------------------


MAX_MESSAGE_BYTES = 1 << 30
"""Longest message of a client: the largest max_message_bytes that a run may have. The master enforces the run's own; a
client with a lower one would fail with messages that the run allows."""


def open_channel(address: str, security: Security) -> grpc.Channel:
    """A channel to the master at "host:port"; connects when first used.

    Raises ConfigError for an address that is not one, or that is not loopback while there are no keys.
    """
    target, options = _target(address, security)
    if isinstance(security, Identity):
        return grpc.secure_channel(target, _credentials(security), options=options)
    return grpc.insecure_channel(target, options=options)


def open_channel_aio(address: str, security: Security) -> grpc.aio.Channel:
    """open_channel for an event loop."""
    target, options = _target(address, security)
    if isinstance(security, Identity):
        return grpc.aio.secure_channel(target, _credentials(security), options=options)
    return grpc.aio.insecure_channel(target, options=options)


def _target(address: str, security: Security) -> tuple[str, list[tuple[str, int | str]]]:
    check_reach(address, "the master's address", security)
    options: list[tuple[str, int | str]] = [*channel_options(MAX_MESSAGE_BYTES)]
    if isinstance(security, Identity):
        options.append(("grpc.ssl_target_name_override", MASTER_DNS_NAME))
    return format_address(*parse_address(address, "the master's address")), options


def _credentials(identity: Identity) -> grpc.ChannelCredentials:
    identity = reloaded(identity)  # keys are renewed while a run goes on
    return grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.cert_pem)


# ---- a master at another address -------------------------------------------------------------------------------------

LOOK_S = 0.5
"""How often a process looks for a standby that has taken over. One that has not listens nowhere, so that a look is a
connection that is refused."""


def newer_master(masters: MasterAddresses, security: Security, caller: Caller) -> bool:
    """Whether a master of the caller's run, in a later epoch than the caller knows, answers at another address than the
    one in use: then that one is in use from now on.

    So a take-over is seen at once, where the other master is silent, as that of a host that was cut off: connections to
    it would last for 20 s. May block for some times LOOK_S.
    """
    for address in masters.others:
        try:
            socket.create_connection(parse_address(address), LOOK_S).close()
            with open_channel(address, security) as channel:
                stub: Any = operator_pb2_grpc.OperatorStub(channel)
                answer = stub.Status(to_message(StatusRequest(caller.run_id)), timeout=2 * LOOK_S)
                epoch = from_message(answer, StatusReply).epoch
        except (OSError, UnicodeError, grpc.RpcError, Refused):
            continue
        if 0 < caller.epoch < epoch:
            masters.take(address, f"it has taken over, in epoch {epoch}")
            return True
    return False
