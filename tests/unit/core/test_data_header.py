"""The data header: round trips, and refusals of what no process may act on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.layout import checksum
from dips.core.messages import Refusal
from dips.core.net.codec_protobuf import to_message
from dips.core.net.data_header import MAX_HEADER_BYTES, MAX_MISSING, DataHeader, DataOp, MissingChunk
from dips.core.protocol import PROTOCOL_VERSION
from dips.core.wire import Codec
from dips.protos import data_pb2

PUSH = PushId(ClusterId("a"), Incarnation(3, 2), 7)
PUT = DataHeader(
    *("run", 4, DataOp.PUT_CHUNK, 9, PUSH),
    attempt=2, block=5, offset_bytes=1024, length_bytes=512, codec=Codec.F32, checksum=2**64 - 1, cause_id="c",
)  # fmt: skip
GET = DataHeader("run", 4, DataOp.GET_CHUNK, 1, version=Version(1, 0), block=0, length_bytes=8)


@pytest.mark.parametrize("header", [
    replace(PUT, push=None), replace(GET, version=None), DataHeader("run", 1, DataOp.QUERY_MISSING, 1),
    DataHeader("run", 1, DataOp.CHUNK, 1), DataHeader("run", 1, DataOp.REFUSED, 1),
], ids=lambda header: header.op.name)  # fmt: skip
def test_an_op_without_what_it_needs_is_malformed(header: DataHeader) -> None:
    with pytest.raises(Refused, match=header.op.name) as caught:
        DataHeader.decode(header.encode())
    assert caught.value.code is RefusalCode.MALFORMED


@pytest.mark.parametrize(("field", "number"), [("op", 99), ("op", 0), ("codec", 99)])
def test_an_unknown_enum_is_malformed(field: str, number: int) -> None:
    message = data_pb2.DataHeader()
    message.ParseFromString(PUT.encode())
    setattr(message, field, number)
    with pytest.raises(Refused, match=f" {number} ") as caught:
        DataHeader.decode(sealed(message))
    assert caught.value.code is RefusalCode.MALFORMED


def sealed(message: data_pb2.DataHeader) -> bytes:
    """The bytes of a message with the right checksum at the end, whatever it says."""
    message.ClearField("header_checksum")
    body = message.SerializeToString()
    return body + data_pb2.DataHeader(header_checksum=checksum(body)).SerializeToString()


def test_the_checksum_is_an_ordinary_last_field() -> None:
    assert sealed(data_pb2.DataHeader.FromString(PUT.encode())) == PUT.encode()
    assert DataHeader.decode(replace(DataHeader.decode(PUT.encode()), block=6).encode()) == replace(PUT, block=6)


def test_the_longest_honest_header_fits_and_a_longer_one_is_refused_unread() -> None:
    with pytest.raises(Refused, match=str(MAX_HEADER_BYTES)):
        DataHeader.decode(b"\x00" * (MAX_HEADER_BYTES + 1))
    missing = tuple(MissingChunk(2**32 - 1, 2**63) for _ in range(MAX_MISSING))
    header = DataHeader("r" * 63, 2**63, DataOp.MISSING, 2**63, push=PUSH, missing=missing)
    assert len(header.encode()) <= MAX_HEADER_BYTES


@given(st.data())
def test_any_damage_to_a_header_is_seen(data: st.DataObject) -> None:
    damaged = bytearray(PUT.encode())
    for position in data.draw(st.sets(st.integers(0, len(damaged) - 1), min_size=1, max_size=4)):
        damaged[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Refused) as refused:
        DataHeader.decode(bytes(damaged))
    assert refused.value.code is RefusalCode.MALFORMED


def test_another_run_is_refused_by_name() -> None:
    with pytest.raises(Refused, match=r"'run'.*'other'") as caught:
        PUT.check_common("other")
    assert caught.value.code is RefusalCode.RUN_ID


@pytest.mark.parametrize("protocol", [0, PROTOCOL_VERSION + 1])
def test_another_protocol_is_refused_with_the_remedy(protocol: int) -> None:
    with pytest.raises(Refused, match="install the same release") as caught:
        replace(PUT, protocol=protocol).check_common("run")
    assert caught.value.code is RefusalCode.PROTOCOL_VERSION


NUMBERS = st.integers(0, 2**64 - 1)
SMALL = st.integers(0, 2**32 - 1)
HEADERS = st.builds(
    DataHeader, run_id=st.text(max_size=20), epoch=NUMBERS, op=st.sampled_from(DataOp), request=NUMBERS,
    push=st.just(PUSH) | st.builds(PushId, st.text(max_size=9), st.builds(Incarnation, NUMBERS, NUMBERS), NUMBERS),
    attempt=NUMBERS, version=st.builds(Version, NUMBERS, NUMBERS), block=SMALL, offset_bytes=NUMBERS,
    length_bytes=NUMBERS, codec=st.sampled_from(Codec), checksum=NUMBERS, cause_id=st.text(max_size=20),
    refusal=st.builds(Refusal, st.sampled_from(RefusalCode), st.text(max_size=20), st.floats(0, 9)),
    missing=st.lists(st.builds(MissingChunk, SMALL, NUMBERS), max_size=3).map(tuple),
    complete=st.booleans(), credit=SMALL, protocol=SMALL, base=st.none() | st.builds(Version, NUMBERS, NUMBERS),
)  # fmt: skip


@given(HEADERS)
def test_every_field_is_written_and_read(header: DataHeader) -> None:
    frame = header.encode()
    message = data_pb2.DataHeader.FromString(frame)
    for name in set(data_pb2.DataHeader.DESCRIPTOR.fields_by_name) - {"header_checksum", "missing"}:
        ours, theirs = getattr(header, name), getattr(message, name)
        if name in ("push", "version", "base", "refusal"):
            assert message.HasField(name) == (ours is not None)
            assert ours is None or to_message(ours) == theirs
        else:
            assert ours == theirs
    assert [to_message(item) for item in header.missing] == list(message.missing)
    assert DataHeader.decode(frame) == header
