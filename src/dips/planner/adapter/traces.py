"""Bandwidths of links over time: the trace file, and how long a message takes on a link whose bandwidth changes.

A trace is piecewise constant. A message's work is the time that it would take at the plan's bandwidth; a link does
rate / WHOLE of it in each nanosecond. All numbers are integers, so a link at the plan's bandwidth takes exactly the
time that dips.planner.simulate takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from dips.core.config import Knobs
from dips.core.errors import ConfigError
from dips.planner.cluster import Link
from dips.planner.costs import NS
from dips.planner.model import read_own_or_shipped

WHOLE = 10**9
"""The rate of a link at the plan's bandwidth."""

MOST_STEPS = 100_000
"""The most steps of one link in a trace."""

TABLES = ("trace", "links")


@dataclass(frozen=True)
class Channel:
    """The rate of one link over time: rates[i] from times_ns[i] on, the last one for ever."""

    times_ns: tuple[int, ...] = (0,)  # rising, the first one is 0
    rates: tuple[int, ...] = (WHOLE,)  # parts of 10^9 of the plan's bandwidth; 0: nothing passes

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.times_ns, self.times_ns[1:], strict=False))
        if len(self.times_ns) != len(self.rates) or self.times_ns[:1] != (0,) or not rising:
            raise ConfigError("the steps of a channel begin at 0 and rise, with a rate for each")
        if min(self.rates) < 0 or not self.rates[-1]:
            raise ConfigError("the rates of a channel are at least 0, and the last one is more")

    def rate_at(self, time_ns: int) -> int:
        return self.rates[bisect_right(self.times_ns, time_ns) - 1]

    def end_ns(self, start_ns: int, work: int) -> int:
        """When a message that starts at start_ns has left the link. work: nanoseconds x WHOLE at the plan's
        bandwidth."""
        at = bisect_right(self.times_ns, start_ns) - 1
        while at + 1 < len(self.times_ns):
            done = (self.times_ns[at + 1] - start_ns) * self.rates[at]
            if done >= work:
                break
            work -= done
            at += 1
            start_ns = self.times_ns[at]
        return start_ns + (-(-work // self.rates[at]) if work else 0)


# ---- file ------------------------------------------------------------------------------------------------------------


class TraceHead(Knobs):
    """The table [trace]."""

    source: str = Field(min_length=1, description="where the bandwidths come from, or how they were made")
    duration_s: Annotated[float, Field(gt=0, le=1e7)] = Field(description="iterations that start before it are played")


class TracedLink(Knobs):
    """The bandwidth of one link, or of all, over time: of all replicas together."""

    sender: str | None = Field(default=None, description="site that sends; without sender and receiver: every link")
    receiver: str | None = Field(default=None, description="site that receives")
    both_ways: bool = Field(default=True, description="whether the link back is equal")
    time_s: tuple[float, ...] = Field(description="when each step begins, from 0 on, rising")
    bandwidth_gbps: tuple[float, ...] | None = Field(default=None, description="of each step, 10^9 bit a second")
    part_of_plan: tuple[float, ...] | None = Field(default=None, description="or: of each step, 1 is the plan's own")


@dataclass(frozen=True)
class TraceFile:
    """The content of a whole file."""

    file: str
    head: TraceHead
    links: tuple[TracedLink, ...]

    @property
    def duration_ns(self) -> int:
        return round(self.head.duration_s * NS)


def read_trace(name: str | Path) -> TraceFile:
    """Read a trace file, or a shipped one by its name. Raises ConfigError, which names file and key."""
    tables = read_own_or_shipped(name, "traces", "traces", TABLES)
    if "trace" not in tables.tables:
        raise ConfigError(f'{name}: the table [trace] is missing: add it, with source = "..." and duration_s')
    found = TraceFile(
        str(name), tables.settings(TraceHead, "trace"), tables.settings_of_rows(TracedLink, "links", required=True)
    )
    for number, link in enumerate(found.links, 1):
        _check(link, f"{name} [[links]] {number}")
    return found


def _check(link: TracedLink, where: str) -> None:
    """Check one link's steps. Raises ConfigError."""
    if (link.sender is None) != (link.receiver is None):
        raise ConfigError(f"{where}: sender or receiver is missing: give both, or neither for every link")
    if (link.bandwidth_gbps is None) == (link.part_of_plan is None):
        raise ConfigError(f"{where}: give either bandwidth_gbps or part_of_plan, one value for each of time_s")
    key = "part_of_plan" if link.bandwidth_gbps is None else "bandwidth_gbps"
    values = link.part_of_plan if link.bandwidth_gbps is None else link.bandwidth_gbps
    assert values is not None
    if not link.time_s:
        raise ConfigError(f"{where}: time_s is empty: give at least the step that begins at 0")
    if len(values) != len(link.time_s) or len(values) > MOST_STEPS:
        raise ConfigError(
            f"{where}: {key} has {len(values)} values for {len(link.time_s)} of time_s: give one each, at most "
            f"{MOST_STEPS}"
        )
    if link.time_s[0] != 0:
        raise ConfigError(f"{where}: time_s begins at {link.time_s[0]:g}: let the first step begin at 0")
    for before, after in zip(link.time_s, link.time_s[1:], strict=False):
        if not after > before or round(after * NS) == round(before * NS):
            raise ConfigError(f"{where}: time_s has {after:g} after {before:g}: give steps in the order of time")
    for value in values:
        if not 0 <= value <= 1e9:
            raise ConfigError(f"{where}: {key} has {value:g}: give rates of at least 0 (0: nothing passes)")
    if not values[-1]:
        raise ConfigError(
            f"{where}: {key} ends with 0, so that messages never arrive: let the last step be more than 0"
        )


def channels_of(trace: TraceFile, ways: Mapping[tuple[str, str], Link]) -> dict[tuple[str, str], Channel]:
    """The rate over time of each directed link that the trace has. ways: the plan's links, by (sender, receiver). A
    table with a name goes before one for every link. Raises ConfigError for a link that the plan does not have, and for
    one that is given twice."""
    found: dict[tuple[str, str], Channel] = {}
    seen: set[tuple[tuple[str, str], bool]] = set()
    for number, one in sorted(enumerate(trace.links, 1), key=lambda each: each[1].sender is not None):
        where = f"{trace.file} [[links]] {number}"
        for way in _ways(one, ways, where):
            if (way, one.sender is None) in seen:
                raise ConfigError(f"{where}: from {way[0]} to {way[1]} was given before: remove one")
            seen.add((way, one.sender is None))
            found[way] = _channel(one, ways[way], where)
    return found


def _ways(one: TracedLink, ways: Iterable[tuple[str, str]], where: str) -> list[tuple[str, str]]:
    known = list(ways)
    if one.sender is None or one.receiver is None:
        return known
    wanted = [(one.sender, one.receiver), (one.receiver, one.sender)][: 1 + one.both_ways]
    for way in wanted:
        if way not in known:
            names = ", ".join(f"{a} to {b}" for a, b in known) or "none"
            raise ConfigError(f"{where}: the plan sends nothing from {way[0]} to {way[1]}: choose from {names}")
    return wanted


def _channel(one: TracedLink, link: Link, where: str) -> Channel:
    if one.part_of_plan is not None:
        parts = list(one.part_of_plan)
    else:
        planned_gbps = link.bandwidth_gbps / link.oversubscription
        parts = [gbps / planned_gbps for gbps in one.bandwidth_gbps or ()]
    rates = tuple(rate_of(part) if part else 0 for part in parts)
    return Channel(tuple(round(time_s * NS) for time_s in one.time_s), rates)


def rate_of(part: float) -> int:
    """The rate of a link with this part of the plan's bandwidth; at least 1, so that messages arrive."""
    return max(1, round(part * WHOLE))
