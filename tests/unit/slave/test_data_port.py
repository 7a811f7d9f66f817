"""The data port without sockets: whatever a peer sends becomes an answer, and only right bytes count as landed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.slave_wire import LAYOUT, push_id, put_of

from dips.core.errors import RefusalCode
from dips.core.ids import RoundId, Version
from dips.core.layout import Block, Chunk, Layout, Parameter, checksum, chunks_of, digest_of_array, shard_digest
from dips.core.math import outer_numpy, wire_numpy
from dips.core.math.outer_numpy import PIECE_ELEMS
from dips.core.messages import AllowedKey, KeyRole, Refusal, SnapshotInfo
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.protocol import MAX_WINDOW_CHUNKS
from dips.core.wire import Codec, encoded_bytes
from dips.slave.calculation import chunk_checksums
from dips.slave.data_port import MAX_REASON_CHARACTERS, Answer, DataPort
from dips.slave.landing import LandingJob
from dips.slave.memory import ThetaBuffer
from dips.slave.state.admission import Admission
from dips.slave.state.effects import PushStaged
from dips.slave.state.staging import ShardMap, Slot

CHUNK_BYTES = 1024
BLOCKS = LAYOUT.blocks
VALUES = np.random.default_rng(2).standard_normal(LAYOUT.n_elems).astype(np.float32)
DATA = VALUES.tobytes()
CHUNKS = chunks_of(BLOCKS, CHUNK_BYTES)
A = push_id("a")
V0 = Version(1, 0)


class Port:
    def __init__(self, blocks: tuple[Block, ...] = BLOCKS, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.staged: list[PushStaged] = []
        self.port = DataPort("run", self.staged.append)
        n_elems = sum(block.n_elems for block in blocks)
        self.staging = np.zeros((2, n_elems), np.float32)
        self.port.set_epoch(3)
        self.port.set_memory(ShardMap(blocks, chunk_bytes), self.staging)
        self.port.hold([Slot(A, 1, 1, opening=5)])
        info = SnapshotInfo(V0, RoundId(1, 1), b"", b"", b"", committed=True)
        theta = np.resize(VALUES, n_elems)
        self.buffer = ThetaBuffer(theta, info, chunk_checksums(theta, blocks, chunk_bytes))
        self.port.set_readable({V0: self.buffer}, V0)

    def send(self, header: DataHeader, *payload: bytes) -> Answer:
        return self.port.answer([memoryview(header.encode()), *(memoryview(part) for part in payload)])

    def refused(self, header: DataHeader, *payload: bytes) -> Refusal:
        before, count, landed = self.staging.copy(), self.port.refused_chunks, self.port.figures().beat
        of_codes = dict(self.port.figures().refused)
        answer = self.send(header, *payload)
        assert answer.header.op is DataOp.REFUSED
        assert answer.header.request == header.request
        assert answer.header.refusal is not None
        assert self.port.refused_chunks == count + 1
        code = answer.header.refusal.code.name
        assert dict(self.port.figures().refused) == of_codes | {code: of_codes.get(code, 0) + 1}
        early = answer.header.refusal.retry_after_s > 0
        assert early or self.port.last_refusal == answer.header.refusal.sentence[:MAX_REASON_CHARACTERS]
        assert self.port.figures().beat == replace(landed, refused_chunks=count + 1)
        if "the payload's checksum" not in answer.header.refusal.sentence:
            np.testing.assert_array_equal(self.staging, before)
        return answer.header.refusal


@pytest.fixture
def port() -> Port:
    return Port()


def payload(chunk: Chunk) -> bytes:
    start = BLOCKS[chunk.block_id].start_elem * 4 + chunk.offset_bytes
    return DATA[start : start + chunk.length_bytes]


def put(chunk: Chunk, body: bytes = b"") -> DataHeader:
    return replace(put_of(chunk, A, body or payload(chunk)), epoch=3, request=17, cause_id="why")


def get(chunk: Chunk, version: Version = V0) -> DataHeader:
    return replace(put(chunk), op=DataOp.GET_CHUNK, push=None, attempt=0, version=version, codec=Codec.NONE, checksum=0)


def test_the_name_of_a_foreign_push_fills_no_log(port: Port) -> None:
    """The slave writes the last refusal to tape and log with each heartbeat; a header has room for 64 KiB of names."""
    key, admission = b"k" * 32, Admission()
    admission.set_keys([AllowedKey(KeyRole.CLUSTER, "a", key)])
    port.port = DataPort("run", port.staged.append, admission=admission)
    header = replace(put(CHUNKS[0]), push=push_id("x" * 60_000))
    answer = port.port.answer([memoryview(header.encode()), memoryview(payload(CHUNKS[0]))], user=key.hex())
    assert answer.header.refusal is not None
    assert answer.header.refusal.code is RefusalCode.KEY
    assert len(port.port.last_refusal) < 500


def test_a_whole_push_lands_in_its_row_and_is_said_once_for_each_attempt(port: Port) -> None:
    port.send(put(CHUNKS[0]), payload(CHUNKS[0]))
    beat = port.port.figures().beat
    assert (beat.staging_open, [(p.push, p.attempt, p.landed_bytes) for p in beat.progress]) == (1, [(A, 1, 1024)])
    for chunk in [*CHUNKS[:-1], *CHUNKS]:
        answer = port.send(put(chunk), payload(chunk)).header
        assert (answer.op, answer.request, answer.push, answer.cause_id) == (DataOp.ACK, 17, A, "why")
        assert (answer.run_id, answer.epoch) == ("run", 3)
        assert (answer.block, answer.offset_bytes) == (chunk.block_id, chunk.offset_bytes)
    assert answer.complete
    np.testing.assert_array_equal(port.staging[1], VALUES)
    assert not port.staging[0].any()
    digest = digest_of_array(VALUES, BLOCKS, CHUNK_BYTES)
    assert port.staged == [PushStaged(Slot(A, 1, 1, 5), digest)]
    assert port.port.figures().beat.staging_bytes == len(DATA)
    port.port.hold([Slot(A, 2, 1, opening=5)])
    assert [(staged.slot.attempt, staged.slot.opening) for staged in port.staged] == [(1, 5), (2, 5)]


def test_a_version_is_served_from_its_own_memory_with_its_checksums(port: Port) -> None:
    for chunk in CHUNKS:
        answer = port.send(get(chunk))
        assert answer.payload is not None
        assert bytes(answer.payload) == payload(chunk)
        assert np.shares_memory(np.frombuffer(answer.payload, np.uint8), port.buffer.theta)
        header = answer.header
        assert (header.op, header.version, header.codec) == (DataOp.CHUNK, V0, Codec.F32)
        assert (header.checksum, header.length_bytes) == (checksum(payload(chunk)), chunk.length_bytes)
    assert port.port.figures().beat.served_bytes == len(DATA)


def test_the_momentum_of_the_newest_version_is_served_and_of_no_other(port: Port) -> None:
    """For a slave that gains blocks in a RESHARD."""
    asked = replace(get(CHUNKS[1]), momentum=True)
    assert port.refused(asked).code is RefusalCode.VERSION_GONE
    port.buffer.momentum = -VALUES
    answer = port.send(asked)
    assert answer.payload is not None
    assert answer.header.momentum
    sent = np.frombuffer(answer.payload, np.float32)
    np.testing.assert_array_equal(sent, -np.frombuffer(payload(CHUNKS[1]), np.float32))
    assert answer.header.checksum == checksum(answer.payload)


def test_reads_ask_for_no_epoch_since_a_version_never_changes_and_one_that_left_is_gone(port: Port) -> None:
    assert port.send(replace(get(CHUNKS[0]), epoch=1)).header.op is DataOp.CHUNK
    assert port.refused(get(CHUNKS[0], Version(1, 1))).code is RefusalCode.VERSION_GONE
    port.port.set_readable({}, None)
    assert port.refused(get(CHUNKS[0])).code is RefusalCode.VERSION_GONE


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol": 9}, RefusalCode.PROTOCOL_VERSION),
        ({"run_id": "other"}, RefusalCode.RUN_ID),
        ({"epoch": 2}, RefusalCode.STALE_EPOCH),
        ({"push": push_id("b")}, RefusalCode.UNKNOWN_PUSH),
        ({"attempt": 2}, RefusalCode.UNKNOWN_PUSH),
        *((changes, RefusalCode.CHUNK) for changes in (
            {"block": 77}, {"offset_bytes": 2}, {"length_bytes": 8}, {"codec": Codec.NONE}, {"checksum": 1},
        )),
        *((changes, RefusalCode.MALFORMED) for changes in (
            {"push": None}, {"op": DataOp.ACK}, {"op": DataOp.QUERY_MISSING},
        )),
    ],
)  # fmt: skip
def test_a_wrong_put_is_refused(port: Port, changes: dict[str, object], code: RefusalCode) -> None:
    header = replace(put(CHUNKS[0]), **changes)  # type: ignore[arg-type]
    answer = port.send(header, payload(CHUNKS[0])).header
    assert answer.refusal is not None
    assert answer.refusal.code is code
    assert port.port.figures().beat.staging_bytes == 0
    assert "checksum" in changes or not port.staging.any()
    assert port.port.refused_chunks == 1


def test_a_chunk_that_comes_before_its_staging_is_open_is_no_news_and_new_memory_forgets_every_staging(
    port: Port,
) -> None:
    assert port.refused(replace(put(CHUNKS[0]), attempt=2), payload(CHUNKS[0])).retry_after_s > 0
    assert port.port.last_refusal == ""
    port.send(put(CHUNKS[0]), payload(CHUNKS[0]))
    port.port.set_memory(ShardMap(BLOCKS, CHUNK_BYTES), np.zeros((1, LAYOUT.n_elems), np.float32))
    assert port.refused(put(CHUNKS[0]), payload(CHUNKS[0])).code is RefusalCode.UNKNOWN_PUSH


@pytest.mark.parametrize("size", [0, 1, 1023, 1025, 4096])
def test_a_payload_of_another_length_than_its_header_is_refused(port: Port, size: int) -> None:
    assert port.refused(put(CHUNKS[0]), bytes(size)).code is RefusalCode.CHUNK


def test_frames_that_do_not_fit_and_other_bytes_for_a_landed_chunk_are_refused(port: Port) -> None:
    assert port.refused(put(CHUNKS[0])).code is RefusalCode.MALFORMED
    assert port.refused(put(CHUNKS[0]), payload(CHUNKS[0]), b"").code is RefusalCode.MALFORMED
    assert port.refused(get(CHUNKS[0]), b"").code is RefusalCode.MALFORMED
    assert port.port.answer([]).header.op is DataOp.REFUSED
    port.send(put(CHUNKS[0]), payload(CHUNKS[0]))
    other = bytes(1024)
    refusal = port.refused(replace(put(CHUNKS[0]), checksum=checksum(other)), other)
    assert refusal.code is RefusalCode.DIGEST


def test_a_slave_without_memory_asks_for_patience(port: Port) -> None:
    port.port.set_memory(None, None)
    port.port.hold([Slot(A, 1, 0)])
    port.port.hold([])
    for header, parts in ((put(CHUNKS[0]), [payload(CHUNKS[0])]), (get(CHUNKS[0]), [])):
        refusal = port.send(header, *parts).header.refusal
        assert refusal is not None
        assert refusal.code is RefusalCode.BUSY
        assert refusal.retry_after_s > 0
    assert port.port.figures().beat.staging_open == 0


def differences(codec: Codec, chunk: Chunk) -> bytes:
    """What a cluster sends of VALUES, on V0 of the port, whose parameters it halves here to have a difference."""
    start = BLOCKS[chunk.block_id].start_elem + chunk.offset_bytes // 4
    here = slice(start, start + chunk.length_bytes // 4)
    encoded = np.zeros(encoded_bytes(codec, chunk.length_bytes // 4), np.uint8)
    wire_numpy.encode(codec, VALUES[here] / np.float32(2), VALUES[here], None, encoded)
    return encoded.tobytes()


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec.is_difference])
def test_differences_land_as_base_plus_what_was_sent(port: Port, codec: Codec) -> None:
    port.port.hold([Slot(A, 2, 1, opening=6, wire=codec, base=V0)])
    checksums = []
    for chunk in CHUNKS:
        body = differences(codec, chunk)
        checksums.append(checksum(body))
        header = replace(put(chunk), attempt=2, codec=codec, checksum=checksums[-1])
        assert port.send(header, body).header.op is DataOp.ACK
    assert port.staged == [PushStaged(Slot(A, 2, 1, 6, codec, V0), shard_digest(checksums))]
    assert port.port.figures().beat.staging_bytes == len(DATA)
    tolerance = {Codec.BF16: 2**-9, Codec.INT8: 1 / 254, Codec.INT4: 1 / 14}[codec]
    largest = float(np.abs(VALUES).max())
    np.testing.assert_allclose(port.staging[1], VALUES / 2, atol=tolerance * largest)
    assert not np.array_equal(port.staging[1], VALUES / 2), "a codec that loses nothing tests nothing"


def test_differences_to_a_version_that_left_are_refused_with_the_remedy(port: Port) -> None:
    body = differences(Codec.INT8, CHUNKS[0])
    header = replace(put(CHUNKS[0]), codec=Codec.INT8, checksum=checksum(body))
    for base in (Version(1, 9), None):
        port.port.hold([Slot(A, 1, 1, opening=7, wire=Codec.INT8, base=base)])
        refusal = port.refused(header, body)
        assert refusal.code is RefusalCode.BASE_GONE
        assert "new ticket" in refusal.sentence


def test_the_same_chunk_is_not_landed_twice_at_a_time(port: Port) -> None:
    """While the first landing is under way, on another thread, a repeated chunk waits for what becomes of it."""
    frames = [memoryview(put(CHUNKS[0]).encode()), memoryview(payload(CHUNKS[0]))]
    job = port.port.begin(frames)
    assert isinstance(job, LandingJob)
    assert port.port.begin(frames) is None
    assert port.port.end(job, job.run()).header.op is DataOp.ACK
    again = port.port.begin(frames)
    assert isinstance(again, Answer)
    assert again.header.op is DataOp.ACK


@pytest.mark.parametrize("codec", [Codec.F32, Codec.INT8])
def test_damaged_bytes_in_the_row_count_for_nothing_and_the_right_ones_overwrite_them(codec: Codec) -> None:
    """Bytes are copied while their checksum is taken, so a damaged chunk leaves its mark; no process may trust it."""
    layout = Layout((Parameter("w", (2 * PIECE_ELEMS,), "float32", "w"),))
    port = Port(layout.blocks, 4 * PIECE_ELEMS)
    theta = port.buffer.theta
    sent = (theta * np.float32(1.25)).astype(np.float32)
    bodies = {}
    for chunk in chunks_of(layout.blocks, 4 * PIECE_ELEMS):
        here = slice(chunk.offset_bytes // 4, (chunk.offset_bytes + chunk.length_bytes) // 4)
        encoded = np.empty(encoded_bytes(codec, PIECE_ELEMS), np.uint8)
        if codec is Codec.F32:
            encoded[:] = sent[here].view(np.uint8)
        else:
            wire_numpy.encode(codec, sent[here], theta[here], None, encoded)
            wire_numpy.decode(codec, theta[here], encoded, sent[here])
        bodies[chunk] = encoded.tobytes()
    port.port.hold([Slot(A, 1, 1, opening=6, wire=codec, base=V0)])
    first, last = bodies
    damaged = bytearray(bodies[first])
    damaged[-1] ^= 0x40
    header = replace(put(first, bodies[first]), codec=codec)
    refusal = port.send(header, bytes(damaged)).header.refusal
    assert refusal is not None
    assert refusal.code is RefusalCode.CHUNK
    assert port.staging[1, :PIECE_ELEMS].any(), "the test is about damaged bytes that are in the row"
    known = port.port.known(V0)
    assert known is not None
    for chunk in (last, first):
        missing = port.send(replace(header, op=DataOp.QUERY_MISSING, checksum=0)).header.missing
        assert (chunk.block_id, chunk.offset_bytes) in [(one.block, one.offset_bytes) for one in missing]
        assert not known.squared(1)[1][chunk.offset_bytes // (4 * PIECE_ELEMS)]
        assert not port.staged
        assert port.send(replace(put(chunk, bodies[chunk]), codec=codec), bodies[chunk]).header.op is DataOp.ACK
    digest = shard_digest([checksum(body) for body in bodies.values()])
    assert port.staged == [PushStaged(Slot(A, 1, 1, 6, codec, V0), digest)]
    np.testing.assert_array_equal(port.staging[1], sent)
    sums, valid = known.squared(1)
    expected = np.empty(2)
    assert outer_numpy.measure_landed(sent, theta, expected) == 0
    assert valid.all()
    np.testing.assert_array_equal(sums, expected)
    assert known.bad(1).tolist() == [0, 0]


def test_every_answer_about_a_transfer_says_what_may_be_in_flight(port: Port) -> None:
    headers = [(put(CHUNKS[0]), [payload(CHUNKS[0])]), (replace(put(CHUNKS[0]), op=DataOp.QUERY_MISSING), [])]
    for header, parts in [*headers, (get(CHUNKS[0]), [])]:
        assert port.send(header, *parts).header.credit >= 1


@pytest.mark.parametrize("then", ["another is closed", "it is opened again, nearly complete"])
def test_a_push_gets_a_place_when_another_is_closed_or_it_needs_least(then: str) -> None:
    """Two of three run at full rate at first."""
    names, numbers = [push_id(name) for name in "abc"], range(3)
    port = DataPort("run", lambda staged: None, now_s=lambda: 0.0)
    port.set_epoch(3)
    port.set_memory(ShardMap(BLOCKS, CHUNK_BYTES), np.zeros((3, LAYOUT.n_elems), np.float32))
    slots = [Slot(name, 1, number, opening=1) for number, name in zip(numbers, names, strict=True)]
    port.hold(slots)

    def credit(attempt: int = 1) -> int:
        query = replace(put(CHUNKS[0]), op=DataOp.QUERY_MISSING, push=names[2], attempt=attempt)
        return port.answer([memoryview(query.encode())]).header.credit

    assert 1 <= credit() < MAX_WINDOW_CHUNKS
    if then == "another is closed":
        port.hold(slots[1:])
        assert credit() == MAX_WINDOW_CHUNKS
        return
    for chunk in CHUNKS[1:]:
        port.answer([memoryview(part) for part in (replace(put(chunk), push=names[2]).encode(), payload(chunk))])
    port.hold([*slots[:2], Slot(names[2], 2, 2, opening=1)])
    assert credit(attempt=2) == MAX_WINDOW_CHUNKS
