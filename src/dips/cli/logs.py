"""`dips logs` shows the log lines of all processes of a run on this machine, in the order of time. `dips track` writes
what its master records to an experiment tracker, while the run goes on or afterwards.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dips.cli.run_options import RequiredRun
from dips.core.config import load
from dips.core.errors import ConfigError, FatalError
from dips.core.observe.logs import LEVELS, configure_logging, escaped, human
from dips.core.units import parse_seconds
from dips.local.log_files import LogEntry, LogFile, find_logs, merged
from dips.local.operator_client import NamedRun
from dips.local.options import overrides_for, with_knobs
from dips.local.tracking import Tracking, TrackKnobs, check_tracker
from dips.trainer.progress import StopSignals

FOLLOW_S = 0.25
"""How often files are looked at that may have grown."""

Level = Literal["debug", "info", "warning", "error", "critical"]


@dataclass(frozen=True)
class LogFilter:
    """Chooses the entries to show."""

    roles: frozenset[str] = frozenset()  # role, process or file names; none: all
    cause: str = ""
    since_s: float = 0.0  # Unix time
    level: str = "DEBUG"

    def takes(self, entry: LogEntry) -> bool:
        line = entry.line
        return (
            (not self.roles or bool(self.roles & {line.role, line.name, entry.source}))
            and (not self.cause or line.cause == self.cause)
            and line.wall_s >= self.since_s
            and LEVELS.index(line.level) >= LEVELS.index(self.level)
        )


def logs(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of the run, such as runs/demo.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines as they come.")] = False,
    role: Annotated[
        list[str] | None,
        typer.Option(
            "--role", metavar="NAME", help="Only this role (master, slave, worker, launch) or process; again for more."
        ),
    ] = None,
    cause: Annotated[
        str, typer.Option("--cause", metavar="ID", help="Only what this push (a/1.1#3) or round (r1.7) caused.")
    ] = "",
    since: Annotated[
        str, typer.Option("--since", metavar="WHEN", help="Only newer: '10 min' ago, or a time as 2026-03-01T12:00Z.")
    ] = "",
    level: Annotated[Level, typer.Option("--level", help="Only lines of this level or above.")] = "debug",
    events: Annotated[
        bool, typer.Option("--events", help="The processes' event records (tapes) as well; --cause has them anyway.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> int:
    """Show the logs of the processes of a run on this machine, merged in the order of time.

    Times are UTC. A line has the time, the level (D, I, W, E, C), the process, the push or round that caused it, and a
    sentence, in which control characters are written out. With --follow it ends with ctrl-C.
    """
    wanted = LogFilter(frozenset(role or ()), cause, since_of(since, time.time()), level.upper())
    files = find_logs(run_dir, events or bool(cause))
    entries = following(run_dir, files, events or bool(cause)) if follow else merged(files, to_the_end=True)
    for entry in entries:
        if wanted.takes(entry):
            # One entry as a JSON object with stable keys; JSON escapes what a terminal would act upon.
            print(
                json.dumps({**entry.line.to_json(), "source": escaped(entry.source)}, separators=(",", ":"))
                if as_json
                else shown(entry),
                flush=follow,
            )
    return 0


def following(
    run_dir: Path,
    files: list[LogFile],
    events: bool,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[LogEntry]:
    """Yield all entries, then new ones as they come, also of new files. Ends when the generator is closed.

    What comes is in the order of time between two looks.
    """
    files = [*files]
    known = {file.path for file in files}
    try:
        while True:
            yield from merged(files, to_the_end=False)
            wait(FOLLOW_S)
            fresh = [file for file in find_logs(run_dir, events) if file.path not in known]
            known |= {file.path for file in fresh}
            files += fresh
    finally:
        for file in files:
            file.close()


def since_of(text: str, now_s: float) -> float:
    """Unix time from "10 min" (before now) or an ISO time, UTC unless it says otherwise. Raises ConfigError."""
    if not text:
        return 0.0
    if re.match(r"\d{4}-\d\d-\d\d", text):
        try:
            when = datetime.fromisoformat(text)
        except ValueError as error:
            raise ConfigError(f"--since {text!r} is not a time: write it as 2026-03-01T12:00") from error
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    try:
        ago_s = parse_seconds(text)
    except ConfigError as error:
        raise ConfigError(f"--since: {error}; or a time such as 2026-03-01T12:00") from error
    if ago_s < 0:
        raise ConfigError(f"--since {text!r} is in the future: write how long ago, such as '10 min'")
    return now_s - ago_s


def shown(entry: LogEntry) -> str:
    """One entry for a terminal. What comes before a file's first log line has no time."""
    return human(entry.line) if entry.line.role else f"{entry.source}: {escaped(entry.line.sentence)}"


LOOK_S = 1.0
LATE_S = 60.0
"""After the run's end: for so long held-out losses are waited for."""


@with_knobs(TrackKnobs)
def track(run: RequiredRun, **given: Any) -> int:
    """Write loss, tokens, norms, staleness, speeds and link rates of each round to a tracker, until the run has ended.

    RUN is a directory with the master's tape, which has every round; an address has only samples. Started again, it
    goes on with what the tracker lacks. A tracker that is away is a warning, and is tried again. Exit code 6: the
    signal to end came while the tracker did not take the last rounds.
    """
    knobs = load(TrackKnobs, "track", overrides=overrides_for(TrackKnobs, given)).value
    check_tracker(knobs)
    named = NamedRun.of(run)
    tracking = Tracking(named.directory or named.masters, knobs)
    configure_logging("track", "track")
    ended_s: float | None = None
    with StopSignals() as signals:
        while True:
            asked = signals.caught is not None
            all_written = tracking.look(time.monotonic())
            if asked:
                break
            ended_s = (ended_s or time.monotonic()) if tracking.ended else None
            if ended_s is not None and (tracking.heldout_is_whole or time.monotonic() > ended_s + LATE_S):
                break
            if all_written or tracking.is_away:
                signals.wait(LOOK_S)
        tracking.close()
    print(f"{knobs.to}: {tracking.written} points of run {tracking.run_id} were written to project {knobs.project}")
    if not all_written:
        raise FatalError(f"{knobs.to} lacks the last rounds: `dips track {run} --to {knobs.to}` writes them")
    return 0
