"""Which share of the clusters' compute becomes trained tokens, in Di-PS and in systems that people would use instead.

    python benchmarks/bench_goodput.py [--systems dips,plain] [--conditions a,d] [--inner-steps H] [--step-s T]
                                       [--rounds R] [--results DIR] [--venvs DIR] [--figure FILE] [--quick] [--json]

Real processes: each cluster is in a network namespace behind a link of its own (--mbit each way, --delay-ms one way),
each server too, without delay and with as much rate as all clusters have together. All train the same model in steps of
the same length: a real optimizer step on all parameters, and a wait for the rest of --step-s, so that two cores can
stand for four clusters. Ideal is that every cluster computes all the time at its own speed and that each step ends up
in the model once; the share is of that. What an exchange takes from a cluster's processor is hidden by the waits:
therefore cpu, the processor seconds of an exchange.

systems    alone             no exchange: the floor
           dips              at its defaults
           dips-waiting      preset safe, overlap none
           torchft           DiLoCo as its documentation has it
           torchft-streaming with fragments that are used some steps after they were sent
           hivemind          DiLoCo around its averager
           hivemind-delayed  the same, with the exchange during the next inner loop
           plain             a plain synchronous server
conditions a  all clusters equal            d  a cluster killed (SIGKILL) and started again
           b  steps 0 to 50 % longer        e  a server killed and started again
           c  one link ten times slower     f  b, c and d together

Each cluster is measured from one of its exchanges to another, over --rounds inner loops of the slowest cluster. The
first two exchanges of each, with joins and first allocations, are not counted. In d, e and f the kill comes half a
round later, and the rounds are counted from there; "after kill" is the share from the cluster's last exchange before
it. Steps that a killed or reset process loses are no tokens; steps made during an exchange are, in all systems, also
where only a part of the parameters' change by them is kept (said with the system's settings). "lost" is the training
time that an exchange costs a cluster; "pause" the longest time in which a cluster that was not killed trained nothing;
"MB" what a cluster's link carries for an exchange, both ways; "twice" the steps that are in the model more than once,
and "own" whether a system's own count of steps agrees. "other" is other work on the machine, in processors: with more
than a little the cell says nothing; "low" is work of low priority (nice), which gives way.

Cells that are finished are kept in --results, one file each, and are not run again, so that a matrix can be spread over
several evenings. --figure measures nothing: it prints and draws the cells that are kept. torchft and hivemind are
installed into environments of their own under --venvs (gigabytes, once). Nothing here judges a number. Needs root, for
the namespaces; without, it says so and exits with code 2.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from goodput.cell import measure
from goodput.conditions import CONDITIONS, Setting
from goodput.systems import SYSTEMS
from peers.environments import NotInstallable
from peers.party import Failed, end_in_order
from shaped import NotPossible, require_root

LABEL_WIDTH = 16
Cell = dict[str, Any]
"""As it is kept: system, condition, setting, settings, and either score or cannot."""


def cell_of(name: str, letter: str, setting: Setting, options: argparse.Namespace) -> Cell:
    """Measures. Raises NotPossible, NotInstallable, and Failed when that is ours."""
    kind, condition = SYSTEMS[name], CONDITIONS[letter]
    cell = {"system": name, "condition": letter, "setting": asdict(setting), "settings": kind.settings}
    why = kind.cannot(condition)
    if why:
        return {**cell, "cannot": why}
    cell["software"] = kind.software(options.venvs)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        try:
            make = functools.partial(
                kind, name, Path(folder) / "run", setting.clusters, setting.params,
                setting=setting, condition=condition, environments=options.venvs,
            )  # fmt: skip
            score = measure(lambda net: make(net=net), kind, setting, condition)
        except Failed as failed:
            if name in ("alone", "dips", "dips-waiting"):
                raise
            return {**cell, "cannot": str(failed)}
    return {**cell, "machine": f"{os.cpu_count()} processors, {platform.machine()}", "score": asdict(score)}


class Results:
    """The kept cells of a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def find(self, name: str, letter: str, setting: Setting) -> Cell | None:
        """Raises SystemExit where a kept cell was measured with another setting."""
        path = self._path(name, letter, setting.inner_steps)
        if not path.exists():
            return None
        cell: Cell = json.loads(path.read_text())
        other = {key: value for key, value in asdict(setting).items() if cell["setting"][key] != value}
        if other:
            raise SystemExit(f"{path} was measured without {other}: give another --results, or delete it")
        return cell

    def keep(self, cell: Cell) -> None:
        path = self._path(cell["system"], cell["condition"], cell["setting"]["inner_steps"])
        path.with_suffix(".new").write_text(json.dumps(cell, indent=2) + "\n")
        path.with_suffix(".new").rename(path)

    def _path(self, name: str, letter: str, inner_steps: int) -> Path:
        return self._directory / f"{letter}-{name}-h{inner_steps}.json"


def _table(cells: Sequence[Cell]) -> str:
    lines = []
    for letter in dict.fromkeys(cell["condition"] for cell in cells):
        lines += ["", f"({letter}) {CONDITIONS[letter].title}"]
        head = f"{'system':<18}{'share':>8}{'after kill':>12}{'lost s':>8}{'pause s':>9}{'exchanges':>11}{'MB':>7}"
        lines.append(f"{head}{'cpu s':>8}{'twice':>7}{'own':>5}{'other':>7}{'low':>6}")
        lines += [_row(cell) for cell in cells if cell["condition"] == letter]
    for name in dict.fromkeys(cell["system"] for cell in cells):
        mine = [cell for cell in cells if cell["system"] == name]
        software = {" ".join(item) for cell in mine for item in cell.get("software", {}).items()}
        lines += ["", f"{name}: {mine[-1]['settings']}", f"    {', '.join(sorted(software))}"]
    return "\n".join(lines)


def _row(cell: Cell) -> str:
    name, score = f"{cell['system']:<18}", cell.get("score")
    if score is None:
        return f"{name} cannot: {cell['cannot']}"
    after, own = score["share_after_kill"], score["own_count"]
    megabytes = [sum(both) / 1e6 for both in score["link_bytes"].values()]
    said = "-" if own is None else "yes" if math.isclose(own, score["counted"]) else f"{own - score['counted']:+.0f}"
    return (
        f"{name}{score['share']:>8.3f}{'' if after is None else format(after, '.3f'):>12}{score['lost_s']:>8.2f}"
        f"{score['longest_pause_s']:>9.2f}{score['exchanges']:>11}{sum(megabytes) / len(megabytes):>7.0f}"
        f"{score['cpu_s']:>8.2f}{score['counted_twice']:>7.0f}{said:>5}{score['foreign']:>7.2f}{score['niced']:>6.2f}  "
        + "; ".join(score["notes"])
    )


def draw(path: Path, cells: Sequence[Cell], inner_steps: int) -> None:
    """The share of ideal of each condition and system, after the kill where something is killed."""
    from dips.lab.compare.pictures import draw_bars

    shares: Mapping[tuple[str, str], float] = {
        (cell["system"], cell["condition"]): score["share" if score["share_after_kill"] is None else "share_after_kill"]
        for cell in cells
        if (score := cell.get("score")) is not None
    }
    letters = [letter for letter in CONDITIONS if any(condition == letter for _, condition in shares)]
    series = [
        (name, [shares.get((name, letter), math.nan) for letter in letters])
        for name in SYSTEMS
        if any(system == name for system, _ in shares)
    ]
    groups = [f"({letter})\n{textwrap.fill(CONDITIONS[letter].title, LABEL_WIDTH)}" for letter in letters]
    draw_bars(path, groups, series, "share of ideal tokens", f"Tokens trained, of ideal: {inner_steps} inner steps")


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", help="which, with commas (default: all)")
    parser.add_argument("--conditions", help="which, with commas (default: all)")
    parser.add_argument("--clusters", type=int, default=4)
    parser.add_argument("--params", type=int, default=25_000_000, help="parameters of the model, float32")
    parser.add_argument("--inner-steps", type=int, default=32, help="H: inner steps between two exchanges")
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds of an inner step of the fastest cluster")
    parser.add_argument("--rounds", type=int, default=10, help="inner loops that are measured, and after a kill")
    parser.add_argument("--mbit", type=float, default=1000.0, help="rate of a cluster's link, each way")
    parser.add_argument("--delay-ms", type=float, default=25.0, help="of a cluster's link, one way")
    parser.add_argument("--results", type=Path, help="where finished cells are kept; default: a temporary folder")
    parser.add_argument("--venvs", type=Path, default=Path("runs/bench-venvs"), help="environments of the peers")
    parser.add_argument("--directory", type=Path, help="where servers keep their files; default: a temporary folder")
    parser.add_argument("--figure", type=Path, help="measure nothing: draw the shares of the kept cells as PNG")
    parser.add_argument("--quick", action="store_true", help="dips and plain in a and d, a tiny model: does it run?")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    given.systems = given.systems or ("dips,plain" if given.quick else ",".join(SYSTEMS))
    given.conditions = given.conditions or ("a,d" if given.quick else ",".join(CONDITIONS))
    if given.quick:
        given.clusters, given.params = 2, 200_000
        given.inner_steps, given.step_s, given.rounds, given.delay_ms = 16, 0.05, 3, 5.0
    for what, known in (("systems", SYSTEMS), ("conditions", CONDITIONS)):
        unknown = set(getattr(given, what).split(",")) - set(known)
        if unknown:
            parser.error(f"--{what}: {', '.join(sorted(unknown))} is unknown: choose from {', '.join(known)}")
    if given.clusters < 2 or min(given.params, given.rounds, given.inner_steps - 1) < 1 or given.inner_steps % 2:
        parser.error("give 2 clusters or more, an even number of inner steps, and counts of at least 1")
    if given.figure and not given.results:
        parser.error("--figure draws what is kept: give --results, too")
    if min(given.step_s, given.mbit) <= 0 or given.delay_ms < 0:
        parser.error("--step-s and --mbit must be more than 0, --delay-ms 0 or more")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parsed(arguments)
    end_in_order()
    setting = Setting(
        options.clusters, options.params, options.inner_steps, options.step_s, options.rounds, 1e6 * options.mbit,
        options.delay_ms,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        results, cells = Results(options.results or Path(folder)), list[Cell]()
        for letter in options.conditions.split(","):
            for name in options.systems.split(","):
                cell = results.find(name, letter, setting)
                if cell is None and options.figure:
                    continue
                if cell is None:
                    print(f"({letter}) {name}", file=sys.stderr, flush=True)
                    try:
                        require_root()
                        cell = cell_of(name, letter, setting, options)
                    except NotPossible as why:
                        print(f"bench_goodput cannot run here: {why}", file=sys.stderr)
                        return 2
                    except NotInstallable as why:
                        print(f"left out: {why}", file=sys.stderr)
                        continue
                    results.keep(cell)
                cells.append(cell)
    if options.figure:
        draw(options.figure, cells, options.inner_steps)
    if options.json:
        print(json.dumps({"setting": asdict(setting), "cells": cells}, indent=2))
    else:
        print(", ".join(f"{key} {value:g}" for key, value in asdict(setting).items()))
        print(_table(cells))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failed:
        sys.exit(str(failed))
