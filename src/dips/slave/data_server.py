"""Runs the data port: one thread for its ROUTER socket and tables, and a pool for landings where cores allow it.

Everything that touches the socket or the DataPort runs on the thread "dips-data"; the control side has it do calls,
which run while no landing is under way. With data_threads = 1 landings run on that thread too. Never shares
a socket or a thread with control, so that a saturated link starves no heartbeat.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Literal, ParamSpec

import zmq

from dips.core.errors import ConfigError, Refused
from dips.core.layout import Buffer as Bytes
from dips.core.layout import checksum as xxh3_64
from dips.core.net.addresses import format_address, require_loopback
from dips.core.net.data_header import MAX_HEADER_BYTES, DataOp
from dips.core.net.newcomers import AcceptFilter, connection_of, cut, received_bytes
from dips.core.net.zmq_numba import ReceivedFrame, poll_items, why_not
from dips.core.net.zmq_sockets import NOW, NOW_MORE, ZAP_ENDPOINT, CurvePair, Failure, Handshakes, Outgoing, as_server
from dips.core.observe.failpoints import FailpointKind, failpoint, hits
from dips.core.protocol import MAX_WINDOW_CHUNKS
from dips.slave.data_port import Answer, DataPort, Figures
from dips.slave.landing import LandingJob
from dips.slave.serve_numba import COMPLETE, NEWS, UNUSUAL, ServeLoop
from dips.slave.state.admission import Admission
from dips.slave.state.effects import PushStaged

# ---- zap -------------------------------------------------------------------------------------------------------------
#
# Authorises clients of the data port: libzmq asks here (ZAP, ZeroMQ's RFC 27) before a peer's first message is read.
#
# By then the peer has shown that it owns the secret half of its key, and that it knew this port's public key, which
# only the master gives out. Answered on the data port's own thread, so that the list never changes in the middle.


ZAP_FRAMES = 7
"""Frames of a request: version, request, domain, address, routing id, mechanism, and for CURVE the key."""

Socket = zmq.Socket[bytes]
P = ParamSpec("P")


class ZapHandler:
    """Answers the requests of all sockets of `context`. refused: called with a sentence for each refused key."""

    def __init__(
        self, context: zmq.Context[Socket], admission: Admission, refused: Callable[[str], None]
    ) -> None:  # fmt: skip
        self._admission = admission
        self._refused = refused
        self.socket = context.socket(zmq.REP)
        """The socket of the requests; readable when there is one."""
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def answer_all(self) -> None:
        """Answer all waiting requests; never waits."""
        while True:
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._answer(question), zmq.NOBLOCK)

    def _answer(self, question: Sequence[bytes]) -> list[bytes]:
        version, request = question[0], question[1]
        why = "a peer without a CURVE key"
        if len(question) == ZAP_FRAMES and question[5] == b"CURVE":
            address, key = question[3].decode("ascii", "replace"), question[6]
            user = self._admission.user_of(key)
            if user is not None:
                return [version, request, b"200", b"OK", user.encode(), b""]
            why = (
                f"a process at {address} with data key {key.hex()[:8]}, which is not on the master's list: it has not "
                "joined, or it was evicted or revoked"
            )
        self._refused(why)
        # Not 300, "try later": libzmq then leaves both ends waiting until the time for the handshake is over.
        return [version, request, b"400", b"this key is not on the master's list", b"", b""]


# ---- data server -----------------------------------------------------------------------------------------------------


HANDSHAKE_MS = 5_000
"""A peer that does not speak ZMTP is dropped after this."""

HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 30_000
"""A frozen peer is dropped after this and its unread answers are freed. A 1 MiB chunk takes 8 s at 1 Mbit/s."""

NULL_HANDSHAKE_BYTES = 64
"""ZMTP's greeting; READY follows."""

CURVE_HANDSHAKE_BYTES = 64 + 170 + 30
"""Greeting and WELCOME, and ERROR to one whose key is refused; READY, with the socket's type, is longer (RFC 26)."""

FIRST_BYTE_S = 1
"""About so long the system keeps a connection to itself that brings no byte. Peers begin to speak at once."""

LINGER_MS = 500
BACKLOG = socket.SOMAXCONN
"""Connections that wait to be accepted; the system may allow fewer. When strangers fill the queue, any other peer waits
a second until its system tries again."""

PAGE_BYTES = resource.getpagesize()
RECEIVE_BATCH = 32
"""Messages taken before posted calls of the control side run: 32 chunks are about 10 ms of work."""

TOGETHER = 4
"""Chunks that are admitted before the first of them lands, if as many wait, and answered after the last. A chunk of
1 MiB evicts the interpreter's code and data from the caches: this way that happens once for four chunks."""

MAX_ANSWERS = 1026
"""Most answers queued for one peer, which has at most 512 requests unanswered (tiny chunks): libzmq reports to the
writing side that messages were taken only once per half of this mark. Payloads are the version's own memory."""

COPIED_BYTES = 16384
"""Smaller frames are copied into the message: that is faster than waiting for libzmq to release the memory."""

BEAT_REFRESH_S = 0.05
"""Greatest age of `figures`. Beats are seconds apart."""

LOOK_AGAIN_MS = 1000
"""Longest wait for messages while a peer has connected and not completed its handshake."""

GIVE_UP_S = 0.05
"""Longest wait while memory is to be given up that libzmq may still read."""

LoopName = Literal["auto", "compiled", "python"]
"""Who takes the messages: slave/serve_numba.py, all but those that it leaves; or this file alone."""

AUTO: LoopName = "compiled"
"""What auto is, where it can be had."""

KEPT_FRAMES = 3
"""Frames that are kept of one message. No correct one has more than two; the third shows that it is wrong."""

MOST_FRAMES = 1 << 16
"""Frames of one message that are read at most; reading and dropping so many takes 50 ms. libzmq cannot skip the rest of
a message; closing the socket does."""

DataMessage = tuple[bytes, Sequence[zmq.Frame | ReceivedFrame]]
"""A peer's routing id, and the frames that it sent."""


class DataServer:
    """Binds at once and serves from start() on.

    staged, refused and crashed are called on the data thread. data_threads: of landings and of libzmq's input and
    output each. cpu: the processor of libzmq's thread and of the data thread, with data_threads = 1; None: any. What
    one of the two writes and the other reads then stays in one processor's cache. curve: encrypt with these keys, and
    admit only keys of set_allowed(); None: neither, and loopback only. loop: _loop_for() says which there are. Raises
    ConfigError when the address cannot be bound, or the loop cannot be had.
    """

    def __init__(
        self,
        host: str,
        port: int,
        run_id: str,
        max_chunk_bytes: int,
        staged: Callable[[PushStaged], object],
        crashed: Callable[[BaseException], object],
        data_threads: int = 1,
        checksum: Callable[[Bytes], int] = xxh3_64,
        curve: CurvePair | None = None,
        cpu: int | None = None,
        loop: LoopName = "auto",
    ) -> None:
        if curve is None:
            require_loopback(host, "data_host")
        assert cpu is None or data_threads == 1, "several threads are not placed on one processor"
        self._cpu = cpu
        self._curve = curve
        admission = Admission() if curve is not None else None
        self.port = DataPort(run_id, staged, checksum, admission=admission, drop_peers=self._drop_peers)
        """The tables. They belong to the data thread from start() on: all but known() is called by do()."""
        self._loop = _loop_for(loop, run_id, data_threads, checksum is xxh3_64)
        self.crashed = crashed
        """Called with the error that ended one of the port's threads, on that thread."""
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = self._stopped = False
        self._context = zmq.Context(data_threads)
        if cpu is not None:  # before the first socket, which starts libzmq's threads
            self._context.set(zmq.THREAD_AFFINITY_CPU_ADD, cpu)
        self._outgoing = Outgoing()
        self._max_chunk_bytes = max_chunk_bytes
        self._listener = self._listen(host, port)
        self.accept_filter = AcceptFilter(self._listener)
        """For slave/connections.py, on its own thread."""
        self._gate: ZapHandler | None = None
        if admission is not None:
            self._gate = ZapHandler(self._context, admission, self.port.refuse_connection)
        self._router, self._handshakes = self._bind()
        self._wake_read, self._wake = os.pipe()
        for end in (self._wake_read, self._wake):
            os.set_blocking(end, False)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_read, zmq.POLLIN)
        if self._gate is not None:
            self._poller.register(self._gate.socket, zmq.POLLIN)
        self._handshakes_due = True
        self._delivered: set[int] | None = None
        self._pool = ThreadPoolExecutor(data_threads, "dips-landing") if data_threads > 1 else None
        self._most_under_way = 2 * data_threads
        self._under_way = 0
        self._admitted: list[tuple[bytes, LandingJob]] = []
        self._landed: queue.SimpleQueue[tuple[bytes, LandingJob, Refused | BaseException | None]] = queue.SimpleQueue()
        self._deferred: deque[DataMessage] = deque()
        self._renew = True
        self._watch()
        self.figures = Figures()
        """The latest counters; read from any thread."""
        self._beat_s = 0.0
        self._counters_moved = True
        self._thread = threading.Thread(target=self._run, name="dips-data", daemon=True)

    def _listen(self, host: str, port: int) -> socket.socket:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            # On [::] peers with IPv4 addresses are served as well, where the system has both.
            both = host == "::" and socket.has_dualstack_ipv6()
            listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"the data port cannot bind tcp://{format_address(host, port)}: {error.strerror or error}; choose "
                "another data_port, or 0"
            ) from error
        listener.setblocking(False)
        # A connection is taken with its first byte: then whoever hangs up and has sent none is a probe, no slow peer.
        if hasattr(socket, "TCP_DEFER_ACCEPT"):  # Linux's
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, FIRST_BYTE_S)
        return listener

    def _bind(self) -> tuple[zmq.Socket[bytes], Handshakes]:
        """A new socket on the listener, which outlives it, so that no other process can take the port."""
        router = self._context.socket(zmq.ROUTER)
        handshakes = Handshakes(self._context, router, arrivals=None if self._curve is None else self._has_spoken)
        options = {
            zmq.USE_FD: os.dup(self._listener.fileno()),
            zmq.IPV6: int(self._listener.family is socket.AF_INET6),
            zmq.MAXMSGSIZE: self._max_chunk_bytes + MAX_HEADER_BYTES,  # encryption adds 33 bytes to a frame
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
            # What a peer sends beyond this waits in its own memory: libzmq stops reading from it, nothing is lost. So
            # frames of one correct peer hold at most 2 x MAX_WINDOW_CHUNKS x max_chunk_bytes of this process's memory.
            # A message of endlessly many frames holds more, as libzmq hands out whole messages only and limits no
            # number of frames: slave/connections.py closes its connection before it fills the memory.
            zmq.RCVHWM: MAX_WINDOW_CHUNKS,
            zmq.SNDHWM: MAX_ANSWERS,
            zmq.LINGER: LINGER_MS,
            zmq.BACKLOG: BACKLOG,
            zmq.ROUTER_MANDATORY: 1,
        }
        for option, value in options.items():
            router.setsockopt(option, value)
        if self._curve is not None:
            as_server(router, self._curve)
        router.bind(self.endpoint)
        return router, handshakes

    def _has_spoken(self, fd: int) -> bool:
        """Whether a byte has come by this connection so far; False if it is closed."""
        with connection_of(fd, self._listener.getsockname()[1]) as found:
            return found is not None and received_bytes(found[1]) > 1  # the end of a connection counts as one

    def _watch(self) -> None:
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._handshakes.socket, zmq.POLLIN)
        if self._loop is not None:
            gate = () if self._gate is None else (self._gate.socket,)
            self._loop.watch(self._router, poll_items(self._router, self._wake_read, self._handshakes.socket, *gate))

    def _drop_peers(self) -> None:
        """Close every connection, with all its unread messages: they may refer to memory that goes away.

        Correct peers connect again by themselves, and ask again for what was lost.
        """
        self._poller.unregister(self._router)
        self._poller.unregister(self._handshakes.socket)
        self._handshakes.close()
        self._router.close(linger=0)
        self._outgoing.clear()
        self._router, self._handshakes = self._bind()
        self._watch()

    @property
    def endpoint(self) -> str:
        """The bound endpoint, "tcp://127.0.0.1:41234"."""
        host, port = self._listener.getsockname()[:2]
        return f"tcp://{format_address(host, port)}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the threads and close the sockets; frames that peers do not take within LINGER_MS are dropped."""
        if self._stopped:
            return
        if self._thread.is_alive():
            self.do(self._end)
            self._thread.join()
        self._stopped = True
        if self._pool is not None:
            self._pool.shutdown()
        self._context.destroy(linger=LINGER_MS)
        self._listener.close()
        os.close(self._wake_read)
        os.close(self._wake)

    @property
    def is_compiled(self) -> bool:
        """Whether the compiled loop serves, which takes seconds to compile when it first does on this machine."""
        return self._loop is not None

    @property
    def n_allowed(self) -> int | None:
        """Keys on the master's list; None: there are no keys."""
        return None if self.port.admission is None else len(self.port.admission.keys)

    @property
    def handshake_bytes(self) -> int:
        """This port sends more to a peer only when their handshake has succeeded."""
        return CURVE_HANDSHAKE_BYTES if self._curve is not None else NULL_HANDSHAKE_BYTES

    def note_deliveries(self, on: bool) -> set[int]:
        """File numbers of the connections that delivered a whole message since the last call; noted only while `on`.

        For slave/connections.py, on its own thread.
        """
        delivered, self._delivered = self._delivered, set() if on else None
        if on != (delivered is not None):
            self._wake_up()  # only the Python loop notes them
        return delivered or set()

    def do(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have the data thread run this call, once it runs, while no landing is under way. Ignored after stop()."""
        if not self._stopped:
            self._posted.put(partial(call, *args, **kwargs))
            self._wake_up()

    def _wake_up(self) -> None:
        """Wake the data thread; from any thread."""
        try:
            os.write(self._wake, b"x")
        except BlockingIOError:
            pass  # the thread has unread wake-ups already and will find what there is

    # ---- the thread ----

    def _run(self) -> None:
        try:
            if self._cpu is not None:
                os.sched_setaffinity(0, {self._cpu})  # of this thread alone
            while not self._ended:
                self._turn()
        except BaseException as error:
            logging.getLogger("dips.slave").exception("the data thread ended")
            self.crashed(error)

    def _turn(self) -> None:
        """Handle ended landings first, then posted calls, then messages; then wait, if nothing is left to read."""
        while not self._landed.empty():
            self._finish(self._landed.get())
        if not self._posted.empty():
            # Run posted calls. They change what landings rely on, so no landing may be under way.
            while self._under_way:
                self._finish(self._landed.get())
            while not self._posted.empty():
                self._posted.get()()
            self._renew = True
        if self._ended:
            return
        if self._handshakes_due:
            # Admit authorised clients, and count failed handshakes. Probes that connect and close are none.
            if self._gate is not None:
                self._gate.answer_all()
            for failed in self._handshakes.failures():
                if failed.failure is not Failure.KEY:  # the gate has counted refused keys itself
                    self.port.refuse_connection(f"a handshake failed: {failed.sentence}")
                    self._counters_moved = True
        # The compiled loop, unless something is on just now that only the Python loop does.
        loop = None if self._delivered is not None or "slave.data.before_answer" in hits() else self._loop
        if loop is not None:
            self._turn_compiled(loop)
            return
        more = self._receive_some()
        self._refresh_figures()
        self._handshakes_due = True  # without a wait no event reports them
        if not more:
            timeout_ms = LOOK_AGAIN_MS if self._handshakes.unsettled else None
            if self._counters_moved:
                timeout_ms = round(BEAT_REFRESH_S * 1000)
            ready = dict(self._poller.poll(timeout_ms))
            self._counters_moved |= bool(ready)
            sockets = (self._handshakes.socket, None if self._gate is None else self._gate.socket)
            self._handshakes_due = self._handshakes.unsettled or any(socket in ready for socket in sockets)
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)

    def _refresh_figures(self) -> None:
        now_s = time.monotonic()
        if self._counters_moved and now_s - self._beat_s >= BEAT_REFRESH_S:
            self.figures, self._beat_s, self._counters_moved = self.port.figures(), now_s, False

    # ---- the compiled loop ----

    def _turn_compiled(self, loop: ServeLoop) -> None:
        """As the rest of _turn(), waiting included; loop: serves all messages but those that it leaves."""
        if self._renew:
            loop.renew(self.port)
            self._renew = False
        loop.give_up()
        # Until then it looks for messages alone.
        now_s, until_s = time.monotonic(), math.inf
        if self._handshakes.unsettled:
            until_s = now_s + LOOK_AGAIN_MS / 1000
        if loop.holds_memory:
            until_s = min(until_s, now_s + GIVE_UP_S)
        if self._counters_moved:
            until_s = min(until_s, self._beat_s + BEAT_REFRESH_S)
        why = loop.serve(until_s, BEAT_REFRESH_S)
        self._counters_moved |= loop.settle(self.port)
        if why == COMPLETE:
            self.port.note_complete(loop.complete)  # before its sender hears of it, as in the Python loop
            loop.flush()
        elif why == UNUSUAL:
            peer, frames, more = loop.left()
            message = self._rest_of(peer, frames, more)
            if message is not None:
                self._serve(message)
                self._land_admitted()
        self._refresh_figures()
        self._handshakes_due = True
        if why == NEWS:
            self._counters_moved = True  # by what the next turn does first
            if loop.is_ready(1):
                os.read(self._wake_read, 4096)

    # ---- parts of the Python loop ----

    def _receive_some(self) -> bool:
        """Serve arrived messages; those that wait for a landing hold their frames, so only few may wait. Returns
        whether there may be more."""
        for _ in range(RECEIVE_BATCH):
            if len(self._admitted) == TOGETHER or (self._admitted and self._deferred):
                self._land_admitted()
            if max(self._under_way, len(self._deferred)) >= self._most_under_way:
                self._finish(self._landed.get())
            message = self._receive()
            if message is None:
                self._land_admitted()
                return False
            self._serve(message)
        self._land_admitted()
        return True

    def _receive(self) -> DataMessage | None:
        try:
            peer = self._router.recv(NOW)
        except zmq.Again:
            return None
        frame = self._router.recv(NOW, copy=False)
        return self._rest_of(peer, [frame], frame.more)

    def _rest_of(self, peer: bytes, first: Sequence[zmq.Frame | ReceivedFrame], more: bool) -> DataMessage | None:
        """The whole message; None for one of too many frames."""
        frames, n_frames = list(first), len(first)
        while more:
            frame = self._router.recv(NOW, copy=False)
            n_frames, more = n_frames + 1, frame.more
            if n_frames <= KEPT_FRAMES:
                frames.append(frame)
            elif n_frames > MOST_FRAMES:
                self.port.refuse_connection(f"a message of more than {MOST_FRAMES} frames: all connections are closed")
                self._counters_moved = True
                self._drop_peers()
                return None
        noted = self._delivered
        if noted is not None:
            with contextlib.suppress(zmq.ZMQError):  # not every frame names its connection
                noted.add(int(frames[0].get(zmq.SRCFD)))
        return peer, frames

    def _serve(self, message: DataMessage) -> None:
        peer, frames = message
        self._counters_moved = True
        user = "" if self.port.admission is None else self._user_of(frames[0], self.port.admission)
        step = self.port.begin([frame.buffer for frame in frames], peer, user)
        if step is None:
            self._deferred.append(message)
        elif isinstance(step, Answer):
            self._send(peer, step)
            if self._loop is not None and step.header.op is DataOp.CHUNK:
                self._loop.meet(self.port, peer)
        elif self._pool is None:
            self._admitted.append((peer, step))
        else:
            self._under_way += 1
            self._pool.submit(self._land, peer, step)

    def _user_of(self, frame: zmq.Frame | ReceivedFrame, admission: Admission) -> str:
        """The user of a message's connection. A connection whose key has left the list is closed."""
        user = str(frame.get("User-Id"))
        if not admission.listed(user) and cut(int(frame.get(zmq.SRCFD)), self._listener.getsockname()[1]):
            self.port.refuse_connection(f"an open connection ends, its data key {user[:8]} left the master's list")
        return user

    # ---- landings on this thread ----

    def _land_admitted(self) -> None:
        """Land all admitted chunks, then send their answers; then serve the messages that waited for one of them."""
        while self._admitted:
            admitted, self._admitted = self._admitted, []
            outcomes = [job.run() for _, job in admitted]
            for (peer, job), refused in zip(admitted, outcomes, strict=True):
                self._send(peer, self.port.end(job, refused))
            self._serve_deferred()

    # ---- landings on the pool ----

    def _land(self, peer: bytes, job: LandingJob) -> None:
        """Run a landing; on a thread of the pool."""
        try:
            outcome: Refused | BaseException | None = job.run()
        except BaseException as error:
            outcome = error
        self._landed.put((peer, job, outcome))
        self._wake_up()

    def _finish(self, ended: tuple[bytes, LandingJob, Refused | BaseException | None]) -> None:
        peer, job, outcome = ended
        self._under_way -= 1
        if outcome is not None and not isinstance(outcome, Refused):
            raise outcome
        self._send(peer, self.port.end(job, outcome))
        self._serve_deferred()

    def _serve_deferred(self) -> None:
        for _ in range(len(self._deferred)):
            self._serve(self._deferred.popleft())

    # ---- answers ----

    def _send(self, peer: bytes, answer: Answer) -> None:
        """Send an answer. A peer that is gone or does not read loses it, and asks again (docs/protocol.md)."""
        frames: list[bytes | memoryview] = [answer.header.encode()]
        if answer.payload is not None:
            frames.append(answer.payload)
        for faulty in _through_failpoint(frames):
            self._send_frames(peer, faulty)

    def _send_frames(self, peer: bytes, frames: Sequence[bytes | memoryview]) -> None:
        try:
            self._router.send(peer, NOW_MORE)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return
            raise
        # A payload is sent from the version's own memory, and the process does not wait for that: a peer that asks and
        # never reads blocks nothing (I15 of docs/architecture.md). When the memory is overwritten before, the bytes do
        # not have the checksum of their header, and the reader asks again (slave/data_port.py, Answer).
        *first, last = frames
        for frame in first:
            self._router.send(frame, NOW_MORE)
        if isinstance(last, bytes) or len(last) < COPIED_BYTES:
            self._router.send(last, NOW)
        else:
            self._router.send(self._outgoing.frame(last), NOW, copy=False)

    def _end(self) -> None:
        self._ended = True


def _loop_for(name: LoopName, run_id: str, data_threads: int, checks_xxh3: bool) -> ServeLoop | None:
    """The compiled loop; None: the Python loop serves alone. Raises ConfigError where the compiled one was asked for by
    name and cannot be had."""
    why_python = why_not()
    if data_threads > 1:
        why_python = "landings run on several threads, which only the Python loop does"
    elif not checks_xxh3:
        why_python = "checksums are not xxh3-64"
    if name == "compiled" and why_python:
        raise ConfigError(f"the data port's compiled loop cannot be had: {why_python}")
    wanted = AUTO if name == "auto" else name
    return None if wanted == "python" or why_python else ServeLoop(run_id)


def _through_failpoint(frames: list[bytes | memoryview]) -> list[list[bytes | memoryview]]:
    """The answer as it is sent: once, unless a failpoint loses, duplicates or corrupts it."""
    try:
        action = failpoint("slave.data.before_answer")
    except OSError:
        return []  # as when the peer is gone
    if action is None:
        return [frames]
    if action.kind is FailpointKind.CORRUPT:
        *first, last = frames
        garbled = bytearray(last)
        garbled[-1] ^= 1
        return [[*first, bytes(garbled)]]
    return {FailpointKind.DROP: [], FailpointKind.DUP: [frames, frames]}.get(action.kind, [frames])


@cache
def _statm() -> int:
    """The file stays open: the process may have no other left when its memory counts."""
    return os.open("/proc/self/statm", os.O_RDONLY)


def resident_bytes() -> int:
    """Resident memory of this process without files that are mapped: heap, arrays, frames. From any thread."""
    _, resident, shared, *_ = os.pread(_statm(), 256, 0).split()
    return (int(resident) - int(shared)) * PAGE_BYTES
