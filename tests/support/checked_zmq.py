"""libzmq as the twins of compiled code call it (support/checked_memory.py): in this process, one call after the other.

Each address is checked. A message is what zmq.h says: it is initialised, received into or sent, and closed. Raises
Misused for one that is used before or after, that is initialised over its bytes, or that was not closed; a payload that
was closed or sent may not be read any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray
from support.checked_memory import Memory

from dips.core.net import zmq_numba
from dips.core.net.zmq_numba import MESSAGE_BYTES, POLL_ITEM


class Misused(AssertionError):
    """A call that libzmq answers with damage."""


class _State(Enum):
    LIVE = "initialised"  # zmq_msg_close() is to be called for it
    EMPTY = "sent or moved away"  # it may be closed, or initialised again
    CLOSED = "closed"


@dataclass
class _Message:
    state: _State = _State.LIVE
    data: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    place: int = 0
    """Of the data, if there are any."""
    more: bool = False
    user: NDArray[np.uint8] | None = None
    hint: int = 0
    """Where the data's return is counted."""


@dataclass
class FakeSocket:
    underlying: int
    inbox: deque[tuple[list[bytes], str]] = field(default_factory=deque)
    """Messages, each with the user id of its connection."""
    sent: list[list[bytes]] = field(default_factory=list)
    refuses: Callable[[], int] = lambda: 0
    """Asked before the first frame of each message that is sent: an errno, or 0."""
    rest: deque[tuple[bytes, bool, str]] = field(default_factory=deque)
    _parts: list[bytes] = field(default_factory=list)


class CheckedZmq:
    """functions: what Twins() is given. close() at the end."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._messages: dict[int, _Message] = {}
        self._sockets: dict[int, FakeSocket] = {}
        self._next = 1
        self._errno = 0
        self.polled: Callable[[int], int] = lambda timeout_ms: 0
        """Called when a poll finds nothing: how many items became ready then."""
        self.fails: Callable[[], int] = lambda: 0
        """Asked at each frame that is received or sent: an errno, or 0."""
        self.is_late = False
        """Whether payloads that were sent stay in its hands until give_back()."""
        self._sent: deque[_Message] = deque()
        names = [name for name in dir(self) if name.startswith("zmq_")]
        self.functions: dict[str, Callable[..., int]] = {name: getattr(self, name) for name in names}

    def socket(self) -> FakeSocket:
        self._next += 1
        made = self._sockets[self._next << 12] = FakeSocket(self._next << 12)
        return made

    @property
    def n_open(self) -> int:
        return sum(message.state is _State.LIVE for message in self._messages.values())

    def give_back(self) -> bool:
        """Give back the payload that has been in its hands the longest. Returns whether there was one."""
        if self._sent:
            self._drop(self._sent.popleft(), _State.CLOSED)
            return True
        return False

    @contextmanager
    def for_python(self) -> Iterator[None]:
        """Python's own calls (zmq_numba.ReceivedFrame) come here too. Give up their frames before this ends."""

        def call(name: str, *arguments: int) -> int:
            with self.memory.trusting():
                return self.functions[name](*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zmq_numba, "_call", call)
            yield

    def zmq_msg_init(self, place: int) -> int:
        return self._new(place, np.zeros(0, np.uint8), writable=False)

    def zmq_msg_init_size(self, place: int, n_bytes: int) -> int:
        return self._new(place, np.zeros(n_bytes, np.uint8), writable=True)

    def zmq_msg_init_data(self, place: int, data: int, n_bytes: int, free: int, hint: int) -> int:
        """The free function is freed(): it counts at `hint`, when the message was sent or closed."""
        if free != zmq_numba.freed():
            raise Misused("zmq_msg_init_data without freed(): nothing says when the bytes are free")
        self.memory.check(hint, 8, write=True)
        return self._new(place, np.frombuffer(self.memory.read(data, n_bytes), np.uint8), writable=False, hint=hint)

    def zmq_msg_move(self, into: int, source: int) -> int:
        self._drop(self._at(into), _State.EMPTY)
        self._drop_handle(into)
        handle = self._handle(source)
        if self._at(source).state is not _State.LIVE:
            raise Misused("a message is moved that is not initialised")
        self.memory.write(into, handle.to_bytes(8, "little"))
        self._new_handle(source, _Message(_State.EMPTY))
        return 0

    def zmq_msg_close(self, place: int) -> int:
        message = self._at(place)
        if message.state is _State.CLOSED:
            raise Misused("a message is closed twice")
        self._drop(message, _State.CLOSED)
        return 0

    def zmq_msg_data(self, place: int) -> int:
        return self._at(place, _State.LIVE).place

    def zmq_msg_size(self, place: int) -> int:
        return len(self._at(place, _State.LIVE).data)

    def zmq_msg_more(self, place: int) -> int:
        return int(self._at(place, _State.LIVE).more)

    def zmq_msg_get(self, place: int, what: int) -> int:
        self._at(place, _State.LIVE)
        if what != zmq.SRCFD:
            raise Misused(f"zmq_msg_get of {what}")
        return 7

    def zmq_msg_gets(self, place: int, name: int) -> int:
        message, text = self._at(place, _State.LIVE), b""
        while not text.endswith(b"\0"):
            text += self.memory.read(name + len(text), 1)
        if text != b"User-Id\0" or message.user is None:
            self._errno = zmq.EINVAL
            return 0
        return self.memory.of_array(message.user)

    def zmq_msg_recv(self, place: int, socket: int, flags: int) -> int:
        message, end = self._at(place, _State.LIVE), self._sockets[int(socket)]
        if flags != zmq.DONTWAIT:
            raise Misused("zmq_msg_recv would wait")
        if failed := self.fails():
            return self._fail(failed)
        if not end.rest and end.inbox:
            frames, user = end.inbox.popleft()
            end.rest.extend((frame, index + 1 < len(frames), user) for index, frame in enumerate(frames))
        if not end.rest:
            return self._fail(zmq.EAGAIN)
        frame, message.more, user = end.rest.popleft()
        message.user = np.frombuffer(user.encode() + b"\0", np.uint8) if user else None
        self._drop(message, _State.LIVE)
        self._fill(message, np.frombuffer(frame, np.uint8).copy(), writable=False)
        return len(frame)

    def zmq_msg_send(self, place: int, socket: int, flags: int) -> int:
        message = self._at(place, _State.LIVE)
        data = message.data.tobytes()
        if self._send(int(socket), data, int(flags)) < 0:
            return -1
        if self.is_late and message.hint:
            self._sent.append(replace(message))
            message.data, message.hint = np.zeros(0, np.uint8), 0
        self._drop(message, _State.EMPTY)
        return len(data)

    def zmq_send(self, socket: int, place: int, n_bytes: int, flags: int) -> int:
        return self._send(int(socket), self.memory.read(place, n_bytes), int(flags))

    def zmq_poll(self, place: int, n: int, timeout_ms: int) -> int:
        self.memory.check(place, int(n) * POLL_ITEM.itemsize, write=True)
        ready = 0
        for index in range(n):
            at = place + index * POLL_ITEM.itemsize
            item = np.frombuffer(self.memory.read(at, POLL_ITEM.itemsize), POLL_ITEM).copy()
            end = self._sockets.get(int(item["socket"][0]))
            item["revents"] = zmq.POLLIN if end is not None and (end.inbox or end.rest) else 0
            ready += bool(item["revents"][0])
            self.memory.write(at, item.tobytes())
        return ready or self.polled(int(timeout_ms))

    def zmq_errno(self) -> int:
        return self._errno

    def _send(self, socket: int, data: bytes, flags: int) -> int:
        end = self._sockets[socket]
        if flags & ~zmq.SNDMORE != zmq.DONTWAIT:
            raise Misused("a frame is sent so that it may wait")
        refused = self.fails() or (end.refuses() if not end._parts else 0)
        if refused:
            return self._fail(refused)
        end._parts.append(data)
        if not flags & zmq.SNDMORE:
            end.sent.append(end._parts)
            end._parts = []
        return len(data)

    def _fail(self, errno: int) -> int:
        self._errno = errno
        return -1

    def _new(self, place: int, data: NDArray[np.uint8], *, writable: bool, hint: int = 0) -> int:
        self.memory.check(place, MESSAGE_BYTES, write=True)
        before = self._messages.get(self._handle(place))
        if before is not None and before.state is _State.LIVE:
            raise Misused("a message is initialised over one that was not closed")
        self._drop_handle(place)
        message = _Message(hint=hint)
        self._fill(message, data, writable=writable)
        self._new_handle(place, message)
        return 0

    def _fill(self, message: _Message, data: NDArray[np.uint8], *, writable: bool) -> None:
        message.data, message.place = data, self.memory.add(data, writable=writable) if len(data) else 0

    def _drop(self, message: _Message, state: _State) -> None:
        """The bytes are gone, and their memory may not be touched any more."""
        if len(message.data):
            self.memory.remove(int(message.place))
        if message.hint:
            count = int.from_bytes(self.memory.read(message.hint, 8), "little", signed=True)
            self.memory.write(message.hint, (count + 1).to_bytes(8, "little", signed=True))
        message.data, message.place, message.hint, message.state = np.zeros(0, np.uint8), 0, 0, state

    def _new_handle(self, place: int, message: _Message) -> None:
        self._next += 1
        self._messages[self._next] = message
        self.memory.write(place, self._next.to_bytes(8, "little"))

    def _drop_handle(self, place: int) -> None:
        self._messages.pop(self._handle(place), None)

    def _handle(self, place: int) -> int:
        self.memory.check(place, MESSAGE_BYTES)
        return int.from_bytes(self.memory.read(place, 8), "little")

    def _at(self, place: int, state: _State | None = None) -> _Message:
        message = self._messages.get(self._handle(place))
        if message is None:
            raise Misused("a message is used that was never initialised")
        if state is not None and message.state is not state:
            raise Misused(f"a message is used that is {message.state.value}")
        return message
