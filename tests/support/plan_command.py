"""`dips plan` in this process: its exit code and what it prints."""

from __future__ import annotations

import pytest

from dips.cli import main


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main.run(("plan", *map(str, arguments)))
    out, error = capsys.readouterr()
    return code, out, error


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one sentence that a mistake is told, without any result."""
    code, out, error = told(capsys, *arguments)
    assert (code, out, error.count("\n")) == (2, "", 1), arguments
    return error
