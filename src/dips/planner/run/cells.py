"""Reads the order of operations from a plan.csv: a line for each rank, a cell such as 2F3 for each operation.

It says where each stage runs. torch's runtime checks that the schedule is complete and can end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dips.core.errors import ConfigError

_CELL = re.compile(r"(\d{1,6})([FIWB])(\d{1,6})", re.ASCII)


class Cell(NamedTuple):
    """One operation. kind: F, I (gradient of the input), W (of the weights) or B (both at once)."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Cells:
    """A whole schedule. rows[r]: the operations of rank r, in their order. rank_of_stage[s]: the rank of stage s."""

    rows: tuple[tuple[Cell, ...], ...]
    rank_of_stage: tuple[int, ...]
    n_microbatches: int

    @property
    def n_ranks(self) -> int:
        return len(self.rows)

    @property
    def n_stages(self) -> int:
        return len(self.rank_of_stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the model."""
        return tuple(stage for stage, place in enumerate(self.rank_of_stage) if place == rank)


def read_cells(file: Path) -> Cells:
    """Read a plan.csv. Raises ConfigError for a file that cannot be read or is not a schedule."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as a schedule: {error}: name the plan.csv of a plan") from error
    return parse_cells(text, str(file))


def parse_cells(text: str, where: str) -> Cells:
    """Parse the text of a plan.csv. where: the text's name in error sentences. Raises ConfigError."""
    lines = [line for line in text.splitlines() if line.strip()]
    rows = tuple(_row(line, number, where) for number, line in enumerate(lines, start=1))
    places: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for cell in row:
            if places.setdefault(cell.stage, rank) != rank:
                raise ConfigError(
                    f"{where}: stage {cell.stage} runs on ranks {places[cell.stage]} and {rank}: give it one line"
                )
    missing = [stage for stage in range(max(places, default=0) + 1) if stage not in places]
    if missing:
        raise ConfigError(f"{where}: no line runs stage {missing[0]}: every stage needs one")
    cells = Cells(rows, tuple(places[s] for s in sorted(places)), max(c.microbatch for row in rows for c in row) + 1)
    _check_last_stage(cells, where)
    return cells


def _row(line: str, number: int, where: str) -> tuple[Cell, ...]:
    found = []
    for column, text in enumerate(line.split(","), start=1):
        match = _CELL.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"{where}, line {number}, column {column}: {text.strip()!r} is not an operation: write STAGE KIND "
                "MICROBATCH without blanks, as in 2F3; parts such as 2F3.1 are stages of their own in plan.csv"
            )
        found.append(Cell(int(match[1]), match[2], int(match[3])))
    return tuple(found)


def _check_last_stage(cells: Cells, where: str) -> None:
    """torch's runtime numbers losses in the order in which the last stage makes them."""
    last = cells.n_stages - 1
    order = [cell.microbatch for cell in cells.rows[cells.rank_of_stage[last]] if cell[:2] == (last, "F")]
    if order != sorted(order):
        raise ConfigError(
            f"{where}: the last stage runs forward passes in the order {order[:8]}, and torch's pipeline runtime takes "
            "losses in rising order: sort them"
        )
