"""The first level: in which order the groups follow each other, and how many layers each gets (SpanTrain, 3.3.2 and
3.3.3, Equation 1, Algorithm 1).

Equation 1 as printed cannot be computed, or ranks plans wrongly. Here, with every repair:

    T = min over plans of max over stages s of { fill + B t^c + wait + AL }

* It is printed as the minimum over stages. A plan is as slow as its slowest stage, and plans are compared: so it is the
  minimum over plans of the maximum over stages. A stage is one first-level group.
* B is called the microbatch size. B t^c is "the cost of running stages", so B is the number of microbatches here.
* fill is the sum of t^f over the predecessors of s. t^f is printed without a sum, but the text says that the sum is the
  cost of filling: t^f_i is one microbatch's forward pass in stage i and its way to stage i + 1.
* t^c is the computation of one microbatch, forward and backward, on the slowest team of the stage.
* wait is the sum of t^l over the predecessors. t^l = t_comm - t_lap would be negative where computation is longer:
  t^l = max(0, t_comm - t_lap). Of one microbatch it would say that a link which is slower than computation costs one
  message; here both times are of all B microbatches. Messages between teams of one group count likewise.
* AL = V / min(bandwidth): V is what a collective sends on one link in an iteration (data parallel: gradients once;
  tensor parallel: for each microbatch), and the bandwidth is the least of the links between devices that take part,
  not of the whole group, whose slow links a collective inside one server never uses. Latencies are added.

Each message between two groups, or two teams, goes over one link: the slowest one between their devices.

Equation 1 looks for candidates; the simulator ranks them. A simulated iteration has each team as one stage of the
compact zero-bubble order (dips.planner.schedules.greedy.compact_zb), the memory of each device, links that carry one
message at a time, and the all-reduce of each team after its last gradient. Equation 1 does not see memory, that
messages of several stages meet on a link, or that two slow links in a line delay a pipeline no more than one. So the
last candidates are simulated, and the best of them are moved on by the same two moves while the simulation gets
shorter. Of both values the simulated one is the answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, permutations
from typing import NamedTuple

from dips.core.errors import ConfigError
from dips.planner.cluster import MOST_BLOCKS, ClusterFile, divisors
from dips.planner.costs import NS, Costs, StageCost, Wire
from dips.planner.exchange import Exchange
from dips.planner.grouping import Group
from dips.planner.ir import straight
from dips.planner.problem import RELEASED_BY_INPUT_GRADIENT
from dips.planner.schedules.greedy import compact_zb
from dips.planner.simulate import Timeline, simulate
from dips.planner.spantrain.inside import (
    DEFAULT_RULES,
    Inside,
    Planner,
    SecondLevelRules,
    TeamStage,
    tensor_s,
    tightest,
    times_of,
)
from dips.planner.spantrain.work import MessageWay, Work, work_of

BEAM = 24
"""Candidates that are kept: l of Algorithm 1."""

ROUNDS = 40
"""The most expansions: max_iter of Algorithm 1. It ends earlier when nothing better is found."""

FINALISTS = 16
"""Candidates of each batch and microbatch size that may be simulated, and as many more with orders of their own."""

CLIMBERS = 3
"""Simulated candidates that are moved on: so many of all, and the best of each batch and microbatch size."""

MOST_COMPARED = 60_000
"""Candidates whose Equation 1 one search computes, about: a few seconds. The beams of all batches and microbatch sizes
get equal parts, and end at a round that exceeds theirs."""

MOST_SCANNED = 32
"""Layers up to which every place of a cut is tried, not only those near the balance."""

SIMULATED_OPERATIONS = 240_000
"""Operations that one search simulates, about: a few seconds. At least one candidate is simulated, of any size."""


class FirstLevelChoice(NamedTuple):
    """What the first level chooses."""

    order: tuple[int, ...]  # groups, in the order of the pipeline
    layers: tuple[int, ...]  # units of each, in that order


class GroupTerms(NamedTuple):
    """Equation 1's terms of one group, in seconds."""

    fill_s: float
    run_s: float  # B t^c
    wait_s: float  # sum of t^l
    collective_s: float  # AL

    @property
    def total_s(self) -> float:
        return self.fill_s + self.run_s + self.wait_s + self.collective_s


@dataclass(frozen=True)
class Chain:
    """A candidate with the inside of each group."""

    candidate: FirstLevelChoice
    batch: int  # sequences of an iteration
    sequences: int  # of a microbatch
    insides: tuple[Inside, ...]
    terms: tuple[GroupTerms, ...]

    @property
    def microbatches(self) -> int:
        return self.batch // self.sequences

    @property
    def equation_s(self) -> float:
        """Equation 1."""
        return max(terms.total_s for terms in self.terms)

    @property
    def stages(self) -> tuple[TeamStage, ...]:
        """All teams, in the order of the pipeline."""
        return tuple(stage for inside in self.insides for stage in inside.stages)


@dataclass(frozen=True, eq=False)
class Simulated:
    """A chain in the compact zero-bubble order, simulated."""

    chain: Chain
    costs: Costs
    limits: tuple[int, ...]
    timeline: Timeline

    @property
    def iteration_s(self) -> float:
        return self.timeline.makespan_ns / NS

    @property
    def samples_per_s(self) -> float:
        return self.chain.batch / self.iteration_s


@dataclass(frozen=True)
class RefusedBatch:
    """A microbatch size that cannot be planned, and why, as a sentence."""

    batch: int
    sequences: int
    why: str


@dataclass
class Found:
    """What a search found: the fastest simulated candidates, the best first."""

    simulated: list[Simulated]
    refused: list[RefusedBatch] = field(default_factory=list)
    works: dict[int, Work] = field(default_factory=dict)  # by sequences of a microbatch
    evaluated: int = 0  # teams with layers whose time was computed
    compared: int = 0  # candidates whose Equation 1 was computed


# ---- Equation 1 ------------------------------------------------------------------------------------------------------


class Level:
    """The first level for one batch and one size of microbatches."""

    def __init__(self, work: Work, groups: Sequence[Group], batch: int, rules: SecondLevelRules) -> None:
        self.work, self.groups, self.batch = work, groups, batch
        self.microbatches = batch // work.sequences
        self.planner = Planner(work, groups, self.microbatches, rules)
        self._seen: dict[FirstLevelChoice, float] = {}

    @property
    def compared(self) -> int:
        return len(self._seen)

    def chain(self, candidate: FirstLevelChoice) -> Chain | None:
        """The candidate with the inside of its groups; None where one does not fit."""
        starts = [0, *accumulate(candidate.layers)]
        insides = []
        for group, begin, end in zip(candidate.order, starts, starts[1:], strict=False):
            inside = self.planner.inside(group, begin, end)
            if inside is None:
                return None
            insides.append(inside)
        terms = equation_1(self.work, insides, self.microbatches)
        return Chain(candidate, self.batch, self.work.sequences, tuple(insides), tuple(terms))

    def seconds(self, candidate: FirstLevelChoice) -> float:
        """Equation 1; infinite where a group does not fit."""
        if candidate not in self._seen:
            found = self.chain(candidate)
            self._seen[candidate] = math.inf if found is None else found.equation_s
        return self._seen[candidate]

    # ---- Algorithm 1 ----

    def best(self, dice: random.Random, most: int = MOST_COMPARED) -> list[FirstLevelChoice]:
        """Beam search; the best first, and none where nothing fits. The same dice give the same candidates. most: are
        compared, about."""
        beam = self._ranked(self._initial(dice))
        for _ in range(ROUNDS):
            grown = self._ranked(dict.fromkeys([*beam, *(new for one in beam for new in moves(one))]))
            if grown == beam or self.compared > most:
                return grown
            beam = grown
        return beam

    def finalists(self, dice: random.Random, most: int = MOST_COMPARED) -> list[FirstLevelChoice]:
        """What is simulated: the best, and the best of each order of the groups, since Equation 1 and the simulation
        differ most between orders."""
        best = self.best(dice, most)[:FINALISTS]
        of_order: dict[tuple[int, ...], FirstLevelChoice] = {}
        for one in sorted(self._seen, key=lambda one: (self._seen[one], one)):
            if math.isfinite(self._seen[one]):
                of_order.setdefault(one.order, one)
        return list(dict.fromkeys([*best, *list(of_order.values())[:FINALISTS]]))

    def _ranked(self, candidates: Iterable[FirstLevelChoice]) -> list[FirstLevelChoice]:
        found = [one for one in candidates if math.isfinite(self.seconds(one))]
        return sorted(found, key=lambda one: (self.seconds(one), one))[:BEAM]

    def _initial(self, dice: random.Random) -> Iterator[FirstLevelChoice]:
        """Random orders of the groups, all of them where these are few, each with layers by the groups' speeds."""
        n = len(self.groups)
        if math.factorial(min(n, 8)) <= 2 * BEAM:
            orders = list(permutations(range(n)))
        else:
            orders = [tuple(dice.sample(range(n), n)) for _ in range(2 * BEAM)]
        for order in dict.fromkeys(orders):
            for layers in (self.segmented(order), self.in_proportion(order)):
                if layers is not None:
                    yield FirstLevelChoice(order, layers)

    def in_proportion(self, order: Sequence[int]) -> tuple[int, ...] | None:
        """Layers in proportion to the computing power of the groups; None where groups are more than layers."""
        times, units, n = self.work.times_s, self.work.units, len(order)
        if units < n:
            return None
        whole_s = times[0][-1].total_s
        speeds = [
            math.fsum(part.devices * whole_s / times[part.site][-1].total_s for part in self.groups[group].parts)
            for group in order
        ]
        ends = [0]
        for number, wanted in enumerate(accumulate(speeds), 1):
            goal_s = whole_s * wanted / math.fsum(speeds)
            some = range(ends[-1] + 1, units - (n - number) + 1)
            ends.append(units if number == n else min(some, key=lambda end: abs(times[0][end].total_s - goal_s)))
        return tuple(b - a for a, b in pairwise(ends))

    def segmented(self, order: Sequence[int]) -> tuple[int, ...] | None:
        """Layers such that the slowest group is as fast as possible, with its collectives and memory; None where they
        do not fit."""
        units, n = self.work.units, len(order)
        best = [0.0] + [math.inf] * units
        cuts: list[list[int]] = []
        for number, group in enumerate(order):
            after, cut = [math.inf] * (units + 1), [0] * (units + 1)
            final = number == n - 1
            for end in range(units if final else number + 1, units - (n - 1 - number) + 1):
                for begin in self._begins(best, group, number, end):
                    seconds = max(best[begin], self._group_s(group, begin, end))
                    if seconds < after[end]:
                        after[end], cut[end] = seconds, begin
            best = after
            cuts.append(cut)
        if math.isinf(best[units]):
            return None
        found, end = [], units
        for cut in reversed(cuts):
            found.append(end - cut[end])
            end = cut[end]
        return tuple(reversed(found))

    def _begins(self, best: Sequence[float], group: int, least: int, end: int) -> Iterable[int]:
        """Where a group that ends there may begin: everywhere, or, with many layers, near where it takes as long as the
        groups before it. (The latter may miss the best, since more layers can allow a group more teams.)"""
        if self.work.units <= MOST_SCANNED:
            return range(least, end)
        low, high = least, end - 1
        while low < high:
            middle = (low + high) // 2
            if best[middle] >= self._group_s(group, middle, end):
                high = middle
            else:
                low = middle + 1
        return range(max(least, low - 1), min(low + 1, end))

    def _group_s(self, group: int, first: int, last: int) -> float:
        inside = self.planner.inside(group, first, last)
        return math.inf if inside is None else inside.stage_s(self.microbatches)


def moves(one: FirstLevelChoice) -> Iterator[FirstLevelChoice]:
    """The two moves: exchange two groups, which keep their numbers of layers or leave these where they are; and move a
    layer over the border of two neighbours."""
    n = len(one.order)
    for a in range(n):
        for b in range(a + 1, n):
            order = _exchanged(one.order, a, b)
            yield FirstLevelChoice(order, _exchanged(one.layers, a, b))
            if one.layers[a] != one.layers[b]:
                yield FirstLevelChoice(order, one.layers)
    for a in range(n - 1):
        for change in (-1, 1):
            layers = list(one.layers)
            layers[a] += change
            layers[a + 1] -= change
            if min(layers[a], layers[a + 1]) > 0:
                yield FirstLevelChoice(one.order, tuple(layers))


def wide_moves(one: FirstLevelChoice) -> Iterator[FirstLevelChoice]:
    """The same two, and several layers at once, also between groups that are not neighbours: all in between then get
    other layers of the model. The simulated time has more valleys than Equation 1."""
    yield from moves(one)
    for a, b in permutations(range(len(one.order)), 2):
        count = 1
        while count < one.layers[a]:
            layers = list(one.layers)
            layers[a] -= count
            layers[b] += count
            yield FirstLevelChoice(one.order, tuple(layers))
            count *= 2


def _exchanged(row: tuple[int, ...], a: int, b: int) -> tuple[int, ...]:
    found = list(row)
    found[a], found[b] = row[b], row[a]
    return tuple(found)


def equation_1(work: Work, insides: Sequence[Inside], microbatches: int) -> list[GroupTerms]:
    """Equation 1's terms of each group of a chain."""
    found, fill, wait = [], 0.0, 0.0
    for number, inside in enumerate(insides):
        wait += microbatches * inside.wait_s
        collective = microbatches * inside.tensor_s + inside.sync_s
        found.append(GroupTerms(fill, microbatches * inside.each_s, wait, collective))
        if number + 1 < len(insides):
            way = way_between(work, inside.stages[-1], insides[number + 1].stages[0])
            busy = way.busy_s(work.message_bytes)
            fill += inside.fill_s + busy + way.latency_s
            wait += microbatches * max(0.0, busy - inside.each_s - inside.tensor_s)
    return found


def way_between(work: Work, sender: TeamStage, receiver: TeamStage) -> MessageWay:
    return work.slowest(sender.team.sites, receiver.team.sites)


# ---- simulation ------------------------------------------------------------------------------------------------------


def costs_of(work: Work, chain: Chain) -> tuple[Costs, tuple[int, ...]]:
    """The costs of a chain, each team as one stage, and the limit of each: bytes of its tightest device."""
    stages, found, limits = chain.stages, [], []
    for stage in stages:
        times, held = times_of(work, stage), tightest(work, stage)
        collective = tensor_s(stage) / 2
        activation = math.ceil(held.activation_bytes)
        found.append(
            StageCost(
                round((times.forward_s + collective) * NS),
                round((times.input_gradient_s + collective) * NS),
                round(times.weight_gradient_s * NS),
                activation,
                round(activation * RELEASED_BY_INPUT_GRADIENT),
            )
        )
        limits.append(max(activation, math.floor(held.memory_bytes - held.state_bytes)))
    wires, n = {}, len(stages)
    for a, (sender, receiver) in enumerate(pairwise(stages)):
        for source, target, ends in ((a, a + 1, (sender, receiver)), (a + 1, a, (receiver, sender))):
            wires[source, target] = _wire(work, way_between(work, *ends), source * n + target)
    exchanges = tuple(_exchange(work, number, stage) for number, stage in enumerate(stages))
    costs = Costs(
        tuple(found),
        {pair: wire for pair, wire in wires.items() if wire.busy_ns or wire.latency_ns},
        exchanges if any(one.reduces for one in exchanges) else (),
        overlapped=work.setup.options.overlap,
    )
    profile = work.setup.profile
    if profile is not None and (profile.operation_us or profile.send_us):
        costs = costs.with_overheads(
            round(profile.operation_us * 1e3), round(profile.send_us * 1e3), straight(len(stages))
        )
    return costs, tuple(limits)


def _wire(work: Work, way: MessageWay, pair: int) -> Wire:
    """Inside of a site each pair of teams has a wire of its own; a link between sites is shared by all."""
    busy_ns, latency_ns = round(way.busy_s(work.message_bytes) * NS), round(way.latency_s * NS)
    if way.sender == way.receiver:
        return Wire(len(work.ways) ** 2 + pair, busy_ns, latency_ns)
    return Wire(way.resource, busy_ns, latency_ns, 2 * latency_ns if work.setup.options.blocking else 0)


def _exchange(work: Work, number: int, stage: TeamStage) -> Exchange:
    size_bytes = work.weight_bytes[stage.last] - work.weight_bytes[stage.first]
    busy_ns, latency_ns = round(size_bytes * stage.team.sync_s_per_byte * NS), round(stage.team.sync_latency_s * NS)
    return Exchange(number, 0, busy_ns, 0, latency_ns)


def simulated(work: Work, chain: Chain) -> Simulated:
    """Simulate a chain in the compact zero-bubble order."""
    costs, limits = costs_of(work, chain)
    schedule = compact_zb(len(chain.stages), chain.microbatches, costs, limits)
    return Simulated(chain, costs, limits, simulate(schedule, costs))


def least_s(work: Work, chain: Chain) -> float:
    """A bound: no order is shorter, since each team computes all microbatches, and each link carries them."""
    costs, n = costs_of(work, chain)[0], chain.microbatches
    computed = [n * (s.f_ns + s.d_ns + s.w_ns + 3 * costs.operation_ns) for s in costs.stages]
    if costs.exchanges:
        computed = [
            ns + one.reduce_ns + one.reduce_latency_ns for ns, one in zip(computed, costs.exchanges, strict=True)
        ]
    carried: dict[int, int] = {}
    for wire in costs.wires.values():
        carried[wire.resource] = carried.get(wire.resource, 0) + n * wire.busy_ns
    return max([*computed, *carried.values()]) / NS


# ---- search ----------------------------------------------------------------------------------------------------------


def search(
    setup: ClusterFile,
    groups: Sequence[Group],
    batches: Sequence[int],
    microbatch_sequences: Sequence[int] | None = None,
    *,
    seed: int = 0,
    rules: SecondLevelRules = DEFAULT_RULES,
    operations: int = SIMULATED_OPERATIONS,
) -> Found:
    """Algorithm 1 over batches (sequences of an iteration) and microbatch sizes (None: all divisors of each batch),
    then the simulation of the best. operations: that are simulated, about. Raises ConfigError where nothing fits, with
    the reason of the smallest and of the largest size."""
    if not batches or min([*batches, *(microbatch_sequences or [1])]) < 1:
        raise ConfigError(
            f"batches {list(batches)} and microbatches {microbatch_sequences} are not at least 1: correct them"
        )
    found = Found([])
    levels: dict[tuple[int, int], Level] = {}
    finalists: list[tuple[float, int, int, FirstLevelChoice]] = []
    pairs = [
        (batch, size)
        for batch in dict.fromkeys(batches)
        for size in (divisors(batch) if microbatch_sequences is None else dict.fromkeys(microbatch_sequences))
    ]
    for batch, size in pairs:
        try:
            level = levels[batch, size] = _level(setup, groups, batch, size, rules, found.works)
        except ConfigError as error:
            found.refused.append(RefusedBatch(batch, size, str(error)))
            continue
        best = level.finalists(random.Random(f"{seed} {batch} {size}"), MOST_COMPARED // len(pairs))
        if not best:
            found.refused.append(RefusedBatch(batch, size, why_not(level)))
        finalists += [(level.seconds(one) / batch, batch, size, one) for one in best]
    if not finalists:
        raise ConfigError("; ".join(dict.fromkeys(one.why for one in (found.refused[0], found.refused[-1]))))
    found.simulated = _Ranking(levels, operations).ranked(sorted(finalists))
    found.evaluated = sum(level.planner.evaluated for level in levels.values())
    found.compared = sum(level.compared for level in levels.values())
    return found


def _level(
    setup: ClusterFile, groups: Sequence[Group], batch: int, size: int, rules: SecondLevelRules, works: dict[int, Work]
) -> Level:
    if size < 1 or batch % size:
        raise ConfigError(f"microbatches of {size} sequences do not divide a batch of {batch}: give a divisor")
    if batch // size * len(groups) > MOST_BLOCKS:
        raise ConfigError(
            f"a batch of {batch} has {batch // size} microbatches of {size} sequences: at most {MOST_BLOCKS} stages x "
            "microbatches can be planned: use larger microbatches"
        )
    if size not in works:
        works[size] = work_of(setup, size)
    return Level(works[size], groups, batch, rules)


def why_not(level: Level) -> str:
    """Why no candidate fits, as a sentence."""
    work, setup, n = level.work, level.work.setup, len(level.groups)
    where = f"{setup.file}, microbatches of {work.sequences}"
    if n > work.units:
        return f"{where}: {n} groups are more than {work.units} layers: lower --threshold, or use fewer sites"
    for number, group in enumerate(level.groups, 1):
        names = ", ".join(dict.fromkeys(setup.sites[part.site].name for part in group.parts))
        if not any(map(all, level.planner.lines[number - 1])):
            return (
                f"{where}: the {group.devices} devices of group {number} ({names}) cannot each have a sequence of a "
                "microbatch: use larger microbatches, or let devices be idle"
            )
        if all(level.planner.inside(number - 1, unit, unit + 1) is None for unit in range(work.units)):
            return (
                f"{where}: no device of group {number} ({names}) holds a layer with its gradients, optimizer state and "
                "one microbatch: use smaller microbatches, recompute activations, or leave the group out"
            )
    return f"{where}: the groups together do not hold all layers: use smaller microbatches, or recompute activations"


class _Ranking:
    """Simulates candidates, the most promising first, within a number of operations."""

    def __init__(self, levels: dict[tuple[int, int], Level], operations: int) -> None:
        self._levels = levels
        self._left = operations
        self._done: dict[tuple[int, int, FirstLevelChoice], Simulated] = {}

    def ranked(self, finalists: Sequence[tuple[float, int, int, FirstLevelChoice]]) -> list[Simulated]:
        for _, batch, size, candidate in finalists:
            fastest = max((one.samples_per_s for one in self._done.values()), default=0.0)
            self._simulate(batch, size, candidate, fastest)
        first = self._sorted()
        of_size = {(one.chain.batch, one.chain.sequences): one for one in reversed(first)}
        for one in dict.fromkeys([*first[:CLIMBERS], *(one for one in first if one in of_size.values())]):
            self._climb(one)
        return self._sorted()

    def _sorted(self) -> list[Simulated]:
        return sorted(
            self._done.values(),
            key=lambda one: (-one.samples_per_s, one.chain.batch, one.chain.sequences, one.chain.candidate),
        )

    def _climb(self, best: Simulated) -> None:
        """Move on while the simulation gets shorter, also to other sizes of microbatches."""
        while True:
            chain, better = best.chain, best
            others = [(batch, size, chain.candidate) for batch, size in self._levels]
            others += [(chain.batch, chain.sequences, candidate) for candidate in wide_moves(chain.candidate)]
            for batch, size, candidate in others:
                one = self._simulate(batch, size, candidate, best.samples_per_s)
                if one is not None and one.samples_per_s > better.samples_per_s:
                    better = one
            if better is best:
                return
            best = better

    def _simulate(self, batch: int, size: int, candidate: FirstLevelChoice, above: float) -> Simulated | None:
        """None: it does not fit, cannot reach more samples a second than `above`, or takes too long to simulate."""
        key = batch, size, candidate
        if key in self._done:
            return self._done[key]
        level = self._levels[batch, size]
        chain = level.chain(candidate)
        if chain is None or (above and batch / least_s(level.work, chain) <= above):
            return None
        operations = 3 * chain.microbatches * len(chain.stages)
        if above and operations > self._left:
            return None
        self._left -= operations
        self._done[key] = one = simulated(level.work, chain)
        return one
