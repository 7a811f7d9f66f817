"""`dips plan tradeoff`: compares splits into stages and replicas, and what the long links should carry."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dips.cli.plan_text import SHARING
from dips.core.errors import ConfigError
from dips.core.units import format_bytes, format_seconds
from dips.planner.cluster import read_setup
from dips.planner.problem import Problem
from dips.planner.problem_file import assumptions
from dips.planner.tradeoff import Choice, Split, Tradeoff
from dips.planner.tradeoff import tradeoff as find


def tradeoff(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="TOML file with sites, links, model; or a shipped one's name.")
    ],
    solver_s: Annotated[
        float | None, typer.Option("--seconds", help="Time for a solver to find the best order, for each way.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Every way to split the file's devices into stages and replicas, the fastest first: is the long link better used
    by pipelines that cross it (activations), or by whole pipelines at each site (gradients)?

    Stages x replicas and the microbatches of all replicas together stay what the file says. For each way: the best
    schedule, how long an iteration takes, the memory of the device that has least left, the bytes over each link
    between sites; and why other ways cannot be.
    """
    problem = Problem(read_setup(file))
    if solver_s is not None:
        if not 0 <= solver_s <= 3600:
            raise ConfigError(f"--seconds {solver_s:g} is no time for a solver: give 0 to 3600")
        problem = problem.with_options(solver_s=solver_s)
    found = find(problem)
    if as_json:
        print(json.dumps(tradeoff_json(found)))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 140)
    for piece in _tell(found):
        console.print(piece, highlight=False, markup=False)
    return 0


def tradeoff_json(found: Tradeoff) -> dict[str, Any]:
    """All ways as a JSON object, the fastest first; times in seconds."""
    setup, best_s = found.problem.setup, found.choices[0].best.iteration_s
    return {
        "setup": Path(setup.file).name,
        "model": setup.model.name,
        "choices": [_choice_json(found, choice, best_s) for choice in found.choices],
        "impossible": [{**_split_json(no.split), "why": no.why} for no in found.impossible],
        "assumptions": assumptions(found.problem),
    }


def _choice_json(found: Tradeoff, choice: Choice, best_s: float) -> dict[str, Any]:
    sites, best = found.problem.setup.sites, choice.best
    return {
        **_split_json(choice.split),
        "schedule": best.name,
        "sharing": best.sharing,
        "layers": list(best.division),
        "iteration_s": best.iteration_s,
        "slower_by": best.iteration_s / best_s - 1,
        "sync_s": best.sync_ns / 1e9,
        "bubble_fraction": best.bubble_fraction,
        "memory_used": choice.memory_used,
        "links": [
            {"sender": sites[a].name, "receiver": sites[b].name, "bytes": size}
            for (a, b), size in sorted(best.link_bytes.items())
        ],
    }


def _split_json(split: Split) -> dict[str, Any]:
    return {
        "pipeline": split.pipeline,
        "data": split.data,
        "microbatches": split.microbatches,
        "groups": split.groups,
        "long_links_carry": split.long_links_carry,
    }


def _tell(found: Tradeoff) -> Iterator[str | Table]:
    setup = found.problem.setup
    training = setup.training
    yield (
        f"{setup.model.name}, {setup.model.parameters() / 1e9:.4g}B parameters: stages x replicas = "
        f"{training.pipeline * training.data}, {training.microbatches * training.data} microbatches in all"
    )
    yield _table(found)
    for no in found.impossible:
        split = no.split
        carries = "" if split.n_sites == 1 else f", long links carry {split.long_links_carry}"
        yield f"not possible: {split.pipeline} x {split.data}{carries}: {no.why}"
    yield "assumed: " + "; ".join(assumptions(found.problem))


def _table(found: Tradeoff) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("stages x replicas", "long links carry", "schedule", "replicas on a link"):
        table.add_column(name)
    for name in ("iteration", "slower by", "memory", "busiest link"):
        table.add_column(name, justify="right")
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
    return table
