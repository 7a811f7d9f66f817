"""The documents as data: fenced blocks with what stands above them, commands, links, and names in code spans."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.repository import ROOT

SHELL = ("sh", "bash", "console")
START = ROOT / "docs" / "start.md"
OPERATIONS = ROOT / "docs" / "operations.md"
MACHINES = "several machines"
"""The note above what tests/slow/test_operators_month.py types."""
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".toml"))

_FENCE = re.compile(r"^```(\w*)$(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- ((?:(?!-->).)*) -->\n\Z", re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"[A-Z_]+=")
_HEADER_COMMAND = re.compile(
    r"(?:^|[:?])\s*((?:[A-Z_]+=\S+ )*(?:dips|python|torchrun) \S.*?)(?=\s{2,}|$)", re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    file: Path
    line: int
    language: str
    text: str
    note: str

    @property
    def not_run(self) -> str:
        return self.note.removeprefix("not run:").strip() if self.note.startswith("not run:") else ""

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(file: Path) -> list[Block]:
    text = file.read_text()
    return [_block(file, text, match) for match in _FENCE.finditer(text)]


def blocks_below(file: Path, heading: str) -> list[Block]:
    lines = file.read_text().splitlines()
    first = next((n for n, line in enumerate(lines, 1) if line in (f"# {heading}", f"## {heading}")), 0)
    assert first, f"{file.name} has no heading {heading!r}"
    last = next((n for n, line in enumerate(lines, 1) if n > first and line.startswith("## ")), len(lines) + 1)
    return [block for block in blocks(file) if first < block.line < last]


def _block(file: Path, text: str, match: re.Match[str]) -> Block:
    above = _COMMENT.search(text[: match.start()])
    note = " ".join(above[1].split()) if above else ""
    return Block(file, text[: match.start()].count("\n") + 1, match[1], match[2].strip("\n"), note)


def prose(file: Path) -> str:
    return _FENCE.sub("", file.read_text())


def spans(file: Path) -> list[str]:
    return _SPAN.findall(prose(file))


def links(file: Path) -> list[str]:
    return _LINK.findall(prose(file))


def anchors(file: Path) -> set[str]:
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(prose(file)))
    return {heading.replace(" ", "-") for heading in plain}


def shell_lines(block: Block) -> list[str]:
    joined = block.text.replace("\\\n", " ")
    lines = (shlex.join(shlex.split(line, comments=True)) for line in joined.splitlines())
    return [line for line in lines if line]


def without_environment(command: str) -> list[str]:
    words = shlex.split(command)
    while words and _ASSIGNMENT.match(words[0]):
        words = words[1:]
    return words


def header_commands(example: Path) -> list[str]:
    """The commands that stand in the comment or docstring at an example's top."""
    text = example.read_text()
    head = text.split('"""')[1] if example.suffix == ".py" else "\n".join(_comment_lines(text))
    return [match[1].strip() for match in _HEADER_COMMAND.finditer(head)]


def _comment_lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        yield line.removeprefix("#").strip()


def table(file: Path, heading: str) -> list[list[str]]:
    below = file.read_text().partition(f"## {heading}\n")[2]
    rows = re.search(r"(?:^\|.*\|$\n?)+", below, re.MULTILINE)
    assert rows, f"{file.name} has no table below {heading!r}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[0].splitlines()[2:]]


def mistakes() -> list[list[str]]:
    """The rows of the table of mistakes: command, exit code, what it says, remedy."""
    return table(START, "When a command says no")


def walks() -> list[Path]:
    return sorted({block.file for file in documents() for block in walked(file)})


def walked(file: Path) -> list[Block]:
    """What is typed on one machine."""
    shell = [block for block in blocks(file) if block.language in SHELL]
    return [block for block in shell if not block.not_run and block.note != MACHINES]


def loop_of_the_readme() -> str:
    (block,) = [block for block in blocks(ROOT / "README.md") if block.language == "python" and not block.not_run]
    return block.text
