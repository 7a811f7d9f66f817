"""Formats tables that fit a terminal of any width without breaking a word.

Names have up to 63 characters and terminals 80 columns. Where the longest words fit side by side, a table is a table.
Where not, sentences go below their row; where that is not enough, each row is a name with its other cells below it, as
`column value` one after the other. Nothing is ever cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.text import Text

_BETWEEN = 2
"""Characters between two columns, and before what is below its row."""

_SENTENCE = 16
"""A column of sentences that is narrower is hard to read."""


@dataclass(frozen=True)
class Column:
    """One column.

    right: numbers. wraps: cells of several words, which may take several lines. sentence: those wrap, take what is left
    of a line, and may go below it. least: characters to keep free, so that the table stays while values change.
    """

    header: str
    right: bool = False
    wraps: bool = False
    sentence: bool = False
    least: int = 0


class FittingTable:
    """A table with a title; the first column says what a row is about."""

    def __init__(self, title: str, columns: Sequence[Column]) -> None:
        self._title = title
        self._columns = list(columns)
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        assert len(cells) == len(self._columns), "a cell for each column"
        self._rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width
        every = list(range(len(self._columns)))
        short = [index for index in every if not self._columns[index].sentence]
        yield Text(self._title, style="italic")
        for inline in (every, short):
            if (widths := self._widths(inline, room)) is not None:
                yield from self._as_table(console, inline, widths, room)
                break
        else:
            for row in self._rows:
                yield row[0]
                yield from self._below(row, every[1:], room)
        yield Text("")

    def _widths(self, inline: Sequence[int], room: int) -> list[int] | None:
        """Of these columns; None when their longest words do not fit side by side."""
        least = [self._least(index) for index in inline]
        widths = [max(low, self._natural(index)) for index, low in zip(inline, least, strict=True)]
        room -= _BETWEEN * (len(widths) - 1)
        if sum(least) > room:
            return None
        while sum(widths) > room:
            widest = max(range(len(widths)), key=lambda at: widths[at] - least[at])
            widths[widest] -= 1
        return widths

    def _natural(self, index: int) -> int:
        return max(cell_len(text) for text in (self._columns[index].header, *self._texts(index)))

    def _least(self, index: int) -> int:
        """Headers wrap at spaces, and so do cells where they may."""
        column = self._columns[index]
        texts = self._texts(index)
        words = [word for text in texts for word in text.split()] if column.wraps or column.sentence else texts
        longest = max(map(cell_len, [*column.header.split(), *words]), default=0)
        enough = min(_SENTENCE, self._natural(index)) if column.sentence else 0
        return max(longest, enough, column.least)

    def _texts(self, index: int) -> list[str]:
        return [row[index].plain for row in self._rows]

    def _as_table(
        self, console: Console, inline: Sequence[int], widths: Sequence[int], room: int
    ) -> Iterator[Text | Padding]:
        headers = [Text(self._columns[index].header, style="bold") for index in inline]
        rule = Text("─" * (sum(widths) + _BETWEEN * (len(widths) - 1)), style="dim")
        yield from (*self._lines(console, headers, inline, widths), rule)
        for row in self._rows:
            yield from self._lines(console, [row[index] for index in inline], inline, widths)
            yield from self._below(row, [index for index in range(len(row)) if index not in inline], room)

    def _lines(
        self, console: Console, cells: Sequence[Text], inline: Sequence[int], widths: Sequence[int]
    ) -> Iterator[Text]:
        wrapped = [list(cell.wrap(console, width)) for cell, width in zip(cells, widths, strict=True)]
        for at in range(max(map(len, wrapped))):
            line = Text()
            for index, lines, width in zip(inline, wrapped, widths, strict=True):
                part = lines[at] if at < len(lines) else Text()
                part.rstrip()
                free = " " * (width - part.cell_len)
                ends = " " * _BETWEEN if index != inline[-1] else ""
                line.append_text(Text.assemble(free, part, ends) if self._columns[index].right else part + free + ends)
            line.rstrip()
            yield line

    def _below(self, row: Sequence[Text], indices: Sequence[int], room: int) -> Iterator[Padding]:
        """Cells as `column value`, as many as fit on a line; what is not known takes no place."""
        line: list[Text] = []
        for index in indices:
            if not row[index].plain or row[index].plain == "-":
                continue
            pair = Text.assemble((f"{self._columns[index].header} ", "dim"), row[index])
            if line and _BETWEEN * (len(line) + 1) + sum(one.cell_len for one in [*line, pair]) > room:
                yield _joined(line)
                line = []
            line.append(pair)
        if line:
            yield _joined(line)


def _joined(pairs: Sequence[Text]) -> Padding:
    return Padding(Text(" " * _BETWEEN).join(pairs), (0, 0, 0, _BETWEEN), expand=False)
