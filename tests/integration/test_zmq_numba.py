"""Compiled code over pyzmq's own libzmq: messages both ways, payloads from their memory, polling, clock, user id."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import zmq
import zmq.backend
from numpy.typing import NDArray
from support.waiting import until

from dips.core.math.simd_numba import address, address_of, atomic_get, compiled
from dips.core.net import zmq_numba
from dips.core.net.zmq_numba import (
    DONTWAIT,
    EAGAIN,
    FREED,
    MESSAGE_BYTES,
    SNDMORE,
    SRCFD,
    Messages,
    PollItems,
    ReceivedFrame,
    is_ready,
    new_messages,
    now_s,
    number_of_user,
    poll_items,
    zmq_errno,
    zmq_msg_close,
    zmq_msg_data,
    zmq_msg_get,
    zmq_msg_init,
    zmq_msg_init_data,
    zmq_msg_more,
    zmq_msg_recv,
    zmq_msg_send,
    zmq_msg_size,
    zmq_poll,
    zmq_send,
)

Socket = zmq.Socket[bytes]
Bytes = NDArray[np.uint8]
Counter = NDArray[np.int64]


@compiled
def receive(socket: int, messages: Messages) -> int:
    """Frames of one message, each in a place of its own; minus the error's number if there is none."""
    place, n_frames = address_of(messages), 0
    while True:
        zmq_msg_init(place)
        if zmq_msg_recv(place, socket, DONTWAIT) < 0:
            error = zmq_errno()
            zmq_msg_close(place)
            return -int(error)
        n_frames += 1
        if not zmq_msg_more(place):
            return n_frames
        place += MESSAGE_BYTES


@compiled
def send(socket: int, header: np.ndarray, payload: np.ndarray, freed: int, counter: Counter, scratch: Messages) -> int:
    """One message of two frames, the second from where it lies."""
    if zmq_send(socket, address_of(header), len(header), SNDMORE | DONTWAIT) < 0:
        return -int(zmq_errno())
    message = address_of(scratch)
    zmq_msg_init_data(message, address_of(payload), len(payload), freed, address_of(counter))
    return int(zmq_msg_send(message, socket, DONTWAIT))


@compiled
def wait(items: PollItems, timeout_ms: int) -> int:
    """Which items are ready, as bits."""
    if zmq_poll(address_of(items), len(items), timeout_ms) <= 0:
        return 0
    found = 0
    for index in range(len(items)):
        found |= is_ready(items, index) << index
    return found


@compiled
def facts(messages: Messages) -> tuple[int, int, int]:
    place = address_of(messages)
    return zmq_msg_size(place), zmq_msg_data(place), zmq_msg_get(place, SRCFD)


@compiled
def given_back(counter: Counter) -> int:
    return int(atomic_get(address_of(counter)))


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    with zmq.Context() as made:
        yield made


@pytest.fixture
def ends(context: zmq.Context[Socket]) -> Iterator[tuple[Socket, Socket]]:
    """A ROUTER and a DEALER that is connected to it over TCP."""
    with context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        yield router, dealer


def received(socket: Socket, messages: Messages) -> int:
    """As `receive`, for a message that comes."""
    socket.poll()
    return receive(socket.underlying, messages)


def test_frames_are_received_where_they_lie_and_taken_over_by_python(ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    payload, messages = os.urandom(1 << 20), new_messages(4)
    dealer.send_multipart([b"header", payload, b""])
    assert received(router, messages) == 4
    identity, header, body, empty = (ReceivedFrame(messages, index) for index in range(4))
    assert (header.bytes, header.more, empty.bytes, empty.more) == (b"header", True, b"", False)
    assert isinstance(header.get(SRCFD), int)
    assert header.get("Socket-Type") == "DEALER"
    with pytest.raises(zmq.ZMQError):
        header.get("User-Id")
    view = body.buffer[5:]
    assert view.readonly
    del body
    gc.collect()
    assert view == payload[5:]  # a part of a frame keeps the frame
    router.send_multipart([identity.bytes, b"answer"])
    assert dealer.recv() == b"answer"
    assert receive(router.underlying, messages) == -EAGAIN


def test_the_places_of_frames_that_were_taken_may_be_used_again(ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    messages = new_messages(2)
    kept = []
    for number in range(100):
        dealer.send(b"%d" % number * 50)
        assert received(router, messages) == 2
        kept.append([ReceivedFrame(messages, index) for index in range(2)])
    assert [frames[1].bytes for frames in kept] == [b"%d" % number * 50 for number in range(100)]


def test_a_payload_is_sent_from_its_own_memory_and_counted_when_it_is_free(ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    payload, header = (
        np.random.default_rng(1).integers(0, 256, 1 << 20).astype(np.uint8),
        np.arange(40).astype(np.uint8),
    )
    counter = np.zeros(1, np.int64)
    for _ in range(10):
        assert send(dealer.underlying, header, payload, FREED, counter, new_messages(1)) == len(payload)
    for _ in range(10):
        _, *frames = router.recv_multipart()
        assert frames == [header.tobytes(), payload.tobytes()]
    until(lambda: given_back(counter) == 10, "all memory is given back")
    dealer.close(linger=0)
    assert given_back(counter) == 10


def test_what_a_closed_socket_had_not_sent_is_given_back(context: zmq.Context[Socket]) -> None:
    payload, counter = np.zeros(1 << 20, np.uint8), np.zeros(1, np.int64)
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect("tcp://127.0.0.1:1")
        for _ in range(5):
            send(dealer.underlying, np.zeros(8, np.uint8), payload, FREED, counter, new_messages(1))
        dealer.close(linger=0)
    until(lambda: given_back(counter) == 5, "all memory is given back")


def test_poll_says_which_of_sockets_and_files_have_something(ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    readable, writable = os.pipe()
    items = poll_items(router, readable, dealer)
    assert zmq_numba.POLL_ITEM.itemsize == 16
    assert wait(items, 0) == 0
    os.write(writable, b"x")
    assert wait(items, -1) == 0b010
    dealer.send(b"x")
    router.poll()
    assert wait(items, -1) == 0b011
    os.read(readable, 1)
    identity, _ = router.recv_multipart()
    router.send_multipart([identity, b"y"])
    dealer.poll()
    assert wait(items, -1) == 0b100
    os.close(readable)
    os.close(writable)


def test_the_clock_is_that_of_python() -> None:
    times = [clock() for _ in range(100) for clock in (time.monotonic, now_s)]
    assert times == sorted(times)


def test_facts_of_a_received_frame(ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    dealer.send(b"abc")
    messages = new_messages(2)
    assert received(router, messages) == 2
    taken = ReceivedFrame(messages, 1)
    again = np.array(taken._message)
    n_bytes, data, connection = facts(again)
    assert (n_bytes, connection) == (3, taken.get(SRCFD))
    assert data


def users(listed: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.array([list(user) for user in listed], np.uint8).reshape(len(listed), -1 if listed else 7)


def test_the_user_id_is_compared_whole(context: zmq.Context[Socket]) -> None:
    """As an authenticator gives it to a connection."""
    from zmq.auth.thread import ThreadAuthenticator

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_plain(domain="*", passwords={"user-12": "secret"})
    try:
        with context.socket(zmq.PULL) as server, context.socket(zmq.PUSH) as client:
            server.plain_server = True
            client.plain_username, client.plain_password = b"user-12", b"secret"
            port = server.bind_to_random_port("tcp://127.0.0.1")
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send(b"x")
            messages = new_messages(1)
            assert received(server, messages) == 1
            place = address(messages)
            for listed, number in (
                ((b"user-12",), 0),
                ((b"user-11", b"user-12"), 1),
                ((b"user-00", b"user-11", b"user-12", b"user-13", b"vser-12"), 2),
                ((b"user-11", b"user-13"), -1),
                ((b"user-1",), -1),
                ((b"user-123",), -1),
                ((b"",), -1),
                ((), -1),
            ):
                assert number_of_user(place, users(listed)) == number
            assert ReceivedFrame(messages, 0).get("User-Id") == "user-12"
    finally:
        authenticator.stop()


def test_no_user_id_is_nobody(ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    dealer.send(b"x")
    messages = new_messages(2)
    assert received(router, messages) == 2
    assert number_of_user(address(messages), users([b"user"])) == -1
    assert number_of_user(address(messages), users([b""])) == -1
    frames = [ReceivedFrame(messages, index) for index in range(2)]
    assert frames[1].bytes == b"x"


def test_this_machine_has_it() -> None:
    assert zmq_numba.available()
    assert zmq_numba.why_not() == ""


@pytest.mark.parametrize(
    ("what", "value", "why"),
    [
        ("platform.machine", lambda: "riscv64", "this is Linux on riscv64"),
        ("platform.system", lambda: "Darwin", "this is Darwin on"),
        ("sys.maxsize", 2**31 - 1, "64-bit Linux"),
        ("zmq.backend.Socket.__module__", "zmq.backend.cffi.socket", "backend zmq.backend.cffi.socket"),
    ],
)
def test_it_says_why_not(monkeypatch: pytest.MonkeyPatch, what: str, value: object, why: str) -> None:
    if what.startswith("zmq"):
        monkeypatch.setattr(zmq.backend, "Socket", type("Socket", (), {"__module__": value}))
    else:
        monkeypatch.setattr(what, value)
    sentence, library = zmq_numba._register()
    assert why in sentence
    assert library is None


def test_a_missing_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zmq_numba._SIGNATURES, "zmq_msg_fly", zmq_numba._SIGNATURES["zmq_msg_more"])
    sentence, _ = zmq_numba._register()
    assert f"zmq_msg_fly is not in the libzmq {zmq.zmq_version()}" in sentence
    assert str(sys.modules["zmq.backend.cython._zmq"].__file__) in sentence
