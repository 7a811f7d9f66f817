"""Checks disks: is there room for what a run claims, how long does a flush take, how fast are snapshots written."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dips.core.units import format_bytes, format_seconds
from dips.doctor.findings import Finding, Findings, fail, ok, warn
from dips.master.state.rounds import MAX_TIMEOUT_FACTOR

FLUSHES = 25
FLUSH_BYTES = 4096
WRITE_BYTES = 64 << 20
_PIECE = bytes(4 << 20)

SLOW_FLUSH_S = 0.02
"""Each decision of the master waits for one flush, and a round for about four. A disk of its own needs 1 to 10 ms."""

CLOCKS_DIFFER_S = 2.0
"""Between this machine and the file system that it writes to."""


@dataclass(frozen=True)
class Room:
    """The bytes that something claims in a directory, at most, in addition to what is there already."""

    directory: Path
    n_bytes: int
    what: str


@dataclass(frozen=True)
class DiskSpeed:
    """A disk's measured speed: the median and the longest flush of 4 KiB, and bytes a second written and flushed."""

    flush_s: float
    longest_flush_s: float
    bytes_per_s: float
    clock_ahead_s: float


def standing(directory: Path) -> Path:
    """The directory, or the nearest one above it that is there: what will be made is on its disk."""
    path = directory.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def check_writable(directory: Path) -> Finding:
    place = standing(directory)
    if not place.is_dir():
        return fail("directory", f"{place} is a file", "a run needs a directory; choose another path")
    if not os.access(place, os.W_OK | os.X_OK):
        return fail("directory", f"{place} cannot be written by this user", "change its owner, or choose another one")
    return ok("directory", f"{directory} can be written")


def check_room(rooms: Iterable[Room]) -> Findings:
    """One finding for each disk, for all that is on it."""
    by_disk: dict[int, list[Room]] = {}
    for room in rooms:
        by_disk.setdefault(standing(room.directory).stat().st_dev, []).append(room)
    for found in by_disk.values():
        free = shutil.disk_usage(standing(found[0].directory)).free
        there = sum(taken(room.directory) for room in found)
        yield judge_room(found, there, free)


def judge_room(rooms: Iterable[Room], there_bytes: int, free_bytes: int) -> Finding:
    """Judge whether a disk has room for all of them. there_bytes: what an earlier start has claimed already."""
    rooms = list(rooms)
    needed = max(0, sum(room.n_bytes for room in rooms) - there_bytes)
    listed = ", ".join(f"{room.what} {format_bytes(room.n_bytes)}" for room in rooms)
    sentence = f"{listed} below {standing(rooms[0].directory)}; {format_bytes(free_bytes)} are free"
    if needed > free_bytes:
        lacking = format_bytes(needed - free_bytes)
        return fail(
            "disk", f"{sentence}: {lacking} are lacking", "lower snapshots_kept or checkpoints_kept, or make room"
        )
    if needed > 0.9 * free_bytes:
        return warn("disk", f"{sentence}, which is tight", "make room: tapes grow with the run")
    return ok("disk", sentence)


def taken(directory: Path) -> int:
    """Bytes of the files below a directory; 0 if it is not there."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total


def measured(directory: Path, flushes: int = FLUSHES, write_bytes: int = WRITE_BYTES) -> DiskSpeed:
    """Measure a disk: write and flush a file that is removed again. Raises OSError."""
    with tempfile.TemporaryFile(dir=standing(directory), buffering=0) as file:
        times: list[float] = []
        for _ in range(flushes):
            began_s = time.monotonic()
            file.write(_PIECE[:FLUSH_BYTES])
            os.fsync(file.fileno())
            times.append(time.monotonic() - began_s)
        ahead_s = os.fstat(file.fileno()).st_mtime - time.time()
        began_s = time.monotonic()
        for _ in range(max(1, write_bytes // len(_PIECE))):
            file.write(_PIECE)
        os.fsync(file.fileno())
        rate = write_bytes / max(time.monotonic() - began_s, 1e-9)
    return DiskSpeed(sorted(times)[len(times) // 2], max(times), rate, ahead_s)


def judge_speed(
    place: Path, speed: DiskSpeed, snapshot_bytes: int | None, round_timeout_s: float, durable: bool
) -> Findings:
    """Judge a disk's speed. snapshot_bytes: what all slaves on it write in a round; None: not known."""
    sentence = (
        f"{place}: a flush takes {format_seconds(speed.flush_s)}, {format_seconds(speed.longest_flush_s)} at most"
    )
    if speed.flush_s > SLOW_FLUSH_S:
        yield warn(
            "flush", f"{sentence}, and every decision of the master waits for one", "use a local SSD, not a share"
        )
    else:
        yield ok("flush", sentence)
    if snapshot_bytes is not None and durable:
        yield _judge_snapshot(speed, snapshot_bytes, round_timeout_s)
    if abs(speed.clock_ahead_s) > CLOCKS_DIFFER_S:
        by = format_seconds(abs(speed.clock_ahead_s))
        sentence = f"{place}: its file system's clock differs from this machine's by {by}"
        yield warn("clock", sentence, "let both follow the same time server")


def _judge_snapshot(speed: DiskSpeed, snapshot_bytes: int, round_timeout_s: float) -> Finding:
    takes_s = snapshot_bytes / speed.bytes_per_s
    sentence = (
        f"the slaves' snapshot of {format_bytes(snapshot_bytes)} takes {format_seconds(takes_s)} at "
        f"{format_bytes(int(speed.bytes_per_s))}/s, of a round_timeout_s of {format_seconds(round_timeout_s)}"
    )
    remedy = "raise round_timeout_s, set durability = 'async', or give slaves faster disks or disks of their own"
    if takes_s > MAX_TIMEOUT_FACTOR * round_timeout_s:
        return fail("snapshots", f"{sentence}: every round would be given up", remedy)
    if takes_s > round_timeout_s / 2:
        return warn("snapshots", sentence, remedy)
    return ok("snapshots", sentence)
