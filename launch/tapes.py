"""Reads what a run's processes wrote to their tapes: losses over tokens, for the report and the picture.

It must never write to a tape, and never fill a gap: what a process did not record, it does not show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dips.core.ids import Version, parse_version
from dips.core.telemetry import read_tape

HELDOUT_TAPE = "heldout"
_SUFFIX = ".tape.jsonl"


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
    """Where the tape of a cluster, of the held-out evaluator or of the launcher stands."""
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


def _number(value: object) -> float | None:
    """None for what is no number, or not a finite one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
