"""What an engine asks while a plan is carried out: how many sequences each stage should take at a time now; and the
same plan under a whole bandwidth trace. Reads plan.json, and writes answers as JSON and as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dips.core.errors import ConfigError
from dips.planner.adapter.decide import (
    AdapterComparison,
    AdapterState,
    Iterations,
    Rules,
    Window,
    borders_of,
    compare,
)
from dips.planner.adapter.pieces import Pipeline, Sizes
from dips.planner.adapter.traces import WHOLE, Channel, TraceFile, channels_of
from dips.planner.calibration import interval_json
from dips.planner.cluster import Link
from dips.planner.costs import NS, StageCost
from dips.planner.problem import Problem
from dips.planner.replan import MeasuredFile, Running, with_measured_links, with_measured_stages
from dips.planner.trace import save

ADAPT_FILES = ("adapt.json", "adapt.svg", "adapt.png")
"""What `dips plan adapt --trace FILE --out FOLDER` writes."""

COMPACT = "compact_zb"


@dataclass(frozen=True)
class Advice:
    """The sizes to use now."""

    running: Running
    rules: Rules  # with the measured numbers
    state: AdapterState
    before: tuple[Sizes, ...]  # the sizes so far
    with_ns: int  # an iteration with the sizes of `state`
    without_ns: int  # with whole microbatches

    @property
    def advised(self) -> bool:
        """Whether sizes should change."""
        return self.state.sizes != self.before

    @property
    def worst(self) -> int | None:
        """The number of the border whose messages take the longest for the compute that hides them."""
        return max(
            range(len(self.rules.borders)),
            key=lambda i: self.transfer_ns(i) / max(1, self.rules.borders[i].hide_ns),
            default=None,
        )

    def transfer_ns(self, number: int) -> float:
        """The time of a message of a whole microbatch over a border as measured."""
        return self.rules.borders[number].transfer_ns(self.state.rates[number])

    @property
    def why(self) -> str:
        """The reason, as a sentence without a full stop."""
        if self.worst is None:
            return "no message crosses a link between sites"
        border = self.rules.borders[self.worst]
        ratio = self.transfer_ns(self.worst) / max(1, border.hide_ns)
        about = f"a message from stage {border.sender} to {border.receiver} takes {ratio:.2f} of the compute that"
        if not any(self.state.levels):
            return f"no message is late: {about} hides it, at most"
        if self.rules.pipeline.sequences == 1:
            return f"{about} should hide it, but a microbatch of one sequence cannot be split"
        if self.state.sizes == self.rules.pipeline.whole:
            return f"{about} should hide it, but smaller pieces would not make an iteration shorter"
        return f"{about} should hide it: smaller pieces save {1 - self.with_ns / self.without_ns:.2%} of an iteration"


def advise(running: Running, measured: MeasuredFile, before: AdapterState | None = None) -> Advice:
    """The sizes to use now. before: what was answered last. Raises ConfigError for a plan that cannot be adapted, and
    for a file that is not of this plan."""
    problem = with_measured_links(running.problem, measured)
    rules = rules_of(running, with_measured_stages(problem, running.division, running.places, measured))
    start = rules.start if before is None else before
    whole = rules.pipeline.sequences
    good = all(1 <= n <= whole for sizes in start.sizes for n in sizes) and all(level >= 0 for level in start.levels)
    if not good or len(start.sizes) != len(rules.pipeline.whole) or len(start.levels) != len(rules.borders):
        raise ConfigError("--before is an answer for another plan: give one for this plan, or leave it out")
    state = rules.measured(start, {border.link: WHOLE for border in rules.borders})
    with_ns, without_ns = (rules.forecast(sizes, state.rates).span_ns for sizes in (state.sizes, rules.pipeline.whole))
    return Advice(running, rules, state, start.sizes, with_ns, without_ns)


def traced(running: Running, trace: TraceFile) -> tuple[Rules, AdapterComparison]:
    """The plan under a trace, with and without the adapter. Raises ConfigError for a plan that cannot be adapted, and
    for a trace of another one."""
    rules = rules_of(running, running.problem)
    found = channels_of(trace, _links_of(running.problem, rules))
    channels = {border.resource: found.get(border.link, Channel()) for border in rules.borders}
    return rules, compare(rules, channels, trace.duration_ns)


# ---- from a plan -----------------------------------------------------------------------------------------------------


def rules_of(running: Running, problem: Problem) -> Rules:
    """What the adapter decides by, with the numbers of `problem`. Raises ConfigError where a plan cannot be adapted."""
    where = running.problem.setup.file
    if running.groups > 1:
        raise ConfigError(
            f"{where}: {running.name} has a whole pipeline at each site, so no microbatch crosses a link between them: "
            "adapt a plan whose pipeline does"
        )
    if running.sharing == "coordinated":
        raise ConfigError(
            f"{where}: replicas take turns on a link, which the adapter does not play: make the plan with "
            'replicas = "fair" in [options]'
        )
    costs, schedule = problem.costs(running.division, running.places), running.schedules[0]
    limits = tuple(problem.limits(running.division, running.places)) if running.name == COMPACT else None
    sequences, profiled = problem.setup.training.microbatch_sequences, _profiled(running, problem)
    try:
        pipeline = Pipeline(schedule, costs, sequences, profiled, limits)
    except ConfigError as error:
        raise ConfigError(f"{running.problem.setup.file}: {error}") from None
    sites, links = problem.setup.sites, dict[int, tuple[tuple[str, str], float]]()
    for left, right in pairwise(running.places):
        for a, b in ((left, right), (right, left)):
            here, there = problem.site_of[a], problem.site_of[b]
            if here != there:
                link = problem.setup.link(sites[here].name, sites[there].name)
                name = (sites[here].name, sites[there].name)
                links[here * len(sites) + there] = (name, link.bandwidth_gbps / link.oversubscription)
    return Rules(pipeline, borders_of(pipeline, links))


def _profiled(running: Running, problem: Problem) -> tuple[tuple[int, tuple[StageCost, ...]], ...]:
    """The costs of smaller microbatches that divide the planned one, where every layer was measured with several
    sizes."""
    profile, found = problem.setup.profile, []
    sizes = set() if profile is None else {row.microbatch_sequences for row in profile.layers}
    whole = problem.setup.training.microbatch_sequences
    if len(sizes) < 2 or 0 in sizes or min(sizes) >= whole:
        return ()
    for n in range(1, whole):
        if whole % n == 0 and n >= min(sizes):
            smaller = problem.with_training(microbatch_sequences=n)
            found.append((n, smaller.costs(running.division, running.places).stages))
    return tuple(found)


def _links_of(problem: Problem, rules: Rules) -> dict[tuple[str, str], Link]:
    """The links that messages of the pipeline cross, by direction."""
    return {border.link: problem.setup.link(*border.link) for border in rules.borders}


# ---- the answer before -----------------------------------------------------------------------------------------------


def read_before(text: str, where: str) -> AdapterState:
    """Read what `adapt --measured FILE --json` answered before: the sizes in use, and which borders were late. Raises
    ConfigError."""
    try:
        found = json.loads(text)
        sizes = tuple(Sizes(int(row["fill"]), int(row["run"]), int(row["drain"])) for row in found["stages"])
        levels = tuple(int(row["level"]) for row in found["borders"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{where} is not an answer of dips plan adapt ({type(error).__name__}: {error}): give what it printed with "
            "--json, or leave --before out"
        ) from error
    n = len(levels)
    return AdapterState(sizes, (WHOLE,) * n, levels, (Window(),) * n, tuple(level > 0 for level in levels))


# ---- as JSON ---------------------------------------------------------------------------------------------------------


def advice_json(advice: Advice) -> dict[str, Any]:
    """An answer as JSON. late_below_gbps is null where messages are late at any bandwidth."""
    problem, error = advice.running.problem, advice.running.problem.calibration_error
    sites, with_s, without_s = problem.setup.sites, advice.with_ns / NS, advice.without_ns / NS
    return {
        "advised": advice.advised,
        "why": advice.why,
        "sequences": advice.rules.pipeline.sequences,
        "stages": [
            {"stage": stage, "site": sites[problem.site_of[place]].name, **one._asdict()}
            for stage, (place, one) in enumerate(zip(advice.running.places, advice.state.sizes, strict=True))
        ],
        "borders": [
            {
                "sender_stage": border.sender,
                "receiver_stage": border.receiver,
                "sender": border.link[0],
                "receiver": border.link[1],
                "measured_gbps": border.planned_gbps,
                "late_below_gbps": border.late_below_gbps if math.isfinite(border.late_below_gbps) else None,
                "on_time_from_gbps": border.on_time_from_gbps if math.isfinite(border.on_time_from_gbps) else None,
                "compute_s": border.hide_ns / NS,
                "level": level,
                "transfer_s": advice.transfer_ns(number) / NS,
            }
            for number, (border, level) in enumerate(zip(advice.rules.borders, advice.state.levels, strict=True))
        ],
        "calibration_error": error,
        "iteration_s": with_s,
        **interval_json("iteration", with_s, error),
        "without_s": without_s,
        **interval_json("without", without_s, error),
    }


def traced_json(compared: AdapterComparison) -> dict[str, Any]:
    """A comparison under a trace as JSON; times in seconds."""

    def each(found: Iterations) -> list[dict[str, Any]]:
        return [
            {"ends_s": end / NS, "sizes": [list(one) for one in sizes]}
            for end, sizes in zip(found.ends_ns, found.sizes, strict=True)
        ]

    return {
        "iterations": len(compared.without.ends_ns),
        "late": compared.late,
        "without_s": compared.without.span_ns / NS,
        "with_s": compared.adapted_ns / NS,
        "speedup": compared.speedup,
        "stated_cost_s": compared.cost_ns / NS,
        "monitored_s": compared.monitored_ns / NS,
        "changes": compared.adapted.changes,
        "without": each(compared.without),
        "with": each(compared.adapted),
    }


# ---- picture ---------------------------------------------------------------------------------------------------------


def draw(running: Running, trace: TraceFile, compared: AdapterComparison, files: Sequence[Path]) -> None:
    """Draw throughput over time with and without the adapter, and below it the bandwidth of each link, in the form of
    each file's suffix. Raises OSError."""
    from matplotlib.figure import Figure

    training = running.problem.setup.training
    batch = training.microbatches * training.microbatch_sequences * training.data
    figure = Figure(figsize=(9.0, 5.0), dpi=110, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    fastest = 0.0
    for found, label, colour in (
        (compared.adapted, "with the adapter", "#0072B2"),
        (compared.without, "without it", "#D55E00"),
    ):
        begins_s = [0.0, *(end / NS for end in found.ends_ns)]
        rates = [batch / (end - begin) for begin, end in pairwise(begins_s)]
        fastest = max(fastest, *rates)
        upper.stairs(rates, begins_s, label=label, color=colour, linewidth=1.6, baseline=None)
    upper.set_ylabel("sequences a second")
    upper.set_ylim(0, 1.08 * fastest)
    upper.legend(loc="lower left", fontsize=8)
    rules = rules_of(running, running.problem)
    links = _links_of(running.problem, rules)
    drawn: dict[tuple[tuple[float, ...], tuple[float, ...]], list[str]] = {}
    for name, channel in channels_of(trace, links).items():
        planned = links[name].bandwidth_gbps / links[name].oversubscription
        edges = [time / NS for time in channel.times_ns if time < trace.duration_ns]
        values = [rate / WHOLE * planned for rate in channel.rates[: len(edges)]]
        drawn.setdefault(((*edges, trace.head.duration_s), tuple(values)), []).append(f"{name[0]} to {name[1]}")
    for (at_s, gbps), names in drawn.items():
        lower.stairs(gbps, at_s, label=names[0] if len(names) == 1 else f"{len(names)} links", baseline=None)
    lower.set_ylabel("bandwidth, Gbit/s")
    lower.set_ylim(0, 1.08 * max((rate for _, rates in drawn for rate in rates), default=0.0) or 1.0)
    lower.set_xlabel("time, seconds")
    if len(drawn) <= 6:
        lower.legend(loc="lower left", fontsize=7)
    n = len(compared.without.ends_ns)
    figure.suptitle(f"{Path(trace.file).stem}: {n} iterations, {compared.speedup:.2f} times as fast with the adapter")
    save(figure, files)
