"""What a measurement says: from the steps that clusters made, and those that are in the model, to the share of ideal.

Ideal is that every cluster computes all the time at its own speed, and that each step ends up in the model once. A
cluster is measured from one of its exchanges to another, so that no round is cut. A step counts when a system tells
that it is in the model; so do those whose fate is open when the measurement ends, of processes that are alive then.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Life = tuple[str, int]
"""A cluster, and the process that it was."""


@dataclass(frozen=True)
class Step:
    """n: from 1, of this process. ended_s: when its compute ended. cpu_s: its arithmetic's processor time."""

    cluster: str
    life: int
    n: int
    ended_s: float
    cpu_s: float


@dataclass(frozen=True)
class Counted:
    """Steps first to last of a process are in one of so many equal parts of the model; known at at_s."""

    cluster: str
    life: int
    first: int
    last: int
    part: int
    parts: int
    at_s: float


@dataclass(frozen=True)
class Span:
    """Of one cluster. credit: how many of its steps' times in it, in steps, count. exchanges: how many ended in it."""

    begin_s: float
    end_s: float
    credit: float
    exchanges: int
    longest_pause_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def exchanges(counted: Sequence[Counted]) -> dict[str, list[float]]:
    """When the exchanges of each cluster ended: once a round."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in counted:
        if each.part == 0:
            found[each.cluster].append(each.at_s)
    return {cluster: sorted(times) for cluster, times in found.items()}


def twice(counted: Sequence[Counted]) -> float:
    """How many steps are in the model more than once."""
    extra = 0.0
    ranges: dict[tuple[Life, int], list[Counted]] = defaultdict(list)
    for each in counted:
        ranges[(each.cluster, each.life), each.part].append(each)
    for several in ranges.values():
        for before, after in itertools.pairwise(sorted(several, key=lambda each: each.first)):
            extra += max(0, before.last - after.first + 1) / after.parts
    return extra


def credits_of(steps: Sequence[Step], counted: Sequence[Counted]) -> dict[tuple[Life, int], float]:
    """How much of each step is in the model, from 0 to 1."""
    newest = {step.cluster: step.life for step in steps}
    by_life: dict[Life, list[Counted]] = defaultdict(list)
    for each in counted:
        by_life[each.cluster, each.life].append(each)
    found: dict[tuple[Life, int], float] = {}
    for step in steps:
        life = (step.cluster, step.life)
        ranges, alive = by_life[life], newest[step.cluster] == step.life
        parts = ranges[0].parts if ranges else 1
        share = 0.0
        for part in range(parts):
            mine = [each for each in ranges if each.part == part]
            open_ = alive and step.n > max((each.last for each in mine), default=0)
            share += (open_ or any(each.first <= step.n <= each.last for each in mine)) / parts
        found[life, step.n] = share
    return found


def spans(
    steps: Sequence[Step], counted: Sequence[Counted], steps_s: Mapping[str, float], window: tuple[float, float], *,
    whole_before: bool = False,
) -> dict[str, Span]:  # fmt: skip
    """Each cluster from its first exchange in the window, or its last one before it (whole_before), to its first one
    after it.

    Where a cluster has no such exchange the window's own end holds: it came to a stop.
    """
    credit, times = credits_of(steps, counted), exchanges(counted)
    found = {}
    for cluster, step_s in steps_s.items():
        mine = times.get(cluster, [])
        earlier, later = [at for at in mine if at <= window[0]], [at for at in mine if at >= window[0]]
        begin_s = max(earlier, default=window[0]) if whole_before else min(later, default=window[0])
        if begin_s >= window[1]:
            begin_s = window[0]
        end_s = min((at for at in mine if at >= window[1]), default=window[1])
        total, ends = 0.0, [begin_s]
        for step in steps:
            if step.cluster == cluster:
                within_s = min(step.ended_s, end_s) - max(step.ended_s - step_s, begin_s)
                total += credit[(cluster, step.life), step.n] * max(0.0, within_s) / step_s
                if begin_s < step.ended_s <= end_s:
                    ends.append(step.ended_s)
        pauses = (after - before - step_s for before, after in itertools.pairwise([*ends, end_s]))
        n = sum(begin_s < at <= end_s for at in mine)
        found[cluster] = Span(begin_s, end_s, total, n, max(pauses, default=0.0))
    return found


def share(found: Mapping[str, Span], steps_s: Mapping[str, float]) -> float:
    """Of ideal, by all clusters together."""
    ideal = sum(span.seconds / steps_s[cluster] for cluster, span in found.items())
    return sum(span.credit for span in found.values()) / ideal if ideal else math.nan


def lost_s(found: Mapping[str, Span], steps_s: Mapping[str, float]) -> float:
    """Seconds of training that an exchange costs a cluster: the mean over all exchanges."""
    lost = sum(span.seconds - span.credit * steps_s[cluster] for cluster, span in found.items())
    n = sum(span.exchanges for span in found.values())
    return lost / n if n else math.nan
