"""`dips story`: shows the events that all processes of a run recorded of one thing, in the order of time."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from dips.cli.verify import RunDirArgument
from dips.judge.story import render, tell_story

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A round (r1.7), version (1:6), push (a/1.1#3), cluster or slave.")
]


def story(
    name: NameArgument,
    run_dir: RunDirArgument,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Show the event history of a round, version, push, cluster or slave, from the journal and all tapes of a run.

    A round's history follows its pushes from their tickets to their verdicts. Times are seconds since the first line.
    """
    history = tell_story(run_dir, name)
    if as_json:
        print(json.dumps(history.to_json(), indent=2))
        return 0
    print(f"{history.what} {history.name}")
    for line in render(history):
        print(line)
    return 0
