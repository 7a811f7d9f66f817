"""`dips verify`, `dips pack` and `dips story`: what the records of a run prove, and what they say of one thing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dips.judge.pack import SUMS, pack_run
from dips.judge.story import render, render_slow_rounds, slow_rounds, tell_story
from dips.judge.verify import NOT_APPLICABLE, OK, VerifyReport, verify_run

RunDirArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run, finished or live.")]

NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A round (r1.7), version (1:6), push (a/1.1#3), cluster or slave; without it: the slowest rounds.",
    ),
]

WithoutTape = Annotated[
    list[str] | None,
    typer.Option(
        "--without-tape",
        metavar="NAME",
        help="A process (master, or a name) of which there is no tape, or no more than is here.",
    ),
]

WIDTH = 120
"""Of the table in a file or pipe."""

SHOWN = 30
"""Violations that are printed, of which --json has all; and slow rounds."""

_STYLES = {OK: "green", NOT_APPLICABLE: "dim"}


def verify(
    run_dir: RunDirArgument,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Also compute every version again from the pushes that slaves recorded."),
    ] = False,
    allow_skipped: Annotated[
        bool,
        typer.Option("--allow-skipped", help="With --replay: versions whose pushes are not here are left out."),
    ] = False,
    without_tape: WithoutTape = None,
) -> int:
    """Check every promise about state against the journal, all tapes, and the slaves' snapshots of a run.

    Reads only, also while the run goes on. Exit code 0: all promises hold. 7: one is violated; or one is unproven, and
    every record can be read. 1: a record cannot be read, and no promise is violated. 2: there is no run, a tape was
    altered, or --replay finds no pushes. 6: the journal is damaged.
    """
    report = verify_run(run_dir, replay, allow_skipped=allow_skipped, without=without_tape or ())
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        _print(report)
    return report.exit_code


def pack(
    run_dir: RunDirArgument,
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="A new folder, outside of the run's directory.")],
    until: Annotated[
        str, typer.Option("--until", metavar="ROUND", help="No pushes of later rounds than this one, such as r1.7.")
    ] = "",
    without_tape: WithoutTape = None,
) -> int:
    """Copy what proves a run's versions into one folder, for `dips verify FOLDER --replay` on any machine.

    Journal, tapes, digests, settings, recorded pushes and the newest snapshots; no keys. Also while the run goes on.
    What was written is verified; exit codes are those of `dips verify`. A version is computed from the one before it,
    so the rounds up to --until can be replayed; the rest needs `dips verify --allow-skipped`.
    """
    report = pack_run(run_dir, to, until, without_tape or ())
    _print(report)
    allow = " --allow-skipped" if until else ""
    without = "".join(f" --without-tape {name}" for name in without_tape or ())
    print(f"{to}: sha256sum -c {SUMS} checks its files, dips verify {to} --replay{allow}{without} what they prove")
    return report.exit_code


def _print(report: VerifyReport) -> None:
    console = Console(highlight=False, width=None if Console().is_terminal else WIDTH)
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("promise")
    table.add_column("records", justify="right", no_wrap=True)
    table.add_column("result")
    for row in report.rows:
        result = f"{row.result}: {row.why}" if row.why else row.result
        table.add_row(row.name, row.promise, str(row.records), Text(result, style=_STYLES.get(row.result, "red")))
    console.print(table)
    for violation in report.violations[:SHOWN]:
        console.print(Text(str(violation), style="red"))
    if len(report.violations) > SHOWN:
        console.print(f"... and {len(report.violations) - SHOWN} more: --json shows all")
    if report.replayed is not None:
        done = report.replayed
        console.print(
            f"replayed {done.versions} versions, {done.shards} shards, bit for bit; "
            f"measured the norms of {done.judged} rounds again"
        )
    for what, sentences, style in (
        ("not replayed", report.replayed.skipped if report.replayed else (), "yellow"),
        ("cannot be read", report.problems, "red"),
        ("unproven", report.unproven, "red"),
        ("note", report.notes, "yellow"),
    ):
        for sentence in sentences:
            console.print(Text(f"{what}: {sentence}", style=style))
    console.print(Text(f"run {report.run_id or '?'}: {report.verdict}"))


def story(
    run_dir: RunDirArgument,
    name: NameArgument = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Show the event history of a round, version, push, cluster or slave, from the journal and all tapes of a run.

    A round's history follows its pushes from their tickets to their verdicts. Times are seconds since the first line.
    Without a name: the rounds that took longest, with the step that took longest in each, and whom it waited for.
    """
    if not name:
        rounds = slow_rounds(run_dir, SHOWN)
        for line in [json.dumps([asdict(one) for one in rounds], indent=2)] if as_json else render_slow_rounds(rounds):
            print(line)
        return 0
    history = tell_story(run_dir, name)
    if as_json:
        print(json.dumps(history.to_json(), indent=2))
        return 0
    print(f"{history.what} {history.name}")
    for line in render(history):
        print(line)
    return 0
