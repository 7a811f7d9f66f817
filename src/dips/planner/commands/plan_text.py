"""Formats what `dips plan` found for a terminal: yields lines and tables, in their order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich import box
from rich.table import Table

from dips.core.units import format_bytes, format_seconds
from dips.planner.adapter.advise import Advice
from dips.planner.adapter.decide import AdapterComparison, Rules
from dips.planner.adapter.pieces import Sizes
from dips.planner.calibration import calibration_text, interval_text
from dips.planner.commands.plan_clusters import AsynchronousClusters, rounds_text
from dips.planner.commands.plan_systems import CANNOT_SEE, SystemChoice
from dips.planner.commands.plan_ways import reasons, take_text, tokens_text
from dips.planner.costs import NS
from dips.planner.grouping import Grouping, Parts
from dips.planner.plan import Plan, layers_of
from dips.planner.problem import assumptions
from dips.planner.replan import ReplanVerdict, Running
from dips.planner.scaleacross.report import ScaleAcrossReport
from dips.planner.simulate import Timeline
from dips.planner.spantrain.report import SpanTrainReport, slowest_stage
from dips.planner.sweep import Panel, SweepRow
from dips.planner.tradeoff import Tradeoff
from dips.planner.validation import PaperCheck

WIDEST = 400
"""Cells of time that a timeline has in a line."""

MOST_WAYS = 8
"""Ways to use the sites that are shown at most, but for those that are always compared."""

MOSTLY_WAITS = 0.5
"""Bubble from which a plan over several sites says what its devices wait for."""

SHARING = {"fair": "bandwidth shared evenly", "coordinated": "one message at a time", "alone": ""}


def table_of(left: Sequence[str], right: Sequence[str] = (), first: Sequence[str] = ()) -> Table:
    """An empty table with columns that are aligned on the left, others on the right, and before both such as the
    latter."""
    table = Table(box=box.SIMPLE_HEAD)
    for names in (first, left, right):
        for name in names:
            table.add_column(name, justify="left" if names is left else "right")
    return table


def _named(name: str, sharing: str) -> str:
    return f"{name}, {SHARING[sharing]}" if SHARING[sharing] else name


def decision_text(decision: SystemChoice) -> Iterator[str | Table]:
    """Which way and which system to use and why, all answers, and the plan of the file's pipelines."""
    use = decision.use
    if decision.ways is not None:
        yield take_text(decision.ways)
        yield from (f"  {sentence}" for sentence in reasons(decision.ways))
        ways = decision.ways
        table = table_of(("way", "how"), ("tokens a day", "worth", "of the best"))
        best = ways.counted(ways.take)
        shown = {*ways.found, *ways.judged[:MOST_WAYS]}
        for way in (way for way in ways.judged if way in shown):
            counted = ways.counted(way)
            table.add_row(
                way.name, way.how, tokens_text(way.tokens_per_day), tokens_text(counted), f"{counted / best:.1%}"
            )
        yield table
        yield from (f"not compared: {no.name}: {no.why}" for no in decision.ways.impossible)
    if len(decision.answers) + len(decision.refused) > 1:
        yield f"{'where all sites train, ' if decision.ways else ''}use {use.system.value}: {use.what}"
        yield from (f"  {sentence}" for sentence in decision.why)
        table = table_of(("system", "how"), ("iteration", "tokens/s", "of the best"))
        best = decision.answers[0].tokens_per_s
        for answer in decision.answers:
            table.add_row(
                answer.system.value,
                answer.what,
                "asynchronous" if answer.iteration_s is None else format_seconds(answer.iteration_s),
                f"{answer.tokens_per_s:,.0f}",
                f"{answer.tokens_per_s / best:.1%}",
            )
        yield table
    for answer in decision.answers:
        yield f"{answer.system.value} cannot see: {CANNOT_SEE[answer.system]}"
    for no in decision.refused:
        yield f"{no.name} has no answer: {no.why}"
    for answer in decision.answers:
        if isinstance(answer.found, AsynchronousClusters):
            yield from rounds_text(answer.found)
        elif answer is use and isinstance(answer.found, SpanTrainReport):
            yield from ("", *spantrain_text(answer.found))
        elif answer is use and isinstance(answer.found, ScaleAcrossReport):
            yield from ("", *explored_text(answer.found))
    if decision.plan is not None:
        yield ""
        yield from plan_text(decision.plan)


def plan_text(plan: Plan) -> Iterator[str | Table]:
    """A plan: what was chosen, its stages and links, what else was tried, and what would help."""
    setup, chosen = plan.problem.setup, plan.chosen
    training = setup.training
    yield (
        f"{setup.model.name}, {setup.model.parameters() / 1e9:.4g}B parameters: {training.pipeline} stages, "
        f"{training.data} replicas, {training.microbatches} microbatches each"
    )
    yield f"chosen: {_named(chosen.name, chosen.sharing)}"
    exposed = f", of it {format_seconds(chosen.sync_ns / NS)} for weights and gradients that nothing hides"
    yield (
        f"iteration: {format_seconds(chosen.iteration_s)} "
        f"({interval_text(chosen.iteration_s, plan.problem.calibration_error)}), bubble {chosen.bubble_fraction:.1%}"
        f"{exposed if chosen.sync_ns else ''}"
    )
    if chosen.bubble_fraction >= MOSTLY_WAITS and len(set(chosen.site_of)) > 1:
        stages, microbatches = len(chosen.site_of), plan.problem.n_microbatches
        own = (stages - 1) / (stages - 1 + microbatches)
        yield (
            f"devices mostly wait: in 1f1b, {stages} even stages without links would wait {own:.1%} of an iteration, "
            f"to fill and drain with {microbatches} microbatches; links between sites and unequal stages add to that"
        )
    if chosen.lower_bound_ns is not None:
        yield f"no schedule of this kind takes less than {format_seconds(chosen.lower_bound_ns / NS)}"
    table = table_of(("stage", "site"), ("layers", "weights and optimizer", "activations", "of"))
    sites = plan.problem.setup.sites
    for device, site in enumerate(chosen.site_of):
        table.add_row(
            str(device),
            sites[site].name,
            " + ".join(map(str, layers_of(chosen, device))),
            *(
                format_bytes(sizes[device])
                for sizes in (chosen.state_bytes, chosen.activation_bytes, chosen.limit_bytes)
            ),
        )
    yield table
    for (a, b), size in sorted(chosen.link_bytes.items()):
        yield f"{setup.sites[a].name} to {setup.sites[b].name}: {format_bytes(round(size))} an iteration"
    table = table_of(("schedule", "replicas on a link", "stages"), ("iteration", "slower by", "bubble"))
    best = plan.candidates[0].iteration_s
    for one in plan.candidates:
        even = max(one.division) - min(one.division) <= 1
        table.add_row(
            one.name,
            SHARING[one.sharing],
            "even" if even else ",".join(map(str, one.division)),
            format_seconds(one.iteration_s),
            f"{one.iteration_s / best - 1:.1%}",
            f"{one.bubble_fraction:.1%}",
        )
    yield table
    for no in plan.refused:
        yield f"not possible: {no.name}: {no.why}"
    if plan.effects:
        yield "what would help, of the time of each microbatch:"
        for effect in plan.effects:
            yield f"  {effect.change:<36}{effect.saved:>7.1%} less"
    yield "assumed: " + "; ".join(assumptions(plan.problem))


def groups_text(found: Grouping) -> Iterator[str | Table]:
    """The groups of devices, and why each merge was made or refused."""
    measured, size = found.measured, format_bytes(round(found.measured.message_bytes))

    def named(parts: Parts) -> str:
        names = (f"{measured.sites[part.site]} x {part.devices}" for part in parts)
        return ", ".join(names) or "each other"

    for number, group in enumerate(found.groups, 1):
        yield f"group {number}: {group.devices} device{'s' * (group.devices > 1)}"
        for inner, subgroup in enumerate(group.subgroups, 1):
            yield f"  {number}.{inner}  {named(subgroup.parts)}: {subgroup.power:.4g} {measured.power_unit} each"
    for margin in found.margins:
        ends = " and ".join(measured.sites[site] for site in dict.fromkeys(margin.pair))
        what = "groups" if margin.level == 1 else "subgroups"
        if margin.error:
            most = f"{min(margin.error, 1.0):.1%} (by {ends})"
            yield f"{what} stay the same while no measurement is off by more than {most}"
        else:
            yield f"{what} may change with any error: {ends} are on the other side of the threshold than their {what}"
    yield f"merges of groups: a message of {size} must go at {found.threshold_gbps:g} Gbit/s or faster"
    table = table_of(("devices", "and"), ("Gbit/s", ""))
    for step in found.steps:
        rate = f"{measured.gbps(step.apart):.4g}" if step.apart else "no time"
        table.add_row(named(step.left), named(step.right), rate, "merged" if step.merged else "refused")
    yield table
    yield f"merges of subgroups: one may be faster by {100 * found.alike:.4g} % at most"
    table = table_of(("group", "devices", "and"), ("faster by", ""))
    for number, group in enumerate(found.groups, 1):
        for step in group.steps:
            apart, verdict = f"{step.apart:.1%}", "merged" if step.merged else "refused"
            table.add_row(str(number), named(step.left), named(step.right), apart, verdict)
    yield table


def checks_text(checks: Iterable[PaperCheck]) -> Iterator[str | Table]:
    """Published numbers next to ours: a table for each setting, below what is said about it."""
    for about, group in groupby(checks, key=lambda check: check.about):
        table = table_of(("number",), ("published", "ours", "error", "tolerance", ""))
        for check in group:
            table.add_row(*check.cells())
        yield about
        yield table


def sweep_text(
    rows: Iterable[SweepRow], maps: Iterable[Panel], only_map: bool, error: float | None
) -> Iterator[str | Table]:
    """A line for each schedule, and maps of the best. error: of the calibration, where there is one."""
    if not only_map:
        sizes_of = ("n_pp", "n_mb", "sites", "latency", "bandwidth", "memory")
        table = table_of(("schedule",), ("makespan", "activations", "bound"), first=sizes_of)
        for row in rows:
            sizes = (row.n_pp, row.n_mb, row.n_sites, row.latency, row.bandwidth, row.memory)
            bound = "" if row.lower_bound is None else f"{row.lower_bound:g}"
            table.add_row(
                *(f"{v:g}" for v in sizes), row.schedule, f"{row.makespan:g}", f"{row.peak_activations:g}", bound
            )
        yield table
    for panel in maps:
        note = "" if panel.over_fits else f" ({panel.over} itself does not fit)"
        yield f"{panel.title}: the best, and how many times faster than {panel.over}{note}"
        # A column for each bandwidth, a line for each latency, the longest first, as in the picture.
        table = table_of((), ["latency \\ bandwidth", *(f"{bandwidth:g}" for bandwidth in panel.bandwidths)])
        for latency, cells in zip(reversed(panel.latencies), reversed(panel.cells), strict=True):
            table.add_row(f"{latency:g}", *(f"{cell.schedule} {cell.times_faster:.2f}x" for cell in cells))
        yield table
    yield calibration_text(error)


def grid_text(timeline: Timeline, column_ns: int) -> Iterable[str]:
    """One line for each device, a column for each column_ns (or more, where that is too wide)."""
    cell_ns = max(column_ns, -(-timeline.makespan_ns // WIDEST))
    width = len(str(timeline.schedule.n_microbatches - 1)) + 1
    for device, order in enumerate(timeline.schedule.orders):
        cells = [" " * width] * (-(-timeline.makespan_ns // cell_ns))
        for op, start, end in zip(order, timeline.starts[device], timeline.ends[device], strict=True):
            name = f"{op.kind.name}{op.microbatch}".ljust(width)
            first, last = start // cell_ns, max(start // cell_ns + 1, end // cell_ns)
            cells[first:last] = [name, *(["-" * width] * (last - first - 1))]
        yield f"{device:>3} |{''.join(cells)}|"


def replan_text(running: Running, verdict: ReplanVerdict) -> Iterator[str]:
    """A verdict: the present plan, the best one now, what a swap gains and costs."""
    new, swap, error = verdict.new, verdict.swap, running.problem.calibration_error
    yield (
        f"present: {_named(running.name, running.sharing)}: {format_seconds(verdict.now_s)} "
        f"({interval_text(verdict.now_s, error)}) an iteration as measured, "
        f"{format_seconds(verdict.planned_s)} as planned"
    )
    layers = ",".join(map(str, new.division))
    yield (
        f"best now: {_named(new.name, new.sharing)}, layers {layers}: {format_seconds(new.iteration_s)} "
        f"({interval_text(new.iteration_s, error)}) an iteration"
    )
    yield f"gain: {format_seconds(verdict.gain_s)} an iteration, {verdict.gain_s / verdict.now_s:.2%}"
    moved = "only the order changes" if not swap.layers else f"{swap.layers} layers change their device"
    yield f"swap: {moved}, {format_seconds(swap.seconds)}"
    for (sender, receiver), size in sorted(swap.link_bytes.items()):
        yield f"  {sender} to {receiver}: {format_bytes(round(size))}"
    yield f"{'swap' if verdict.advised else 'keep'}: {verdict.why}"


def advice_text(advice: Advice) -> Iterator[str | Table]:
    """The sizes to use now, the borders that decide, and what an iteration takes."""
    rules, error = advice.rules, advice.running.problem.calibration_error
    yield f"a microbatch has {rules.pipeline.sequences} sequences; so many each stage should take at a time:"
    table = table_of(("stage", "site"), ("while it fills", "runs", "drains"))
    sites, site_of = advice.running.problem.setup.sites, advice.running.problem.site_of
    for stage, (place, sizes) in enumerate(zip(advice.running.places, advice.state.sizes, strict=True)):
        table.add_row(str(stage), sites[site_of[place]].name, *map(str, sizes))
    yield table
    yield _borders_table(rules, [advice.transfer_ns(number) for number in range(len(rules.borders))])
    for name, time_ns in (("with these sizes", advice.with_ns), ("with whole microbatches", advice.without_ns)):
        yield f"iteration {name}: {format_seconds(time_ns / NS)} ({interval_text(time_ns / NS, error)})"
    yield f"{'change' if advice.advised else 'keep'}: {advice.why}"


def _borders_table(rules: Rules, transfers_ns: Sequence[float]) -> Table:
    table = table_of(("stages", "link"), ("a message", "compute", "late below", "on time from"))

    def gbps(value: float) -> str:
        return f"{value:.4g} Gbit/s" if math.isfinite(value) else "any"

    for border, time_ns in zip(rules.borders, transfers_ns, strict=True):
        times = (format_seconds(ns / NS) for ns in (time_ns, border.hide_ns))
        ends = f"{border.sender} to {border.receiver}", f"{border.link[0]} to {border.link[1]}"
        table.add_row(*ends, *times, gbps(border.late_below_gbps), gbps(border.on_time_from_gbps))
    return table


MOST_ROWS = 24
"""Iterations that a trace's table shows."""


def traced_text(rules: Rules, compared: AdapterComparison, error: float | None) -> Iterator[str | Table]:
    """Iterations under a trace with and without the adapter; of many, some at equal distances."""
    yield _borders_table(rules, [border.busy_ns + border.latency_ns for border in rules.borders])
    without, adapted = compared.without, compared.adapted
    n = len(without.ends_ns)
    table = table_of(("iteration",), ("begins", "without", "begins", "with", "sizes as it begins"))
    for number in sorted({i * (n - 1) // max(1, MOST_ROWS - 1) for i in range(MOST_ROWS)}):
        cells = []
        for found in (without, adapted):
            begin_ns = found.ends_ns[number - 1] if number else 0
            cells += [f"{begin_ns / NS:.4g} s", format_seconds((found.ends_ns[number] - begin_ns) / NS)]
        table.add_row(str(number + 1), *cells, _sizes_text(adapted.sizes[number], rules.pipeline.whole))
    yield table
    spans = (format_seconds(ns / NS) for ns in (without.span_ns, compared.adapted_ns))
    yield f"{n} iterations: {' without, '.join(spans)} with the adapter"
    yield f"{compared.speedup:.3f} times as fast; sizes changed {adapted.changes} times"
    yield (
        f"stated cost: {format_seconds(compared.cost_ns / NS)} at most, {compared.cost_ns / without.span_ns:.2%}: the "
        f"overhead of smaller pieces, and {format_seconds(compared.monitored_ns / NS)} to observe messages"
    )
    if not compared.late:
        yield "no message came to be late: sizes stay as planned"
    yield calibration_text(error)


def _sizes_text(sizes: Sequence[Sizes], whole: Sequence[Sizes]) -> str:
    """The sizes of each stage; those while it fills, runs and drains where they differ."""
    if tuple(sizes) == tuple(whole):
        return "whole"
    return ",".join(str(one.run) if len(set(one)) == 1 else "/".join(map(str, one)) for one in sizes)


def tradeoff_text(found: Tradeoff) -> Iterator[str | Table]:
    """Every way to split the devices, the fastest first, and why others are not possible."""
    setup = found.problem.setup
    training = setup.training
    yield (
        f"{setup.model.name}, {setup.model.parameters() / 1e9:.4g}B parameters: stages x replicas = "
        f"{training.pipeline * training.data}, {training.microbatches * training.data} microbatches in all"
    )
    yield calibration_text(found.problem.calibration_error)
    table = table_of(
        ("stages x replicas", "long links carry", "schedule", "replicas on a link"),
        ("iteration", "slower by", "memory", "busiest link"),
    )
    best_s = found.choices[0].best.iteration_s
    for choice in found.choices:
        best = choice.best
        table.add_row(
            f"{choice.split.pipeline} x {choice.split.data}",
            choice.split.long_links_carry,
            best.name,
            SHARING[best.sharing],
            format_seconds(best.iteration_s),
            f"{best.iteration_s / best_s - 1:.1%}",
            f"{choice.memory_used:.0%}",
            format_bytes(round(max(best.link_bytes.values(), default=0.0))),
        )
    yield table
    for split, why in found.impossible:
        carries = "" if split.n_sites == 1 else f", long links carry {split.long_links_carry}"
        yield f"not possible: {split.pipeline} x {split.data}{carries}: {why}"
    yield "assumed: " + "; ".join(assumptions(found.problem))


def spantrain_text(found: SpanTrainReport) -> Iterator[str | Table]:
    """SpanTrain's plan: groups and layers, what each device does, Equation 1, what else was tried, and its limits."""
    setup, best = found.setup, found.best
    chain = best.chain
    yield (
        f"SpanTrain: {setup.model.name}, {setup.model.parameters() / 1e9:.4g}B parameters, "
        f"{sum(site.devices for site in setup.sites)} devices in {len(found.grouping.groups)} groups"
    )
    yield (
        f"batch {chain.batch}: {chain.microbatches} microbatches of {chain.sequences} sequences, schedule compact_zb"
        f"{'' if found.flowing is None else ', OUT OF ORDER'}"
    )
    yield (
        f"iteration: {format_seconds(found.iteration_s)} simulated "
        f"({interval_text(found.iteration_s, None if setup.profile is None else setup.profile.error)}), "
        f"{found.samples_per_s:.4g} samples/s; Equation 1: {format_seconds(found.equation_s)}"
    )
    slowest, _ = slowest_stage(found)
    table = table_of(("group",), ("layers", "filling", "running", "waiting", "collectives", "Equation 1"))
    for number, n_layers, terms in zip(chain.candidate.order, chain.candidate.layers, chain.terms, strict=True):
        name = f"{number + 1}{' (slowest)' if number + 1 == slowest else ''}"
        table.add_row(name, str(n_layers), *map(format_seconds, (*terms, terms.total_s)))
    yield table
    table = table_of(
        ("stage", "group", "devices", "how they share"),
        ("layers", "sequences", "of a microbatch", "of a layer", "weights and optimizer", "activations", "of"),
    )
    for row in found.devices():
        layers = f"{row.first_layer} to {row.first_layer + row.layers - 1}" if row.layers else "idle"
        sizes = (row.state_bytes, row.activation_bytes, row.memory_bytes)
        table.add_row(
            str(row.stage), str(row.group), f"{row.site} x {row.devices}", row.layout, layers, str(row.sequences),
            row.data, row.tensor, *(format_bytes(round(size)) for size in sizes),
        )  # fmt: skip
    yield table
    if found.flowing is not None:
        yield (
            f"without a drain: {format_seconds(found.iteration_s)} from one iteration to the next, "
            f"{1 - found.iteration_s / best.iteration_s:.1%} less than with one"
        )
        for number, stale in enumerate(found.flowing.staleness):
            yield (
                f"  stage {number}: weights lack up to {stale.iterations} iterations ({stale.microbatches} "
                f"microbatches are not computed); {stale.mixed:.0%} of microbatches go back with other weights"
            )
    if found.runners_up:
        left, right = ("runner-up: groups", "layers"), ("batch", "microbatch", "iteration", "slower by", "Equation 1")
        table = table_of(left, right)
        for one in found.runners_up:
            chain = one.chain
            table.add_row(
                ",".join(str(number + 1) for number in chain.candidate.order),
                ",".join(map(str, chain.candidate.layers)),
                str(chain.batch),
                str(chain.sequences),
                format_seconds(one.iteration_s),
                f"{best.samples_per_s / one.samples_per_s - 1:.1%}",
                format_seconds(chain.equation_s),
            )
        yield table
    for no in found.found.refused:
        yield f"not possible: microbatches of {no.sequences}: {no.why}"
    yield "what SpanTrain does not see or say:"
    for sentence in found.unseen:
        yield f"  {sentence}"


def explored_text(found: ScaleAcrossReport) -> Iterator[str | Table]:
    """ScaleAcross Explorer's choice, why, what the next one would need, and how to use the long links."""
    explored = found.explored
    topology, links = explored.topology, explored.links
    yield (
        f"{topology.model.name}, {topology.model.parameters() / 1e9:.4g}B parameters: {topology.n_accelerators} "
        f"accelerators in {len(topology.buildings)} buildings, {topology.batch.sequences} sequences an iteration"
    )
    yield f"{explored.n_played} of {explored.n_cases} cases played, {explored.n_divisions} divisions into chunks"
    yield f"searched by {'times with one message at a time on each way' if links else 'Algorithm 1 as printed'}"
    table = table_of(
        ("TP-CP-EP-PP-DP", "microbatch", "outermost", "replicas", "schedule", "chunks of a stage", "layers of a chunk"),
        ("Algorithm 1", "with links", "slower by", "memory"),
    )
    best_s = explored.best[0].seconds(links)
    rows = [*explored.best, *([explored.present] if explored.present is not None else [])]
    for choice in rows:
        case = choice.case
        sizes = f"{min(choice.division)} to {max(choice.division)}" if len(set(choice.division)) > 1 else None
        table.add_row(
            str(case.split),
            str(case.split.microbatch_sequences),
            case.outermost,
            case.sharding,
            case.pipelining + (" (present)" if choice is explored.present else ""),
            str(case.chunks),
            sizes or str(choice.division[0]),
            *("does not fit" if math.isinf(t) else format_seconds(t) for t in (choice.printed_s, choice.links_s)),
            "" if math.isinf(choice.links_s) else f"{choice.seconds(links) / best_s - 1:.1%}",
            format_bytes(round(choice.used_bytes)),
        )
    yield table
    yield from found.why
    if topology.network is None:
        return
    yield "for the long links:"
    for advice in found.advice:
        yield f"  {advice.about}: {advice.use}"
        yield f"    {advice.why}"
        yield f"    rule: {advice.rule} (ScaleAcross Explorer, {advice.source})"
    if not found.advice:
        yield "  there are none: all accelerators are in one building"
