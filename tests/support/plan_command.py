"""`dips plan` in this process: its exit code and what it prints."""

from __future__ import annotations

import io
from collections.abc import Iterable

import pytest
from rich.console import Console, RenderableType
from support.repository import ROOT

from dips.cli import main

EXAMPLE = ROOT / "examples" / "04-plan-a-schedule" / "sites.toml"


def example(*changes: tuple[str, object]) -> str:
    """The text of EXAMPLE, in which each of these is replaced once: in the text that the ones before it left."""
    text = EXAMPLE.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, str(new), 1)
    return text


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main.run(("plan", *map(str, arguments)))
    out, error = capsys.readouterr()
    return code, out, error


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one sentence that a mistake is told, without any result."""
    code, out, error = told(capsys, *arguments)
    assert (code, out, error.count("\n")) == (2, "", 1), arguments
    return error


def printed(pieces: Iterable[RenderableType]) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    for piece in pieces:
        console.print(piece)
    return " ".join(console.export_text().split())
