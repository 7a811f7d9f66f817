"""The compiled header has the bytes of DataHeader.encode(), and never means another thing than DataHeader.decode()."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fuzz.mutate import shaken
from fuzz.wire import sealed
from support.checked_memory import Interpreted
from support.hostile_headers import some_header

from dips.core.errors import Refused
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.math.simd_numba import address
from dips.core.messages import MissingChunk
from dips.core.net import header_numba
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.protocol import PROTOCOL_VERSION
from dips.core.wire import Codec
from dips.protos import data_pb2

RUN = "run-1"
PUSH = PushId(ClusterId("a"), Incarnation(3, 2), 7)


def parsed(frame: bytes) -> tuple[np.ndarray, np.ndarray] | None:
    memory = np.frombuffer(frame, np.uint8)
    value, length = np.full(header_numba.N_FIELDS, 77, np.int64), np.full(header_numba.N_FIELDS, 77, np.int64)
    return (value, length) if header_numba.parse(address(memory), len(frame), value, length) else None


def fields_of(frame: bytes) -> dict[str, object] | None:
    memory = np.frombuffer(frame, np.uint8)
    found = parsed(frame)
    if found is None:
        return None
    value, length = found
    fields: dict[str, object] = {}
    for field in data_pb2.DataHeader.DESCRIPTOR.fields:
        number, n_bytes = int(value[field.number]), int(length[field.number])
        if n_bytes > 0 or (n_bytes == 0 and field.name in ("push", "version", "base")):
            begin = number - address(memory)
            assert 0 <= begin <= begin + n_bytes <= len(frame) - header_numba.TRAILER_BYTES
            fields[field.name] = frame[begin : begin + n_bytes]
        elif n_bytes == 0:
            fields[field.name] = number % 2**64
    return fields


def expected_fields(header: DataHeader) -> dict[str, object]:
    fields: dict[str, object] = {
        "push": None if header.push is None else header_numba.part_of(header.push).tobytes(),
        "version": None if header.version is None else header_numba.part_of(header.version).tobytes(),
        "base": None if header.base is None else header_numba.part_of(header.base).tobytes(),
        "run_id": header.run_id.encode() or None,
        "cause_id": header.cause_id.encode() or None,
    }
    for name in ("protocol", "epoch", "op", "attempt", "block", "offset_bytes", "length_bytes", "codec", "checksum"):
        fields[name] = int(getattr(header, name)) or None
    for name in ("request", "complete", "credit", "momentum"):
        fields[name] = int(getattr(header, name)) or None
    return {name: value for name, value in fields.items() if value is not None}


def check(frame: bytes) -> bool:
    """Whether the frame is plain; then Python reads the same from it, and would write it so."""
    fields = fields_of(frame)
    if fields is None:
        return False
    header = DataHeader.decode(frame)
    assert fields == expected_fields(header)
    assert header.encode() == frame
    return True


def test_a_plain_header_is_read_as_python_reads_it() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        assert check(some_header(rng).encode())


@pytest.mark.parametrize("n", [30, pytest.param(1000, marks=pytest.mark.long)])
def test_what_is_nearly_a_header_never_means_another_thing(n: int) -> None:
    """Whatever the compiled parser accepts, decode() accepts, reads equally and would have written."""
    rng = random.Random(2)
    accepted = refused = 0
    for _ in range(n):
        bodies = [some_header(rng).encode()[: -header_numba.TRAILER_BYTES] for _ in range(20)]
        for number in range(1000):
            body = shaken(rng, bodies)
            if check(sealed(body) if number % 10 else body + bodies[0][-10:]):
                accepted += 1
            else:
                refused += 1
    assert accepted > 45 * n
    assert refused > 500 * n


PLAIN = DataHeader(
    RUN, 4, DataOp.PUT_CHUNK, 9, PUSH, 2, None, 5, 1024, 512, Codec.F32, 2**64 - 1, "c", credit=3, complete=True
)


def test_no_byte_of_a_header_can_be_changed() -> None:
    """With the trailer of the right bytes: each of them counts, and so does the number of bytes."""
    frame = PLAIN.encode()
    for place in range(len(frame)):
        for bit in range(8):
            changed = bytearray(frame)
            changed[place] ^= 1 << bit
            assert parsed(bytes(changed)) is None
    for n_bytes in range(len(frame)):
        assert parsed(frame[:n_bytes]) is None
        assert parsed(frame + frame[n_bytes:]) is None


@pytest.mark.parametrize(
    "odd",
    {
        "no op": b"",
        "an op of tomorrow": b"\x20\x08",
        "a codec of tomorrow": b"\x20\x04\x58\x05",
        "a refusal that says nothing": b"\x20\x07",
        "a chunk without its version": b"\x20\x06",
        "a put without its push": b"\x20\x01",
        "a query without its push": b"\x20\x02",
        "a get without its version": b"\x20\x03",
        "a push without incarnation": b"\x20\x01\x2a\x03\x0a\x01a",
        "a push whose cluster is no UTF-8": b"\x20\x01\x2a\x05\x0a\x01\xff\x12\x00",
        "a cause that is no UTF-8": b"\x20\x04\x72\x01\xff",
        "a cause that is no ASCII": b"\x20\x04\x72\x02\xc3\xa9",
        "a field twice": b"\x20\x04\x20\x04",
        "fields in another order": b"\x20\x04\x18\x05",
        "an unknown field": b"\x20\x04\xa8\x01\x01",
        "field 0": b"\x00\x01\x20\x04",
        "a field number of 32 bits": b"\x20\x04\xf8\xff\xff\xff\x7f\x01",
        "a number of 5 bytes that needs 1": b"\x20\x84\x80\x80\x80\x00",
        "a 0 that is written": b"\x20\x04\x30\x00",
        "an empty cause that is written": b"\x20\x04\x72\x00",
        "a block of 33 bits": b"\x20\x04\x40\x80\x80\x80\x80\x20",
        "a credit of 33 bits": b"\x20\x04\x98\x01\x80\x80\x80\x80\x20",
        "complete, twice over": b"\x20\x04\x88\x01\x02",
        "an epoch of 63 bits": b"\x20\x04\x30\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        "a checksum of 65 bits": b"\x20\x04\x60\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02",
        "a checksum of 11 bytes": b"\x20\x04\x60\xff\xff\xff\xff\xff\xff\xff\xff\xff\x81\x00",
        "a number that does not end": b"\x20\x04\x60\xff",
        "a text that does not end": b"\x20\x04\x72\x05abc",
        "a text of 2^63 bytes": b"\x20\x04\x72\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01abc",
        "a number where a text belongs": b"\x20\x04\x70\x01",
        "a text where a number belongs": b"\x20\x04\x6a\x01a",
        "fixed64": b"\x20\x04\x69" + bytes(8),
        "its own trailer before": b"\x20\x04\x91\x01" + bytes(8),
    }.items(),
    ids=lambda odd: odd[0],
)
def test_odd_headers_are_left_to_python(odd: tuple[str, bytes]) -> None:
    _, rest = odd
    assert parsed(sealed(b"\x08\x01\x12\x05run-1" + rest)) is None


def test_long_headers_and_lists_are_left_to_python() -> None:
    # The length of the longer text has one byte more.
    longest = replace(PLAIN, cause_id="c" * (header_numba.PLAIN_BYTES - len(PLAIN.encode())))
    assert len(longest.encode()) == header_numba.PLAIN_BYTES
    assert parsed(longest.encode()) is not None
    assert parsed(replace(longest, cause_id=longest.cause_id + "c").encode()) is None
    missing = DataHeader(RUN, 4, DataOp.MISSING, 2, push=PUSH, missing=(MissingChunk(1, 4096),))
    assert parsed(missing.encode()) is None
    assert parsed(replace(missing, missing=()).encode()) is not None


def test_ours_is_what_check_common_lets_pass() -> None:
    run_id = header_numba.text_of(RUN)
    others = [(PROTOCOL_VERSION + 1, RUN), (0, RUN), (1, "run-2"), (1, "run"), (1, "")]
    for protocol_of, run in [(PROTOCOL_VERSION, RUN), *others]:
        header = replace(PLAIN, protocol=protocol_of, run_id=run)
        frame = np.frombuffer(header.encode(), np.uint8)
        value, length = np.zeros(header_numba.N_FIELDS, np.int64), np.zeros(header_numba.N_FIELDS, np.int64)
        assert header_numba.parse(address(frame), len(frame), value, length)
        try:
            header.check_common(RUN)
        except Refused:
            assert not header_numba.is_ours(value, length, run_id)
        else:
            assert header_numba.is_ours(value, length, run_id)


@pytest.mark.parametrize(
    ("kernels", "n"), [(header_numba, 1000), (Interpreted(header_numba), 60)], ids=["compiled", "interpreted"]
)
def test_whole_headers_have_the_bytes_of_encode(kernels: Any, n: int) -> None:
    """Requests, and the answers to them; where the buffer is too short there is none, and nothing behind it changes."""
    rng, at = random.Random(3), getattr(kernels, "address", address)
    for _ in range(n):
        some = some_header(rng)
        push, version = (
            PushId(ClusterId("abc"), Incarnation(some.block, 1), some.epoch),
            Version(some.epoch, some.block),
        )
        put = replace(
            some, op=DataOp.PUT_CHUNK, push=push, version=None, complete=False, credit=0, protocol=PROTOCOL_VERSION,
            momentum=False, base=None,
        )  # fmt: skip
        get = replace(put, op=DataOp.GET_CHUNK, push=None, attempt=0, version=version, codec=Codec.F32, checksum=0)
        base = Version(some.block, some.epoch) if some.epoch % 2 else None
        codec = Codec.F32 if base is None else Codec.INT8
        get = replace(get, momentum=some.momentum, codec=codec, base=base)
        run_id, cause = kernels.text_of(some.run_id), kernels.text_of(some.cause_id)
        expect(
            put, kernels.write_put_chunk, run_id, put.epoch, kernels.part_of(push), put.attempt, put.block,
            put.offset_bytes, put.length_bytes, int(put.codec), np.uint64(put.checksum), put.request, cause,
        )  # fmt: skip
        expect(
            get, kernels.write_get_chunk, run_id, get.epoch, kernels.part_of(version), get.block, get.offset_bytes,
            get.length_bytes, int(codec), get.request, cause, get.momentum,
            kernels.part_of(base or version),
        )  # fmt: skip
        ack = replace(put, op=DataOp.ACK, length_bytes=0, codec=Codec.NONE, checksum=0)
        ack = replace(ack, complete=some.complete, credit=some.credit)
        asked = np.frombuffer(put.encode(), np.uint8)
        value, length = np.zeros(kernels.N_FIELDS, np.int64), np.zeros(kernels.N_FIELDS, np.int64)
        assert kernels.parse(at(asked), len(asked), value, length)
        expect(ack, kernels.write_ack, run_id, ack.epoch, value, length, ack.complete, ack.credit)
        chunk = replace(get, op=DataOp.CHUNK, checksum=some.checksum, credit=some.credit)
        asked = np.frombuffer(get.encode(), np.uint8)
        assert kernels.parse(at(asked), len(asked), value, length)
        expect(
            chunk, kernels.write_chunk, run_id, chunk.epoch, value, length, int(codec), np.uint64(chunk.checksum),
            chunk.credit,
        )  # fmt: skip


def expect(header: DataHeader, write: object, *arguments: object) -> None:
    assert callable(write)
    frame = header.encode()
    for room in (len(frame), len(frame) + 3, len(frame) - 1, len(frame) - 9, len(frame) // 2, 0):
        memory = np.full(len(frame) + 16, 0xAA, np.uint8)
        n_bytes = write(memory[:room], *arguments)
        assert memory[room:].tobytes() == b"\xaa" * (len(memory) - room)
        if room < len(frame):
            assert n_bytes == -1
        else:
            assert memory[:n_bytes].tobytes() == frame


@pytest.mark.parametrize("kernels", [header_numba, Interpreted(header_numba)], ids=["compiled", "interpreted"])
def test_texts_and_parts_are_compared_to_their_last_byte(kernels: Any) -> None:
    memory = np.frombuffer(b"run-1run-2", np.uint8)
    at = getattr(kernels, "address", address)(memory)
    assert kernels.same(at, 5, kernels.text_of("run-1"))
    assert not kernels.same(at + 5, 5, kernels.text_of("run-1"))
    assert not kernels.same(at, 5, kernels.text_of("run"))
    assert not kernels.same(at, 3, kernels.text_of("run-1"))
    assert kernels.same(0, kernels.ABSENT, kernels.text_of(""))
    assert not kernels.same(0, kernels.ABSENT, kernels.text_of("run-1"))
