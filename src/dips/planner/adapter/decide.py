"""The adapter's state machine: from measured transfers to the sequences that each stage takes at a time.

SpanTrain (section 3.4) reduces the microbatch size of a group when its messages are late: in the filling phase, while
the pipeline runs, and of all groups when forward passes have ended. It gives no thresholds. Here each border between
stages has two, both computed from the plan:

* late: a message of a whole microbatch takes longer than the compute that hides it and the overhead of one more piece.
  Compute that hides it: while a message is under way, its sender computes the next one and its receiver the one before;
  the longer of these two operations. One late message is enough, so that sizes change while the delay lasts.
* on time again: it takes no longer than that compute. All of the last 20 messages must be (the paper checks each 20).

Between them nothing changes, nor with one fast message among late ones. While messages are late, how many times the
compute is contained in them, in powers of two, is the border's level; sizes are chosen when a level changes. A choice
plays one iteration for each candidate, and takes the shortest; of equal ones, that with the fewest operations. So where
smaller pieces cost more than they save, nothing changes. After one late message it plays the measured bandwidths and
the planned ones, and takes the sum of both, each relative to the best candidate's: the delay may be over. When it has
lasted for 20 messages, only the measured ones count. While no border is late, sizes are the planned ones, whatever
else might be shorter: this is no search for the best microbatch.

Time is an argument, and there is no state but AdapterState: an engine can use the machine as the simulation does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from dips.core.errors import ConfigError
from dips.planner.adapter.pieces import LinkMessage, Pipeline, Played, Sizes, play
from dips.planner.adapter.traces import WHOLE, Channel
from dips.planner.costs import NS
from dips.planner.ir import Kind

T = TypeVar("T")

WINDOW = 20
"""Messages of a border that must be on time before sizes grow (SpanTrain, section 4.6: "each 20 micro-batch
transmission")."""

MOST_PIECES = 8
"""The most pieces of a microbatch. Filling and draining take a time that shrinks as 1 / pieces: more pieces could save
an eighth of that at most."""


@dataclass(frozen=True)
class Border:
    """Messages from one stage to its neighbour, over a link whose bandwidth is measured."""

    sender: int  # stage
    receiver: int
    resource: int  # of the wire
    link: tuple[str, str]  # names of its ends
    planned_gbps: float
    busy_ns: int  # a message of a whole microbatch at the plan's bandwidth
    latency_ns: int
    hide_ns: int  # the compute that hides it
    piece_ns: int  # what compute takes longer in two pieces than whole

    def transfer_ns(self, rate: float) -> float:
        """The time of a message of a whole microbatch. rate: in parts of WHOLE of the plan's bandwidth."""
        return self.busy_ns * WHOLE / rate + self.latency_ns

    @property
    def late_below_gbps(self) -> float:
        """The bandwidth below which messages are late; infinite where latency alone is too long."""
        return self._gbps(self.hide_ns + self.piece_ns)

    @property
    def on_time_from_gbps(self) -> float:
        """The bandwidth from which they are on time again."""
        return self._gbps(self.hide_ns)

    def _gbps(self, time_ns: int) -> float:
        left_ns = time_ns - self.latency_ns
        return self.planned_gbps * self.busy_ns / left_ns if left_ns > 0 else math.inf

    def level(self, rate: float, was: int) -> int:
        """0 while messages are on time, else log2(transfer / compute), rounded up, at least 1. was: the level so
        far, which decides between the thresholds."""
        time_ns = self.transfer_ns(rate)
        if time_ns <= self.hide_ns + (0 if was else self.piece_ns):
            return 0
        return max(1, math.ceil(math.log2(time_ns / self.hide_ns))) if self.hide_ns else 64


class Window(NamedTuple):
    """The last messages of a border, up to WINDOW of them, since its level changed."""

    messages: int = 0
    work: int = 0  # time that they would take at the plan's bandwidth, in nanoseconds x WHOLE
    busy_ns: int = 0  # and took
    slowest: int = 0  # the least rate of one of them


@dataclass(frozen=True)
class AdapterState:
    """What the adapter knows; entries are by border, but for sizes."""

    sizes: tuple[Sizes, ...]  # of each stage, to use next
    rates: tuple[int, ...]  # as measured last, in parts of WHOLE of the plan's bandwidth
    levels: tuple[int, ...]
    windows: tuple[Window, ...]
    lasts: tuple[bool, ...]  # whether messages have been late for a whole window
    changes: int = 0  # how often sizes have changed


@dataclass(frozen=True, eq=False)
class Rules:
    """What the adapter decides by: the plan's numbers. The forecasts of candidates are kept."""

    pipeline: Pipeline
    borders: tuple[Border, ...]
    _forecasts: dict[tuple[tuple[Sizes, ...], tuple[int, ...]], Played] = field(default_factory=dict, repr=False)

    @cached_property
    def start(self) -> AdapterState:
        n = len(self.borders)
        return AdapterState(self.pipeline.whole, (WHOLE,) * n, (0,) * n, (Window(),) * n, (False,) * n)

    @cached_property
    def border_of(self) -> dict[tuple[int, int], int]:
        """The number of the border from one stage to another."""
        return {(border.sender, border.receiver): number for number, border in enumerate(self.borders)}

    @cached_property
    def smaller(self) -> tuple[int, ...]:
        """The sizes below a whole microbatch that are considered, the largest first: those that divide it and are
        within what was profiled."""
        b, profiled = self.pipeline.sequences, self.pipeline.profiled
        least = max(1, -(-b // MOST_PIECES), profiled[0][0] if profiled else 1)
        return tuple(n for n in range(b // 2, least - 1, -1) if b % n == 0)

    def observe(self, state: AdapterState, transfer: LinkMessage) -> AdapterState:
        """The state after one more message. Messages over other links change nothing."""
        number = self.border_of.get((transfer.sender, transfer.receiver))
        if number is None:
            return state
        border = self.borders[number]
        work = border.busy_ns * transfer.sequences * WHOLE // self.pipeline.sequences
        busy_ns = max(1, transfer.freed_ns - transfer.start_ns)
        rate, was, window = max(1, work // busy_ns), state.levels[number], state.windows[number]
        level = border.level(rate, was)
        if level > was:
            return self._changed(state, number, rate, level, False)
        slowest = min(rate, window.slowest) if window.messages else rate
        window = Window(window.messages + 1, window.work + work, window.busy_ns + busy_ns, slowest)
        if window.messages < WINDOW:
            return replace(state, windows=_with(state.windows, number, window))
        mean, level = max(1, window.work // window.busy_ns), border.level(window.slowest, was)
        if level < was or (was and not state.lasts[number]):
            return self._changed(state, number, mean, level, level > 0)
        rates, windows = _with(state.rates, number, mean), _with(state.windows, number, Window())
        return replace(state, rates=rates, windows=windows)

    def measured(self, state: AdapterState, rates: Mapping[tuple[str, str], int]) -> AdapterState:
        """The state when whole windows of messages had these rates, by link."""
        found = tuple(rates.get(border.link, old) for border, old in zip(self.borders, state.rates, strict=True))
        levels = tuple(map(Border.level, self.borders, found, state.levels))
        sizes = state.sizes if levels == state.levels else self.choose(found, levels)
        changes = state.changes + (sizes != state.sizes)
        lasts = tuple(level > 0 for level in levels)
        return AdapterState(sizes, found, levels, (Window(),) * len(found), lasts, changes)

    def _changed(self, state: AdapterState, number: int, rate: int, level: int, lasts: bool) -> AdapterState:
        rates, levels = _with(state.rates, number, rate), _with(state.levels, number, level)
        last = _with(state.lasts, number, lasts)
        sizes = self.choose(rates, levels, all(long for long, late in zip(last, levels, strict=True) if late))
        windows = _with(state.windows, number, Window())
        return AdapterState(sizes, rates, levels, windows, last, state.changes + (sizes != state.sizes))

    def choose(self, rates: Sequence[int], levels: Sequence[int], lasts: bool = True) -> tuple[Sizes, ...]:
        """The best candidate at these rates, the planned sizes while no border is late. lasts: whether the rates are
        sure to last; else they may be the planned ones again."""
        late = [border for border, level in zip(self.borders, levels, strict=True) if level]
        if not late:
            return self.pipeline.whole
        found = list(self._candidates(late))
        worlds = (tuple(rates),) if lasts else (tuple(rates), (WHOLE,) * len(rates))
        played = [[self.forecast(sizes, world) for sizes in found] for world in worlds]
        shortest = [max(1, min(one.span_ns for one in row)) for row in played]

        def cost(index: int) -> tuple[float, int]:
            relative = (row[index].span_ns / least for row, least in zip(played, shortest, strict=True))
            return sum(relative), played[0][index].operations

        return found[min(range(len(found)), key=cost)]

    def _candidates(self, late: Iterable[Border]) -> Iterator[tuple[Sizes, ...]]:
        """The planned sizes; each smaller size for the stages at late borders, or for all, either throughout or while
        the pipeline fills and drains (the paper's first and third rule alone)."""
        b, n_stages = self.pipeline.sequences, len(self.pipeline.whole)
        ends = {stage for border in late for stage in (border.sender, border.receiver)}
        yield self.pipeline.whole
        for n in self.smaller:
            for stages in dict.fromkeys((tuple(sorted(ends)), tuple(range(n_stages)))):
                for chosen in (Sizes(n, n, n), Sizes(n, b, n)):
                    yield tuple(chosen if stage in stages else Sizes(b, b, b) for stage in range(n_stages))

    def forecast(self, sizes: tuple[Sizes, ...], rates: Sequence[int]) -> Played:
        """One iteration with these sizes while links keep these rates."""
        key = sizes, tuple(rates)
        found = self._forecasts.get(key)
        if found is None:
            channels = {
                border.resource: Channel((0,), (rate,)) for border, rate in zip(self.borders, rates, strict=True)
            }
            found = self._forecasts[key] = play(self.pipeline, sizes, channels)
        return found


def _with(row: tuple[T, ...], number: int, value: T) -> tuple[T, ...]:
    return (*row[:number], value, *row[number + 1 :])


def borders_of(pipeline: Pipeline, links: Mapping[int, tuple[tuple[str, str], float]]) -> tuple[Border, ...]:
    """The borders of a pipeline. links: names and planned Gbit/s of those that can be measured, by the resource of
    their wires."""
    costs, places, found = pipeline.costs, pipeline.schedule.device_of_stage, []
    backward = Kind.D if pipeline.schedule.split else Kind.B
    for sender in range(len(places)):
        for receiver, kind in ((sender + 1, Kind.F), (sender - 1, backward)):
            if not 0 <= receiver < len(places):
                continue
            wire = costs.wires.get((places[sender], places[receiver]))
            if wire is None or not wire.busy_ns or wire.resource not in links:
                continue
            link, gbps = links[wire.resource]
            hides = max((sender, receiver), key=lambda stage: costs.compute_ns(stage, kind))
            found.append(
                Border(
                    sender, receiver, wire.resource, link, gbps, wire.busy_ns, wire.latency_ns,
                    costs.compute_ns(hides, kind), _piece_ns(pipeline, hides, kind),
                )
            )  # fmt: skip
    return tuple(found)


def _piece_ns(pipeline: Pipeline, stage: int, kind: Kind) -> int:
    """What an operation takes longer in two pieces than whole."""
    b = pipeline.sequences
    if b == 1:
        return 0
    halves = pipeline.compute_ns(stage, kind, b // 2) + pipeline.compute_ns(stage, kind, b - b // 2)
    return max(0, halves - pipeline.compute_ns(stage, kind, b)) + pipeline.costs.operation_ns


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
    """The iterations that start before duration_ns, in whole microbatches. Raises ConfigError for too many."""
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
            raise ConfigError(
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
