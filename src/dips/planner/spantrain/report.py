"""The answer of SpanTrain's planner: the chosen chain with what each device does, Equation 1's terms, the simulated
iteration, what else was tried, and what SpanTrain does not see."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from dips.core.errors import ConfigError
from dips.core.units import format_seconds
from dips.planner.cluster import ClusterFile
from dips.planner.grouping import ALIKE, THRESHOLD_GBPS, Group, Grouping, group, measured_of
from dips.planner.plan import ready_folder, writing
from dips.planner.simulate import peaks
from dips.planner.spantrain.flowing import SENTENCE, Flowing, flow
from dips.planner.spantrain.inside import DeviceShare, SecondLevelRules, TeamStage, held_by
from dips.planner.spantrain.search import SIMULATED_OPERATIONS, Found, GroupTerms, Simulated, search, way_between
from dips.planner.spantrain.work import Work
from dips.planner.trace import draw, trace_events

RUNNERS_UP = 5

MOST_LEFT_OUT = 4
"""Groups up to which plans without some of them are tried: all ways to leave groups out."""

MOST_THRESHOLDS, MOST_GROUPS = 4, 6
"""Other thresholds that are tried, and groups up to which they are: more take long to plan."""


class DeviceRow(NamedTuple):
    """Equal devices that do the same."""

    group: int  # from 1 on, as dips plan groups numbers them
    stage: int  # team, in the order of the pipeline, from 0 on
    layout: str
    site: str
    devices: int
    first_layer: int
    layers: int
    sequences: int  # of each microbatch; 0: idle
    data: str  # the share of a microbatch, as a fraction
    tensor: str  # and of each layer's tensors
    state_bytes: float
    activation_bytes: float  # at the peak
    memory_bytes: float


@dataclass(frozen=True, eq=False)
class SpanTrainReport:
    """A plan of SpanTrain, its reasons and its limits."""

    setup: ClusterFile
    grouping: Grouping
    found: Found
    rules: SecondLevelRules
    flowing: Flowing | None  # where the out-of-order variant was asked for
    unseen: tuple[str, ...]  # what SpanTrain does not see, or does not say, as sentences without a full stop

    @property
    def best(self) -> Simulated:
        return self.found.simulated[0]

    @property
    def work(self) -> Work:
        return self.found.works[self.best.chain.sequences]

    @property
    def iteration_s(self) -> float:
        """The simulated iteration; out of order: from one to the next, in the steady state."""
        return self.best.iteration_s if self.flowing is None else self.flowing.iteration_s

    @property
    def samples_per_s(self) -> float:
        return self.best.chain.batch / self.iteration_s

    @property
    def equation_s(self) -> float:
        """Equation 1, which does not know the out-of-order variant."""
        return self.best.chain.equation_s

    @property
    def runners_up(self) -> tuple[Simulated, ...]:
        return tuple(self.found.simulated[1 : 1 + RUNNERS_UP])

    def devices(self) -> list[DeviceRow]:
        """What each device does, in the order of the pipeline."""
        found, best, work = [], self.best, self.work
        held = self.flowing.activation_bytes if self.flowing else peaks(best.timeline.schedule, best.costs)
        pairs = zip(best.chain.candidate.order, best.chain.insides, strict=True)
        groups = [group + 1 for group, inside in pairs for _ in inside.stages]
        for number, (stage, inside) in enumerate(zip(best.chain.stages, groups, strict=True)):
            activation = best.costs.stages[number].activation
            microbatches = held[number] / activation if activation else 0.0
            found += [self._row(work, inside, number, stage, share, microbatches) for share in stage.team.shares]
        return found

    def _row(
        self, work: Work, inside: int, number: int, stage: TeamStage, share: DeviceShare, microbatches: float
    ) -> DeviceRow:
        held, tile = held_by(work, share, stage.first, stage.last), share.tile
        return DeviceRow(
            inside, number, stage.team.layout, self.setup.sites[share.site].name, share.devices, stage.first,
            stage.layers if tile.data else 0, int(tile.data * work.sequences), str(tile.data), str(tile.tensor),
            held.state_bytes, held.activation_bytes * microbatches, held.memory_bytes,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Times in seconds; layers are units, from 0 on."""
        best, chain = self.best, self.best.chain
        return {
            "system": "spantrain",
            "file": Path(self.setup.file).name,
            "model": self.setup.model.name,
            "schedule": "compact_zb" if self.flowing is None else "compact_zb, out of order",
            "equals_synchronous_training": self.flowing is None,
            "second_level": self.rules.second_level,
            "iteration_s": self.iteration_s,
            "samples_per_s": self.samples_per_s,
            "equation_1_s": self.equation_s,
            "batch": chain.batch,
            "microbatch_sequences": chain.sequences,
            "microbatches": chain.microbatches,
            "bubble": best.timeline.bubble_fraction,
            "groups": [
                {"group": number + 1, "layers": layers, "equation_1": terms._asdict() | {"total_s": terms.total_s}}
                for number, layers, terms in zip(
                    chain.candidate.order, chain.candidate.layers, chain.terms, strict=True
                )
            ],
            "devices": [row._asdict() for row in self.devices()],
            "staleness": None if self.flowing is None else [one._asdict() for one in self.flowing.staleness],
            "runners_up": [_short(one) for one in self.runners_up],
            "refused": [asdict(one) for one in self.found.refused],
            "unseen": list(self.unseen),
        }


def _short(one: Simulated) -> dict[str, Any]:
    chain = one.chain
    return {
        "batch": chain.batch,
        "microbatch_sequences": chain.sequences,
        "order": [number + 1 for number in chain.candidate.order],
        "layers": list(chain.candidate.layers),
        "iteration_s": one.iteration_s,
        "samples_per_s": one.samples_per_s,
        "equation_1_s": chain.equation_s,
    }


def report_of(
    setup: ClusterFile,
    *,
    batches: Sequence[int] | None = None,
    microbatch_sequences: Sequence[int] | None = None,
    threshold_gbps: float = THRESHOLD_GBPS,
    alike: float = ALIKE,
    second_level: bool = True,
    idle: bool = False,
    out_of_order: bool = False,
    alternatives: bool = True,
    seed: int = 0,
) -> SpanTrainReport:
    """Plan a problem as SpanTrain does.

    batches: sequences of an iteration, of which the one with most samples a second is chosen; None: the file's.
    microbatch_sequences: None: all divisors of each batch. second_level, idle: see Rules. out_of_order: the paper's
    variant that does not equal synchronous training. alternatives: also plans with idle devices, without groups, and
    by other thresholds, to say where these are faster.
    Raises ConfigError where nothing fits.
    """
    training = setup.training
    grouping = group(measured_of(setup), threshold_gbps, alike)
    wanted = batches or [training.microbatches * training.microbatch_sequences * training.data]
    rules = SecondLevelRules(second_level, idle)
    found = search(setup, grouping.groups, wanted, microbatch_sequences, seed=seed, rules=rules)
    flowing = flow(found.simulated[0]) if out_of_order else None
    sentences = [*unseen(setup, found), *([SENTENCE] if out_of_order else [])]
    if alternatives:
        sentences += _alternatives(setup, grouping, found, microbatch_sequences, seed, rules)
    return SpanTrainReport(setup, grouping, found, rules, flowing, tuple(sentences))


def report_of_best_groups(setup: ClusterFile) -> SpanTrainReport:
    """The fastest plan of several thresholds of groups, of which the paper gives none. Raises ConfigError."""
    first = report_of(setup, alternatives=False)
    found = [first]
    for limit, _ in _other_groups(first.grouping):
        try:
            found.append(report_of(setup, threshold_gbps=limit, alternatives=False))
        except ConfigError:  # no group of these can hold its layers
            continue
    best = min(found, key=lambda one: one.iteration_s)
    return report_of(setup, threshold_gbps=best.grouping.threshold_gbps)


# ---- what SpanTrain does not see -------------------------------------------------------------------------------------


def unseen(setup: ClusterFile, found: Found) -> Iterator[str]:
    """What SpanTrain does not see of the best plan, as sentences without a full stop."""
    best, training = found.simulated[0], setup.training
    work, stages = found.works[best.chain.sequences], best.chain.stages
    off = best.chain.equation_s / best.iteration_s - 1
    if abs(off) >= 0.01:
        yield (
            f"Equation 1 says {format_seconds(best.chain.equation_s)}, {abs(off):.1%} {'more' if off > 0 else 'less'} "
            f"than the simulation: it adds up what slow links cost, and knows neither memory nor shared links"
        )
    used: dict[int, list[int]] = {}
    for number, (sender, receiver) in enumerate(pairwise(stages)):
        way = way_between(work, sender, receiver)
        if way.sender != way.receiver:
            used.setdefault(way.resource, []).append(number)
    for numbers in used.values():
        if len(numbers) > 1:
            way = way_between(work, stages[numbers[0]], stages[numbers[0] + 1])
            ends = f"{setup.sites[way.sender].name} to {setup.sites[way.receiver].name}"
            after = " and ".join(map(str, numbers))
            yield f"messages behind stages {after} share the link from {ends}: simulated, but not in Equation 1"
    if len(stages) > 1:
        yield "a message between two stages goes over one link, the slowest between their devices, whole"
    if any(share.tile.data * share.tile.tensor not in (0, 1) for stage in stages for share in stage.team.shares):
        yield "a part of a microbatch, or of a layer, is taken to need that part of its time on a device"
    free = {
        setup.sites[share.site].name: None
        for stage in stages
        for share in stage.team.shares
        if share.devices > 1 and setup.sites[share.site].network_gbps is None
    }
    if free:
        yield f"network_gbps of {', '.join(free)} is not given: collectives and messages inside take no time"
    split = {name: getattr(training, name) for name in ("tensor", "context", "expert", "data")}
    given = ", ".join(f"{name} = {value}" for name, value in split.items() if value > 1)
    if given:
        yield f"[training] has {given}: not used but for the batch, since SpanTrain chooses how devices share layers"
    if training.zero_stage and any(stage.team.replicas > 1 for stage in stages):
        yield f"[training] has zero_stage = {training.zero_stage}: not used, each replica has all states of its layers"
    if setup.profile is not None and setup.profile.memory_microbatches is not None:
        yield "[profile] has memory_microbatches: not used, memory is what memory_gib leaves"
    for stage in stages:
        out = [share for share in stage.team.shares if not share.tile.data]
        names = ", ".join(f"{setup.sites[share.site].name} x {share.devices}" for share in out)
        if names:
            yield f"idle: {names}"


def _alternatives(
    setup: ClusterFile,
    grouping: Grouping,
    found: Found,
    sizes: Sequence[int] | None,
    seed: int,
    rules: SecondLevelRules,
) -> Iterator[str]:
    """Plans that SpanTrain does not look for, where they are faster, for the same batch."""
    groups, best = grouping.groups, found.simulated[0]
    batch = best.chain.batch

    def faster(some: Sequence[Group], changed: SecondLevelRules) -> float | None:
        try:
            one = search(
                setup, some, [batch], sizes, seed=seed, rules=changed, operations=SIMULATED_OPERATIONS // 8
            ).simulated[0]
        except ConfigError:  # this one is not possible
            return None
        return one.iteration_s if one.iteration_s < best.iteration_s * 0.99 else None

    def says(what: str, seconds: float) -> str:
        return f"{what} an iteration takes {format_seconds(seconds)}, {1 - seconds / best.iteration_s:.1%} less"

    if not rules.idle and (seconds := faster(groups, rules._replace(idle=True))) is not None:
        yield says("SpanTrain uses all devices: where some may be idle", seconds)
    if 1 < len(groups) <= MOST_LEFT_OUT:
        tried = [
            (seconds, some)
            for size in range(1, len(groups))
            for some in combinations(range(len(groups)), size)
            if (seconds := faster([groups[number] for number in some], rules)) is not None
        ]
        if tried:
            seconds, some = min(tried)
            names = " and ".join(str(number + 1) for number in some)
            yield says(f"SpanTrain uses all groups: with group {names} alone", seconds)
    others = [
        (seconds, limit, len(some))
        for limit, some in _other_groups(grouping)
        if (seconds := faster(some, rules)) is not None
    ]
    if others:
        seconds, limit, count = min(others)
        yield says(f"groups depend on the threshold: with {limit:.4g} Gbit/s there are {count}, and", seconds)


def _other_groups(grouping: Grouping) -> Iterator[tuple[float, tuple[Group, ...]]]:
    """Groups by higher thresholds, just above what a message gets between two sites; a few of them, and few groups."""
    measured = grouping.measured
    rates = {measured.gbps(measured.times_s[a][b]) for a, b in combinations(range(len(measured.sites)), 2)}
    above = sorted(rate * 1.001 for rate in rates if grouping.threshold_gbps <= rate * 1.001 < math.inf)
    seen = {len(grouping.groups)}
    for limit in above[:: -(-len(above) // MOST_THRESHOLDS) or 1]:
        try:
            some = group(measured, limit, grouping.alike).groups
        except ConfigError:  # too many devices on slow networks of their own
            continue
        if len(some) <= MOST_GROUPS and len(some) not in seen:
            seen.add(len(some))
            yield limit, some


def write_report(report: SpanTrainReport, folder: Path) -> list[Path]:
    """Write the answer as files, and make the folder: spantrain.json (to_json()), plan.csv (a line for each team, as
    torch's pipeline runtime loads it), trace.json for Perfetto, timeline.svg and .png. Of the out-of-order variant the
    orders and times are of all simulated iterations. Raises ConfigError when it cannot be written."""
    best, setup = report.best, report.setup
    timeline = best.timeline if report.flowing is None else report.flowing.timeline
    names = [
        f"{number}: {', '.join(dict.fromkeys(setup.sites[site].name for site in stage.team.sites))}"
        for number, stage in enumerate(best.chain.stages)
    ]
    links: dict[tuple[int, int], str] = {}
    for number, (sender, receiver) in enumerate(pairwise(best.chain.stages)):
        way = way_between(report.work, sender, receiver)
        ends = setup.sites[way.sender].name, setup.sites[way.receiver].name
        there, back = (f"{ends[0]} to {ends[1]}", f"{ends[1]} to {ends[0]}")
        inside = f"inside {ends[0]}" if ends[0] == ends[1] else ""
        links[number, number + 1], links[number + 1, number] = inside or there, inside or back
    title = f"SpanTrain: {setup.model.name}, {format_seconds(report.iteration_s)} an iteration"
    texts = {
        "spantrain.json": json.dumps(report.to_json()) + "\n",
        "plan.csv": timeline.schedule.to_csv(),
        "trace.json": json.dumps(trace_events(timeline, names)) + "\n",
    }
    pictures = [folder / "timeline.svg", folder / "timeline.png"]
    ready_folder(folder)
    with writing(folder):
        for name, text in texts.items():
            (folder / name).write_text(text)
        draw([timeline], pictures, title if report.flowing is None else f"{title}, out of order", names, links)
    return [*(folder / name for name in texts), *pictures]


def slowest_stage(report: SpanTrainReport) -> tuple[int, GroupTerms]:
    """The group, from 1 on, that decides Equation 1, and its terms."""
    chain = report.best.chain
    number, terms = max(zip(chain.candidate.order, chain.terms, strict=True), key=lambda one: one[1].total_s)
    return number + 1, terms
