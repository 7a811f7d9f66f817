"""Reads losses over tokens, and the progress of starts, from the tapes of a run's processes.

It must never write to a tape, and never fill a gap: what a process did not record, it does not show.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dips.core.ids import Version, parse_version
from dips.core.observe.starting import KIND
from dips.core.observe.telemetry import read_tape

HELDOUT_TAPE = "heldout"
_SUFFIX = ".tape.jsonl"
_STARTING = f'"{KIND}"'.encode()
_AT_ONCE_BYTES = 1 << 20


@dataclass(frozen=True)
class LossPoint:
    """A training loss in nats per byte, at a count of tokens that the whole run had then."""

    tokens: int
    loss: float


@dataclass(frozen=True)
class HeldoutPoint:
    """The held-out loss of a published version, in nats per byte."""

    version: Version
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
        tokens, loss = _number(record.get("tokens")), _number(record.get("loss"))
        if record.get("kind") == "step" and tokens is not None and loss is not None:
            points.append(LossPoint(int(tokens), loss))
    return points


def heldout_losses(path: Path) -> list[HeldoutPoint]:
    """The held-out losses of the published versions, by version; a version evaluated twice counts once."""
    points: dict[Version, HeldoutPoint] = {}
    for record in records(path):
        tokens, loss = _number(record.get("tokens")), _number(record.get("loss"))
        if record.get("kind") == "heldout" and tokens is not None and loss is not None:
            point = HeldoutPoint(parse_version(str(record.get("version"))), int(tokens), loss)
            points[point.version] = point
    return [points[version] for version in sorted(points)]


class StartFollower:
    """Reads what processes report of a start that takes long (core/observe/starting.py), as it comes on their tapes.

    What was there before is left out. Reads what is new and no more; a tape that is not there yet is looked for
    again.
    """

    def __init__(self, tapes: Mapping[str, Path]) -> None:
        """tapes: of each process, by its name."""
        self._tapes = dict(tapes)
        self._read = {name: path.stat().st_size if path.is_file() else 0 for name, path in tapes.items()}

    def news(self) -> Iterator[tuple[str, str]]:
        """(process, its sentence) since the last call."""
        for name, path in self._tapes.items():
            for line in self._lines(name, path):
                if _STARTING not in line:
                    continue
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict) and record.get("kind") == KIND and isinstance(record.get("sentence"), str):
                    yield name, record["sentence"]

    def _lines(self, name: str, path: Path) -> list[bytes]:
        """Whole lines; half a one waits for its end."""
        try:
            with path.open("rb") as file:
                file.seek(self._read[name])
                found = file.read(_AT_ONCE_BYTES)
        except OSError:
            return []
        end = found.rfind(b"\n") + 1
        self._read[name] += end or (len(found) if len(found) == _AT_ONCE_BYTES else 0)
        return found[:end].splitlines()


def _number(value: object) -> float | None:
    """None for what is no number, or not a finite one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
