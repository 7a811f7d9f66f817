"""Evaluates one way to train: a schedule for a division of the model, simulated, with its memory and its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dips.core.errors import ConfigError
from dips.core.units import format_bytes
from dips.planner.costs import NS, Costs
from dips.planner.division import divide
from dips.planner.ir import Schedule, straight, wave
from dips.planner.problem import Problem, regrouped
from dips.planner.schedules import SCHEDULES
from dips.planner.schedules.greedy import jeeves
from dips.planner.simulate import Fleet, Timeline, peaks, simulate_fleet, validate
from dips.planner.units import Division

NAMES = (*SCHEDULES, "jeeves", "optimal_ud", "optimal_wave", "dp")
"""What a plan can choose from. jeeves, the solver's and dp are made in other ways than the schedules by name."""


@dataclass(frozen=True)
class Candidate:
    """One way to train, simulated."""

    name: str
    sharing: str  # how replicas use a link: alone, fair or coordinated
    division: Division
    schedules: tuple[Schedule, ...]  # of each replica that has an order of its own; one, where all are equal
    timeline: Timeline
    makespan_ns: int
    bubble_fraction: float
    activation_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    limit_bytes: tuple[int, ...]
    site_of: tuple[int, ...]  # of each device, as the file numbers sites
    link_bytes: dict[tuple[int, int], float]  # of an iteration, over each directed link between sites
    costs: Costs  # what the first replica was made for; where replicas take turns on a link, its own messages alone
    # the part of the makespan for exchanges of replicas before the first operation and after the last one
    sync_ns: int = 0
    lower_bound_ns: int | None = None  # no schedule of this kind is shorter; None where no solver looked

    @property
    def iteration_s(self) -> float:
        return self.makespan_ns / NS


@dataclass(frozen=True)
class RefusedCandidate:
    """A candidate that is not possible, and the reason as a sentence."""

    name: str
    why: str


def divided(problem: Problem, name: str) -> list[Candidate]:
    """The candidates with even stages, and with balanced ones where these differ and are wanted. Raises ConfigError
    when neither is possible."""
    places = SCHEDULES[name].places(problem.n_devices)
    divisions = [problem.uniform(len(places))]
    if problem.setup.options.division != "uniform":
        divisions.append(problem.balanced(places))
    return _possible(partial(plain, problem, name, division) for division in dict.fromkeys(divisions))


def _possible(tries: Iterable[Callable[[], Candidate]]) -> list[Candidate]:
    """The candidates that can be made. Raises the last ConfigError when none can."""
    found, why = [], ConfigError("")
    for attempt in tries:
        try:
            found.append(attempt())
        except ConfigError as error:
            why = error
    if not found:
        raise why
    return found


def plain(problem: Problem, name: str, division: Division | None = None) -> Candidate:
    make, places = SCHEDULES[name].make, SCHEDULES[name].places(problem.n_devices)
    if division is None or len(division) != len(places):
        division = problem.uniform(len(places))
    costs, limits = problem.costs(division, places), problem.limits(division, places)
    schedule = make(problem.n_devices, problem.n_microbatches, costs, limits)
    return judged(problem, name, division, schedule, costs, limits)


def judged(
    problem: Problem,
    name: str,
    division: Division,
    schedule: Schedule,
    costs: Costs,
    limits: Sequence[int],
    lower_bound_ns: int | None = None,
) -> Candidate:
    held = peaks(schedule, costs)
    for device, (peak, limit) in enumerate(zip(held, limits, strict=True)):
        if peak > limit:
            raise ConfigError(
                f"stage {device} would hold {format_bytes(peak)} of activations, {format_bytes(limit)} are left"
            )
    timeline, sharing = validate(schedule, costs, limits), "fair" if problem.shares_links else "alone"
    found = _simulated(problem, name, sharing, division, [schedule], costs, limits, timeline)
    return replace(found, lower_bound_ns=lower_bound_ns)


def _simulated(
    problem: Problem,
    name: str,
    sharing: str,
    division: Division,
    schedules: Sequence[Schedule],
    costs: Costs,
    limits: Sequence[int],
    played: Timeline | Fleet,
) -> Candidate:
    """The candidate that was played: by one replica, which stands for all, or by several."""
    timelines = played.timelines if isinstance(played, Fleet) else (played,)
    held = [peaks(schedule, costs) for schedule in schedules]
    return Candidate(
        name=name,
        sharing=sharing,
        division=division,
        schedules=tuple(schedules),
        timeline=timelines[0],
        makespan_ns=played.makespan_ns,
        bubble_fraction=played.bubble_fraction,
        activation_bytes=tuple(max(column) for column in zip(*held, strict=True)),
        state_bytes=tuple(problem.state_bytes(division, schedules[0].device_of_stage)),
        limit_bytes=tuple(limits),
        site_of=problem.site_in_file,
        link_bytes=link_bytes(problem, division, timelines),
        costs=costs,
        sync_ns=timelines[0].exposed_ns,
    )


def coordinated(problem: Problem, candidate: Candidate, most: int = 1 << 30) -> Candidate:
    """The same order on each replica, one message on a link at a time. most: replicas that are simulated, with messages
    as much larger."""
    (schedule,) = candidate.schedules
    played = min(most, problem.replicas)
    costs = problem.costs(candidate.division, schedule.device_of_stage, together=problem.replicas / played)
    fleet = simulate_fleet([schedule] * played, costs)
    return replace(
        candidate,
        sharing="coordinated",
        timeline=fleet.timelines[0],
        makespan_ns=fleet.makespan_ns,
        bubble_fraction=fleet.bubble_fraction,
        costs=costs,
        sync_ns=fleet.timelines[0].exposed_ns,
        lower_bound_ns=None,
    )


def replicas_of(problem: Problem, candidate: Candidate) -> tuple[Timeline, ...]:
    """The timelines of all replicas where they take turns on a link; else of one, which stands for all."""
    if candidate.sharing != "coordinated":
        return (candidate.timeline,)
    schedules = candidate.schedules
    return simulate_fleet(schedules * problem.replicas if len(schedules) == 1 else schedules, candidate.costs).timelines


def jeeves_of(problem: Problem) -> list[Candidate]:
    """JEEVES with even stages, for each way in which replicas may share a link, and with the best division where that
    differs and is wanted. Raises ConfigError when no division fits the memory."""
    options, uniform = problem.setup.options, problem.uniform()
    coordinated = problem.shares_links and options.replicas != "fair"
    ways = [] if coordinated and options.replicas == "coordinated" else [(uniform, False)]
    if coordinated:
        ways.append((uniform, True))
    if options.division != "uniform" and problem.n_devices > 1:
        better = divide(problem, coordinated).division
        if better != uniform:
            ways.append((better, coordinated))
    return _possible(partial(jeeves_with, problem, division, together) for division, together in ways)


def jeeves_with(problem: Problem, division: Division, coordinated: bool, most: int = 1 << 30) -> Candidate:
    """JEEVES' greedy schedule for one division. most: as for coordinated(). Raises ConfigError when memory is too
    small."""
    limits = problem.limits(division)
    if not coordinated:
        costs = problem.costs(division)
        (schedule,) = jeeves(problem.n_microbatches, costs, limits)
        return judged(problem, "jeeves", division, schedule, costs, limits)
    played = min(most, problem.replicas)
    costs = problem.costs(division, together=problem.replicas / played)
    schedules = jeeves(problem.n_microbatches, costs, limits, played)
    fleet = simulate_fleet(schedules, costs)
    return _simulated(problem, "jeeves", "coordinated", division, schedules, costs, limits, fleet)


def optimal_of(problem: Problem, name: str) -> Candidate:
    from dips.planner.schedules.optimal import optimal  # imported here: it takes a second, and only this needs it

    places = straight(problem.n_devices) if name == "optimal_ud" else wave(problem.n_devices)
    division = problem.uniform(len(places))
    costs, limits = problem.costs(division, places), problem.limits(division, places)
    hint = best_hint(problem, name, costs, limits)
    seconds = problem.setup.options.solver_s
    best = optimal(name, places, problem.n_microbatches, costs, limits, hint, seconds)
    return judged(problem, name, division, best.schedule, costs, limits, best.lower_bound_ns)


def best_hint(problem: Problem, name: str, costs: Costs, limits: Sequence[int]) -> Schedule | None:
    """The best schedule of whole, split blocks with the same places that fits the memory; None if there is none."""
    found = []
    for other in ("zb_h1", "cross_ud/1", "compact_zb") if name == "optimal_ud" else ("zb_v", "cross_wave"):
        try:
            schedule = SCHEDULES[other].make(problem.n_devices, problem.n_microbatches, costs, limits)
            found.append((validate(schedule, costs, limits).makespan_ns, other, schedule))
        except ConfigError:
            continue
    return min(found, key=lambda row: row[:2])[2] if found else None


STATIC_AND_GREEDY = ("1f1b", "zb_h1", "zb_v", "cross_ud/1")


def data_parallel(problem: Problem) -> Candidate:
    """The best of these schedules with a whole pipeline at each site. Raises ConfigError when sites cannot hold
    that."""
    if len(problem.setup.sites) < 2:
        raise ConfigError("whole pipelines at several sites need at least two of them")
    each = regrouped(problem, len(problem.setup.sites))
    found, why = [], ""
    for name in STATIC_AND_GREEDY:
        try:
            found.append(plain(each, name))
        except ConfigError as error:
            why = str(error)
    if not found:
        raise ConfigError(why)
    best = min(found, key=lambda c: c.makespan_ns)
    return replace(best, name=f"dp/{best.name}")


def link_bytes(problem: Problem, division: Division, timelines: Sequence[Timeline]) -> dict[tuple[int, int], float]:
    """Bytes of an iteration over each directed link between sites, as the file numbers them, of all replicas, which the
    timelines represent in equal parts: messages of the pipeline, weights and gradients."""
    found, times = dict[tuple[int, int], float](), problem.replicas / len(timelines)
    for timeline in timelines:
        for message in timeline.messages:
            here, there = problem.site_of[message.source], problem.site_of[message.target]
            if here != there:
                for pair in zip(problem.members(here), problem.members(there), strict=True):
                    found[pair] = found.get(pair, 0.0) + problem.message_bytes * times
    for pair, size in problem.ring_bytes(division, timelines[0].schedule.device_of_stage).items():
        found[pair] = found.get(pair, 0.0) + size
    return found
