"""The page on what settings assume of each other is that of the table."""

from __future__ import annotations

from support.repository import ROOT

from dips.cli.docs import assumptions
from dips.core.assumptions import ROLES

PAGE = ROOT / "docs" / "assumptions.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == assumptions(), "run `make docs`"


def test_the_page_has_every_row_in_lines_of_a_screen() -> None:
    text = assumptions()
    assert max(map(len, text.splitlines())) <= 120
    assert all(f"`{row.text}` ({row.name})" in text for rows in ROLES.values() for row in rows)
