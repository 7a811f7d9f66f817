"""Reads and judges this machine's memory, files, huge pages, buffers and clock. Only reading touches the system."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from dips.core.file_limit import WANTED_FILES
from dips.core.files import open_to_others
from dips.core.release import DISTRIBUTION, how_to_install, requirement
from dips.core.threads import usable_processors
from dips.core.units import format_bits_per_s, format_bytes, format_seconds
from dips.doctor.findings import Finding, Findings, fail, ok, warn
from dips.master.state.rounds import MAX_TIMEOUT_FACTOR

# ---- disk ------------------------------------------------------------------------------------------------------------
#
# Checks disks: is there room for what a run claims, how long does a flush take, how fast are snapshots written.


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


def check_closed(folders: Iterable[Path], group: str) -> Findings:
    """Whether other users of this machine can open what a run keeps in these folders. group: of files_group."""
    there = {folder.resolve() for folder in folders if folder.is_dir()}
    for folder in sorted(one for one in there if there.isdisjoint(one.parents)):
        if found := list(open_to_others(folder, group)):
            what = f"other users of this machine can open {len(found)} of its files and folders, such as {found[-1]}"
            remedy = f"chgrp -R {group} {folder} && chmod -R o= {folder}" if group else f"chmod -R go= {folder}"
            yield warn("permissions", f"{folder}: {what}", remedy)
        else:
            yield ok("permissions", f"{folder} is closed to other users")


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


# ---- packages --------------------------------------------------------------------------------------------------------
#
# Checks versions: what is installed here against what dips and its extras ask for, from the packages' records.


VersionOf = Callable[[str], str | None]


def installed(name: str) -> str | None:
    """The version of a package; None when it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages(
    extras: Iterable[str], requirements: Iterable[str] | None = None, version: VersionOf = installed
) -> Findings:
    """Check the packages that dips and these extras need. requirements: as in dips' own record, for tests."""
    if requirements is None:
        try:
            requirements = importlib.metadata.requires(DISTRIBUTION) or ()
        except importlib.metadata.PackageNotFoundError:
            sentence = f"{DISTRIBUTION} itself is not installed in this environment"
            yield fail("packages", sentence, how_to_install())
            return
    if (other := version("dips")) is not None:
        sentence = f"a distribution named dips ({other}) is installed as well, in the same folder as {DISTRIBUTION}"
        yield fail(
            "packages", sentence, f"pip uninstall dips, then install {DISTRIBUTION} again (pip's --force-reinstall)"
        )
    wanted = ("", *extras)
    bad: list[Finding] = []
    good: list[str] = []
    for needed in map(Requirement, requirements):
        asking = [extra for extra in wanted if needed.marker is None or needed.marker.evaluate({"extra": extra})]
        if not asking or needed.name.lower() == DISTRIBUTION:
            continue
        found, by = version(needed.name), tuple(filter(None, asking[:1]))
        if found is None:
            sentence = f"{needed.name} is not installed, and {requirement(*by)} needs it"
            bad.append(fail("packages", sentence, how_to_install(*by)))
        elif not needed.specifier.contains(found, prereleases=True):
            sentence = f"{needed.name} {found} is installed, and {requirement(*by)} needs {needed.specifier}"
            bad.append(fail("packages", sentence, how_to_install(*by)))
        else:
            good.append(f"{needed.name} {found}")
    yield from dict.fromkeys(bad)
    yield ok("packages", f"python {platform.python_version()}, {', '.join(dict.fromkeys(good))}")


# ---- host ------------------------------------------------------------------------------------------------------------


_TIME_ERROR = 5
"""What adjtimex(2) returns while nothing keeps the clock right."""

_TIMEX_BYTES = 256
"""More than struct timex has on any system."""

FEWEST_FILES = 4096
"""Below it a few hundred peers and their harmless reconnections already do not fit."""

ORDINARY_LINK_BITS_PER_S = 10e9
"""The rate of a link that no one has given."""

TIGHT_SHARE = 0.8
"""Of the memory that is free: beyond it the kernel's own caches and a growing run have no room."""


@dataclass(frozen=True)
class HostFacts:
    """The facts that were read; None: this system does not report it.

    Buffers: the largest that TCP grows to by itself.
    """

    memory_bytes: int | None
    files: int
    huge_pages: str | None
    receive_buffer_bytes: int | None
    send_buffer_bytes: int | None
    clock_is_kept: bool | None
    processors: int


def read_facts() -> HostFacts:
    """Read the facts of the machine, or the container, that this process runs in."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # What can still be had, of the machine and of this container.
    rows = dict(line.split(":", 1) for line in (_read("/proc/meminfo") or "").splitlines() if ":" in line)
    machine = rows.get("MemAvailable", "").split()
    found = [int(machine[0]) * 1024] if machine else []
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None and limit.strip().isdecimal():
        found.append(int(limit) - int(used))
    return HostFacts(
        (max(0, min(found)) if found else None),
        WANTED_FILES if hard == resource.RLIM_INFINITY else hard,
        _chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        _third(_read("/proc/sys/net/ipv4/tcp_rmem")),
        _third(_read("/proc/sys/net/ipv4/tcp_wmem")),
        _clock_is_kept(),
        usable_processors(),
    )


# ---- judged ----


def judge_memory(facts: HostFacts, needed_bytes: int, what_for: str) -> Finding:
    """Judge the free memory. needed_bytes: of all processes that start here, at most."""
    free = facts.memory_bytes
    if free is None:
        return warn("memory", "this system does not report its free memory", f"{what_for}: see that it is there")
    sentence = f"{what_for}, and {format_bytes(free)} are free here"
    if needed_bytes > free:
        return fail(
            "memory", sentence, "end what else runs, lower max_clusters or pinned_versions, or use more machines"
        )
    if needed_bytes > TIGHT_SHARE * free:
        return warn("memory", f"{sentence}: that is tight", "end what else runs; trainers need memory as well")
    return ok("memory", sentence)


def judge_files(facts: HostFacts) -> Finding:
    sentence = f"a process may open {facts.files} files"
    remedy = (
        f"raise the hard limit to {WANTED_FILES} (ulimit -Hn, limits.conf, LimitNOFILE= or the container's ulimits)"
    )
    if facts.files < FEWEST_FILES:
        return fail("files", f"{sentence}, and each connection is one", remedy)
    if facts.files < WANTED_FILES:
        return warn(
            "files", f"{sentence}; connections of unknown peers are refused sooner than at {WANTED_FILES}", remedy
        )
    return ok("files", sentence)


def judge_huge_pages(facts: HostFacts) -> Finding:
    if facts.huge_pages is None:
        return ok("huge pages", "this system has no setting for them")
    if facts.huge_pages == "never":
        return warn(
            "huge pages",
            "transparent huge pages are switched off, and slaves go through large arrays",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root",
        )
    return ok("huge pages", f"transparent huge pages: {facts.huge_pages}")


def judge_buffers(facts: HostFacts, link_bits_per_s: float, round_trip_s: float) -> Finding:
    """Judge the TCP buffers: they must hold what is under way, which is rate x round trip."""
    have = [value for value in (facts.receive_buffer_bytes, facts.send_buffer_bytes) if value is not None]
    if not have:
        return ok("kernel buffers", "this system grows them by itself")
    wanted = int(link_bits_per_s / 8 * round_trip_s)
    path = f"{format_bits_per_s(link_bits_per_s)} with a round trip of {format_seconds(round_trip_s)}"
    sentence = f"TCP buffers grow to {format_bytes(min(have))}"
    # Half of a receive buffer is for the kernel's own book-keeping (tcp_adv_win_scale).
    if min(have) < 2 * wanted:
        return warn(
            "kernel buffers",
            f"{sentence}, and {path} has {format_bytes(wanted)} on its way",
            f"sysctl -w net.ipv4.tcp_rmem='4096 131072 {2 * wanted}' net.ipv4.tcp_wmem='4096 65536 {2 * wanted}'",
        )
    return ok("kernel buffers", f"{sentence}, enough for {path}")


def judge_clock(facts: HostFacts) -> Finding:
    if facts.clock_is_kept is None:
        return ok("clock", "this system does not report whether its clock is kept right")
    if not facts.clock_is_kept:
        return warn(
            "clock",
            "nothing keeps this machine's clock right: certificates, logs and tapes of several machines need it",
            "start chrony, ntpd or systemd-timesyncd",
        )
    return ok("clock", "the clock is kept right")


def judge_processors(facts: HostFacts, processes: int) -> Finding:
    sentence = f"{processes} busy processes on {facts.processors} processors"
    if processes > facts.processors:
        return warn("processors", f"{sentence}: they take turns", "fine for trying out; for speed use more machines")
    return ok("processors", sentence)


EVERY_PROCESS = (judge_files, judge_huge_pages, judge_clock)
"""What judges the facts that matter for every process."""


# ---- read ----


def _chosen(text: str | None) -> str | None:
    """The word in brackets: "always [madvise] never" -> "madvise"."""
    return None if text is None or "[" not in text else text.partition("[")[2].partition("]")[0]


def _third(text: str | None) -> int | None:
    words = (text or "").split()
    return int(words[2]) if len(words) == 3 else None


def _clock_is_kept() -> bool | None:
    if sys.platform != "linux":
        return None
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else state != _TIME_ERROR


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None
