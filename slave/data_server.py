"""The data port's thread: one ROUTER socket, and an inproc socket that wakes it for the control side's words.

Everything that touches the socket or the DataPort runs on the thread "dips-data"; the control side only posts
functions. Never shares a socket or a thread with control, so that a saturated link starves no heartbeat.
"""

from __future__ import annotations

import logging
import queue
import resource
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import zmq

from dips.core.data_header import MAX_HEADER_BYTES
from dips.core.errors import ConfigError
from dips.core.failpoint_spec import Kind
from dips.core.failpoints import failpoint
from dips.core.ids import PushId, Version
from dips.core.messages import SlaveBeat
from dips.slave.data_port import Answer, DataPort
from dips.slave.memory import F32, Buffer
from dips.slave.state.checks import MAX_WINDOW_CHUNKS
from dips.slave.state.events import PushStaged
from dips.slave.state.staging import ShardMap

HANDSHAKE_MS = 5_000
"""A peer that does not speak ZMTP is dropped after this."""

HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 30_000
"""A frozen peer is dropped after this and its unread answers are freed. A 1 MiB chunk takes 8 s at 1 Mbit/s."""

LINGER_MS = 500
PAGE_BYTES = resource.getpagesize()
RECEIVE_BATCH = 32
"""Messages taken before the control side's words are looked at again: 32 chunks are about 10 ms of work."""


class DataServer:
    """Binds at once and serves from start() on.

    staged, refused and crashed are called on the data thread. Raises ConfigError when the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        run_id: str,
        max_chunk_bytes: int,
        staged: Callable[[PushStaged], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._port = DataPort(run_id, staged)
        self._crashed = crashed
        self._words: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = False
        self._context = zmq.Context()
        self._router = self._bind(host, port, max_chunk_bytes)
        self._hear, self._wake = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._hear.bind("inproc://words")
        self._wake.connect("inproc://words")
        self._beat = SlaveBeat()
        self._thread = threading.Thread(target=self._run, name="dips-data", daemon=True)

    def _bind(self, host: str, port: int, max_chunk_bytes: int) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        options = {
            zmq.MAXMSGSIZE: max_chunk_bytes + MAX_HEADER_BYTES,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
            # Each peer has at most MAX_WINDOW_CHUNKS unanswered, so neither queue can overflow in an honest run, and
            # none can hold more than 2 x MAX_WINDOW_CHUNKS x max_chunk_bytes of this process's memory.
            zmq.RCVHWM: MAX_WINDOW_CHUNKS,
            zmq.SNDHWM: MAX_WINDOW_CHUNKS,
            zmq.LINGER: LINGER_MS,
            zmq.ROUTER_MANDATORY: 1,
        }
        for option, value in options.items():
            router.setsockopt(option, value)
        address = f"tcp://{host}:{port or '*'}"
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"the data port cannot bind {address}: {error.strerror or error}; choose another data_port, or 0"
            ) from error
        return router

    @property
    def endpoint(self) -> str:
        """The bound endpoint, "tcp://127.0.0.1:41234"."""
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the sockets; frames that peers do not take within LINGER_MS are dropped."""
        if self._thread.is_alive():
            self._post(self._end)
            self._thread.join()
        self._context.destroy(linger=LINGER_MS)

    def beat(self) -> SlaveBeat:
        """The latest counters; may be called from any thread."""
        return self._beat

    @property
    def last_refusal(self) -> str:
        """Why the last refused message was refused; empty when none was."""
        return self._port.last_refusal

    # ---- the control side's words; done is called on the data thread ----

    def set_epoch(self, epoch: int) -> None:
        self._post(lambda: self._port.set_epoch(epoch))

    def set_memory(self, shard: ShardMap | None, staging: F32 | None, done: Callable[[], None]) -> None:
        self._post(lambda: self._port.set_memory(shard, staging))
        self._post(done)

    def set_readable(self, versions: Mapping[Version, Buffer], done: Callable[[], None]) -> None:
        self._post(lambda: self._port.set_readable(versions))
        self._post(done)

    def open(self, push: PushId, attempt: int, slot: int, opening: int) -> None:
        self._post(lambda: self._port.open(push, attempt, slot, opening))

    def close(self, push: PushId) -> None:
        self._post(lambda: self._port.close(push))

    def close_all(self) -> None:
        self._post(self._port.close_all)

    def _post(self, word: Callable[[], None]) -> None:
        self._words.put(word)
        try:
            self._wake.send(b"", zmq.NOBLOCK)
        except zmq.Again:
            pass  # the thread has unread wake-ups already and will find the word

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._ended:
                self._turn()
        except BaseException as error:
            logging.getLogger("dips.slave").exception("the data thread ended")
            self._crashed(error)

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._hear, zmq.POLLIN)
        ready = dict(poller.poll())
        if self._hear in ready:
            self._hear_words()
        if self._router in ready and not self._ended:
            for _ in range(RECEIVE_BATCH):
                if not self._receive():
                    break
        self._beat = self._port.beat()

    def _hear_words(self) -> None:
        while self._hear.poll(0):
            self._hear.recv()
        while not self._words.empty():
            self._words.get()()

    def _receive(self) -> bool:
        try:
            peer, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        answer = self._port.answer([frame.buffer for frame in frames])
        self._send(peer.bytes, answer)
        return True

    def _send(self, peer: bytes, answer: Answer) -> None:
        """A peer that is gone, or reads nothing, loses its answer: it asks again (docs/protocol.md, the data flow)."""
        frames: list[bytes | memoryview] = [answer.header.encode()]
        if answer.payload is not None:
            frames.append(answer.payload)
        for faulty in _through_failpoint(frames):
            self._send_frames(peer, faulty)

    def _send_frames(self, peer: bytes, frames: list[bytes | memoryview]) -> None:
        try:
            self._router.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return
            raise
        # Copied on purpose: a frame that referred to the version's memory would, with a peer that asks and never
        # reads, hold that buffer for ever and stop the rounds (I15 of docs/architecture.md). The copy costs
        # 0.1 ms for 1 MiB.
        self._router.send_multipart(frames, zmq.NOBLOCK)

    def _end(self) -> None:
        self._ended = True


def _through_failpoint(frames: list[bytes | memoryview]) -> list[list[bytes | memoryview]]:
    """The answer as it goes out: once, unless a failpoint loses, doubles or garbles it."""
    try:
        action = failpoint("slave.data.before_answer")
    except OSError:
        return []  # as when the peer is gone
    if action is None:
        return [frames]
    if action.kind is Kind.CORRUPT:
        *first, last = frames
        garbled = bytearray(last)
        garbled[-1] ^= 1
        return [[*first, bytes(garbled)]]
    return {Kind.DROP: [], Kind.DUP: [frames, frames]}.get(action.kind, [frames])


def with_resident_bytes(beat: SlaveBeat) -> SlaveBeat:
    """Fill in this process's resident memory, as the kernel counts it."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return replace(beat, resident_bytes=pages * PAGE_BYTES)
