"""Calls the master: blocking gRPC stubs on a small pool of threads, "dips-control".

Every call has a deadline, and its outcome is an event for the session. Decides nothing, retries nothing, and never
touches the data flow or a parameter.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import Message

from dips.core import messages
from dips.core.clock import Clock
from dips.core.errors import RefusalCode, Refused, RetryLater
from dips.core.ids import Incarnation
from dips.core.messages import (
    ClusterReply,
    ClusterRequest,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    Settings,
    StatusRequest,
)
from dips.core.net.addresses import MasterAddresses
from dips.core.net.codec_protobuf import from_message, to_message
from dips.core.net.grpc_calls import LOOK_S, is_unreachable, newer_master, open_channel, refused_from
from dips.core.net.keys import UsedKeys
from dips.core.net.security import Identity, Security
from dips.core.net.tls_probe import why_not_let_in
from dips.core.observe.failpoints import failpoint
from dips.core.observe.logs import ChangeLogger
from dips.protos import clusters_pb2_grpc
from dips.worker.state.effects import Beat, Done, Event, Failed
from dips.worker.state.shared import Remedy, remedy_for

_logger = logging.getLogger("dips.worker.control")

N_THREADS = 3
"""Threads: one for each lane of the session (the exchange, leases, and small calls)."""


def channel_to(master: str, security: Security) -> grpc.Channel:
    """A channel to the master; connects when first used. Raises ConfigError for an address that cannot be dialled."""
    return open_channel(master, security)


class MasterStubs:
    """Typed blocking calls to the master, from any thread: at the address in use, with the present keys."""

    def __init__(
        self,
        masters: MasterAddresses,
        security: Security,
        *,
        service: Callable[[grpc.Channel], Any] | None = None,
        explains: bool = False,
    ) -> None:
        """service: the stub of another service than Clusters. explains: of a master that cannot be reached, find out
        whether it refuses this process's keys.

        Raises ConfigError for an address that cannot be dialled.
        """
        self._masters = masters
        self._security = security
        self._service, self._explains = service or clusters_pb2_grpc.ClustersStub, explains
        self._lock = threading.Lock()
        self._channels: list[tuple[str, grpc.Channel]] = []
        self._stubs: dict[str, tuple[UsedKeys, Any]] = {}
        self._closed = False
        self._at_master()

    def close(self) -> None:
        """Cancel the calls."""
        with self._lock:
            self._closed = True
        for _, channel in self._channels:
            channel.close()

    def hang_up(self) -> None:
        """Cancel the calls at addresses that are not in use any longer: the host there may have been cut off."""
        with self._lock:
            used = self._masters.now
            left = [channel for address, channel in self._channels if address != used]
            self._channels = [pair for pair in self._channels if pair[0] == used]
            self._stubs = {address: stub for address, stub in self._stubs.items() if address == used}
        for channel in left:
            channel.close()

    def _at_master(self) -> tuple[str, UsedKeys, Any]:
        """The address in use, the keys that it is called with, and the stub. Renewed keys get a new connection; calls
        on earlier connections go on to their end."""
        with self._lock:  # with hang_up, so that no call begins at an address that was left
            master = self._masters.now
            if self._closed:
                raise RetryLater("this process makes no more calls")
            found = self._stubs.get(master)
            if found is None or found[0].renewed:
                used = UsedKeys(self._security)
                channel = channel_to(master, self._security)
                self._channels.append((master, channel))
                found = self._stubs[master] = used, self._service(channel)
            return master, *found

    def call(self, request: ClusterRequest | StatusRequest, deadline_s: float) -> Any:
        """Call and wait for the reply that goes with the request. Raises Refused, or RetryLater when no answer came in
        time; then the next call goes to the next address, if none came about for want of a connection."""
        master, used, stub = self._at_master()
        # The request of every method is named after it, and so is the answer.
        method, message = type(request).__name__.removesuffix("Request"), to_message(request)
        try:
            failpoint(f"worker.rpc.before_{method}")
            try:
                answer = getattr(stub, method)(message, timeout=deadline_s)
            except ValueError as error:  # of gRPC, for a channel that hang_up has closed
                raise RetryLater(f"the master at {master} was left before {method} was sent") from error
            if failpoint(f"worker.rpc.after_{method}"):
                raise RetryLater(f"a failpoint loses the answer to {method}")
        except grpc.RpcError as error:
            # Wrong keys can be replaced while this process runs, so it waits for that; without keys it never has any.
            away = is_unreachable(error)
            why = why_not_let_in(master, self._security) if away and self._explains else ""
            if why and not isinstance(self._security, Identity):
                raise Refused(RefusalCode.IDENTITY, why) from error
            cause: Refused | RetryLater = RetryLater(why) if why else refused_from(error)
            if away:
                self._masters.leave(master, str(cause))
                cause = RetryLater(self._masters.why_none(str(cause)), cause.retry_after_s)
            elif isinstance(cause, Refused) and cause.code is RefusalCode.IDENTITY and used.renewed:
                cause = RetryLater(f"{cause} (they were renewed meanwhile)")
            raise cause from error
        except OSError as error:
            raise RetryLater(f"{method} failed: {error.strerror or error}") from error
        reply = from_message(answer, getattr(messages, f"{method}Reply"))
        if isinstance(request, JoinRequest) and isinstance(reply, JoinReply):
            # A master that another one at another address has replaced: its rounds end at slaves that have promised the
            # newer epoch. It may not know of that yet, and let clusters join.
            before = request.caller.incarnation
            if self._masters.several and before is not None and reply.epoch < before.epoch:
                why = (
                    f"the one there is in epoch {reply.epoch}, and this cluster took part in epoch {before.epoch}; if "
                    "it is the right one, give its address alone"
                )
                self._masters.leave(master, why)
                raise RetryLater(self._masters.why_none(why))
        self._masters.answered()
        return reply


class MasterClient:
    """Makes the session's calls; `deliver` is called on a pool thread with the outcome of each."""

    def __init__(self, masters: MasterAddresses, security: Security, deliver: Callable[[Event], None]) -> None:
        """Raises ConfigError for an address that cannot be dialled."""
        self._stubs = MasterStubs(masters, security, explains=True)
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(N_THREADS, "dips-control")
        self._closed = False
        self.hang_up = self._stubs.hang_up

    def start(self, job: int, request: ClusterRequest, deadline_s: float) -> None:
        future = self._pool.submit(self._stubs.call, request, deadline_s)
        future.add_done_callback(lambda done: self._ended(job, request, done))

    def close(self) -> None:
        """Cancel the calls and end the threads."""
        self._closed = True
        self._stubs.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _ended(self, job: int, request: ClusterRequest, done: Future[ClusterReply]) -> None:
        if self._closed or done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._deliver(Done(job, done.result()))
        elif isinstance(error, Refused):
            self._deliver(Done(job, error))
        else:
            _logger.debug("call %s: %s", type(request).__name__, error)
            self._deliver(Failed(job, str(error) or type(error).__name__))


# ---- heartbeat -------------------------------------------------------------------------------------------------------
#
# Sends heartbeats on its own thread and channel, so that neither training nor transfers nor slow calls delay them.
#
# Reconnects for ever. Sends the facts that the training thread set last, and delivers the master's answers when they
# contain something new. Never blocks the training thread.


STREAM_S = 3600.0
"""A stream's deadline: every call has one, and a new stream an hour costs nothing."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 1.0
"""Pause between two streams: within it a restarted master receives a beat of a cluster that makes no other call."""


class Heartbeat:
    """Sends the heartbeats. `deliver` is called on its thread with Beat events."""

    def __init__(
        self,
        masters: MasterAddresses,
        security: Security,
        deliver: Callable[[Event], None],
        clock: Clock,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """moved: called on a thread of its own when a standby has taken over, which is in use from then on."""
        self._moved = moved
        self._masters = masters
        self._security = security
        self._used = UsedKeys(security)
        self._deliver = deliver
        self._clock = clock
        self._log = ChangeLogger(logging.getLogger("dips.worker.control"))
        self._facts: tuple[HeartbeatRequest, Settings] | None = None
        self._stop = threading.Event()
        self._delivered: tuple[Incarnation, HeartbeatReply] | None = None
        self._fenced = Incarnation(0, 0)  # no master's epoch is 0
        self._unanswered: deque[Incarnation | None] = deque()
        self._last_reply_s = 0.0
        self.late_ranks: Sequence[int] = ()
        """Ranks that others wait for between two steps, when the training thread can tell nothing; from any thread."""
        self.answered_s: float | None = None
        """When the master last answered a beat; for metrics, from any thread."""
        self._threads: list[threading.Thread] = []
        self._hang_up: Callable[[], object] = lambda: None

    def tell(self, request: HeartbeatRequest, settings: Settings) -> None:
        """Set the content of beats from now on, and the run's settings; the first call starts the thread.

        The request's caller has an incarnation.
        """
        self._facts = request, settings
        if not self._threads and not self._stop.is_set():
            work = {"dips-heartbeat": self._run, **({"dips-standby": self._look} if self._masters.several else {})}
            self._threads = [threading.Thread(target=each, name=name, daemon=True) for name, each in work.items()]
            for thread in self._threads:
                thread.start()

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            if self._facts is not None and self._facts[0].caller.incarnation == self._fenced:
                self._stop.wait(FIRST_PAUSE_S)  # until the session has joined again
                continue
            self._used = UsedKeys(self._security)
            master = self._masters.now
            with channel_to(master, self._security) as channel:
                answered = self._stream(master, channel)
            pause_s = FIRST_PAUSE_S if answered else min(MAX_PAUSE_S, 2 * pause_s)
            self._stop.wait(pause_s)

    def _look(self) -> None:
        while not self._stop.wait(LOOK_S):
            if self._facts is not None and newer_master(self._masters, self._security, self._facts[0].caller):
                self._moved()
                self._hang_up()

    def _stream(self, master: str, channel: grpc.Channel) -> bool:
        """Beat until the stream ends; whether at least one beat was answered."""
        stub = clusters_pb2_grpc.ClustersStub(channel)
        self._last_reply_s = self._clock.monotonic_s()
        self._unanswered.clear()
        ended = threading.Event()
        answered = False
        stream = stub.Heartbeat(self._requests(ended, lambda: stream.cancel()), timeout=STREAM_S)
        self._hang_up = stream.cancel
        if master != self._masters.now:  # it was left meanwhile
            stream.cancel()
        try:
            for answer in stream:
                answered = True
                self._last_reply_s = self.answered_s = self._clock.monotonic_s()
                self._log.report("master", "")
                self._masters.answered()
                if failpoint("worker.rpc.after_Heartbeat"):
                    continue  # a failpoint loses the answer
                reply = from_message(answer, HeartbeatReply)
                incarnation = self._unanswered.popleft() if self._unanswered else None
                if incarnation is not None and self._delivered != (incarnation, reply):
                    self._delivered = (incarnation, reply)
                    self._deliver(Beat(incarnation, reply))
        except grpc.RpcError as error:
            self._failed(master, error, answered)
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
            assert self._facts is not None, "the thread starts with the first facts"
            request, settings = self._facts
            self._unanswered.append(request.caller.incarnation)
            failpoint("worker.rpc.before_Heartbeat")
            yield to_message(replace(request, late_ranks=request.late_ranks or tuple(self.late_ranks)))
            silent_s = self._clock.monotonic_s() - self._last_reply_s
            if silent_s > settings.heartbeat_s * settings.evict_after_beats or self._used.renewed:
                break
            self._stop.wait(settings.heartbeat_s)
        if not ended.is_set():
            hang_up()

    def _failed(self, master: str, error: grpc.RpcError, answered: bool) -> None:
        """Requests are answered in order, so a refusal is of the oldest one that is not answered."""
        if self._stop.is_set() or master != self._masters.now:
            return
        cause = refused_from(error)
        hung_up = isinstance(cause, RetryLater) or cause.code is RefusalCode.IDENTITY
        if hung_up and self._used.renewed:
            return  # the next stream uses the keys that were renewed meanwhile
        incarnation = self._unanswered.popleft() if self._unanswered else None
        if isinstance(cause, Refused) and incarnation is not None:
            if remedy_for(cause, joining=False, pushing=False) is Remedy.JOIN_AGAIN:
                self._fenced = incarnation
            self._deliver(Beat(incarnation, cause))
        elif self._masters.several and (is_unreachable(error) or not answered):
            self._masters.leave(master, str(cause))
        else:
            self._log.report("master", f"heartbeats do not reach the master: {cause}", logging.WARNING)
