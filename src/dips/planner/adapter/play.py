"""Plays iterations under a bandwidth trace, with and without the adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dips.planner.adapter.decide import AdapterState, Rules
from dips.planner.adapter.pieces import LinkMessage, Pipeline, Played, Sizes, play
from dips.planner.adapter.traces import Channel
from dips.planner.costs import NS
from dips.planner.errors import PlanError

MOST_CELLS = 200_000
"""The most stages x microbatches of all iterations that are played of a trace: some minutes."""

MONITOR_NS = 10_000
"""The time to observe one message: more than one call of the state machine takes (benchmarks/bench_adapter.py). It is
added to the time of all iterations, and not played: a shift of a few microseconds can decide which of two operations
the compact order finds ready first, and so make an iteration shorter or longer by percents that are not the
adapter's."""


@dataclass(frozen=True)
class Iterations:
    """Iterations one after another, from time 0 on."""

    ends_ns: tuple[int, ...]
    sizes: tuple[tuple[Sizes, ...], ...]  # as each iteration began
    changes: int  # how often sizes changed, also within iterations
    busy_ns: tuple[int, ...]  # time that each device computed
    operations: int
    messages: tuple[int, ...]  # that each device received over a wire

    @property
    def span_ns(self) -> int:
        return self.ends_ns[-1]


def without_adapter(pipeline: Pipeline, channels: Mapping[int, Channel], duration_ns: int) -> Iterations:
    """The iterations that start before duration_ns, in whole microbatches. Raises PlanError for too many."""
    played: list[Played] = []
    known: dict[tuple[int, ...], Played] = {}  # by rates, where they did not change in the iteration
    begin_ns = 0
    most = MOST_CELLS // (pipeline.schedule.n_stages * pipeline.schedule.n_microbatches)
    while begin_ns < duration_ns:
        rates = tuple(channel.rate_at(begin_ns) for channel in channels.values())
        one = known.get(rates)
        if one is None or begin_ns + one.span_ns > _steady_until(channels, begin_ns):
            one = play(pipeline, pipeline.whole, channels, begin_ns)
            if one.end_ns <= _steady_until(channels, begin_ns):
                known[rates] = one
        begin_ns += one.span_ns
        played.append(one)
        if len(played) > most or not one.span_ns:
            raise PlanError(
                f"more than {most} iterations start within {duration_ns / NS:g} s: give the trace a shorter duration_s"
            )
    return _joined(played, [pipeline.whole] * len(played), 0)


def _steady_until(channels: Mapping[int, Channel], time_ns: int) -> float:
    return min((at for one in channels.values() for at in one.times_ns if at > time_ns), default=float("inf"))


def with_adapter(rules: Rules, channels: Mapping[int, Channel], iterations: int) -> tuple[Iterations, AdapterState]:
    """So many iterations with the adapter. A changed size counts from the next piece that a stage begins."""
    state, played, sizes = rules.start, list[Played](), list[tuple[Sizes, ...]]()

    def watch(transfer: LinkMessage) -> Sequence[Sizes] | None:
        nonlocal state
        before = state.sizes
        state = rules.observe(state, transfer)
        return None if state.sizes is before else state.sizes

    begin_ns = 0
    for _ in range(iterations):
        sizes.append(state.sizes)
        one = play(rules.pipeline, state.sizes, channels, begin_ns, watch)
        begin_ns = one.end_ns
        played.append(one)
    return _joined(played, sizes, state.changes), state


def _joined(played: Sequence[Played], sizes: Sequence[tuple[Sizes, ...]], changes: int) -> Iterations:
    ends, end_ns = [], 0
    for one in played:
        end_ns += one.span_ns
        ends.append(end_ns)
    busy, messages = (
        tuple(map(sum, zip(*rows, strict=True)))
        for rows in ([one.busy_ns for one in played], [one.messages for one in played])
    )
    return Iterations(tuple(ends), tuple(sizes), changes, busy, sum(one.operations for one in played), messages)


@dataclass(frozen=True)
class AdapterComparison:
    """As many iterations with the adapter as start within the trace without it."""

    without: Iterations
    adapted: Iterations
    late: bool  # whether messages came to be late

    @property
    def monitored_ns(self) -> int:
        """The time to observe the messages of the device that receives the most."""
        return MONITOR_NS * max(self.adapted.messages)

    @property
    def adapted_ns(self) -> int:
        """All iterations with the adapter, and the time to observe their messages."""
        return self.adapted.span_ns + self.monitored_ns

    @property
    def speedup(self) -> float:
        return self.without.span_ns / self.adapted_ns

    @property
    def cost_ns(self) -> int:
        """What the adapter may cost: the greatest time that a device computes longer, because of overheads of smaller
        pieces, and the time to observe messages."""
        pairs = zip(self.adapted.busy_ns, self.without.busy_ns, strict=True)
        return self.monitored_ns + max(0, *(longer - shorter for longer, shorter in pairs))

    @property
    def slower_ns(self) -> int:
        """By how much all iterations took longer with it; negative where they were faster."""
        return self.adapted_ns - self.without.span_ns


def compare(rules: Rules, channels: Mapping[int, Channel], duration_ns: int) -> AdapterComparison:
    """Play a trace with and without the adapter. channels: by the resource of a wire."""
    without = without_adapter(rules.pipeline, channels, duration_ns)
    adapted, _ = with_adapter(rules, channels, len(without.ends_ns))
    return AdapterComparison(without, adapted, exceeds(rules, channels, without.span_ns))


def exceeds(rules: Rules, channels: Mapping[int, Channel], until_ns: int) -> bool:
    """Whether the bandwidth of a link is ever so low, before until_ns, that messages are late."""
    return any(
        not rate or border.level(rate, 0)
        for border in rules.borders
        for channel in (channels.get(border.resource, Channel()),)
        for at, rate in zip(channel.times_ns, channel.rates, strict=True)
        if at < until_ns
    )
