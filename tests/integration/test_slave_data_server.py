"""The data port's sockets and threads: landings on a pool, peers that never read, and words in between."""

from __future__ import annotations

import gc
import os
import queue
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from support import hostile, keyed_port
from support.keyed_port import Cluster, KeyedPort, push_id, settle
from support.waiting import NO_LIMIT_S, until

from dips.core.errors import ConfigError
from dips.core.ids import PushId, RoundId, Version
from dips.core.layout import Buffer as Bytes
from dips.core.layout import Layout, Parameter, checksum, chunks_of, digest_of_array, shard_digest
from dips.core.messages import SnapshotInfo
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.zmq_sockets import CurvePair, as_client
from dips.core.observe.failpoints import armed
from dips.core.protocol import MAX_WINDOW_CHUNKS
from dips.core.wire import Codec
from dips.slave import serve_numba
from dips.slave.calculation import chunk_checksums
from dips.slave.data_server import MOST_FRAMES, RECEIVE_BATCH, DataServer, LoopName
from dips.slave.memory import ShardMemory, ThetaBuffer
from dips.slave.state.effects import PushStaged
from dips.slave.state.staging import Slot

CHUNK_BYTES = 1 << 20
LAYOUT = Layout(
    tuple(Parameter(f"layers.{i}.weight", (n,), "float32", f"layers.{i}") for i, n in enumerate((9 << 18, 77)))
)
CHUNKS = chunks_of(LAYOUT.blocks, CHUNK_BYTES)
RNG = np.random.default_rng(8)
THETA = RNG.standard_normal(LAYOUT.n_elems, np.float32)
VALUES = RNG.standard_normal(LAYOUT.n_elems, np.float32)
V0 = Version(1, 0)


class Served:
    def __init__(self, data_threads: int, loop: LoopName) -> None:
        self.staged: list[PushStaged] = []
        self.is_staged = threading.Event()
        self.crashed: list[BaseException] = []
        self.server = DataServer(
            *("127.0.0.1", 0, "run", CHUNK_BYTES, self._note, self.crashed.append),
            data_threads=data_threads,
            loop=loop,
        )
        self.server.start()
        self.memory: ShardMemory | None = ShardMemory(LAYOUT.blocks, CHUNK_BYTES, 2, 40 * LAYOUT.n_elems)
        buffer = self.memory.take()
        buffer.theta[:] = THETA
        sums = chunk_checksums(THETA, LAYOUT.blocks, CHUNK_BYTES)
        info = SnapshotInfo(V0, RoundId(1, 1), b"", b"", shard_digest(sums), committed=True)
        self.memory.name_shadow(info, sums)
        self.memory.flip(info)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: list[zmq.Socket[bytes]] = []
        self._slots: dict[int, Slot] = {}
        self.serve()

    def _note(self, event: PushStaged) -> None:
        self.staged.append(event)
        self.is_staged.set()

    def serve(self) -> None:
        assert self.memory is not None
        self.server.do(self.server.port.set_memory, self.memory.map, self.memory.staging)
        self.server.do(self.server.port.set_readable, self._readable(), V0)
        settle(self.server)

    def _readable(self) -> dict[Version, ThetaBuffer]:
        assert self.memory is not None
        return dict(self.memory.readable())

    def open(self, push: PushId, slot: int, opening: int) -> None:
        """As this slot; what was in it leaves."""
        self._slots[slot] = Slot(push, 1, slot, opening)
        self.server.do(self.server.port.hold, list(self._slots.values()))
        settle(self.server)

    def peer(self) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVTIMEO, int(NO_LIMIT_S * 1000))
        dealer.connect(self.server.endpoint)
        self._peers.append(dealer)
        return dealer

    def close(self) -> None:
        self.server.stop()
        for peer in self._peers:
            peer.close(linger=0)
        self.context.term()
        assert not self.crashed


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    serve_numba.warm_up()


@pytest.fixture(params=[(1, "python"), (3, "python"), (1, "compiled")], ids=lambda param: f"{param[1]}-{param[0]}")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    served = Served(*request.param)
    assert served.server.is_compiled is (request.param[1] == "compiled")
    yield served
    served.close()


def put_frames(index: int, push: PushId, request: int = 0) -> list[bytes]:
    chunk = CHUNKS[index]
    start = LAYOUT.blocks[chunk.block_id].start_elem * 4 + chunk.offset_bytes
    payload = VALUES.view(np.uint8)[start : start + chunk.length_bytes].tobytes()
    header = DataHeader(
        "run", 1, DataOp.PUT_CHUNK, request, push=push, attempt=1, block=chunk.block_id,
        offset_bytes=chunk.offset_bytes, length_bytes=chunk.length_bytes, codec=Codec.F32, checksum=checksum(payload),
    )  # fmt: skip
    return [header.encode(), payload]


def get_frame(index: int, request: int = 0) -> bytes:
    chunk = CHUNKS[index]
    return DataHeader(
        "run", 1, DataOp.GET_CHUNK, request, version=V0, block=chunk.block_id, offset_bytes=chunk.offset_bytes,
        length_bytes=chunk.length_bytes,
    ).encode()  # fmt: skip


def test_every_message_gets_one_answer_and_every_push_is_staged_once(served: Served) -> None:
    """All chunks of two pushes at once, each twice in a row, from two peers."""
    peers = {push_id("a"): served.peer(), push_id("b"): served.peer()}
    for slot, push in enumerate(peers):
        served.open(push, slot, 1)
    for index in range(len(CHUNKS)):
        for push, peer in peers.items():
            for request in (2 * index, 2 * index + 1):
                peer.send_multipart(put_frames(index, push, request))
    for peer in peers.values():
        answers = [DataHeader.decode(peer.recv_multipart()[0]) for _ in range(2 * len(CHUNKS))]
        assert {answer.op for answer in answers} == {DataOp.ACK}
        assert sorted(answer.request for answer in answers) == list(range(2 * len(CHUNKS)))
        assert all(answer.credit >= 1 for answer in answers)
    digest = digest_of_array(VALUES, LAYOUT.blocks, CHUNK_BYTES)
    assert sorted(staged.slot.push.cluster for staged in served.staged) == ["a", "b"]
    assert {staged.digest for staged in served.staged} == {digest}
    assert served.memory is not None
    for row in served.memory.staging:
        np.testing.assert_array_equal(row, VALUES)
    known = served.server.port.known(V0)
    assert known is not None
    assert known.squared(0)[1].all()
    np.testing.assert_array_equal(known.squared(0)[0], known.squared(1)[0])


class Queue(queue.SimpleQueue[object]):
    """Says when the data thread waits for a landing."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for = threading.Event()

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        self.waited_for.set()
        return super().get(block, timeout)


@pytest.mark.parametrize("served", [(3, "python")], indirect=True)
def test_a_chunk_that_is_sent_again_and_again_while_it_lands_fills_no_memory(served: Served) -> None:
    """I15: repeated messages wait for the first one's landing, and their frames with them: a few, not all."""
    server, most, n_sent = served.server, 0, 200
    waiting = server._landed = Queue()  # type: ignore[assignment]

    def slow_checksum(payload: Bytes) -> int:
        nonlocal most
        while not waiting.waited_for.is_set() and len(server._deferred) <= server._most_under_way:
            waiting.waited_for.wait(0.01)
        most = len(server._deferred)
        return checksum(payload)

    server.port._checksum = slow_checksum
    served.open(push_id("a"), 0, 1)
    peer = served.peer()
    for request in range(n_sent):
        peer.send_multipart(put_frames(len(CHUNKS) - 1, push_id("a"), request))
    answers = [DataHeader.decode(peer.recv_multipart()[0]) for _ in range(n_sent)]
    assert {answer.op for answer in answers} == {DataOp.ACK}
    assert sorted(answer.request for answer in answers) == list(range(n_sent))
    assert 0 < most <= server._most_under_way


def test_words_wait_for_landings_that_are_under_way(served: Served) -> None:
    """The slot is given to another push while chunks of the first are on their way: none of them lands after that."""
    first, second = push_id("a"), push_id("b")
    peer = served.peer()
    for again in range(5):
        served.open(first, 0, 2 * again + 1)
        for index in range(len(CHUNKS)):
            peer.send_multipart(put_frames(index, first))
        served.server.do(served.server.port.hold, [Slot(second, 1, 0, 2 * again + 2)])
        for _ in CHUNKS:
            assert DataHeader.decode(peer.recv_multipart()[0]).op in (DataOp.ACK, DataOp.REFUSED)
        served.server.do(served.server.port.set_readable, served._readable(), V0)
        settle(served.server)
        assert served.memory is not None
        served.memory.staging[0].fill(0)
        query = DataHeader("run", 1, DataOp.QUERY_MISSING, 1, push=second, attempt=1)
        peer.send(query.encode())
        assert len(DataHeader.decode(peer.recv_multipart()[0]).missing) == len(CHUNKS)
        assert not served.memory.staging[0].any()


def test_the_last_of_many_messages_is_counted_too(served: Served) -> None:
    """More than one batch at once, and nothing after it that would wake the thread."""
    n, free = 3 * RECEIVE_BATCH, threading.Event()
    peer = served.peer()

    def busy() -> None:
        free.wait(NO_LIMIT_S)

    served.server.do(busy)
    for number in range(n):
        peer.send(get_frame(0, number))
    time.sleep(0.2)  # most of them lie before the thread then; where they do not, this test asks less
    free.set()
    for _ in range(n):
        peer.recv_multipart()
    until(lambda: served.server.figures.beat.served_bytes >= n * CHUNKS[0].length_bytes, "the last is counted")


def test_messages_of_too_many_frames_are_counted_at_once_though_nothing_else_comes(served: Served) -> None:
    for number in range(1, 4):
        with hostile.dealer(served.server.endpoint) as stranger:
            hostile.many_frames(stranger, MOST_FRAMES + 1)
            assert hostile.hung_up(stranger)
        until(lambda n=number: served.server.figures.beat.refused_connections == n, f"{number} of them")  # type: ignore[misc]


def asked_for_much(served: Served) -> zmq.Socket[bytes]:
    """A peer that reads nothing, and was served all that one may leave unanswered: more than sockets buffer."""
    lazy = served.peer()
    lazy.setsockopt(zmq.RCVHWM, 1)
    lazy.disconnect(served.server.endpoint)
    lazy.connect(served.server.endpoint)
    for number in range(MAX_WINDOW_CHUNKS):
        lazy.send(get_frame(number % 9, number))
    other = served.peer()
    while served.server.figures.beat.served_bytes < MAX_WINDOW_CHUNKS * CHUNK_BYTES:
        other.send(DataHeader("run", 1, DataOp.QUERY_MISSING, 1, push=push_id("z")).encode())
        assert DataHeader.decode(other.recv_multipart()[0]).op is DataOp.REFUSED
    return lazy


def test_a_peer_that_never_reads_holds_up_no_buffer_and_what_it_reads_late_is_seen_to_be_wrong(served: Served) -> None:
    """I15: the version leaves and its memory is written again, though answers that refer to it were never read."""
    lazy = asked_for_much(served)
    assert served.memory is not None
    assert served.memory.current is not None
    theta = served.memory.current.theta
    served.server.do(served.server.port.set_readable, {}, None)
    settle(served.server)
    theta.fill(7.0)  # as the next round would
    right = late = 0
    for _ in range(MAX_WINDOW_CHUNKS):
        head, body = lazy.recv_multipart()
        header = DataHeader.decode(head)
        if header.checksum == checksum(body):
            start = header.offset_bytes
            assert body == THETA.view(np.uint8)[start : start + header.length_bytes].tobytes()
            right += 1
        else:
            late += 1
    assert late > 0, "the last chunks cannot have been in any buffer but the version's own"
    lazy.send(get_frame(0))
    assert DataHeader.decode(lazy.recv_multipart()[0]).op is DataOp.REFUSED


def test_memory_that_goes_away_is_not_held_by_peers_that_do_not_read(served: Served) -> None:
    """I16: another model is loaded; messages to a peer that never reads would hold the one before."""
    asked_for_much(served)
    assert served.memory is not None
    assert served.memory.current is not None
    freed = threading.Event()
    weakref.finalize(served.memory.current.theta.base, freed.set)
    served.server.do(served.server.port.set_memory, None, None)
    settle(served.server)
    served.memory = None
    gc.collect()
    assert freed.wait(NO_LIMIT_S)
    served.memory = ShardMemory(LAYOUT.blocks, CHUNK_BYTES, 2, 40 * LAYOUT.n_elems)
    served.server.do(served.server.port.set_memory, served.memory.map, served.memory.staging)
    served.open(push_id("a"), 0, 1)
    peer = served.peer()
    peer.send_multipart(put_frames(0, push_id("a")))
    assert DataHeader.decode(peer.recv_multipart()[0]).op is DataOp.ACK


def test_answers_are_lost_doubled_and_garbled_at_a_failpoint(served: Served) -> None:
    peer = served.peer()
    with armed("slave.data.before_answer=1*drop->1*dup->1*corrupt->1*error(gone)->off"):
        settle(served.server)  # the compiled loop leaves all to Python then
        for request in range(5):
            peer.send(get_frame(0, request))
        heard = [peer.recv_multipart() for _ in range(4)]
    headers = [DataHeader.decode(header) for header, _ in heard]
    assert [header.request for header in headers] == [1, 1, 2, 4]
    right = [header.checksum == checksum(body) for header, (_, body) in zip(headers, heard, strict=True)]
    assert right == [True, True, False, True]


@pytest.mark.parametrize("loop", ["python", "compiled"])
def test_with_keys_the_list_says_who_comes_in_and_for_what_until_its_key_leaves(loop: LoopName) -> None:
    with KeyedPort(CurvePair.new(), loop=loop) as port, keyed_port.fresh_context() as context:
        a, b, reader, stranger = (Cluster(name, CurvePair.new(), port) for name in "abrx")
        port.allow(a, b, readers=(reader,))
        port.open("a")
        assert port.server.port.traffic_bytes == 2 * 3 * MAX_WINDOW_CHUNKS * keyed_port.CHUNK_BYTES
        port.server.note_deliveries(True)
        pull, flat = reader.pull()
        assert pull.done, pull.failure
        np.testing.assert_array_equal(flat, keyed_port.THETA)
        assert "is not cluster b's" in b.push(of="a").failure
        assert "refuses this process's data key" in stranger.push().failure
        assert port.server.note_deliveries(False)
        assert a.push().done
        np.testing.assert_array_equal(port.landed(0), keyed_port.pushed("a"))
        digest = digest_of_array(port.landed(0), keyed_port.LAYOUT.blocks, keyed_port.CHUNK_BYTES)
        assert port.staged == {keyed_port.push_id("a"): digest}
        n_bytes = keyed_port.LAYOUT.n_bytes
        until(lambda: port.server.figures.beat.staging_bytes == n_bytes, "the push is counted")
        assert (port.server.figures.beat.served_bytes, port.server.figures.staged_of) == (n_bytes, {"a": n_bytes})

        def dealer(who: Cluster) -> zmq.Socket[bytes]:
            made = context.socket(zmq.DEALER)
            assert who.curve is not None
            assert port.curve is not None
            as_client(made, who.curve, port.curve.public)
            made.setsockopt(zmq.RCVTIMEO, int(NO_LIMIT_S * 1000))
            made.connect(port.server.endpoint)
            made.send(of_port)
            return made

        of_port = DataHeader(
            keyed_port.RUN, 1, DataOp.GET_CHUNK, 1, version=keyed_port.V0, block=0, offset_bytes=0,
            length_bytes=keyed_port.CHUNK_BYTES,
        ).encode()  # fmt: skip
        of_stranger, of_a, of_b = (dealer(who) for who in (stranger, a, b))
        for known in (of_a, of_b):
            assert DataHeader.decode(known.recv_multipart()[0]).op is DataOp.CHUNK
        until(lambda: port.server.figures.beat.refused_connections >= 1, "the stranger is counted")
        assert f"data key {stranger.public.hex()[:8]}, which is not on" in port.server.figures.beat.refused_connection
        port.allow(a)
        of_b.send(of_port)
        until(lambda: "left the master's list" in port.server.figures.beat.refused_connection, "the connection's end")
        of_a.send(of_port)
        assert DataHeader.decode(of_a.recv_multipart()[0]).op is DataOp.CHUNK
        assert not of_stranger.poll(0)


def test_words_after_the_end_go_nowhere(served: Served) -> None:
    """The control side may still speak while it ends; the pipe's number may belong to another file by then."""
    served.server.stop()
    with tempfile.TemporaryFile() as first, tempfile.TemporaryFile() as second:
        served.server.do(served.server.port.hold, [Slot(push_id("a"), 1, 0, 1)])
        assert [os.fstat(file.fileno()).st_size for file in (first, second)] == [0, 0]


def test_a_port_that_is_taken_is_said_with_the_remedy(served: Served) -> None:
    port = int(served.server.endpoint.rpartition(":")[2])
    with pytest.raises(ConfigError, match="choose another data_port"):
        DataServer("127.0.0.1", port, "run", CHUNK_BYTES, lambda event: None, lambda error: None)


def test_the_ports_threads_stay_on_the_processor_that_was_asked_for() -> None:
    """libzmq's thread, which reads and writes connections, and the data thread; not the thread that made them."""
    usual = os.sched_getaffinity(0)
    cpu = max(usual)
    server = DataServer("127.0.0.1", 0, "run", CHUNK_BYTES, lambda event: None, lambda error: None, cpu=cpu)
    assert server.is_compiled  # what "auto" is here
    server.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.RCVTIMEO, int(NO_LIMIT_S * 1000))
        dealer.connect(server.endpoint)
        dealer.send(get_frame(0))
        assert DataHeader.decode(dealer.recv()).op is DataOp.REFUSED  # so both threads have begun
        placed = {}
        for task in Path("/proc/self/task").iterdir():
            placed[int(task.name)] = os.sched_getaffinity(int(task.name))
    finally:
        server.stop()
        dealer.close(linger=0)
        context.term()
    assert server._thread.native_id is not None
    assert placed[server._thread.native_id] == {cpu}
    assert placed[threading.get_native_id()] == usual
    if len(usual) > 1:
        assert sum(cpus == {cpu} for cpus in placed.values()) == 3, "the data thread, libzmq's two: of sockets, reaper"


def test_as_many_may_wait_to_be_let_in_as_the_system_allows(served: Served) -> None:
    """Else strangers in a crowd keep an honest cluster out for a second, after which its system tries again."""
    info = served.server._listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    (longest_queue,) = struct.unpack_from("I", info, 28)  # tcpi_sacked, of a socket that listens
    system = int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert longest_queue == min(socket.SOMAXCONN, system)
