"""Formats a plan for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.table import Table

from dips.core.units import format_bytes, format_seconds
from dips.planner.candidates import Candidate
from dips.planner.plan import Plan, layers_of
from dips.planner.problem import assumptions
from dips.planner.sweep import Panel, SweepRow

SHARING = {"fair": "bandwidth shared evenly", "coordinated": "one message at a time", "alone": ""}


def tell(plan: Plan) -> Iterator[str | Table]:
    """Yield the pieces of the output: lines and tables."""
    setup, chosen = plan.problem.setup, plan.chosen
    training = setup.training
    yield (
        f"{setup.model.name}, {setup.model.parameters() / 1e9:.4g}B parameters: {training.pipeline} stages, "
        f"{training.data} replicas, {training.microbatches} microbatches each"
    )
    how = SHARING[chosen.sharing]
    yield f"chosen: {chosen.name}{', ' + how if how else ''}"
    yield f"iteration: {format_seconds(chosen.iteration_s)}, bubble {chosen.bubble_fraction:.1%}" + _sync(chosen)
    if chosen.lower_bound_ns is not None:
        yield f"no schedule of this kind takes less than {format_seconds(chosen.lower_bound_ns / 1e9)}"
    yield _stages(plan, chosen)
    for (a, b), size in sorted(chosen.link_bytes.items()):
        yield f"{setup.sites[a].name} to {setup.sites[b].name}: {format_bytes(round(size))} an iteration"
    yield _candidates(plan.candidates)
    for no in plan.refused:
        yield f"not possible: {no.name}: {no.why}"
    if plan.effects:
        yield "what would help, of the time of each microbatch:"
        for effect in plan.effects:
            yield f"  {effect.change:<32}{effect.saved:>7.1%} less"
    yield "assumed: " + "; ".join(assumptions(plan.problem))


def _sync(chosen: Candidate) -> str:
    if not chosen.sync_ns:
        return ""
    return f", of it {format_seconds(chosen.sync_ns / 1e9)} for weights and gradients that nothing hides"


def _stages(plan: Plan, chosen: Candidate) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("stage", "site"):
        table.add_column(name)
    for name in ("layers", "weights and optimizer", "activations", "of"):
        table.add_column(name, justify="right")
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
    return table


def _candidates(candidates: Sequence[Candidate]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("schedule")
    table.add_column("replicas on a link")
    table.add_column("stages")
    for name in ("iteration", "slower by", "bubble"):
        table.add_column(name, justify="right")
    best = candidates[0].iteration_s
    for one in candidates:
        even = max(one.division) - min(one.division) <= 1
        table.add_row(
            one.name,
            SHARING[one.sharing],
            "even" if even else ",".join(map(str, one.division)),
            format_seconds(one.iteration_s),
            f"{one.iteration_s / best - 1:.1%}",
            f"{one.bubble_fraction:.1%}",
        )
    return table


# ---- sweep text ------------------------------------------------------------------------------------------------------
#
# Formats a sweep for a terminal: a line for each schedule, and maps of the best.


def rows_table(rows: Iterable[SweepRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("n_pp", "n_mb", "sites", "latency", "bandwidth", "memory"):
        table.add_column(name, justify="right")
    table.add_column("schedule")
    for name in ("makespan", "activations", "bound"):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = (row.n_pp, row.n_mb, row.n_sites, row.latency, row.bandwidth, row.memory)
        bound = "" if row.lower_bound is None else f"{row.lower_bound:g}"
        table.add_row(*(f"{v:g}" for v in sizes), row.schedule, f"{row.makespan:g}", f"{row.peak_activations:g}", bound)
    return table


def heading(panel: Panel) -> str:
    note = "" if panel.over_fits else f" ({panel.over} itself does not fit)"
    return f"{panel.title}: the best, and how many times faster than {panel.over}{note}"


def map_table(panel: Panel) -> Table:
    """A map as a table: a column for each bandwidth, a line for each latency, the longest first, as in the picture."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("latency \\ bandwidth", justify="right")
    for bandwidth in panel.bandwidths:
        table.add_column(f"{bandwidth:g}", justify="right")
    for latency, cells in zip(reversed(panel.latencies), reversed(panel.cells), strict=True):
        table.add_row(f"{latency:g}", *(f"{cell.schedule} {cell.times_faster:.2f}x" for cell in cells))
    return table
