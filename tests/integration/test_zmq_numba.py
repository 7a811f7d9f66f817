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
from dips.core.net.zmq_sockets import Outgoing

Socket = zmq.Socket[bytes]
Counter = NDArray[np.int64]


@compiled
def receive(socket: int, messages: zmq_numba.Messages) -> int:
    """Frames of one message, each in a place of its own; minus the error's number if there is none."""
    place, n_frames = address_of(messages), 0
    while True:
        zmq_numba.zmq_msg_init(place)
        if zmq_numba.zmq_msg_recv(place, socket, zmq_numba.DONTWAIT) < 0:
            error = zmq_numba.zmq_errno()
            zmq_numba.zmq_msg_close(place)
            return -int(error)
        n_frames += 1
        if not zmq_numba.zmq_msg_more(place):
            return n_frames
        place += zmq_numba.MESSAGE_BYTES


@compiled
def send(
    socket: int, header: np.ndarray, payload: np.ndarray, freed: int, counter: Counter, scratch: zmq_numba.Messages
) -> int:
    """One message of two frames, the second from where it lies."""
    if zmq_numba.zmq_send(socket, address_of(header), len(header), zmq_numba.SNDMORE | zmq_numba.DONTWAIT) < 0:
        return -int(zmq_numba.zmq_errno())
    message = address_of(scratch)
    zmq_numba.zmq_msg_init_data(message, address_of(payload), len(payload), freed, address_of(counter))
    return int(zmq_numba.zmq_msg_send(message, socket, zmq_numba.DONTWAIT))


@compiled
def given_back(counter: Counter) -> int:
    return int(atomic_get(address_of(counter)))


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    with zmq.Context() as made:
        yield made


@pytest.fixture
def ends(context: zmq.Context[Socket]) -> Iterator[tuple[Socket, Socket]]:
    with context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        yield router, dealer


def received(socket: Socket, messages: zmq_numba.Messages) -> int:
    socket.poll()
    return receive(socket.underlying, messages)


def test_frames_are_received_where_they_lie_and_taken_over_by_python(ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    payload, messages = os.urandom(1 << 20), zmq_numba.new_messages(4)
    dealer.send_multipart([b"header", payload, b""])
    assert received(router, messages) == 4
    identity, header, body, empty = (zmq_numba.ReceivedFrame(messages, index) for index in range(4))
    assert (header.bytes, header.more, empty.bytes, empty.more) == (b"header", True, b"", False)
    assert isinstance(header.get(zmq_numba.SRCFD), int)
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
    assert receive(router.underlying, messages) == -zmq_numba.EAGAIN


def test_a_payload_is_sent_from_its_own_memory_and_counted_when_it_is_free(ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    payload, header = (
        np.random.default_rng(1).integers(0, 256, 1 << 20).astype(np.uint8),
        np.arange(40).astype(np.uint8),
    )
    counter = np.zeros(1, np.int64)
    for _ in range(10):
        assert send(dealer.underlying, header, payload, zmq_numba.freed(), counter, zmq_numba.new_messages(1)) == len(
            payload
        )
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
            send(
                dealer.underlying, np.zeros(8, np.uint8), payload, zmq_numba.freed(), counter, zmq_numba.new_messages(1)
            )
        dealer.close(linger=0)
    until(lambda: given_back(counter) == 5, "all memory is given back")


def test_the_clock_is_that_of_python() -> None:
    times = [clock() for _ in range(100) for clock in (time.monotonic, zmq_numba.now_s)]
    assert times == sorted(times)


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
            messages = zmq_numba.new_messages(1)
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
                assert zmq_numba.number_of_user(place, users(listed)) == number
            assert zmq_numba.ReceivedFrame(messages, 0).get("User-Id") == "user-12"
    finally:
        authenticator.stop()


def test_no_user_id_is_nobody(ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    dealer.send(b"x")
    messages = zmq_numba.new_messages(2)
    assert received(router, messages) == 2
    assert zmq_numba.number_of_user(address(messages), users([b"user"])) == -1
    assert zmq_numba.number_of_user(address(messages), users([b""])) == -1
    frames = [zmq_numba.ReceivedFrame(messages, index) for index in range(2)]
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


def given_up(memory: bytearray) -> bool:
    """Whether nothing refers to its bytes now; pyzmq's collector, a thread, releases them last."""

    def is_free() -> bool:
        try:
            memory.append(0)
        except BufferError:
            return False
        return True

    until(is_free, "nothing refers to the bytes")
    return True


@pytest.mark.parametrize("bound", [{"most_frames": 3}, {"most_bytes": 399}])
def test_frames_that_have_left_are_given_up_when_many_are_kept(bound: dict[str, int]) -> None:
    memories = [bytearray(b"%d" % i * 100) for i in range(4)]
    outgoing = Outgoing(**bound)
    with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        here.bind("inproc://here")
        there.connect("inproc://here")
        for memory in memories:
            here.send(outgoing.frame(memoryview(memory)), copy=False)
        assert [there.recv() for _ in memories] == [b"%d" % i * 100 for i in range(4)]
        assert all(given_up(memory) for memory in memories[:3])
        with pytest.raises(BufferError):
            memories[3].append(0)
        outgoing.clear()
        assert given_up(memories[3])
