"""Sends heartbeats on its own thread and channel, so that neither training nor transfers nor slow calls delay them.

Reconnects for ever. Sends the facts that the training thread set last, and delivers the master's answers when they
contain something new. Never blocks the training thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
from google.protobuf.message import Message

from dips.core.clock import Clock
from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Incarnation
from dips.core.messages import HeartbeatReply, HeartbeatRequest
from dips.core.net.codec_protobuf import from_message, to_message
from dips.core.net.grpc_refusal import refused_from
from dips.core.net.keys import UsedKeys
from dips.core.net.security import Security
from dips.core.observe.failpoints import failpoint
from dips.core.observe.telemetry import ChangeLogger
from dips.protos import clusters_pb2_grpc
from dips.worker.control import channel_to
from dips.worker.state.events import Beat, BeatRefused, Event
from dips.worker.state.refusals import Remedy, remedy_for

STREAM_S = 3600.0
"""A stream's deadline: every call has one, and a new stream an hour costs nothing."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 1.0
"""Pause between two streams: within it a restarted master receives a beat of a cluster that makes no other call."""


@dataclass(frozen=True)
class Facts:
    """Content of the next beat, and the interval. The request's caller has an incarnation."""

    request: HeartbeatRequest
    heartbeat_s: float
    evict_after_beats: int


class Heartbeat:
    """Sends the heartbeats. `deliver` is called on its thread with Beat and BeatRefused events."""

    def __init__(self, master: str, security: Security, deliver: Callable[[Event], None], clock: Clock) -> None:
        self._master = master
        self._security = security
        self._used = UsedKeys(security)
        self._deliver = deliver
        self._clock = clock
        self._log = ChangeLogger(logging.getLogger("dips.worker.heartbeat"))
        self._facts: Facts | None = None
        self._stop = threading.Event()
        self._delivered: tuple[Incarnation, HeartbeatReply] | None = None
        self._fenced = Incarnation(0, 0)  # no master's epoch is 0
        self._unanswered: deque[Incarnation | None] = deque()
        self._last_reply_s = 0.0
        self.answered_s: float | None = None
        """When the master last answered a beat; for metrics, from any thread."""
        self._thread: threading.Thread | None = None

    def tell(self, facts: Facts) -> None:
        """Set the content of beats from now on; the first call starts the thread."""
        self._facts = facts
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name="dips-heartbeat", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            if self._incarnation() == self._fenced:
                self._stop.wait(FIRST_PAUSE_S)  # until the session has joined again
                continue
            self._used = UsedKeys(self._security)
            with channel_to(self._master, self._security) as channel:
                answered = self._stream(channel)
            pause_s = FIRST_PAUSE_S if answered else min(MAX_PAUSE_S, 2 * pause_s)
            self._stop.wait(pause_s)

    def _stream(self, channel: grpc.Channel) -> bool:
        """Beat until the stream ends; whether at least one beat was answered."""
        stub = clusters_pb2_grpc.ClustersStub(channel)
        self._last_reply_s = self._clock.monotonic_s()
        self._unanswered.clear()
        ended = threading.Event()
        answered = False
        stream = stub.Heartbeat(self._requests(ended, lambda: stream.cancel()), timeout=STREAM_S)
        try:
            for answer in stream:
                answered = True
                self._last_reply_s = self.answered_s = self._clock.monotonic_s()
                self._log.report("master", "")
                if failpoint("worker.rpc.after_Heartbeat"):
                    continue  # a failpoint loses the answer
                self._take(from_message(answer, HeartbeatReply))
        except grpc.RpcError as error:
            self._failed(error)
        except OSError as error:
            self._log.report("master", f"a heartbeat failed: {error}", logging.WARNING)
        except Refused as refused:
            self._log.report("master", f"a heartbeat's answer cannot be read: {refused}", logging.WARNING)
        finally:
            ended.set()
        return answered

    def _requests(self, ended: threading.Event, hang_up: Callable[[], object]) -> Iterator[Message]:
        """One request a beat, on a thread of gRPC's; ends the stream when the master has stopped answering."""
        while not (ended.is_set() or self._stop.is_set()):
            facts = self._facts
            assert facts is not None, "the thread starts with the first facts"
            self._unanswered.append(facts.request.caller.incarnation)
            failpoint("worker.rpc.before_Heartbeat")
            yield to_message(facts.request)
            silent_s = self._clock.monotonic_s() - self._last_reply_s
            if silent_s > facts.heartbeat_s * facts.evict_after_beats or self._used.renewed:
                break
            self._stop.wait(facts.heartbeat_s)
        if not ended.is_set():
            hang_up()

    def _take(self, reply: HeartbeatReply) -> None:
        incarnation = self._unanswered.popleft() if self._unanswered else None
        if incarnation is not None and self._delivered != (incarnation, reply):
            self._delivered = (incarnation, reply)
            self._deliver(Beat(incarnation, reply))

    def _failed(self, error: grpc.RpcError) -> None:
        """Requests are answered in order, so a refusal is of the oldest one that is not answered."""
        if self._stop.is_set():
            return
        cause = refused_from(error)
        if isinstance(cause, Refused) and cause.code is RefusalCode.IDENTITY and self._used.renewed:
            return  # the next stream uses the keys that were renewed meanwhile
        incarnation = self._unanswered.popleft() if self._unanswered else None
        if isinstance(cause, Refused) and incarnation is not None:
            if remedy_for(cause, joining=False, pushing=False) is Remedy.JOIN_AGAIN:
                self._fenced = incarnation
            self._deliver(BeatRefused(incarnation, cause))
        else:
            self._log.report("master", f"heartbeats do not reach the master: {cause}", logging.WARNING)

    def _incarnation(self) -> Incarnation | None:
        return self._facts.request.caller.incarnation if self._facts else None
