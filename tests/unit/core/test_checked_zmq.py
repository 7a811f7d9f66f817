"""The harness's libzmq behaves as libzmq, and complains of what libzmq would answer with damage."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray
from support.checked_memory import Memory, Outside, Twins
from support.checked_zmq import CheckedZmq, Misused

from dips.core.math.simd_numba import address_of, compiled, peek8
from dips.core.net.zmq_numba import (
    DONTWAIT,
    FREED,
    MESSAGE_BYTES,
    POLL_ITEM,
    SNDMORE,
    Messages,
    PollItems,
    ReceivedFrame,
    is_ready,
    new_messages,
    number_of_user,
    zmq_errno,
    zmq_msg_close,
    zmq_msg_data,
    zmq_msg_init,
    zmq_msg_init_data,
    zmq_msg_init_size,
    zmq_msg_more,
    zmq_msg_move,
    zmq_msg_recv,
    zmq_msg_send,
    zmq_msg_size,
    zmq_poll,
    zmq_send,
)


@compiled
def echo(socket: int, messages: Messages) -> int:
    """Send one message back, frame by frame; how many there were, or minus the error."""
    place, n_frames, more = address_of(messages), 0, True
    while more:
        zmq_msg_init(place)
        if zmq_msg_recv(place, socket, DONTWAIT) < 0:
            zmq_msg_close(place)
            return -int(zmq_errno())
        more = zmq_msg_more(place) != 0
        if zmq_msg_send(place, socket, SNDMORE | DONTWAIT if more else DONTWAIT) < 0:
            zmq_msg_close(place)
            return -int(zmq_errno())
        n_frames += 1
    return n_frames


@compiled
def first_byte_of(socket: int, messages: Messages, after: int) -> int:
    """The byte `after` those of a frame, before or after it is closed (after -1)."""
    place = address_of(messages)
    zmq_msg_init(place)
    zmq_msg_recv(place, socket, DONTWAIT)
    data, size = zmq_msg_data(place), zmq_msg_size(place)
    if after >= 0:
        found = int(peek8(data + size - 1 + after))
        zmq_msg_close(place)
        return found
    zmq_msg_close(place)
    return int(peek8(data))


@compiled
def wrong(what: int, socket: int, messages: Messages) -> None:
    place = address_of(messages)
    zmq_msg_init(place)
    if what == 0:  # never closed
        zmq_msg_recv(place, socket, DONTWAIT)
        zmq_msg_init(place)
    elif what == 1:
        zmq_msg_close(place)
        zmq_msg_close(place)
    elif what == 2:
        zmq_msg_close(place)
        zmq_msg_recv(place, socket, DONTWAIT)
    elif what == 3:
        zmq_msg_send(place, socket, DONTWAIT)
        zmq_msg_size(place)
    elif what == 4:
        zmq_msg_recv(place, socket, 0)
    else:
        zmq_msg_init(place + MESSAGE_BYTES)


@compiled
def lend(socket: int, payload: NDArray[np.uint8], free: int, counts: NDArray[np.int64], messages: Messages) -> int:
    place = address_of(messages)
    zmq_msg_init_data(place, address_of(payload), len(payload), free, address_of(counts))
    if zmq_msg_send(place, socket, SNDMORE | DONTWAIT) < 0:
        zmq_msg_close(place)
        return -int(zmq_errno())
    zmq_msg_init_size(place, 2)
    return int(zmq_send(socket, zmq_msg_data(place), 2, DONTWAIT)) + int(zmq_msg_close(place))


@compiled
def receive_for(user: NDArray[np.uint8], socket: int, messages: Messages) -> bool:
    """Whether the message is this user's; it lies in the second place then."""
    place = address_of(messages)
    zmq_msg_init(place)
    zmq_msg_recv(place, socket, DONTWAIT)
    zmq_msg_init(place + MESSAGE_BYTES)
    zmq_msg_move(place + MESSAGE_BYTES, place)
    return number_of_user(place + MESSAGE_BYTES, user.reshape(1, -1)) == 0


@compiled
def poll(items: PollItems) -> bool:
    return zmq_poll(address_of(items), len(items), 0) > 0 and is_ready(items, 0)


@pytest.fixture
def checked() -> CheckedZmq:
    return CheckedZmq(Memory())


def twin(checked: CheckedZmq, function: Callable[..., object]) -> Callable[..., object]:
    return Twins(checked.memory, checked.functions).of(function)


def test_messages_come_and_go(checked: CheckedZmq) -> None:
    end = checked.socket()
    end.inbox.append(([b"a", b"", b"ccc"], ""))
    run = twin(checked, echo)
    assert run(end.underlying, new_messages(1)) == 3
    assert end.sent == [[b"a", b"", b"ccc"]]
    assert run(end.underlying, new_messages(1)) == -zmq.EAGAIN
    end.refuses = lambda: zmq.EHOSTUNREACH
    end.inbox.append(([b"a"], ""))
    assert run(end.underlying, new_messages(1)) == -zmq.EHOSTUNREACH
    assert checked.n_open == 0


def test_a_frame_has_its_bytes_until_it_is_closed(checked: CheckedZmq) -> None:
    end = checked.socket()
    run = twin(checked, first_byte_of)
    for _ in range(3):
        end.inbox.append(([b"xyz"], ""))
    assert run(end.underlying, new_messages(1), 0) == ord("z")
    with pytest.raises(Outside):
        run(end.underlying, new_messages(1), 1)
    with pytest.raises(Outside):
        run(end.underlying, new_messages(1), -1)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (0, "over one that was not closed"),
        (1, "closed twice"),
        (2, "that is closed"),
        (3, "that is sent"),
        (4, "would wait"),
        (5, "outside every"),
    ],
)
def test_misuse(checked: CheckedZmq, what: int, why: str) -> None:
    end = checked.socket()
    end.inbox.append(([b"xyz"], ""))
    with pytest.raises((Misused, Outside), match=why):
        twin(checked, wrong)(what, end.underlying, new_messages(1))


def test_a_lent_payload_is_counted_once_it_is_free(checked: CheckedZmq) -> None:
    end, payload, counts = checked.socket(), np.arange(9, dtype=np.uint8), np.zeros(1, np.int64)
    run = twin(checked, lend)
    checked.memory.add(counts)
    assert run(end.underlying, payload, FREED, counts, new_messages(1)) == 2
    assert end.sent == [[payload.tobytes(), bytes(2)]]
    end.refuses = lambda: zmq.EAGAIN
    assert run(end.underlying, payload, FREED, counts, new_messages(1)) == -zmq.EAGAIN
    assert counts[0] == 2
    assert checked.n_open == 0


def test_python_takes_over_a_frame_and_its_user(checked: CheckedZmq) -> None:
    end, messages = checked.socket(), new_messages(2)
    end.inbox.append(([b"xyz"], "user"))
    checked.memory.add(messages)
    run = twin(checked, receive_for)
    assert run(np.frombuffer(b"user", np.uint8), end.underlying, messages) is True
    with checked.for_python():
        frame = ReceivedFrame(messages, 1)
        assert (frame.bytes, frame.get("User-Id"), frame.more) == (b"xyz", "user", False)
        del frame
        gc.collect()
    end.inbox.append(([b"xyz"], "user-2"))
    assert run(np.frombuffer(b"user", np.uint8), end.underlying, messages) is False


def test_poll_finds_what_is_there(checked: CheckedZmq) -> None:
    end = checked.socket()
    items = np.zeros(1, POLL_ITEM).view(np.recarray)  # whose elements have attributes, as numba's do
    items["socket"] = end.underlying
    run = twin(checked, poll)
    assert not run(items)
    end.inbox.append(([b"a"], ""))
    assert run(items)
