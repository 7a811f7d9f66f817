"""`dips plan replan`: says whether a running plan, now measured, should be swapped for another one."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dips.cli.plan_text import SHARING
from dips.core.errors import ConfigError
from dips.core.units import format_bytes, format_seconds
from dips.planner.api import read_text
from dips.planner.measured import read_measured
from dips.planner.plan_file import ready_folder, write_plan
from dips.planner.replan import Limits, ReplanVerdict, Running, read_running
from dips.planner.replan import replan as judge


def replan(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="The plan.json that is carried out, of dips plan FILE --out FOLDER.")
    ],
    profile: Annotated[
        Path, typer.Option("--profile", metavar="FILE", help="What was measured: TOML, or JSON if it ends in .json.")
    ],
    least_gain: Annotated[
        float, typer.Option("--least-gain", metavar="PERCENT", help="The least gain of an iteration for which to swap.")
    ] = 2.0,
    within: Annotated[
        int, typer.Option("--within", metavar="N", help="Iterations after which a swap must have paid off.")
    ] = 1000,
    pause_s: Annotated[
        float, typer.Option("--pause", metavar="SECONDS", help="Time that any swap takes, apart from moving layers.")
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the new plan's files go, if a swap is advised.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Play the present schedule with measured times and links, plan again with them, and say whether to swap: what an
    iteration would gain, what the swap costs, and after how many iterations it has paid off.

    Exit code 0: keep the plan. 1: swap it. 2: a mistake in a file or an option. A swap costs the time to move layers
    that change their device over the links between sites, and nothing where only the order changes.
    """
    limits = _limits(least_gain, within, pause_s)
    running = read_running(read_text(plan, "plan.json", "make one with dips plan FILE --out FOLDER"), str(plan))
    if out is not None:
        ready_folder(out)
    verdict = judge(running, read_measured(profile), limits)
    files = write_plan(verdict.plan, out) if out is not None and verdict.advised else []
    if as_json:
        print(json.dumps(verdict_json(running, verdict)))
        return int(verdict.advised)
    console = Console(width=None if sys.stdout.isatty() else 120)
    for line in _tell(running, verdict):
        console.print(line, highlight=False, markup=False)
    for written in files:
        console.print(f"wrote {written}", highlight=False, markup=False)
    return int(verdict.advised)


def _limits(least_gain: float, within: int, pause_s: float) -> Limits:
    if not 0 <= least_gain < 100:
        raise ConfigError(f"--least-gain {least_gain:g} is no part of an iteration: give 0 up to 100 (percent)")
    if within < 1:
        raise ConfigError(f"--within {within} is no number of iterations: give at least 1")
    if not (math.isfinite(pause_s) and pause_s >= 0):
        raise ConfigError(f"--pause {pause_s:g} is no time: give seconds, at least 0")
    return Limits(least_gain / 100, within, pause_s)


def verdict_json(running: Running, verdict: ReplanVerdict) -> dict[str, Any]:
    """The verdict as a JSON object; times in seconds."""
    new, swap = verdict.new, verdict.swap
    return {
        "advised": verdict.advised,
        "why": verdict.why,
        "present": {
            "schedule": running.name,
            "sharing": running.sharing,
            "layers": list(running.division),
            "planned_s": verdict.planned_s,
            "iteration_s": verdict.now_s,
        },
        "new": {
            "schedule": new.name,
            "sharing": new.sharing,
            "layers": list(new.division),
            "iteration_s": new.iteration_s,
        },
        "gain_s": verdict.gain_s,
        "swap": {
            "layers": swap.layers,
            "links": [
                {"sender": sender, "receiver": receiver, "bytes": size}
                for (sender, receiver), size in sorted(swap.link_bytes.items())
            ],
            "inside_bytes": swap.inside_bytes,
            "seconds": swap.seconds,
        },
        "break_even_iterations": verdict.break_even,
    }


def _tell(running: Running, verdict: ReplanVerdict) -> Iterator[str]:
    new, swap = verdict.new, verdict.swap
    yield (
        f"present: {_named(running.name, running.sharing)}: {format_seconds(verdict.now_s)} an iteration as measured, "
        f"{format_seconds(verdict.planned_s)} as planned"
    )
    layers = ",".join(map(str, new.division))
    yield f"best now: {_named(new.name, new.sharing)}, layers {layers}: {format_seconds(new.iteration_s)} an iteration"
    yield f"gain: {format_seconds(verdict.gain_s)} an iteration, {verdict.gain_s / verdict.now_s:.2%}"
    moved = "only the order changes" if not swap.layers else f"{swap.layers} layers change their device"
    yield f"swap: {moved}, {format_seconds(swap.seconds)}"
    for (sender, receiver), size in sorted(swap.link_bytes.items()):
        yield f"  {sender} to {receiver}: {format_bytes(round(size))}"
    yield f"{'swap' if verdict.advised else 'keep'}: {verdict.why}"


def _named(name: str, sharing: str) -> str:
    return f"{name}, {SHARING[sharing]}" if SHARING[sharing] else name
