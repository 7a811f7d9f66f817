"""Reads and judges this machine's memory, files, huge pages, buffers and clock. Only reading touches the system."""

from __future__ import annotations

import ctypes
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from dips.core.file_limit import WANTED_FILES
from dips.core.threads import usable_processors
from dips.core.units import format_bits_per_s, format_bytes, format_seconds
from dips.doctor.findings import Finding, Findings, fail, ok, warn

_TIME_ERROR = 5
"""What adjtimex(2) returns while nothing keeps the clock right."""

_TIMEX_BYTES = 256
"""More than struct timex has on any system."""

FEWEST_FILES = 4096
"""Below it a few hundred peers and their harmless reconnections already do not fit."""

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
    return HostFacts(
        _free_memory_bytes(),
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


def judge_all(facts: HostFacts) -> Findings:
    """Judge the facts that matter for every process."""
    yield judge_files(facts)
    yield judge_huge_pages(facts)
    yield judge_clock(facts)


# ---- read ----


def _free_memory_bytes() -> int | None:
    """What can still be had, of the machine and of this container."""
    rows = dict(line.split(":", 1) for line in (_read("/proc/meminfo") or "").splitlines() if ":" in line)
    machine = rows.get("MemAvailable", "").split()
    found = [int(machine[0]) * 1024] if machine else []
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None and limit.strip().isdecimal():
        found.append(int(limit) - int(used))
    return max(0, min(found)) if found else None


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
