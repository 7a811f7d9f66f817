"""What comes over a socket: control messages, the data header, whole data messages at a port that holds pushes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from support.slave_wire import LAYOUT, RUN, push_id
from support.wire_values import values_of

from dips.core import messages as m
from dips.core.errors import RefusalCode, Refused
from dips.core.ids import RoundId, Version
from dips.core.layout import Layout, checksum, chunks_of
from dips.core.net.codec_protobuf import decode, encode
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.grpc_calls import to_refusal
from dips.core.wire import Codec
from dips.slave.calculation import chunk_checksums
from dips.slave.data_port import DataPort
from dips.slave.memory import ThetaBuffer
from dips.slave.state.staging import ShardMap, Slot
from fuzz.mutate import mutated
from fuzz.target import Broken, Target

SERVICES: dict[str, Sequence[type]] = {
    "clusters": (*m.ClusterRequest.__args__, *m.ClusterReply.__args__),
    "slaves": (m.SlaveMessage, m.SlaveCommand),
    "operator": (
        *(m.StatusRequest, m.WatchRequest, m.OperatorRequest, m.EvictRequest, m.DrainRequest, m.ExtendRequest),
        *(m.OperatorReply, m.StatusReply),
        m.Refusal,
    ),
}
"""Requests are read by the master, replies and commands by clusters, slaves and commands of a person."""

TRAILER = b"\x91\x01"
CHUNK_BYTES = 1024
V0 = Version(1, 0)


def messages(service: str) -> Target:
    """The first byte of an input says of which kind the rest is."""
    kinds = SERVICES[service]

    def seeds_of(number: int) -> st.SearchStrategy[bytes]:
        return values_of(kinds[number]).map(encode).flatmap(lambda data: mutated(lambda: [data]))

    whole = st.integers(0, len(kinds) - 1).flatmap(
        lambda number: st.one_of(seeds_of(number), st.binary(max_size=200)).map(lambda data: bytes([number]) + data)
    )

    def feed(data: bytes) -> str:
        kind = kinds[data[0] % len(kinds)] if data else kinds[0]
        value: object = decode(data[1:], kind)
        again = encode(value)
        if encode(decode(again, kind)) != again:
            raise Broken(f"a {kind.__name__} changes when it is written and read again")
        return "taken"

    return Target(f"protobuf {service}", whole, feed, (Refused,))


def sealed(body: bytes) -> bytes:
    """A header frame with the checksum that its bytes ask for."""
    return body + TRAILER + checksum(body).to_bytes(8, "little")


def headers() -> list[bytes]:
    """Right ones of every kind, without their checksums."""
    pushed = {"push": push_id("a"), "attempt": 1, "block": 0, "length_bytes": 1024, "codec": Codec.F32}
    made = [
        DataHeader(RUN, 1, DataOp.PUT_CHUNK, 1, **pushed, checksum=checksum(bytes(1024))),  # type: ignore[arg-type]
        DataHeader(RUN, 1, DataOp.QUERY_MISSING, 2, push=push_id("a"), attempt=1),
        DataHeader(RUN, 1, DataOp.QUERY_MISSING, 2, push=push_id("a"), attempt=1, block=2, offset_bytes=1024),
        DataHeader(RUN, 1, DataOp.GET_CHUNK, 3, version=V0, block=1, length_bytes=1024, codec=Codec.F32),
        DataHeader(RUN, 1, DataOp.ACK, 4, push=push_id("a"), attempt=1, credit=4),
        DataHeader(RUN, 1, DataOp.REFUSED, 5, refusal=to_refusal(Refused(RefusalCode.CHUNK, "no"))),
    ]
    return [header.encode()[:-10] for header in made]


_FIELD: dict[str, st.SearchStrategy[Any]] = {
    "run_id": st.sampled_from(("", RUN, "other", "\0" * 200)),
    "op": st.sampled_from(DataOp),
    "push": st.sampled_from((None, push_id("a"), push_id("b"), push_id("z"))),
    "version": st.sampled_from((None, V0, Version(2**64 - 1, 2**64 - 1))),
    "base": st.sampled_from((None, V0, Version(2**64 - 1, 2**64 - 1))),
    "codec": st.sampled_from(Codec),
    "cause_id": st.text(max_size=300),
    "complete": st.booleans(),
    "checksum": st.sampled_from((0, 2**64 - 1, checksum(bytes(1024)), checksum(bytes(272)))),
}


def data_header() -> Target:
    inputs = st.one_of(st.binary(max_size=300), mutated(headers), nearly_headers())

    def feed(data: bytes) -> str:
        header = DataHeader.decode(data)
        if DataHeader.decode(header.encode()) != header:
            raise Broken("a header changes when it is written and read again")
        return "taken"

    return Target("data header", inputs, feed, (Refused,), finish=lambda data: sealed(data[:-10]))


def nearly_headers() -> st.SearchStrategy[bytes]:
    """Frames of right headers of which up to three fields are anything that the wire can carry."""

    @st.composite
    def one(draw: st.DrawFn) -> bytes:
        right = DataHeader.decode(sealed(draw(st.sampled_from([*headers(), *put_headers()]))))
        names = draw(st.sets(st.sampled_from([field.name for field in dataclasses.fields(right)]), max_size=3))
        changes: dict[str, Any] = {}
        for name in names - {"header_checksum", "refusal", "missing"}:
            changes[name] = draw(_FIELD.get(name, st.sampled_from((0, 1, 2, 4, 1024, 2**31, 2**32 - 1))))
        return dataclasses.replace(right, **changes).encode()

    return one()


class Port:
    """A data port with a push that is half here, one of differences, and a version to read."""

    def __init__(self) -> None:
        self.rows = np.zeros((3, LAYOUT.n_elems), np.float32)
        self.port = DataPort(RUN, lambda staged: None)
        self.port.set_epoch(1)
        self.port.set_memory(ShardMap(LAYOUT.blocks, CHUNK_BYTES), self.rows)
        theta = np.arange(LAYOUT.n_elems, dtype=np.float32)
        info = m.SnapshotInfo(V0, RoundId(1, 1), b"", b"", b"", committed=True)
        buffer = ThetaBuffer(theta, info, chunk_checksums(theta, LAYOUT.blocks, CHUNK_BYTES))
        self.port.set_readable({V0: buffer}, V0)
        differences = Slot(push_id("b"), 1, 1, opening=1, wire=Codec.INT8, base=V0)
        self.port.hold([Slot(push_id("a"), 1, 0, opening=1), differences])

    def take(self, frames: Sequence[bytes]) -> str:
        """One message. Raises Broken unless it is answered once, counted if refused, and lands only when ACKed: a wrong
        checksum is seen when the bytes are in the row already, which then are of no chunk that counts."""
        before, refused = self.rows.copy(), self.port.refused_chunks
        answer = self.port.answer([memoryview(frame) for frame in frames])
        op = answer.header.op
        answer.header.encode()
        if (self.port.refused_chunks == refused + 1) != (op is DataOp.REFUSED):
            raise Broken(f"an answer {op.name} with {self.port.refused_chunks - refused} counted refusals")
        damaged = answer.header.refusal is not None and "the payload's checksum is" in answer.header.refusal.sentence
        if op is not DataOp.ACK:
            changed = before.view(np.uint32) != self.rows.view(np.uint32)
            if damaged:
                changed[self._place_of(DataHeader.decode(frames[0]))] = False
            if changed.any():
                raise Broken(f"staging changed with an answer {op.name}")
        if op is DataOp.REFUSED:
            assert answer.header.refusal is not None
            return f"refused: {answer.header.refusal.code.name}"
        return f"answered: {op.name}"

    def _place_of(self, header: DataHeader) -> tuple[int, slice]:
        """Row and elements of a chunk that a PUT_CHUNK named rightly and that had not landed."""
        row = 0 if header.push == push_id("a") else 1
        return row, ShardMap(LAYOUT.blocks, CHUNK_BYTES).find(header).elems


@lru_cache(maxsize=1)
def put_headers() -> list[bytes]:
    """A right PUT_CHUNK of zeros for each chunk of push a, without its checksum."""
    made = []
    for chunk in chunks_of(LAYOUT.blocks, CHUNK_BYTES):
        header = DataHeader(
            RUN, 1, DataOp.PUT_CHUNK, 1, push=push_id("a"), attempt=1, block=chunk.block_id,
            offset_bytes=chunk.offset_bytes, length_bytes=chunk.length_bytes, codec=Codec.F32,
            checksum=checksum(bytes(chunk.length_bytes)),
        )  # fmt: skip
        made.append(header.encode()[:-10])
    return made


def data_message() -> Target:
    """Whole messages: a count of frames, then each with its length, so that any bytes are some message."""
    port = Port()
    lengths = st.sampled_from((0, 1, 4, 100, 255, 256, 272, 1000, 1024, 1028))
    head = st.one_of(nearly_headers(), nearly_headers(), mutated(headers).map(sealed), st.binary(max_size=99))
    frames = st.tuples(head, st.lists(lengths.map(bytes) | st.binary(max_size=64), max_size=2))

    def packed(message: tuple[bytes, list[bytes]]) -> bytes:
        all_frames = (message[0], *message[1])
        return b"".join(len(frame).to_bytes(4, "little") + frame for frame in all_frames)

    def feed(data: bytes) -> str:
        parts: list[bytes] = []
        at = 0
        while at < len(data) and len(parts) < 8:
            size = int.from_bytes(data[at : at + 4], "little")
            parts.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        return port.take(parts)

    def finish(data: bytes) -> bytes:
        """The header's checksum is right for what it has become."""
        size = int.from_bytes(data[:4], "little")
        head, rest = data[4 : 4 + size], data[4 + size :]
        return packed((sealed(head[:-10]), [])) + rest

    return Target("data message", frames.map(packed), feed, finish=finish)


def layouts() -> Target:
    """The names and shapes that a first joiner brings."""

    def feed(data: bytes) -> str:
        layout = decode(data, Layout)
        if layout.n_elems < len(layout.blocks):
            raise Broken("a layout with blocks of nothing")
        return "taken"

    inputs = values_of(Layout).map(encode).flatmap(lambda data: mutated(lambda: [data]))
    return Target("layout", inputs, feed, (Refused,))


TARGETS: tuple[Callable[[], Target], ...] = (
    lambda: messages("clusters"),
    lambda: messages("slaves"),
    lambda: messages("operator"),
    data_header,
    data_message,
    layouts,
)
