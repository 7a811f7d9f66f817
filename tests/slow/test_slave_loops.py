"""The data port's two loops say the same of every message, and leave the same memory, sums and counts behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import zmq
from support.keyed_port import settle
from support.waiting import NO_LIMIT_S, until

from dips.core.errors import ConfigError
from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, Version
from dips.core.layout import Layout, Parameter, checksum, chunks_of
from dips.core.math import wire_numpy
from dips.core.math.outer_numpy import PIECE_ELEMS
from dips.core.messages import AllowedKey, KeyRole, SlaveBeat, SnapshotInfo
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.zmq_sockets import CurvePair, as_client
from dips.core.protocol import MAX_WINDOW_CHUNKS
from dips.core.wire import Codec, encoded_bytes
from dips.slave import serve_numba
from dips.slave.calculation import chunk_checksums
from dips.slave.data_server import DataServer, LoopName
from dips.slave.memory import ThetaBuffer
from dips.slave.state.admission import HELD
from dips.slave.state.effects import PushStaged
from dips.slave.state.staging import ShardMap, Slot

RUN = "run"
LAYOUT = Layout(
    tuple(
        Parameter(f"layers.{i}.weight", (n,), "float32", f"layers.{i}")
        for i, n in enumerate((5 * PIECE_ELEMS + 77, 3, PIECE_ELEMS))
    )
)
"""Blocks of 6, 1 and 1 pieces."""

BLOCKS = LAYOUT.blocks
WHOLE_PIECES, PARTS_OF_PIECES = 2 * PIECE_ELEMS * 4, 20_000
V0, V1 = Version(1, 0), Version(1, 1)
RNG = np.random.default_rng(21)
THETA = {version: RNG.standard_normal(LAYOUT.n_elems, np.float32) for version in (V0, V1)}
N_SLOTS = 5


def push_id(row: int) -> PushId:
    return PushId(ClusterId(f"c{row}"), Incarnation(1, 1), 1)


def values_of(row: int) -> np.ndarray:
    values = np.random.default_rng(row).standard_normal(LAYOUT.n_elems, np.float32)
    values[row * 1000] = np.nan if row % 2 else 1.0
    return values


VALUES = [values_of(row) for row in range(N_SLOTS)]
CODECS = (Codec.F32, Codec.BF16, Codec.F32, Codec.INT8, Codec.INT4)
"""Of the push in each slot."""


class End:
    """A data server with a push open in every slot and two versions, and peers of it."""

    def __init__(
        self,
        loop: LoopName,
        chunk_bytes: int = WHOLE_PIECES,
        current: Version | None = V0,
        curve: CurvePair | None = None,
    ) -> None:
        self.chunk_bytes, self.curve = chunk_bytes, curve
        self.chunks = chunks_of(BLOCKS, chunk_bytes)
        self.staged: list[PushStaged] = []
        self.crashed: list[BaseException] = []
        self.left_to_python = 0
        self.server = DataServer(
            "127.0.0.1", 0, RUN, chunk_bytes, self.staged.append, self.crashed.append, curve=curve, loop=loop
        )
        self._count_messages()
        self.server.start()
        self.staging = np.zeros((N_SLOTS, LAYOUT.n_elems), np.float32)
        self.server.do(self.server.port.set_epoch, 2)
        self.server.do(self.server.port.set_memory, ShardMap(BLOCKS, chunk_bytes), self.staging)
        self.serve(current)
        slots = [
            Slot(push_id(row), 1, row, 1, codec, V0 if codec is not Codec.F32 else None)
            for row, codec in enumerate(CODECS)
        ]
        self.server.do(self.server.port.hold, slots)
        settle(self.server)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: list[zmq.Socket[bytes]] = []
        self._first: zmq.Socket[bytes] | None = None

    def _count_messages(self) -> None:
        real = self.server.port.begin

        def begin(*arguments: object) -> object:
            self.left_to_python += 1
            return real(*arguments)  # type: ignore[arg-type]

        self.server.port.begin = begin  # type: ignore[assignment, method-assign]

    def serve(self, current: Version | None) -> None:
        def buffer(version: Version) -> ThetaBuffer:
            info = SnapshotInfo(version, RoundId(1, 1), b"", b"", b"", committed=True)
            theta = THETA[version]
            return ThetaBuffer(theta, info, chunk_checksums(theta, BLOCKS, self.chunk_bytes), -theta)

        self.server.do(self.server.port.set_readable, {version: buffer(version) for version in THETA}, current)
        settle(self.server)

    def peer(self, pair: CurvePair | None = None) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVTIMEO, int(NO_LIMIT_S * 1000))
        dealer.setsockopt(zmq.SNDTIMEO, int(NO_LIMIT_S * 1000))
        dealer.setsockopt(zmq.LINGER, 0)
        if pair is not None and self.curve is not None:
            as_client(dealer, pair, self.curve.public)
        dealer.connect(self.server.endpoint)
        self._peers.append(dealer)
        return dealer

    def ask(self, frames: Sequence[bytes], peer: zmq.Socket[bytes] | None = None) -> tuple[DataHeader, list[bytes]]:
        """The answer to one message, without its credit, which is a matter of time."""
        if peer is None:
            peer = self._first = self._first or self.peer()
        peer.send_multipart(frames)
        head, *rest = peer.recv_multipart()
        return replace(DataHeader.decode(head), credit=0), rest

    def put(self, row: int, index: int, request: int = 1) -> list[bytes]:
        chunk, codec = self.chunks[index], CODECS[row]
        start = BLOCKS[chunk.block_id].start_elem + chunk.offset_bytes // 4
        here = slice(start, start + chunk.length_bytes // 4)
        payload = VALUES[row][here].view(np.uint8)
        if codec is not Codec.F32:
            payload = np.zeros(encoded_bytes(codec, chunk.length_bytes // 4), np.uint8)
            wire_numpy.encode(codec, VALUES[row][here], THETA[V0][here], None, payload)
        header = DataHeader(
            *(RUN, 2, DataOp.PUT_CHUNK, request, push_id(row), 1, None, chunk.block_id, chunk.offset_bytes),
            *(chunk.length_bytes, codec, checksum(payload.tobytes()), f"cause-{request}"),
        )
        return [header.encode(), payload.tobytes()]

    def get(self, index: int, version: Version = V0, request: int = 1, momentum: bool = False) -> list[bytes]:
        chunk = self.chunks[index]
        header = DataHeader(
            RUN, 1, DataOp.GET_CHUNK, request, version=version, block=chunk.block_id, offset_bytes=chunk.offset_bytes,
            length_bytes=chunk.length_bytes, cause_id="why", momentum=momentum,
        )  # fmt: skip
        return [header.encode()]

    def counts(self) -> tuple[SlaveBeat, dict[str, int], dict[str, int], list[PushStaged]]:
        settle(self.server)
        figures = self.server.port.figures()
        return figures.beat, dict(figures.refused), dict(figures.staged_of), self.staged

    def close(self) -> None:
        self.server.stop()
        for peer in self._peers:
            peer.close(linger=0)
        self.context.term()
        assert not self.crashed


MakeEnd = Callable[..., End]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    serve_numba.warm_up()


@pytest.fixture
def end() -> Iterator[MakeEnd]:
    ends: list[End] = []

    def make(loop: LoopName, **options: object) -> End:
        ends.append(End(loop, **options))  # type: ignore[arg-type]
        return ends[-1]

    yield make
    for made in ends:
        made.close()


def assert_same(python: End, compiled: End) -> None:
    """What both have landed, summed and counted."""
    assert compiled.counts() == python.counts()
    np.testing.assert_array_equal(compiled.staging.view(np.uint32), python.staging.view(np.uint32))
    ours, theirs = (end.server.port for end in (python, compiled))
    assert ours.table is not None
    assert theirs.table is not None
    for mine, other in zip(ours.table.rows or (), theirs.table.rows or (), strict=True):
        np.testing.assert_array_equal(other, mine)
    assert ours.receipts is not None
    assert theirs.receipts is not None
    for mine, other in zip(ours.receipts.sums, theirs.receipts.sums, strict=True):
        np.testing.assert_array_equal(other.view(np.uint64), mine.view(np.uint64))


@pytest.mark.parametrize("chunk_bytes", [WHOLE_PIECES, PARTS_OF_PIECES])
@pytest.mark.parametrize("current", [V0, V1, None])
def test_pushes_of_all_codecs_land_and_are_summed_alike(
    end: MakeEnd, chunk_bytes: int, current: Version | None
) -> None:
    """Chunk by chunk in any order, each twice now and then, products between pushes included, and a version that flips
    in the middle."""
    python, compiled = (end(loop, chunk_bytes=chunk_bytes, current=current) for loop in ("python", "compiled"))
    todo = [(row, index) for row in range(N_SLOTS) for index in range(len(python.chunks))]
    random.Random(4).shuffle(todo)
    for n, (row, index) in enumerate(todo):
        if n == len(todo) // 2 and current is V0:
            for one in (python, compiled):
                one.serve(V1)
        for _ in range(1 + (n % 3 == 0)):
            expected = python.ask(python.put(row, index, n))
            assert expected[0].op is DataOp.ACK
            assert compiled.ask(compiled.put(row, index, n)) == expected
    assert len(compiled.staged) == N_SLOTS
    assert_same(python, compiled)
    assert python.left_to_python >= len(todo)
    assert compiled.left_to_python == 0


def test_ten_thousand_readers_come_and_go_and_each_is_answered(end: MakeEnd) -> None:
    """Forty times as many as the loop knows at a time. They come in crowds, and leave without a word."""
    compiled, smallest, crowd = end("compiled"), 1, 100
    expected = compiled.ask(compiled.get(smallest))
    left_to_python = compiled.left_to_python
    for _ in range(10_000 // crowd):
        readers = [compiled.peer() for _ in range(crowd)]
        for _ in range(2):
            for reader in readers:
                reader.send_multipart(compiled.get(smallest))
            for reader in readers:
                head, *payload = reader.recv_multipart()
                assert (replace(DataHeader.decode(head), credit=0), payload) == expected
        for reader in readers:
            reader.close()
    first_requests = compiled.left_to_python - left_to_python  # of a crowd again where the loop's table was full
    assert 10_000 <= first_requests < 15_000
    assert compiled.ask(compiled.get(smallest)) == expected
    for index in range(len(compiled.chunks)):
        assert compiled.ask(compiled.put(4, index))[0].op is DataOp.ACK
    assert push_id(4) in {event.slot.push for event in compiled.staged}


@pytest.mark.parametrize("loop", ["python", "compiled"])
def test_the_ranks_of_a_cluster_are_one_stream_of_a_pull(end: MakeEnd, loop: LoopName) -> None:
    """They take one place of those that run at full rate."""
    one = end(loop, curve=CurvePair.new())
    one.server.port._now_s = lambda: 0.0
    cluster = {name: [CurvePair.new() for _ in range(n)] for name, n in (("c0", 5), ("c1", 1), ("c2", 3), ("c3", 1))}
    allow(one, cluster)
    peers = {name: [one.peer(pair) for pair in pairs] for name, pairs in cluster.items()}
    for name in cluster:
        for peer in peers[name]:
            one.ask(one.get(1), peer)
        settle(one.server)  # the compiled loop tells what it served after a while
    assert len(one.server.port._pull_credits._streams) == len(cluster)
    credits = {name: {credit_of(one, peer) for peer in peers[name]} for name in cluster}
    assert credits == {"c0": {MAX_WINDOW_CHUNKS}, "c1": {MAX_WINDOW_CHUNKS}, "c2": {HELD}, "c3": {HELD}}
    for row, name in enumerate(cluster):  # of a push all ranks are one stream, too; c3 and c4 have least to send
        credits[name] = {credit_of(one, peer, one.put(row, 0)) for peer in peers[name]}
    assert credits == {"c0": {HELD}, "c1": {HELD}, "c2": {HELD}, "c3": {MAX_WINDOW_CHUNKS}}


def allow(end: End, cluster: Mapping[str, Sequence[CurvePair]]) -> None:
    """Admit these ranks' keys."""
    pairs = [(name, pair) for name, ranks in cluster.items() for pair in ranks]
    end.server.do(end.server.port.set_allowed, [AllowedKey(KeyRole.CLUSTER, name, pair.public) for name, pair in pairs])
    settle(end.server)


def credit_of(end: End, peer: zmq.Socket[bytes], frames: Sequence[bytes] = ()) -> int:
    """What the answer to a message gives, by default to a read."""
    peer.send_multipart(frames or end.get(1))
    return DataHeader.decode(peer.recv_multipart()[0]).credit


def test_every_rank_of_a_large_cluster_is_served_without_python(end: MakeEnd) -> None:
    """More of them than the loop knows readers without keys; their key table stays as long as the list does."""
    compiled, slots = end("compiled", curve=CurvePair.new()), N_SLOTS
    ranks = [CurvePair.new() for _ in range(serve_numba.MOST_PEERS + 5)]
    few = compiled.server.port.traffic_bytes
    allow(compiled, {push_id(4).cluster: ranks, "other": [CurvePair.new()]})
    assert few == 2 * slots * MAX_WINDOW_CHUNKS * compiled.chunk_bytes
    assert compiled.server.port.traffic_bytes == few + 2 * (len(ranks) - MAX_WINDOW_CHUNKS) * compiled.chunk_bytes
    loop = compiled.server._loop
    assert loop is not None
    tables = []
    for rank, pair in enumerate(ranks):
        peer = compiled.peer(pair)
        header, (body,) = compiled.ask(compiled.get(1), peer)
        assert header.checksum == checksum(body)
        tables.append(loop._keys)  # that of the new list: it has let this rank in
        if rank < len(compiled.chunks):
            assert compiled.ask(compiled.put(4, rank), peer)[0].op is DataOp.ACK
    assert push_id(4) in {event.slot.push for event in compiled.staged}
    assert compiled.left_to_python == 0
    assert all(table is tables[0] for table in tables)


def test_a_port_that_is_stopped_while_it_is_busy_ends(end: MakeEnd) -> None:
    """Peers send and ask without a pause, one reads nothing; memory that libzmq still reads lives until its end."""
    compiled = end("compiled")
    stop = threading.Event()
    lazy = compiled.peer()
    lazy.setsockopt(zmq.RCVHWM, 1)

    def flood() -> None:
        with compiled.context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(compiled.server.endpoint)
            number = 0
            while not stop.is_set():
                number += 1
                frames = compiled.get(number % 3) if number % 2 else compiled.put(0, number % 3)
                try:
                    peer.send_multipart(frames, zmq.NOBLOCK)
                    while True:
                        peer.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    time.sleep(0)

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(60):
        lazy.send_multipart(compiled.get(number % 3))
    until(lambda: compiled.server.figures.beat.served_bytes >= 100 * WHOLE_PIECES, "a hundred pieces")
    compiled.server.stop()
    stop.set()
    for thread in threads:
        thread.join(NO_LIMIT_S)
        assert not thread.is_alive()


def test_versions_that_change_while_they_are_read_never_give_wrong_bytes_with_a_right_checksum(end: MakeEnd) -> None:
    compiled = end("compiled")
    peer = compiled.peer()
    for turn in range(40):
        versions = (V0, V1) if turn % 2 else (V1, V0)
        for index in range(len(compiled.chunks)):
            peer.send_multipart(compiled.get(index, versions[index % 2], index))
        compiled.serve(versions[0])
        for _ in compiled.chunks:
            head, body = peer.recv_multipart()
            header = DataHeader.decode(head)
            assert header.checksum == checksum(body)
            assert header.version == versions[header.request % 2]
            start = 4 * BLOCKS[header.block].start_elem + header.offset_bytes
            assert body == THETA[header.version].view(np.uint8)[start : start + header.length_bytes].tobytes()


def test_the_python_loop_notes_deliveries_and_then_the_compiled_one_goes_on(end: MakeEnd) -> None:
    compiled = end("compiled")
    assert compiled.server.note_deliveries(True) == set()
    settle(compiled.server)
    compiled.ask(compiled.put(0, 1))
    assert len(compiled.server.note_deliveries(False)) == 1
    python = compiled.left_to_python
    assert python > 0
    settle(compiled.server)
    compiled.ask(compiled.put(0, 3))
    assert compiled.left_to_python == python


def test_a_compiled_loop_that_cannot_be_had_is_refused_by_name() -> None:
    for options in ({"data_threads": 2}, {"checksum": lambda payload: 0}):
        with pytest.raises(ConfigError, match="compiled loop cannot be had"):
            DataServer("127.0.0.1", 0, RUN, 1024, lambda e: None, lambda e: None, loop="compiled", **options)
