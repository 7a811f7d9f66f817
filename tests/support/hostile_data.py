"""Data messages that a slave may be sent: right ones, and ones with something wrong. Quick, and told by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuzz.mutate import EDGES, shaken
from fuzz.wire import sealed
from support.slave_wire import LAYOUT, RUN, push_id

from dips.core.ids import Version
from dips.core.layout import Chunk, checksum, chunks_of
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.wire import Codec, encoded_bytes

V0, V1, V2 = VERSIONS = tuple(Version(1, v) for v in range(3))
"""That can be read; each but the first also as DIFFERENCE to the one before."""

DIFFERENCE = Codec.INT4
TRAILER_BYTES = 10

PUSHES = {"a": Codec.F32, "b": Codec.INT8, "c": Codec.F32, "d": Codec.BF16}
"""Clusters and the codec of their pushes, by slot."""


@dataclass(frozen=True)
class Traffic:
    chunk_bytes: int
    epoch: int = 1

    def chunks(self) -> Sequence[Chunk]:
        return chunks_of(LAYOUT.blocks, self.chunk_bytes)

    def put(self, cluster: str, chunk: Chunk, payload: bytes, request: int = 1) -> DataHeader:
        return DataHeader(
            RUN, self.epoch, DataOp.PUT_CHUNK, request, push_id(cluster), 1, block=chunk.block_id,
            offset_bytes=chunk.offset_bytes, length_bytes=chunk.length_bytes, codec=PUSHES[cluster],
            checksum=checksum(payload), cause_id="cause",
        )  # fmt: skip

    def payload(self, rng: random.Random, cluster: str, chunk: Chunk) -> bytes:
        n = chunk.length_bytes // 4
        if PUSHES[cluster] is Codec.F32:
            return rng.choice((b"\x00\x00\x80\x3f", b"\x00\x00\x00\x40", b"\x01\x02\x03\x3e")) * n
        return bytes(encoded_bytes(PUSHES[cluster], n))

    def get(self, chunk: Chunk, request: int = 2, version: Version = V0, base: Version | None = None) -> DataHeader:
        return DataHeader(
            RUN, self.epoch, DataOp.GET_CHUNK, request, version=version, block=chunk.block_id,
            offset_bytes=chunk.offset_bytes, length_bytes=chunk.length_bytes,
            codec=Codec.F32 if base is None else DIFFERENCE, cause_id="cause", base=base,
        )  # fmt: skip

    def right(self, rng: random.Random) -> list[bytes]:
        chunk, what = rng.choice(self.chunks()), rng.random()
        request = rng.randrange(1, 2**32)
        if what < 0.15:
            return [self.get(chunk, request, rng.choice(VERSIONS)).encode()]
        if what < 0.3:
            version, base = rng.choice(((V1, V0), (V2, V1), (V2, V0)))
            return [self.get(chunk, request, version, base).encode()]
        if what < 0.35:
            start = (chunk.block_id, chunk.offset_bytes) if rng.random() < 0.5 else (0, 0)
            block, offset_bytes = start if rng.random() < 0.8 else (rng.randrange(2**32), rng.randrange(2**64))
            query = DataHeader(
                RUN, self.epoch, DataOp.QUERY_MISSING, request, push_id(rng.choice("abcd")), 1, block=block,
                offset_bytes=offset_bytes,
            )  # fmt: skip
            return [query.encode()]
        cluster = rng.choice("abcd")
        payload = self.payload(rng, cluster, chunk)
        return [self.put(cluster, chunk, payload, request).encode(), payload]

    def hostile(self, rng: random.Random) -> list[bytes]:
        frames = self.right(rng)
        return spoilt(rng, frames, self.chunk_bytes) if rng.randrange(8) else frames


def spoilt(rng: random.Random, frames: list[bytes], chunk_bytes: int) -> list[bytes]:
    """With other fields, other bits, or other frames."""
    match rng.randrange(7):
        case 0 | 1:
            frames[0] = with_odd_fields(rng, frames[0])
        case 2:
            frames[0] = sealed(shaken(rng, [frames[0][:-TRAILER_BYTES]])[:2000])
        case 3:
            frames[0] = shaken(rng, frames[:1])[:2000]
        case 4:
            frames[-1] = shaken(rng, frames[-1:])[: 4 * chunk_bytes]
        case 5:
            frames = frames[: rng.randrange(1, 3)] + [rng.randbytes(rng.choice((0, 4, 1024)))] * rng.randrange(4)
        case _:
            frames = [b"", *frames] if rng.random() < 0.5 else frames[::-1]
    return frames


def with_odd_fields(rng: random.Random, frame: bytes) -> bytes:
    """Up to three fields are something that the wire can carry, with the trailer of these bytes."""
    header = DataHeader.decode(frame)
    changes: dict[str, Any] = {}
    for name in rng.sample(sorted(_ODD), rng.randint(1, 3)):
        changes[name] = rng.choice(_ODD[name])
    return replace(header, **changes).encode()


_WIDE = tuple(number for number in EDGES if number < 2**64)
_ODD: dict[str, Sequence[Any]] = {
    "run_id": ("", "other", RUN + "x", RUN[:-1], "\0" * 200, "é"),
    "cause_id": ("", "x" * 400, "é", "cause" * 20),
    "op": tuple(DataOp)[:-1],
    "push": (None, push_id("a"), push_id("b"), push_id("a", 2), push_id("z")),
    "version": (None, *VERSIONS, Version(1, 3), Version(2**64 - 1, 2**64 - 1)),
    "base": (None, *VERSIONS, Version(1, 3), Version(2**64 - 1, 2**64 - 1)),
    "codec": tuple(Codec),
    "epoch": _WIDE,
    "attempt": _WIDE,
    "block": (0, 1, 5, 6, 7, 2**31 - 1, 2**31, 2**32 - 1),
    "offset_bytes": (*_WIDE, 4, 1024, 1028, 65536),
    "length_bytes": (*_WIDE, 4, 272, 1020, 1024, 1028, 65536),
    "checksum": _WIDE,
    "request": _WIDE,
    "protocol": (0, 1, 2, 2**32 - 1),
    "momentum": (True, False),
    "complete": (True, False),
    "credit": (0, 1, 2**32 - 1),
}


def every_flip(traffic: Traffic, rng: random.Random) -> Iterator[list[bytes]]:
    """Each bit of each header of correct peers flipped, with its old trailer and with the right one; each length."""
    chunk = traffic.chunks()[1]
    messages = [[traffic.get(chunk).encode()], [traffic.get(chunk, version=V2, base=V0).encode()]]
    for cluster in PUSHES:
        payload = traffic.payload(rng, cluster, chunk)
        messages.append([traffic.put(cluster, chunk, payload).encode(), payload])
    for header, *rest in messages:
        for place in range(len(header)):
            for bit in range(8):
                changed = bytearray(header)
                changed[place] ^= 1 << bit
                yield [bytes(changed), *rest]
                yield [sealed(bytes(changed[:-TRAILER_BYTES])), *rest]
            yield [header[:place], *rest]
            yield [sealed(header[:place]), *rest]
            yield [header + header[place:], *rest]
        for payload in rest:
            for n_bytes in (0, 1, len(payload) - 1, len(payload) - 4):
                yield [header, payload[:n_bytes]]
            yield [header, payload + b"\0"]
            yield [header, payload, b""]
            yield [header]
