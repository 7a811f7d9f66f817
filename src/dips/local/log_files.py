"""Reads the logs of a run's processes: each file's lines as entries, and merges all files in the order of time.

Memory is bounded by the number of files, not by their length: each file is read line by line, and the merge holds one
entry of each. Files are other processes' and may hold anything: a torn last line waits for its end, a line that is no
log line belongs to the entry before it, and one that is too long is cut. Never writes.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from dips.core.errors import ConfigError
from dips.core.observe.logs import LogLine, parse
from dips.core.observe.tape import read_tape
from dips.master.page.history import HeldoutPoint, heldout_point

# ---- tapes -----------------------------------------------------------------------------------------------------------
#
# Reads losses over tokens from the tapes of a run's processes.
#
# It must never write to a tape, and never fill a gap: what a process did not record, it does not show.


HELDOUT_TAPE = "heldout"
_SUFFIX = ".tape.jsonl"


@dataclass(frozen=True)
class LossPoint:
    """A training loss in nats per byte, at a count of tokens that the whole run had then."""

    tokens: int
    loss: float


def tape_path(run_dir: Path, name: str) -> Path:
    """Where the tape of a cluster, of the held-out evaluator or of the launcher is."""
    return run_dir / "tapes" / f"{name}{_SUFFIX}"


def records(path: Path) -> Iterator[Mapping[str, Any]]:
    """The records of a tape, oldest first; none when the file does not exist (its process never began)."""
    if path.is_file():
        yield from read_tape(path)


def training_losses(path: Path) -> list[LossPoint]:
    """The losses that a cluster recorded, in the order of its steps, over all its incarnations."""
    points = []
    for record in records(path):
        tokens, loss = record.get("tokens"), record.get("loss")
        if record.get("kind") == "step" and isinstance(tokens, int) and isinstance(loss, float) and math.isfinite(loss):
            points.append(LossPoint(tokens, loss))
    return points


def heldout_losses(path: Path) -> list[HeldoutPoint]:
    """The held-out losses of the published versions, by version; a version evaluated twice counts once."""
    found = (heldout_point(record["wall_s"], record["kind"], record) for record in records(path))
    points = {point.version: point for point in found if point is not None}
    return [points[version] for version in sorted(points)]


# ---- log files -------------------------------------------------------------------------------------------------------


MAX_LINE_BYTES = 64 << 10
"""Of one line; the rest is dropped, and the entry says so."""

MAX_ENTRY_LINES = 200
"""Of one entry, such as a stack trace or a list of settings; what follows is an entry of its own."""

CLOCK_STEP_S = 1.0
"""A line that claims to be so much later than the file's last change does not count for the order."""

LOG_SUFFIX, TAPE_SUFFIX = ".log", ".tape.jsonl"
EVENT_LEVEL = "DEBUG"
"""A tape's events are for a close look: their level is below every sentence of a log."""


@dataclass(frozen=True)
class LogEntry:
    """One line of a log with what belongs to it.

    line.wall_s is 0 for what is in a file before its first log line.
    """

    line: LogLine
    after_s: float  # never before the entry above it in its file, for the order
    source: str


class LogFile:
    """One file, read as it grows. A file that became shorter, or was replaced, is read from its beginning."""

    def __init__(self, path: Path, is_tape: bool = False) -> None:
        self.path = path
        self.source = path.name.removesuffix(TAPE_SUFFIX if is_tape else LOG_SUFFIX)
        self._is_tape = is_tape
        self._file: BinaryIO | None = None
        self._identity = (0, 0)
        self._changed_s = 0.0
        self._after_s = 0.0
        self._skipping = False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def entries(self, *, to_the_end: bool) -> Iterator[LogEntry]:
        """Those that are new since the last call. to_the_end: also a last line without its newline, then close."""
        try:
            if self._open():
                yield from self._new_entries(to_the_end)
        finally:
            if to_the_end:
                self.close()

    def _new_entries(self, to_the_end: bool) -> Iterator[LogEntry]:
        held: LogEntry | None = None
        n_lines = 0
        for text in self._lines(to_the_end and not self._is_tape):
            entry = self._entry(text)
            if entry is not None and held is not None:
                yield held
            if entry is None and held is not None and n_lines < MAX_ENTRY_LINES:
                whole = f"{held.line.sentence}\n{text.removeprefix('  ')}"
                held, n_lines = replace(held, line=replace(held.line, sentence=whole)), n_lines + 1
                continue
            if entry is None:  # no entry precedes it, or one that is long enough
                if held is not None:
                    yield held
                loose = LogLine(self._after_s, "INFO", "", self.source, text)
                entry = LogEntry(loose, self._after_s, self.source)
            held, n_lines = entry, 1
        if held is not None:
            yield held

    def _open(self) -> bool:
        """Whether there is a file to read, from where it was left or from its beginning."""
        try:
            found = self.path.stat()
            identity = (found.st_dev, found.st_ino)
            if self._file is not None and (identity != self._identity or found.st_size < self._file.tell()):
                self.close()
                self._after_s, self._skipping = 0.0, False
            if self._file is None:
                self._file, self._identity = self.path.open("rb"), identity
            self._changed_s = found.st_mtime
        except FileNotFoundError:
            self.close()
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}; ask its owner for the right") from error
        return self._file is not None

    def _lines(self, to_the_end: bool) -> Iterator[str]:
        assert self._file is not None
        while True:
            at = self._file.tell()
            data = self._file.readline(MAX_LINE_BYTES)
            if not data:
                return
            whole = data.endswith(b"\n")
            if not whole and len(data) < MAX_LINE_BYTES and not to_the_end:
                self._file.seek(at)  # its writer is in the middle of it, or was killed there
                return
            skipped, self._skipping = self._skipping, not whole and len(data) == MAX_LINE_BYTES
            if not skipped:
                text = data.decode("utf-8", errors="backslashreplace").rstrip("\r\n")
                yield f"{text} (cut here: the line is longer)" if self._skipping else text

    def _entry(self, text: str) -> LogEntry | None:
        line = _event(text) if self._is_tape else parse(text)
        if line is None:
            return None
        if line.wall_s <= self._changed_s + CLOCK_STEP_S:  # no process writes what has yet to happen
            self._after_s = max(self._after_s, line.wall_s)
        return LogEntry(line, self._after_s, self.source)


def find_logs(run_dir: Path, events: bool = False) -> list[LogFile]:
    """The logs of a run's directory; with `events` its tapes, too. Raises ConfigError when there are none."""
    found = [LogFile(path) for path in sorted((run_dir / "logs").glob(f"*{LOG_SUFFIX}"))]
    if events:
        tapes = (
            run_dir.glob(f"{folder}/*{TAPE_SUFFIX}") for folder in ("master", "tapes", "slaves/*", "checkpoints/*")
        )
        found += [LogFile(path, is_tape=True) for path in sorted(itertools.chain.from_iterable(tapes))]
    if not found:
        raise ConfigError(
            f"{run_dir} has no logs: give the directory of a run that `dips up` or `dips demo` started, such as "
            "runs/demo"
        )
    return found


def merged(files: Sequence[LogFile], *, to_the_end: bool) -> Iterator[LogEntry]:
    """The new entries of all files in the order of time; of one file always in its own order."""
    return heapq.merge(*(file.entries(to_the_end=to_the_end) for file in files), key=lambda entry: entry.after_s)


def _event(text: str) -> LogLine | None:
    """An event of a tape as a line: its kind, and its own fields as JSON."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict):
        return None
    head = {key: raw.pop(key, "") for key in ("wall_s", "monotonic_s", "role", "name", "kind", "cause")}
    fields = " ".join(f"{key}={json.dumps(value)}" for key, value in raw.items())
    values = {"wall_s": head["wall_s"], "level": EVENT_LEVEL, "role": head["role"], "name": head["name"]}
    cause = "" if head["cause"] == "-" else head["cause"]
    return parse(json.dumps({**values, "cause": cause, "sentence": f"{head['kind']} {fields}".rstrip()}))
