"""The ring of buffers: what stays readable is never written, and memory stays within what was stated."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.slave_wire import LAYOUT

from dips.core.errors import LocalProtocolError, RefusalCode, Refused
from dips.core.ids import RoundId, Version
from dips.core.messages import SnapshotInfo
from dips.core.placement import file_bytes_needed, memory_bytes_needed, shard_bytes_needed
from dips.slave.memory import MemoryFiles, ShardMemory, ThetaBuffer

BLOCKS = LAYOUT.blocks
N = LAYOUT.n_elems
SLOTS = 2


def info(v: int) -> SnapshotInfo:
    return SnapshotInfo(Version(1, v), RoundId(1, v + 1), b"l", b"p", b"d", committed=True)


def make(pins: int = 0) -> ShardMemory:
    return ShardMemory(BLOCKS, 1024, SLOTS, stated(pins))


def stated(pins: int) -> int:
    return shard_bytes_needed([block.n_elems for block in BLOCKS], 1024, SLOTS, pins)


def publish(memory: ShardMemory, v: int) -> ThetaBuffer:
    buffer = memory.take()
    buffer.theta.fill(v)
    memory.next_momentum.fill(-v)
    memory.name_shadow(info(v), [v])
    memory.flip(info(v))
    memory.left()
    return buffer


def test_a_pinned_version_stays_and_costs_one_buffer() -> None:
    memory = make(pins=1)
    publish(memory, 0)
    memory.pin([Version(1, 0)])
    for v in range(1, 6):
        publish(memory, v)
        assert (memory.readable()[Version(1, 0)].theta == 0).all()
    assert sum(memory.bytes_by_use().values()) == memory_bytes_needed(N, SLOTS, 1)
    memory.pin([])
    assert sorted(memory.readable()) == [Version(1, 4), Version(1, 5)]
    memory.left()
    publish(memory, 6)
    assert sum(memory.bytes_by_use().values()) == memory_bytes_needed(N, SLOTS, 1)


def test_a_buffer_that_left_waits_for_the_data_port() -> None:
    memory = make()
    first = publish(memory, 0)
    publish(memory, 1)
    memory.take()
    memory.name_shadow(info(2), [2])
    memory.flip(info(2))
    with pytest.raises(Refused, match="read or pinned"):
        memory.take()
    memory.left()
    assert memory.take() is first


def test_a_shadow_is_flipped_to_only_when_complete_and_a_second_one_is_a_bug() -> None:
    memory = make()
    with pytest.raises(LocalProtocolError):
        memory.flip(info(0))
    memory.take()
    with pytest.raises(LocalProtocolError):
        memory.flip(info(0))
    memory.name_shadow(info(0), [])
    with pytest.raises(LocalProtocolError):
        memory.flip(info(1))
    memory.drop_shadow()
    memory = make()
    memory.take()
    with pytest.raises(LocalProtocolError, match="second shadow"):
        memory.take()


@pytest.mark.parametrize("which", ["none", "stagings", "versions"])
def test_what_is_in_files_is_not_in_the_stated_memory(tmp_path: Path, which: str) -> None:
    elems = [block.n_elems for block in BLOCKS]
    needed = shard_bytes_needed(elems, 1024, SLOTS, 0, which)
    assert needed == stated(0) - file_bytes_needed(N, SLOTS, 0, which)
    files = MemoryFiles(tmp_path, which)
    memory = ShardMemory(BLOCKS, 1024, SLOTS, needed, files=files)
    assert sum(memory.bytes_by_use().values()) == memory_bytes_needed(N, SLOTS, 0) - file_bytes_needed(
        N, SLOTS, 0, which
    )
    assert list(tmp_path.iterdir()) == [], "the files have no names"
    with pytest.raises(Refused, match="raise this slave's memory_bytes") as caught:
        ShardMemory(BLOCKS, 1024, SLOTS, needed - 1, files=files)
    assert caught.value.code is RefusalCode.MEMORY


@pytest.mark.parametrize("which", ["none", "stagings", "versions"])
def test_versions_and_stagings_in_files_are_as_those_in_memory(tmp_path: Path, which: str) -> None:
    needed = shard_bytes_needed([block.n_elems for block in BLOCKS], 1024, SLOTS, 1, which)
    memory = ShardMemory(BLOCKS, 1024, SLOTS, needed, files=MemoryFiles(tmp_path, which, pins=1))
    assert memory.staging.shape == (SLOTS, N)
    assert not memory.staging.any()
    memory.staging[1] = 7.0
    publish(memory, 0)
    memory.pin([Version(1, 0)])
    for v in range(1, 5):
        publish(memory, v)
        assert (memory.readable()[Version(1, 0)].theta == 0).all()
    assert (memory.staging[1] == 7.0).all()
    assert not memory.staging[0].any()
    memory.pin([Version(1, 0), Version(1, 3)])
    publish(memory, 5)
    with pytest.raises(Refused, match="pinned") as caught:
        memory.take()
    assert caught.value.code is RefusalCode.BUSY, "one pin has room, in memory and in files"
    assert caught.value.retry_after_s > 0
    assert (memory.readable()[Version(1, 0)].theta == 0).all()


def test_a_disk_without_room_for_them_is_refused_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Refused, match=f"no room for {4 * SLOTS * N} bytes") as caught:
        ShardMemory(BLOCKS, 1024, SLOTS, stated(0), files=MemoryFiles(tmp_path, "stagings"))
    assert caught.value.code is RefusalCode.DISK
    assert caught.value.retry_after_s > 0


@pytest.mark.parametrize("which", ["none", "stagings", "versions"])
def test_a_slave_without_blocks_works(tmp_path: Path, which: str) -> None:
    memory = ShardMemory([], 1024, SLOTS, 0, files=MemoryFiles(tmp_path, which))
    for v in range(3):
        publish(memory, v)
    assert sum(memory.bytes_by_use().values()) == 0


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(["publish", "pin", "drop"]), st.sets(st.integers(0, 12), max_size=3)), max_size=25
    )
)
def test_whatever_comes_readable_versions_keep_their_content(steps: list[tuple[str, set[int]]]) -> None:
    memory, v = make(pins=2), 0
    for step, versions in steps:
        if step == "publish":
            try:
                publish(memory, v)
                v += 1
            except Refused:
                memory.drop_shadow()
        elif step == "pin":
            memory.pin(Version(1, x) for x in versions)
        else:
            memory.left()
        assert sum(memory.bytes_by_use().values()) <= memory_bytes_needed(N, SLOTS, 2)
        for version, buffer in memory.readable().items():
            assert (buffer.theta == version.v).all()
            assert buffer.checksums == [version.v]


def test_progress_while_memory_is_made_ends_with_all_of_it() -> None:
    said: list[tuple[int, int]] = []
    memory = ShardMemory(BLOCKS, 1024, SLOTS, stated(0), touched=lambda *made: said.append(made))
    made, of = zip(*said, strict=True)
    assert list(made) == sorted(set(made))
    assert set(of) == {made[-1]} == {sum(memory.bytes_by_use().values())}
