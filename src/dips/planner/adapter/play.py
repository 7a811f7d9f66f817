"""Plays iterations under a bandwidth trace, with and without the adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dips.planner.adapter.decide import AdapterState, Rules
from dips.planner.adapter.pieces import Pipeline, Played, Sizes, Transfer, play
from dips.planner.adapter.traces import Channel

MOST_ITERATIONS = 20_000
"""The most iterations that are played of a trace."""


@dataclass(frozen=True)
class Iterations:
    """Iterations one after another, from time 0 on."""

    ends_ns: tuple[int, ...]
    sizes: tuple[tuple[Sizes, ...], ...]  # as each iteration began
    changes: int  # how often sizes changed, also within iterations
    busy_ns: tuple[int, ...]  # time that each device computed
    operations: int
    messages: int

    @property
    def span_ns(self) -> int:
        return self.ends_ns[-1]


def without_adapter(pipeline: Pipeline, channels: Mapping[int, Channel], duration_ns: int) -> Iterations:
    """The iterations that start before duration_ns, in whole microbatches."""
    played: list[Played] = []
    known: dict[tuple[int, ...], Played] = {}  # by rates, where they did not change in the iteration
    begin_ns = 0
    while begin_ns < duration_ns and len(played) < MOST_ITERATIONS:
        rates = tuple(channel.rate_at(begin_ns) for channel in channels.values())
        one = known.get(rates)
        if one is None or begin_ns + one.span_ns > _steady_until(channels, begin_ns):
            one = play(pipeline, pipeline.whole, channels, begin_ns)
            if one.end_ns <= _steady_until(channels, begin_ns):
                known[rates] = one
        begin_ns += one.span_ns
        played.append(one)
    return _joined(played, [pipeline.whole] * len(played), 0)


def _steady_until(channels: Mapping[int, Channel], time_ns: int) -> float:
    return min((at for one in channels.values() for at in one.times_ns if at > time_ns), default=float("inf"))


def with_adapter(rules: Rules, channels: Mapping[int, Channel], iterations: int) -> tuple[Iterations, AdapterState]:
    """So many iterations with the adapter. A changed size counts from the next piece that a stage begins."""
    state, played, sizes = rules.start, list[Played](), list[tuple[Sizes, ...]]()

    def watch(transfer: Transfer) -> Sequence[Sizes] | None:
        nonlocal state
        before = state.sizes
        state = rules.observe(state, transfer)
        return None if state.sizes is before else state.sizes

    begin_ns = 0
    for _ in range(iterations):
        sizes.append(state.sizes)
        one = play(rules.pipeline, state.sizes, channels, begin_ns, watch, rules.monitor_ns)
        begin_ns = one.end_ns
        played.append(one)
    return _joined(played, sizes, state.changes), state


def _joined(played: Sequence[Played], sizes: Sequence[tuple[Sizes, ...]], changes: int) -> Iterations:
    ends, end_ns = [], 0
    for one in played:
        end_ns += one.span_ns
        ends.append(end_ns)
    busy = tuple(map(sum, zip(*(one.busy_ns for one in played), strict=True)))
    return Iterations(
        tuple(ends), tuple(sizes), changes, busy, sum(one.operations for one in played),
        sum(one.messages for one in played),
    )  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """As many iterations with the adapter as start within the trace without it."""

    without: Iterations
    adapted: Iterations
    late: bool  # whether messages came to be late

    @property
    def speedup(self) -> float:
        return self.without.span_ns / self.adapted.span_ns

    @property
    def cost_ns(self) -> int:
        """What the adapter may cost: the greatest time that a device computes longer, because of overheads of smaller
        pieces and of timing messages."""
        pairs = zip(self.adapted.busy_ns, self.without.busy_ns, strict=True)
        return max(0, *(longer - shorter for longer, shorter in pairs))

    @property
    def slower_ns(self) -> int:
        """By how much all iterations took longer with it; negative where they were faster."""
        return self.adapted.span_ns - self.without.span_ns


def compare(rules: Rules, channels: Mapping[int, Channel], duration_ns: int) -> Comparison:
    """Play a trace with and without the adapter. channels: by the resource of a wire."""
    without = without_adapter(rules.pipeline, channels, duration_ns)
    adapted, _ = with_adapter(rules, channels, len(without.ends_ns))
    return Comparison(without, adapted, exceeds(rules, channels, without.span_ns))


def exceeds(rules: Rules, channels: Mapping[int, Channel], until_ns: int) -> bool:
    """Whether the bandwidth of a link is ever so low, before until_ns, that messages are late."""
    return any(
        not rate or border.level(rate, 0)
        for border in rules.borders
        for channel in (channels.get(border.resource, Channel()),)
        for at, rate in zip(channel.times_ns, channel.rates, strict=True)
        if at < until_ns
    )
