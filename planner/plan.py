"""The best of all schedules for a problem, what it beat and by how much, and what would help most.

Candidates: every schedule that fits the memory, with the stage divisions and the ways of sharing a link that the
problem allows, and the other answer to slow links, a whole pipeline at each site with gradients exchanged between
them (data parallel across sites, CrossPipe, arXiv:2507.00217, appendix E). The answer is the one with the shortest
iteration. What is not counted: the exchange of gradients between replicas of one site, which is taken to be hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dips.core.units import format_bytes
from dips.planner.costs import NS, Costs
from dips.planner.division import divide
from dips.planner.errors import PlanError
from dips.planner.fleet import simulate_fleet
from dips.planner.ir import Schedule, loop, straight, wave
from dips.planner.problem import Division, Problem
from dips.planner.schedules.cross_ud import cross_ud
from dips.planner.schedules.cross_wave import cross_wave
from dips.planner.schedules.interleaved import interleaved_1f1b
from dips.planner.schedules.jeeves import jeeves
from dips.planner.schedules.static import gpipe, one_f_one_b, zb_h1
from dips.planner.schedules.zb_v import zb_v
from dips.planner.simulate import Timeline, simulate
from dips.planner.validate import peaks, validate

Maker = Callable[[Problem, Costs, Sequence[int]], Schedule]


def _fixed(make: Callable[[int, int], Schedule]) -> Maker:
    return lambda problem, costs, limits: make(problem.n_devices, problem.n_microbatches)


def _ud(parts: int) -> Maker:
    return lambda problem, costs, limits: cross_ud(problem.n_devices, problem.n_microbatches, costs, limits, parts)


MAKERS: dict[str, tuple[Maker, Callable[[int], tuple[int, ...]]]] = {
    "gpipe": (_fixed(gpipe), straight),
    "1f1b": (_fixed(one_f_one_b), straight),
    "interleaved_1f1b": (_fixed(interleaved_1f1b), lambda n: loop(n, 2)),
    "zb_h1": (_fixed(zb_h1), straight),
    "zb_v": (_fixed(zb_v), wave),
    "cross_ud/1": (_ud(1), straight),
    "cross_ud/2": (_ud(2), straight),
    "cross_ud/4": (_ud(4), straight),
    "cross_wave": (lambda p, costs, limits: cross_wave(p.n_devices, p.n_microbatches, costs, limits), wave),
}
"""name: (maker, where the stages stand). jeeves, the solver's and dp are made otherwise."""

NAMES = (*MAKERS, "jeeves", "optimal_ud", "optimal_wave", "dp")
COORDINATED_TOO = 3
"""Schedules that are also played with one message at a time: the best so many, and jeeves."""

FEW = 8
"""Replicas that are played, before and after, to see what a change would do."""


@dataclass(frozen=True)
class Candidate:
    """One way to train. schedules: of each replica that has an order of its own (one, where all are equal). sharing:
    how replicas use a link. sync_ns: exchange of gradients between sites, after the last operation.
    pipeline_devices and site_of say what stands where. lower_bound_ns: no schedule of this kind is shorter; None
    where no solver looked."""

    name: str
    sharing: str
    division: Division
    schedules: tuple[Schedule, ...]
    timeline: Timeline
    makespan_ns: int
    bubble_fraction: float
    activation_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    limit_bytes: tuple[int, ...]
    site_of: tuple[int, ...]
    link_bytes: dict[tuple[int, int], float]
    sync_ns: int = 0
    lower_bound_ns: int | None = None

    @property
    def iteration_s(self) -> float:
        return (self.makespan_ns + self.sync_ns) / NS


@dataclass(frozen=True)
class Refused:
    """A candidate that cannot be, and why, in a sentence."""

    name: str
    why: str


@dataclass(frozen=True)
class Effect:
    """What a change of the setting would do. saved: part of each microbatch's share of the iteration that it saves."""

    change: str
    saved: float


@dataclass(frozen=True)
class Plan:
    """candidates: the fastest first; the first is chosen."""

    problem: Problem
    candidates: tuple[Candidate, ...]
    refused: tuple[Refused, ...]
    effects: tuple[Effect, ...]

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]


def make_plan(problem: Problem, sensitivity: bool = True) -> Plan:
    """Raises PlanError where nothing fits, with the reason of each candidate."""
    names = _names(problem)
    found: list[Candidate] = []
    refused: list[Refused] = []
    for name in names:
        try:
            found += _candidates(problem, name)
        except PlanError as error:
            refused.append(Refused(name, str(error)))
    if not found:
        _check_one_fits(problem)
        reasons = "; ".join(f"{no.name}: {no.why}" for no in refused[:3])
        raise PlanError(f"{problem.setup.file}: no schedule can be: {reasons}")
    if _shares(problem) and problem.setup.options.replicas != "fair":
        found.sort(key=lambda c: c.iteration_s)
        plain = [c for c in found if c.sharing == "fair" and c.name in MAKERS]
        if problem.setup.options.replicas == "best":
            several = list({c.makespan_ns: c for c in reversed(plain)}.values())[::-1][:COORDINATED_TOO]
        else:
            several = plain
        found += [_coordinated(problem, candidate) for candidate in several]
    if problem.setup.options.replicas == "coordinated" and _shares(problem):
        found = [c for c in found if c.sharing != "fair"]
    ranked = tuple(sorted(found, key=lambda c: (c.makespan_ns + c.sync_ns, c.division != problem.uniform())))
    effects = tuple(_effects(problem, ranked)) if sensitivity else ()
    return Plan(problem, ranked, tuple(refused), effects)


def _check_one_fits(problem: Problem) -> None:
    """Raises PlanError where a stage cannot hold a single microbatch."""
    division, training = problem.uniform(), problem.setup.training
    limits, costs = problem.limits(division), problem.costs(division)
    for device, (stage, limit) in enumerate(zip(costs.stages, limits, strict=True)):
        if stage.activation > limit:
            profile = problem.setup.profile
            measured = profile is not None and profile.memory_microbatches is not None
            key = (
                "[profile]: memory_microbatches" if measured else f"[[sites]] {problem.site_of[device] + 1}: memory_gib"
            )
            raise PlanError(
                f"{problem.setup.file} {key} leaves {format_bytes(limit)} for activations, one microbatch of stage "
                f"{device} needs {format_bytes(stage.activation)}: give more memory or stages, a smaller "
                f'microbatch_sequences (now {training.microbatch_sequences}), or recompute = "full"'
            )


def _names(problem: Problem) -> list[str]:
    asked, options = problem.setup.options.schedules, problem.setup.options
    for name in asked:
        if name not in NAMES:
            raise PlanError(
                f"{problem.setup.file} [options]: schedules has {name!r}, which is unknown: "
                f"choose of {', '.join(NAMES)}"
            )
    names = list(asked or NAMES)
    if not options.solver_s:
        if asked and any(name.startswith("optimal") for name in asked):
            raise PlanError(
                f"{problem.setup.file} [options]: optimal schedules need solver_s, the solver's seconds: give it"
            )
        names = [name for name in names if not name.startswith("optimal")]
    if len(problem.setup.sites) < 2 and not asked:
        names.remove("dp")
    return names


def _shares(problem: Problem) -> bool:
    """Whether several replicas meet on a link."""
    return problem.replicas > 1 and len(set(problem.site_of)) > 1


# ---- candidates ----


def _candidates(problem: Problem, name: str) -> Iterator[Candidate]:
    if name == "jeeves":
        yield from _jeeves(problem)
    elif name == "dp":
        yield data_parallel(problem)
    elif name.startswith("optimal"):
        yield _optimal(problem, name)
    else:
        yield from _divided(problem, name)


def _divided(problem: Problem, name: str) -> Iterator[Candidate]:
    """With even stages, and with balanced ones where those differ and are wanted. Raises PlanError where neither can
    be."""
    places = MAKERS[name][1](problem.n_devices)
    found, why = [], PlanError("")
    divisions = [problem.uniform(len(places))]
    if problem.setup.options.division != "uniform":
        divisions.append(problem.balanced(places))
    for division in dict.fromkeys(divisions):
        try:
            found.append(_plain(problem, name, division))
        except PlanError as error:
            why = error
    if not found:
        raise why
    yield from found


def _plain(problem: Problem, name: str, division: Division | None = None) -> Candidate:
    make, places_of = MAKERS[name]
    places = places_of(problem.n_devices)
    if division is None or len(division) != len(places):
        division = problem.uniform(len(places))
    costs, limits = problem.costs(division, places), problem.limits(division, places)
    schedule = make(problem, costs, limits)
    return _judged(problem, name, division, schedule, costs, limits)


def _judged(
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
            raise PlanError(
                f"stage {device} would hold {format_bytes(peak)} of activations, {format_bytes(limit)} are left"
            )
    timeline = validate(schedule, costs, limits)
    return Candidate(
        name=name,
        sharing="fair" if _shares(problem) else "alone",
        division=division,
        schedules=(schedule,),
        timeline=timeline,
        makespan_ns=timeline.makespan_ns,
        bubble_fraction=timeline.bubble_fraction,
        activation_bytes=held,
        state_bytes=tuple(problem.state_bytes(division, schedule.device_of_stage)),
        limit_bytes=tuple(limits),
        site_of=problem.site_of,
        link_bytes=_link_bytes(problem, [timeline], problem.replicas),
        lower_bound_ns=lower_bound_ns,
    )


def _coordinated(problem: Problem, candidate: Candidate, most: int = 1 << 30) -> Candidate:
    """The same order on each replica, one message on a link at a time. most: replicas that are played, with messages as
    much larger."""
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
        lower_bound_ns=None,
    )


def _jeeves(problem: Problem) -> Iterator[Candidate]:
    options, uniform = problem.setup.options, problem.uniform()
    shares = _shares(problem)
    if options.replicas != "coordinated" or not shares:
        yield jeeves_with(problem, uniform, coordinated=False)
    coordinated = shares and options.replicas != "fair"
    if coordinated:
        yield jeeves_with(problem, uniform, coordinated=True)
    if options.division != "uniform" and problem.n_devices > 1:
        divided = divide(problem, coordinated)
        if divided.division != uniform:
            yield jeeves_with(problem, divided.division, coordinated)


def jeeves_with(problem: Problem, division: Division, coordinated: bool, most: int = 1 << 30) -> Candidate:
    """JEEVES' greedy for one division. most: as for _coordinated. Raises PlanError where memory forbids it."""
    limits = problem.limits(division)
    if not coordinated:
        costs = problem.costs(division)
        (schedule,) = jeeves(problem.n_microbatches, costs, limits)
        return _judged(problem, "jeeves", division, schedule, costs, limits)
    played = min(most, problem.replicas)
    costs = problem.costs(division, together=problem.replicas / played)
    schedules = jeeves(problem.n_microbatches, costs, limits, played)
    fleet = simulate_fleet(schedules, costs)
    held = [peaks(schedule, costs) for schedule in schedules]
    return Candidate(
        name="jeeves",
        sharing="coordinated",
        division=division,
        schedules=tuple(schedules),
        timeline=fleet.timelines[0],
        makespan_ns=fleet.makespan_ns,
        bubble_fraction=fleet.bubble_fraction,
        activation_bytes=tuple(max(column) for column in zip(*held, strict=True)),
        state_bytes=tuple(problem.state_bytes(division)),
        limit_bytes=tuple(limits),
        site_of=problem.site_of,
        link_bytes=_link_bytes(problem, fleet.timelines, problem.replicas / played),
    )


def _optimal(problem: Problem, name: str) -> Candidate:
    from dips.planner.schedules.optimal import optimal  # a second to import, and only needed here

    places = straight(problem.n_devices) if name == "optimal_ud" else wave(problem.n_devices)
    division = problem.uniform(len(places))
    costs, limits = problem.costs(division, places), problem.limits(division, places)
    hint = best_hint(problem, name, costs, limits)
    seconds = problem.setup.options.solver_s
    best = optimal(name, places, problem.n_microbatches, costs, limits, hint, seconds)
    return _judged(problem, name, division, best.schedule, costs, limits, best.lower_bound_ns)


def best_hint(problem: Problem, name: str, costs: Costs, limits: Sequence[int]) -> Schedule | None:
    """The best schedule of whole, split blocks with the same places that fits the memory; None if there is none."""
    found = []
    for other in ("zb_h1", "cross_ud/1") if name == "optimal_ud" else ("zb_v", "cross_wave"):
        try:
            schedule = MAKERS[other][0](problem, costs, limits)
            found.append((validate(schedule, costs, limits).makespan_ns, other, schedule))
        except PlanError:
            continue
    return min(found, key=lambda row: row[:2])[2] if found else None


def data_parallel(problem: Problem, names: Iterable[str] = ("1f1b", "zb_h1", "zb_v", "cross_ud/1")) -> Candidate:
    """A whole pipeline at each site, with an equal share of the replicas; then all sites add their gradients in a ring
    (2 (k - 1) steps of 1/k of the gradients among k sites), which nothing hides.

    Raises PlanError where the sites cannot hold that.
    """
    setup, k = problem.setup, len(problem.setup.sites)
    training = setup.training
    if k < 2 or training.data % k:
        raise PlanError(f"data = {training.data} does not divide among {k} sites: each takes as many replicas")
    needed = training.pipeline * setup.devices_of_a_stage // k
    for site in setup.sites:
        if site.devices < needed:
            raise PlanError(f"{site.name} has {site.devices} devices, an equal share of the replicas needs {needed}")
    slowest = min(setup.sites, key=lambda site: site.sustained_tflops or 0)
    inner = replace(
        setup,
        sites=(slowest.model_copy(update={"stages": 0, "devices": max(slowest.devices, needed)}),),
        training=training.model_copy(update={"data": training.data // k}),
        options=setup.options.model_copy(update={"division": "uniform"}),
    )
    best = min(_those_that_fit(replace(problem, setup=inner), names), key=lambda c: c.makespan_ns)
    size = setup.model.parameters() * 2.0
    pairs = [(setup.sites[i], setup.sites[(i + 1) % k]) for i in range(k)]
    links = [setup.link(a.name, b.name) for a, b in pairs]
    steps = 2 * (k - 1)
    sync_s = max(steps * (link.latency_ms / 1e3 + size / k / link.bytes_per_s) for link in links)
    sent = {(i, (i + 1) % k): steps * size / k for i in range(k)}
    return replace(best, name=f"dp/{best.name}", sync_ns=round(sync_s * NS), link_bytes=sent)


def _those_that_fit(problem: Problem, names: Iterable[str]) -> list[Candidate]:
    found, why = [], ""
    for name in names:
        try:
            found.append(_plain(problem, name))
        except PlanError as error:
            why = str(error)
    if not found:
        raise PlanError(why)
    return found


def _link_bytes(problem: Problem, timelines: Iterable[Timeline], times: float) -> dict[tuple[int, int], float]:
    """Bytes of an iteration over each directed link between sites, of all replicas."""
    found: dict[tuple[int, int], float] = {}
    for timeline in timelines:
        for message in timeline.messages:
            pair = (problem.site_of[message.source], problem.site_of[message.target])
            if pair[0] != pair[1]:
                found[pair] = found.get(pair, 0.0) + problem.message_bytes * times
    return found


# ---- what would help ----


def _effects(problem: Problem, ranked: Sequence[Candidate]) -> Iterator[Effect]:
    """Each change alone, planned anew among the schedules that are near the front; the greatest help first."""
    changes: list[tuple[str, Problem]] = [
        ("microbatches x 2", problem.with_training(microbatches=2 * problem.n_microbatches))
    ]
    if len(set(problem.site_of)) > 1:
        changes += [
            ("bandwidth between sites x 2", problem.with_links(bandwidth=2)),
            ("latency between sites / 2", problem.with_links(latency=0.5)),
        ]
    changes.append(("memory of activations x 2", _more_activations(problem)))
    before = _near_the_front(problem, ranked)
    found = []
    for change, other in changes:
        each = _near_the_front(other, ranked) * problem.n_microbatches / other.n_microbatches
        found.append(Effect(change, max(0.0, 1 - each / before)))  # nobody has to use what does not help
    yield from sorted(found, key=lambda effect: -effect.saved)


def _more_activations(problem: Problem) -> Problem:
    if problem.setup.profile is not None and problem.setup.profile.memory_microbatches is not None:
        return problem.with_memory(2)
    division = problem.uniform()
    held = max(problem.state_bytes(division))
    site = min(site.memory_gib for site in problem.setup.sites if site.memory_gib is not None) * 2**30
    return problem.with_memory((2 * site - held) / site)


def _near_the_front(problem: Problem, ranked: Sequence[Candidate]) -> float:
    """The best iteration in seconds of the chosen order, its kind and the greedies."""
    chosen = ranked[0]
    spans = [_replayed_s(problem, chosen)]
    coordinated = chosen.sharing == "coordinated"
    for name in dict.fromkeys([chosen.name, "cross_ud/1", "jeeves"]):
        try:
            if name.startswith("dp/"):
                spans.append(data_parallel(problem).iteration_s)
            elif name in MAKERS:
                candidate = _plain(problem, name, chosen.division)
                spans.append((_coordinated(problem, candidate, FEW) if coordinated else candidate).iteration_s)
            elif name == "jeeves":
                division = next((c.division for c in ranked if c.name == "jeeves"), problem.uniform())
                spans.append(jeeves_with(problem, division, coordinated, FEW).iteration_s)
        except PlanError:
            continue
    return min(spans)


def _replayed_s(problem: Problem, chosen: Candidate) -> float:
    """The chosen order under another setting, in seconds; infinite where that has other microbatches."""
    first = chosen.schedules[0]
    if first.n_microbatches != problem.n_microbatches or chosen.sync_ns:
        return math.inf
    if chosen.sharing != "coordinated":
        return simulate(first, problem.costs(chosen.division, first.device_of_stage)).makespan_ns / NS
    played = min(FEW, problem.replicas)
    orders = [first] * played if len(chosen.schedules) == 1 else chosen.schedules[:played]
    costs = problem.costs(chosen.division, first.device_of_stage, together=problem.replicas / played)
    return simulate_fleet(orders, costs).makespan_ns / NS
