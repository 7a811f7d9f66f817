"""Follows the evaluator's tape (`dips eval --follow --tape FILE`): the held-out loss of each version.

It reads what was appended since the last call and never waits for more.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dips.master.page.event_buffer import read_event
from dips.master.page.timeline import cut

MAX_READ_BYTES = 256 * 1024
"""The most bytes of one call; a longer tape is read in several calls."""


@dataclass(frozen=True)
class HeldoutLoss:
    wall_s: float
    version: str
    tokens: int
    loss: float


class HeldoutTail:
    """The end of one tape. A file that does not exist (yet) has no losses."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._offset = 0

    def news(self) -> list[HeldoutLoss]:
        """Losses that were appended since the last call."""
        if self._path is None:
            return []
        try:
            with self._path.open("rb") as file:
                return list(self._losses(file))
        except OSError:
            return []

    def _losses(self, file: BinaryIO) -> Iterator[HeldoutLoss]:
        if file.seek(0, os.SEEK_END) < self._offset:
            self._offset = 0  # a new file, of another run
        file.seek(self._offset)
        data = file.read(MAX_READ_BYTES)
        whole, newline, _ = data.rpartition(b"\n")
        if not newline and len(data) == MAX_READ_BYTES:
            self._offset += len(data)  # no line is this long: it is not a tape
        self._offset += len(whole) + len(newline)
        for line in whole.split(b"\n"):
            event = read_event(line)
            found = _loss(event[0], event[2]) if event is not None and event[1] == "heldout" else None
            if found is not None:
                yield found


def _loss(wall_s: float, fields: Mapping[str, Any]) -> HeldoutLoss | None:
    tokens, loss = fields.get("tokens"), fields.get("loss")
    if not isinstance(tokens, int) or not isinstance(loss, int | float) or not math.isfinite(loss) or tokens < 0:
        return None
    return HeldoutLoss(wall_s, cut(fields.get("version"), 40), tokens, float(loss))
