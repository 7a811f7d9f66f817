"""Bytes reach their place in a file by either way, and a device that refuses one way gets them by the other."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from dips.slave import disk as module
from dips.slave.disk import SECTOR_BYTES, LocalDisk, overwrite

PIECE = 4096
OLD = 255


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", PIECE)


@pytest.fixture
def pages() -> memoryview:
    view = memoryview(mmap.mmap(-1, 1 << 16))
    view[:] = (np.arange(1 << 16) % 251).astype(np.uint8).data
    return view


class Writes:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuse: int = 0, most: int = 1 << 30) -> None:
        self.direct: list[int] = []
        self.plain: list[int] = []
        self._pwrite, self._open = os.pwrite, os.open
        self._refuse, self._most = refuse, most
        self._direct_handles: set[int] = set()
        monkeypatch.setattr(os, "open", self._opened)
        monkeypatch.setattr(os, "pwrite", self._written)

    def _opened(self, path: Path, flags: int, mode: int = 0o777) -> int:
        """The direct way is played by a plain handle, so that every file system has it."""
        direct = getattr(os, "O_DIRECT", 0)
        handle = self._open(path, flags & ~direct, mode)
        (self._direct_handles.add if flags & direct else self._direct_handles.discard)(handle)
        return handle

    def _written(self, handle: int, data: memoryview, at: int) -> int:
        if handle not in self._direct_handles:
            self.plain.append(len(data))
            return self._pwrite(handle, data, at)
        if self._refuse:
            raise OSError(self._refuse, os.strerror(self._refuse))
        self.direct.append(min(self._most, len(data)))
        return self._pwrite(handle, data[: self._most], at)


def file_of(folder: Path, n_bytes: int) -> Path:
    path = folder / "file"
    path.write_bytes(bytes([OLD]) * n_bytes)
    return path


@pytest.mark.parametrize("at", [0, SECTOR_BYTES, 4096, 7])
@pytest.mark.parametrize("skipped", [0, 12])
@pytest.mark.parametrize("length", [0, 1, SECTOR_BYTES, PIECE, 3 * PIECE, 3 * PIECE + 700, 3 * PIECE + 513])
@pytest.mark.parametrize("straight", [False, True])
def test_the_bytes_stand_in_their_place_nothing_else_changed_and_all_are_shown_in_order(
    tmp_path: Path, pages: memoryview, at: int, skipped: int, length: int, straight: bool
) -> None:
    path = file_of(tmp_path, 1 << 16)
    data = pages[skipped : skipped + length]
    shown = bytearray()
    overwrite(path, at, data, shown.extend, straight)
    assert bytes(shown) == bytes(data)
    found = path.read_bytes()
    assert found[at : at + length] == bytes(data)
    assert set(found[:at] + found[at + length :]) == {OLD}
    assert len(found) == 1 << 16


def test_whole_sectors_of_whole_pages_go_straight_to_the_device(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, writes = file_of(tmp_path, 1 << 16), Writes(monkeypatch)
    overwrite(path, 4096, pages[: 2 * PIECE + 700], straight=True)
    assert (sorted(writes.direct), writes.plain) == ([SECTOR_BYTES, PIECE, PIECE], [700 - SECTOR_BYTES])


@pytest.mark.parametrize(("at", "skipped", "straight"), [(4096, 12, True), (4100, 0, True), (4096, 0, False)])
def test_what_does_not_begin_with_a_page_or_a_sector_or_is_not_wished_so_goes_through_the_page_cache(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch, at: int, skipped: int, straight: bool
) -> None:
    path, writes = file_of(tmp_path, 1 << 16), Writes(monkeypatch)
    overwrite(path, at, pages[skipped : skipped + 2 * PIECE], straight=straight)
    assert (writes.direct, writes.plain) == ([], [PIECE, PIECE])


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_device_with_larger_sectors_or_no_such_way_is_written_through_the_page_cache(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path, writes = file_of(tmp_path, 1 << 16), Writes(monkeypatch, refuse=number)
    overwrite(path, 0, pages[: 2 * PIECE], straight=True)
    assert (writes.direct, writes.plain) == ([], [PIECE, PIECE])
    assert path.read_bytes()[: 2 * PIECE] == bytes(pages[: 2 * PIECE])


def test_a_write_that_was_cut_short_goes_on_where_it_stopped(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, writes = file_of(tmp_path, 1 << 16), Writes(monkeypatch, most=1000)
    overwrite(path, 0, pages[: 2 * PIECE], straight=True)
    assert writes.direct == [1000, 1000]
    assert writes.plain == [PIECE - 1000, PIECE - 1000]
    assert path.read_bytes()[: 2 * PIECE] == bytes(pages[: 2 * PIECE])


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_device_that_fails_is_not_asked_another_way(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path, writes = file_of(tmp_path, 1 << 16), Writes(monkeypatch, refuse=number)
    with pytest.raises(OSError, match=os.strerror(number)):
        overwrite(path, 0, pages[: 2 * PIECE], lambda piece: None, straight=True)
    assert writes.plain == []


def test_a_file_system_without_the_direct_way_is_written_the_plain_one(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def no_direct(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", no_direct)
    path = file_of(tmp_path, 1 << 16)
    overwrite(path, 0, pages[: 2 * PIECE], straight=True)
    assert path.read_bytes()[: 2 * PIECE] == bytes(pages[: 2 * PIECE])


def test_where_pages_are_larger_than_a_header_nothing_goes_straight(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces would share a page of the cache, which could put back what went past it at the same time."""
    monkeypatch.setattr(mmap, "PAGESIZE", 65536)
    path, writes = file_of(tmp_path, 1 << 16), Writes(monkeypatch)
    overwrite(path, 4096, pages[: 2 * PIECE + 700], straight=True)
    assert (writes.direct, sorted(writes.plain)) == ([], [700, PIECE, PIECE])


def test_without_sync_file_range_the_bytes_come_all_the_same(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_sync_file_range", None)
    path = file_of(tmp_path, 1 << 16)
    overwrite(path, 4, pages[:PIECE])
    assert path.read_bytes()[4 : 4 + PIECE] == bytes(pages[:PIECE])


@pytest.mark.parametrize("straight", [False, True])
def test_what_is_raised_by_the_one_who_sees_the_bytes_is_not_swallowed(
    tmp_path: Path, pages: memoryview, straight: bool
) -> None:
    def fail(piece: memoryview) -> None:
        raise ValueError("seen")

    for length in (PIECE, 3 * PIECE):
        with pytest.raises(ValueError, match="seen"):
            overwrite(file_of(tmp_path, 1 << 16), 0, pages[:length], fail, straight)


def test_what_a_file_lacks_is_known_before_it_is_written(tmp_path: Path) -> None:
    disk, n_bytes = LocalDisk(tmp_path), 1 << 20
    assert disk.missing_bytes("none", n_bytes) == n_bytes
    for name, room in (("whole", n_bytes), ("half", n_bytes // 2), ("larger", 2 * n_bytes)):
        disk.allocate(name, room)
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", n_bytes)
    lacks = {name: disk.missing_bytes(name, n_bytes) for name in ("whole", "half", "larger", "hole")}
    assert lacks == {"whole": 0, "half": n_bytes // 2, "larger": 1, "hole": n_bytes}
