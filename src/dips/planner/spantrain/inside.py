"""The second level: how the devices of one first-level group share its layers (SpanTrain, 3.3.3, Figure 7).

A group is a line of teams. Each team holds some of the group's layers, and all of its devices work on each microbatch
(data and tensor parallel); teams follow each other as stages (asymmetric PP). For each group these lines are tried:

* a team for each subgroup, with layers such that the slowest team is as fast as possible (Figure 7a);
* the same, with all subgroups of a single device in one team (Figure 7b);
* all devices of the group in one team (Figure 7c, where powers allow it);

each in the order of the subgroups and in the reverse one. A team shares its layers in one of these ways:

* symmetric: equal devices, every divisor of a site's devices as tensor-parallel degree (inside one site, and of the
  model's heads), the rest data parallel;
* asymmetric DP: each device gets as many sequences of a microbatch as its speed allows;
* asymmetric TP and DP: the powers are a grid, power = row x column; a row has a part of each tensor, a column has a
  part of the microbatch. Powers that do not factor so to within ALIKE get asymmetric DP alone.

In each, devices whose memory is too small for the layers may be left out, the sites with the least memory first; they
are idle. All others work, as in SpanTrain, so a microbatch has a sequence for each replica at least; with `idle` some
may get none, where that is faster. Sequences and attention heads are whole, so shares are as near to the powers as
these allow: a device's time is its share of the time of the whole microbatch, and the slowest device decides. The line
and the ways with the least time of the group's stage (Equation 1: running, collectives, filling) are taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import chain, combinations, groupby, pairwise
from typing import NamedTuple

from dips.planner.grouping import ALIKE, Group, GroupPart, devices_in
from dips.planner.spantrain.work import MessageWay, UnitTimes, Work

MOST_IN_A_GRID = 12
"""Devices of which a grid is looked for: the ways to place them grow with 2^devices."""

IDLE, SYMMETRIC, DATA, GRID = "idle", "symmetric DP and TP", "asymmetric DP", "asymmetric TP and DP"


# ---- shares ----------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """The part that one device computes: of a microbatch, and of each layer's tensors."""

    data: Fraction
    tensor: Fraction


def data_shares(powers: Sequence[int]) -> list[Fraction]:
    """Asymmetric DP without rounding: shares of a microbatch in proportion to the powers (Figure 7b: 1:2)."""
    return [Fraction(power, sum(powers)) for power in powers]


def tiles(powers: Sequence[float], alike: float = ALIKE) -> list[Tile] | None:
    """Asymmetric TP and DP: the tile of each device, so that all end at the same time (Figure 7c). None where the
    powers are not rows x columns to within `alike`: no tile may be larger than its power by more."""
    grid = grid_of(powers, alike)
    if grid is None:
        return None
    exact = [Fraction(power).limit_denominator(10**6) for power in powers]
    whole = sum(exact)
    tensor = [sum((exact[i] for i in row), Fraction()) / whole for row in grid]
    data = [sum((exact[i] for i in column), Fraction()) / whole for column in zip(*grid, strict=True)]
    found = {device: Tile(data[c], tensor[r]) for r, row in enumerate(grid) for c, device in enumerate(row)}
    return [found[device] for device in range(len(powers))]


def grid_of(powers: Sequence[float], alike: float = ALIKE) -> tuple[tuple[int, ...], ...] | None:
    """Devices placed so that power = row x column, as nearly as possible: a row shares tensors, a column sequences.
    None for too many devices, a number without divisors, and where a tile would exceed its power by more than
    `alike`."""
    n, whole = len(powers), math.fsum(powers)
    if n > MOST_IN_A_GRID:
        return None
    order = sorted(range(n), key=lambda i: (powers[i], i))
    best: tuple[float, tuple[tuple[int, ...], ...]] | None = None
    for columns in (size for size in range(2, n // 2 + 1) if n % size == 0):
        for others in combinations(order[1:], columns - 1):
            grid = _placed(powers, order, (order[0], *others))
            rows = [math.fsum(powers[i] for i in row) for row in grid]
            tops = [math.fsum(powers[i] for i in column) for column in zip(*grid, strict=True)]
            over = max(rows[r] * tops[c] / whole / powers[i] for r, row in enumerate(grid) for c, i in enumerate(row))
            if over <= 1 + alike and (best is None or over < best[0] * (1 - 1e-9)):
                best = over, grid
    return None if best is None else best[1]


def _placed(powers: Sequence[float], order: Sequence[int], first: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The grid with this first row: each further row begins with the weakest that is left, and goes on with those that
    are nearest to the first row's ratios."""
    left = [i for i in order if i not in first]
    grid = [first]
    while left:
        row = [left.pop(0)]
        for top in first[1:]:
            wanted = powers[row[0]] * powers[top] / powers[first[0]]
            nearest = min(left, key=lambda i: (abs(powers[i] - wanted), i))
            left.remove(nearest)
            row.append(nearest)
        grid.append(tuple(row))
    return tuple(grid)


@lru_cache(maxsize=1 << 14)
def whole_shares(total: int, powers: tuple[float, ...]) -> tuple[int, ...]:
    """Share whole things (sequences, heads) so that the slowest, of share / power, is as fast as possible. Some may get
    none."""
    whole = math.fsum(powers)
    found = [int(total * power / whole * (1 - 1e-12)) for power in powers]
    heap = [((found[i] + 1) / power, i) for i, power in enumerate(powers)]
    heapify(heap)
    for _ in range(total - sum(found)):
        _, i = heap[0]
        found[i] += 1
        heapreplace(heap, ((found[i] + 1) / powers[i], i))
    return tuple(found)


# ---- teams -----------------------------------------------------------------------------------------------------------


class DeviceShare(NamedTuple):
    """Equal devices of one site with equal tiles."""

    site: int
    devices: int
    tile: Tile  # 0 x 0: idle


@dataclass(frozen=True)
class Team:
    """Devices that share the same layers, and how."""

    layout: str
    shares: tuple[DeviceShare, ...]
    left_out: int  # devices whose memory is too small; their shares come last
    sites: tuple[int, ...]  # of those that work
    replicas: int  # that exchange gradients
    tensor_parts: int  # devices that share each layer
    paces: tuple[tuple[int, float], ...]  # the largest part of a layer and microbatch on a device of each site
    tensor_s: float  # collectives of one layer and microbatch in its forward pass, and as long in its backward pass
    sync_s_per_byte: float  # all-reduce of gradients, after the last microbatch
    sync_latency_s: float
    strict: bool = False  # only where those left out cannot hold these layers with one sequence

    @property
    def working(self) -> int:
        return sum(share.devices for share in self.shares if share.tile.data)


class TeamStage(NamedTuple):
    """A team with its units: first, up to and without last."""

    team: Team
    first: int
    last: int

    @property
    def layers(self) -> int:
        return self.last - self.first


def times_of(work: Work, stage: TeamStage) -> UnitTimes:
    """Seconds of one microbatch, of computation alone: of the slowest device of each operation."""
    columns = []
    for site, part in stage.team.paces:
        low, high = work.times_s[site][stage.first], work.times_s[site][stage.last]
        columns.append((part * (high[0] - low[0]), part * (high[1] - low[1]), part * (high[2] - low[2])))
    return UnitTimes(*columns[0]) if len(columns) == 1 else UnitTimes(*map(max, zip(*columns, strict=True)))


def tensor_s(stage: TeamStage) -> float:
    """Collectives of tensor parallelism for one microbatch, forward and backward."""
    return 2 * stage.team.tensor_s * stage.layers


def sync_s(work: Work, stage: TeamStage) -> float:
    """The all-reduce of the team's gradients, once in an iteration."""
    size_bytes = work.weight_bytes[stage.last] - work.weight_bytes[stage.first]
    return size_bytes * stage.team.sync_s_per_byte + stage.team.sync_latency_s


class DeviceMemory(NamedTuple):
    """Memory of a device."""

    state_bytes: float
    activation_bytes: float  # of one microbatch
    memory_bytes: float

    @property
    def microbatches(self) -> float:
        """How many microbatches' activations fit."""
        left = self.memory_bytes - self.state_bytes
        return left / self.activation_bytes if self.activation_bytes else math.inf if left >= 0 else -1.0


def held_by(work: Work, share: DeviceShare, first: int, last: int) -> DeviceMemory:
    tensor = float(share.tile.tensor)
    state = (work.state_bytes[last] - work.state_bytes[first]) * tensor
    activation = (work.activation_bytes[last] - work.activation_bytes[first]) * tensor * float(share.tile.data)
    return DeviceMemory(state, activation, work.memory_bytes[share.site])


def tightest(work: Work, stage: TeamStage) -> DeviceMemory:
    """Memory of the device that can hold the fewest microbatches."""
    busy = (share for share in stage.team.shares if share.tile.data)
    return min((held_by(work, share, stage.first, stage.last) for share in busy), key=lambda held: held.microbatches)


def _team(
    work: Work, layout: str, shares: Sequence[DeviceShare], idle: Sequence[GroupPart], replicas: int, parts: int
) -> Team:
    """The costs of a team. parts: devices that share a layer. replicas: those that got sequences."""
    busy = [share for share in shares if share.tile.data]
    counts = {site: sum(s.devices for s in some) for site, some in groupby(sorted(busy), key=lambda s: s.site)}
    paces = tuple((site, max(float(s.tile.data * s.tile.tensor) for s in busy if s.site == site)) for site in counts)
    sites, devices = tuple(counts), tuple(counts.values())
    tensor = sync_rate = sync_latency = 0.0
    if parts > 1:
        within = [work.ways[site][site] for site in sites] if layout == SYMMETRIC else []
        way = _least(within) if within else work.slowest_within(sites, devices)
        size = work.message_bytes * max(float(share.tile.data) for share in busy)
        each = 2 * (parts - 1) / parts * way.busy_s(size) + 2 * (parts - 1) * way.latency_s
        tensor = 2 * each  # after the attention and after the MLP (arXiv:1909.08053, section 3)
    if replicas > 1:
        way = work.slowest_within(sites, devices)
        whole = 1.0 if way.sender != way.receiver else 1 / parts  # rings of all parts share a link between sites
        sync_rate = 2 * (replicas - 1) / replicas * whole / way.bytes_per_s
        sync_latency = 2 * (replicas - 1) * way.latency_s
    left_out = [DeviceShare(part.site, part.devices, Tile(Fraction(0), Fraction(0))) for part in idle]
    return Team(
        layout, (*shares, *left_out), devices_in(idle), sites, replicas, parts, paces, tensor, sync_rate, sync_latency
    )  # fmt: skip


def _least(ways: Sequence[MessageWay]) -> MessageWay:
    return min(ways, key=lambda way: (way.bytes_per_s, -way.latency_s))


class SecondLevelRules(NamedTuple):
    """What the second level may do."""

    second_level: bool = True  # no: all devices of a group share its layers with even parts of each microbatch
    idle: bool = False  # devices may get no sequence, though their memory is large enough


DEFAULT_RULES = SecondLevelRules()


def teams_of(work: Work, parts: Sequence[GroupPart], alike: bool, rules: SecondLevelRules) -> Iterator[Team]:
    """The teams that devices can be. alike: they are one subgroup."""
    even, strict = not rules.second_level, False
    by_memory = sorted({work.memory_bytes[part.site] for part in parts})
    for least in by_memory[:1] if even else by_memory:
        used = [part for part in parts if work.memory_bytes[part.site] >= least]
        idle = [part for part in parts if work.memory_bytes[part.site] < least]
        most = math.inf if rules.idle else work.sequences  # replicas, each of which needs a sequence
        if alike or even:
            found = list(_symmetric(work, used, idle, even, most))
        else:
            found = list(_grid(work, used, idle))
            if devices_in(used) <= most:
                sites = [part.site for part in used for _ in range(part.devices)]
                found.insert(0, _shared(work, DATA, sites, tuple(_power(work, site) for site in sites), idle, 1))
        allowed = [team for team in found if rules.idle or team.working + team.left_out == devices_in(parts)]
        yield from (replace(team, strict=strict) for team in allowed)
        strict = strict or not allowed


def _power(work: Work, site: int) -> float:
    """Whole microbatches that one device computes in a second."""
    return 1 / work.times_s[site][-1].total_s


def _symmetric(
    work: Work, used: Sequence[GroupPart], idle: Sequence[GroupPart], even: bool, most: float
) -> Iterator[Team]:
    common, heads = math.gcd(*(part.devices for part in used)), work.setup.model.heads
    for parts in (size for size in range(1, min(common, heads) + 1) if common % size == 0 and heads % size == 0):
        if devices_in(used) // parts > most:
            continue
        sites = [part.site for part in used for _ in range(part.devices // parts)]
        powers = tuple(1.0 if even else _power(work, site) for site in sites)
        yield _shared(work, SYMMETRIC, sites, powers, idle, parts)


def _shared(
    work: Work, layout: str, sites: Sequence[int], powers: tuple[float, ...], idle: Sequence[GroupPart], parts: int
) -> Team:
    """A team of replicas, each of `parts` devices of one site, with whole sequences for each."""
    counts = whole_shares(work.sequences, powers)
    shares = []
    for (site, count), some in groupby(sorted(zip(sites, counts, strict=True), key=lambda s: (s[0], -s[1]))):
        tile = Tile(Fraction(count, work.sequences), Fraction(1 if count else 0, parts))
        shares.append(DeviceShare(site, parts * len(list(some)), tile))
    return _team(work, layout, shares, idle, sum(count > 0 for count in counts), parts)


def _grid(work: Work, used: Sequence[GroupPart], idle: Sequence[GroupPart]) -> list[Team]:
    """Empty where powers are no grid, or a row or column of it would get nothing."""
    if devices_in(used) > MOST_IN_A_GRID:
        return []
    sites = [part.site for part in used for _ in range(part.devices)]
    powers = [_power(work, site) for site in sites]
    grid = grid_of(powers)
    if grid is None:
        return []
    heads = whole_shares(work.setup.model.heads, tuple(math.fsum(powers[i] for i in row) for row in grid))
    columns = zip(*grid, strict=True)
    sequences = whole_shares(work.sequences, tuple(math.fsum(powers[i] for i in column) for column in columns))
    if 0 in heads or 0 in sequences:
        return []
    placed = sorted(
        (sites[i], Tile(Fraction(sequences[c], work.sequences), Fraction(heads[r], work.setup.model.heads)))
        for r, row in enumerate(grid)
        for c, i in enumerate(row)
    )
    shares = [DeviceShare(site, len(list(some)), tile) for (site, tile), some in groupby(placed)]
    return [_team(work, GRID, shares, idle, len(sequences), len(heads))]


# ---- the line of a group ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inside:
    """A group with its layers, as Equation 1 sees it: one stage. Seconds."""

    stages: tuple[TeamStage, ...]
    fill_s: float  # the forward pass of one microbatch, through all teams and between them
    each_s: float  # t^c: computation of one microbatch on the slowest team
    tensor_s: float  # and its collectives of tensor parallelism
    wait_s: float  # what a message between two teams takes longer than that
    sync_s: float  # collectives of data parallelism, of the team where they take longest

    def stage_s(self, microbatches: int) -> float:
        """Running and collectives of an iteration, without filling."""
        return microbatches * (self.each_s + self.tensor_s + self.wait_s) + self.sync_s


def lines_of(group: Group, second_level: bool) -> list[tuple[tuple[tuple[GroupPart, ...], bool], ...]]:
    """The lines of a group: for each team its devices, and whether they are one subgroup."""
    subgroups = [(inner.parts, True) for inner in group.subgroups]
    everything = tuple(chain.from_iterable(parts for parts, _ in subgroups))
    if not second_level:
        return [((everything, len(subgroups) == 1),)]
    lone = [parts for parts, _ in subgroups if devices_in(parts) == 1]
    others = [one for one in subgroups if one[0] not in lone]
    found = [tuple(subgroups), tuple(reversed(subgroups))]
    if len(lone) > 1 and others:
        together = (tuple(chain.from_iterable(lone)), False)
        found += [(*others, together), (together, *reversed(others))]
    found.append(((everything, len(subgroups) == 1),))
    return list(dict.fromkeys(found))


class Planner:
    """Plans the inside of groups for an iteration of so many microbatches, and remembers what it found."""

    def __init__(self, work: Work, groups: Sequence[Group], microbatches: int, rules: SecondLevelRules) -> None:
        self.work, self.microbatches, self.rules = work, microbatches, rules
        self.evaluated = 0  # teams with layers whose time was computed
        # of each group: lines of teams, each with the ways in which it may share layers
        self.lines = [
            [
                [tuple(teams_of(work, parts, alike, rules)) for parts, alike in line]
                for line in lines_of(group, rules.second_level)
            ]
            for group in groups
        ]
        self._best: dict[tuple[int, int, int], Inside | None] = {}
        self._tables: dict[tuple[int, int], tuple[list[float], list[list[int]]]] = {}
        # by the identity of a team's ways, which self.lines keeps
        self._sides: dict[tuple[int, int, int], tuple[float, TeamStage | None]] = {}

    def inside(self, group: int, first: int, last: int) -> Inside | None:
        """The best way for a group to hold these units; None where they do not fit."""
        key = group, first, last

        def whole_s(inside: Inside) -> float:
            return inside.stage_s(self.microbatches) + inside.fill_s

        if key not in self._best:
            found = [one for line in self.lines[group] for one in self.of_line(line, first, last)]
            self._best[key] = min(found, key=whole_s, default=None)
        return self._best[key]

    def of_line(self, line: Sequence[tuple[Team, ...]], first: int, last: int) -> Iterator[Inside]:
        """The line with units such that its slowest team is as fast as possible."""
        stages = self._cut(line, first, last)
        if stages is not None:
            yield inside_of(self.work, stages)

    def _cut(self, line: Sequence[tuple[Team, ...]], first: int, last: int) -> list[TeamStage] | None:
        """Cut units into consecutive parts with the least maximum of the teams' times; None where they do not fit."""
        best, cuts = self._table(line, first)
        if math.isinf(best[last]):
            return None
        stages, end = [], last
        for teams, cut in zip(reversed(line), reversed(cuts), strict=True):
            _, stage = self._side(teams, cut[end], end)
            assert stage is not None
            stages.append(stage)
            end = cut[end]
        return stages[::-1]

    def _table(self, line: Sequence[tuple[Team, ...]], first: int) -> tuple[list[float], list[list[int]]]:
        """For units from the first on, by where they end: the time of the slowest team, and where each team begins. By
        dynamic programming; the best place of a cut is where both sides take as long, since a team's time grows with
        its units."""
        key = id(line), first
        if key in self._tables:
            return self._tables[key]
        units = self.work.units
        best = [0.0 if end == first else math.inf for end in range(units + 1)]
        cuts: list[list[int]] = []
        for number, teams in enumerate(line):
            after, cut = [math.inf] * (units + 1), [0] * (units + 1)
            low = first + number
            for end in range(first + number + 1, units + 1):
                # the first cut at which the teams before take longer than this one: with more units it comes later
                while low < end - 1 and best[low] < self._side(teams, low, end)[0]:
                    low += 1
                for begin in range(max(first + number, low - 1), min(low + 1, end)):
                    seconds = max(best[begin], self._side(teams, begin, end)[0])
                    if seconds < after[end]:
                        after[end], cut[end] = seconds, begin
                if math.isinf(after[end]) and end > first + len(line):
                    break  # more units do not fit either
            best = after
            cuts.append(cut)
        self._tables[key] = best, cuts
        return best, cuts

    def _side(self, teams: tuple[Team, ...], first: int, last: int) -> tuple[float, TeamStage | None]:
        """The fastest of a team's ways for these units, and its time; None where none fits."""
        key = id(teams), first, last
        found = self._sides.get(key)
        if found is None:
            self.evaluated += len(teams)
            fit = [one for one in (TeamStage(team, first, last) for team in teams) if _fits(self.work, one)]
            if not self.rules.idle:  # devices are left out for their memory alone
                fewest = min((one.team.left_out for one in fit), default=0)
                fit = [one for one in fit if one.team.left_out == fewest]
            n, work = self.microbatches, self.work
            timed = [(n * (times_of(work, one).total_s + tensor_s(one)) + sync_s(work, one), one) for one in fit]
            found = self._sides[key] = min(timed, key=lambda row: row[0], default=(math.inf, None))
        return found


def _fits(work: Work, stage: TeamStage) -> bool:
    """Whether each device holds its state and one microbatch; and where that matters, whether none that is left out
    could hold one sequence."""
    if tightest(work, stage).microbatches < 1:
        return False
    one = Tile(Fraction(1, work.sequences), Fraction(1, stage.team.tensor_parts))
    out = [share for share in stage.team.shares if stage.team.strict and not share.tile.data]
    return all(held_by(work, share._replace(tile=one), stage.first, stage.last).microbatches < 1 for share in out)


def inside_of(work: Work, stages: Sequence[TeamStage]) -> Inside:
    """The line of these teams as one stage."""
    times = [times_of(work, stage) for stage in stages]
    slowest = max(range(len(stages)), key=lambda i: times[i].total_s + tensor_s(stages[i]))
    each, tensor = times[slowest].total_s, tensor_s(stages[slowest])
    ways = [work.slowest(a.team.sites, b.team.sites) for a, b in pairwise(stages)]
    busy = [way.busy_s(work.message_bytes) for way in ways]
    fill = math.fsum(time.forward_s + tensor_s(stage) / 2 for time, stage in zip(times, stages, strict=True))
    return Inside(
        stages=tuple(stages),
        fill_s=fill + math.fsum(busy) + math.fsum(way.latency_s for way in ways),
        each_s=each,
        tensor_s=tensor,
        wait_s=max(0.0, max(busy, default=0.0) - each - tensor),
        sync_s=max(sync_s(work, stage) for stage in stages),
    )
