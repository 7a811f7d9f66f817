"""Rounded versions on a slave: computed, kept, stored and served, whatever is asked of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.published_shard import BLOCKS, CHUNK_BYTES, PUSHES, Shard, vector
from support.slave_wire import LAYOUT, prepare_of

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import RoundId, Version
from dips.core.layout import AVERAGED_LAYER, Layout, Parameter, chunks_of, digest_of_array
from dips.core.math import outer_numpy, wire_numpy
from dips.core.messages import Configure, PlacementSpec, Settings, SnapshotInfo
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.placement import shard_bytes_needed
from dips.core.wire import RESIDUAL_CODEC, WIRE_DTYPES, Codec, encoded_bytes
from dips.slave import calculation
from dips.slave.data_port import Answer, DataPort
from dips.slave.disk import LocalDisk
from dips.slave.memory import U8, ShardMemory, residual_bytes_of
from dips.slave.ring import Ring
from dips.slave.state.checks import check_memory, check_settings

CHUNKS = chunks_of(BLOCKS, CHUNK_BYTES)
NAMES = sorted(name for name, codec in WIRE_DTYPES.items() if codec.is_difference)


@pytest.mark.parametrize("pull_wire", NAMES)
def test_a_version_is_the_references_rounded_step(pull_wire: str) -> None:
    shard = Shard(pull_wire)
    codec, n = WIRE_DTYPES[pull_wire], LAYOUT.n_elems
    momentum, lost = np.zeros(n, np.float32), [np.zeros(encoded_bytes(RESIDUAL_CODEC, c.length_bytes // 4), np.uint8)
                                               for c in CHUNKS]  # fmt: skip
    assert np.array_equal(shard.theta, vector(0)), "the seed is not rounded"
    for _ in range(4):
        before = shard.theta.copy()
        shard.next()
        out, after = np.empty(n, np.float32), np.empty(n, np.float32)
        outer_numpy.outer_step(
            before, momentum, shard.memory.staging, np.arange(2), np.array([0.5, 0.5], np.float32), 1.0, 0.7, 0.8, 0.8,
            1.0, out, after, 0, n,
        )  # fmt: skip
        exact, momentum, start = out.copy(), after, 0
        for index, chunk in enumerate(CHUNKS):
            here = slice(start, start + chunk.length_bytes // 4)
            payload = np.empty(encoded_bytes(codec, here.stop - start), np.uint8)
            old, lost[index] = lost[index], np.empty_like(lost[index])
            wire_numpy.publish(codec, out[here], before[here], old, payload, lost[index])
            assert shard.memory.residual.of(index).tobytes() == lost[index].tobytes()
            start = here.stop
        np.testing.assert_array_equal(shard.theta, out)
        assert not np.array_equal(exact, out)
        assert shard.memory.current is not None
        assert shard.memory.current.info is not None
        assert shard.memory.current.info.digest == digest_of_array(out, BLOCKS, CHUNK_BYTES)


def test_a_difference_that_overflows_is_refused() -> None:
    shard = Shard("int8")
    shard.theta[:3] = -3e38
    shard.memory.staging[:] = shard.theta
    shard.memory.staging[:, :3] = 3e38
    shadow = shard.memory.take()
    body = prepare_of(RoundId(1, 9), Version(1, 1), PUSHES[:1], Version(1, 0), weights=(0.5,), scale=1.0)
    with pytest.raises(Refused) as refused:
        calculation.prepare(shard.memory, shard.theta, shadow.theta, body, [0], difference=shadow.difference)
    assert refused.value.code is RefusalCode.NONFINITE


@pytest.mark.parametrize("pins", [0, 2])
@pytest.mark.parametrize("pull_wire", NAMES)
def test_exactly_the_stated_memory_is_enough(pull_wire: str, pins: int) -> None:
    sizes = [block.n_elems for block in BLOCKS]
    plain, needed = (shard_bytes_needed(sizes, CHUNK_BYTES, 2, pins, pull_wire=way) for way in ("float32", pull_wire))
    memory = ShardMemory(BLOCKS, CHUNK_BYTES, 2, needed, pull_wire=pull_wire)
    assert memory.max_buffers == 3 + pins
    by_use = memory.bytes_by_use()
    assert by_use["difference"] * (3 + pins) // 3 + by_use["residual"] == needed - plain
    lacking = shard_bytes_needed(sizes, CHUNK_BYTES, 2, 0, pull_wire=pull_wire) - 1
    with pytest.raises(Refused, match="raise this slave's memory_bytes"):
        ShardMemory(BLOCKS, CHUNK_BYTES, 2, lacking, pull_wire=pull_wire)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(Refused, match="pull_wire is 'int3'") as refused:
        check_settings(Settings(pull_wire="int3"), 1 << 21, 3)
    assert refused.value.code is RefusalCode.CONFIG
    buffers = Layout((Parameter("a", (8,), "float32", "a"), Parameter("m", (8,), "float32", AVERAGED_LAYER, True)))
    body = Configure(buffers, buffers.layout_hash, PlacementSpec((), (), b""), 1)
    with pytest.raises(Refused, match="averaged buffers") as refused:
        check_memory(buffers.blocks, body, Settings(pull_wire="int8"), 1 << 30)
    assert refused.value.code is RefusalCode.CONFIG
    check_memory(buffers.blocks, body, Settings(), 1 << 30)


def ring_at(directory: Path) -> Ring:
    ring = Ring(LocalDisk(directory), "run", "s0", 2)
    ring.scan()
    return ring


def test_the_residual_comes_back_from_the_disk_and_zeros_where_there_is_none(tmp_path: Path) -> None:
    shard, n_bytes = Shard("int4"), residual_bytes_of(BLOCKS, CHUNK_BYTES, "int4")
    shard.next()
    memory = shard.memory
    assert memory.current is not None
    assert memory.current.info is not None
    ring = ring_at(tmp_path)
    ring.make(LAYOUT.n_elems, n_bytes)
    ring.write_committed(memory.current.info, shard.theta, memory.momentum, b"record", memory.residual.data)
    other = replace(memory.current.info, version=Version(1, 2), round=RoundId(1, 7))
    ring.write_committed(other, shard.theta, memory.momentum, b"record")
    again = ring_at(tmp_path)
    assert {info.version for info in again.infos()} == {Version(1, 1), Version(1, 2)}
    theta, momentum, residual = np.empty_like(shard.theta), np.empty_like(shard.theta), np.empty(n_bytes, np.uint8)
    again.load(memory.current.info, theta, momentum, residual)
    assert (theta.tobytes(), residual.tobytes()) == (shard.theta.tobytes(), memory.residual.data.tobytes())
    again.load(memory.current.info, theta, momentum)
    residual.fill(7)
    again.load(other, theta, momentum, residual)
    assert not residual.any()


def test_a_shard_that_moves_has_a_residual_of_zeros(tmp_path: Path) -> None:
    ring, n_bytes = ring_at(tmp_path), residual_bytes_of(BLOCKS, CHUNK_BYTES, "int8")
    info = SnapshotInfo(Version(1, 4), RoundId(1, 9), b"l", b"p", b"d", committed=False)
    stream = ring.begin_stream(info, LAYOUT.n_elems, n_bytes)
    for seed in (1, 2):
        stream.write(vector(seed).view(np.uint8).data)
    stream.write_no_residual()
    ring.seal_stream(stream, info)
    theta, momentum, residual = vector(8), vector(8), np.full(n_bytes, 7, np.uint8)
    ring_at(tmp_path).load(info, theta, momentum, residual)
    assert (theta.tobytes(), momentum.tobytes()) == (vector(1).tobytes(), vector(2).tobytes())
    assert not residual.any()


class Served:
    def __init__(self, pull_wire: str) -> None:
        self.shard = Shard(pull_wire)
        self.codec = WIRE_DTYPES[pull_wire]
        self.held = {Version(1, 0): self.shard.theta.copy()}
        self.port = DataPort("run", lambda staged: None)
        self.port.set_memory(self.shard.memory.map, self.shard.memory.staging)

    def rounds(self, n: int) -> None:
        for _ in range(n):
            self.shard.next()
            info = self.shard.memory.current.info if self.shard.memory.current is not None else None
            assert info is not None
            self.held[info.version] = self.shard.theta.copy()
        assert info is not None
        self.port.set_readable(self.shard.memory.readable(), info.version)

    def ask(self, index: int, version: int, base: int | None, codec: Codec | None = None, **changes: object) -> Answer:
        chunk = CHUNKS[index]
        header = DataHeader(
            "run", 1, DataOp.GET_CHUNK, 17, version=Version(1, version), block=chunk.block_id,
            offset_bytes=chunk.offset_bytes, length_bytes=chunk.length_bytes, codec=codec or self.codec,
            base=None if base is None else Version(1, base),
        )  # fmt: skip
        return self.port.answer([memoryview(replace(header, **changes).encode())])  # type: ignore[arg-type]


@pytest.mark.parametrize(("pull_wire", "behind"), [("bfloat16", 1), ("int8", 1), ("int8", 2), ("int4", 1), ("int4", 2)])
def test_differences_lead_from_the_base_to_the_version_to_the_bit(pull_wire: str, behind: int) -> None:
    served = Served(pull_wire)
    served.rounds(3)
    start = 0
    for index, chunk in enumerate(CHUNKS):
        here = slice(start, start + chunk.length_bytes // 4)
        answer = served.ask(index, 3, 3 - behind)
        header, payload = answer.header, answer.payload
        assert payload is not None, header.refusal
        assert (header.op, header.codec, header.base) == (DataOp.CHUNK, served.codec, Version(1, 3 - behind))
        each = encoded_bytes(served.codec, here.stop - start)
        assert len(payload) == behind * each
        now = served.held[Version(1, 3 - behind)][here]
        for part in range(behind):
            out = np.empty_like(now)
            data: U8 = np.frombuffer(payload[part * each : (part + 1) * each], np.uint8)
            wire_numpy.decode(served.codec, now, data, out)
            now = out
        assert now.tobytes() == served.held[Version(1, 3)][here].tobytes()
        assert header.checksum == served.shard.memory.readable()[Version(1, 3)].checksums[index]
        start = here.stop


def test_what_is_not_kept_is_refused_with_the_remedy() -> None:
    served = Served("int8")
    served.rounds(4)
    cases = {
        (4, 1, Codec.INT8): RefusalCode.BASE_GONE,  # three behind
        (4, 4, Codec.INT8): RefusalCode.BASE_GONE,  # none
        (3, 4, Codec.INT8): RefusalCode.BASE_GONE,  # the wrong way
        (4, 3, Codec.INT4): RefusalCode.BASE_GONE,  # not as it is written here
        (4, 3, Codec.F32): RefusalCode.BASE_GONE,
        (9, 8, Codec.INT8): RefusalCode.VERSION_GONE,
    }
    for (version, base, codec), code in cases.items():
        refusal = served.ask(0, version, base, codec).header.refusal
        assert refusal is not None
        assert refusal.code is code, (version, base, codec)
    refusal = served.ask(0, 4, 3, momentum=True).header.refusal
    assert refusal is not None
    assert refusal.code is RefusalCode.CHUNK
    refusal = served.ask(0, 4, 3, length_bytes=4).header.refusal
    assert refusal is not None
    assert refusal.code is RefusalCode.CHUNK
    plain = served.ask(0, 4, None, Codec.F32)
    assert plain.payload is not None
    assert bytes(plain.payload) == served.shard.theta[: len(plain.payload) // 4].tobytes()


def test_two_differences_that_are_no_fewer_bytes_are_refused() -> None:
    served = Served("bfloat16")
    served.rounds(3)
    refusal = served.ask(0, 3, 1).header.refusal
    assert refusal is not None
    assert refusal.code is RefusalCode.BASE_GONE
