"""docs/protocol.md says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from dips.cli.docs import PARTS, TABLES, diagram, protocol, refusals
from dips.core.errors import ConfigError, RefusalCode
from dips.core.protocol import PROTOCOL_VERSION

DOCUMENT = Path(__file__).parents[3] / "docs" / "protocol.md"


def test_document_is_current() -> None:
    text = DOCUMENT.read_text()
    assert protocol(text) == text, "run `make docs`"


def test_document_names_the_version_that_the_code_speaks() -> None:
    assert f"Protocol version {PROTOCOL_VERSION}" in DOCUMENT.read_text()


def test_every_refusal_code_has_its_sentence() -> None:
    table = refusals()
    for code in RefusalCode:
        if code is not RefusalCode.UNSPECIFIED:
            assert f"| {code.value} | `{code.name}` |" in table


@pytest.mark.parametrize("name", sorted(TABLES))
def test_diagram_shows_every_arrow(name: str) -> None:
    text = diagram(TABLES[name])
    for start, label, end in TABLES[name].arrows():
        lines = [line for line in text.splitlines() if line.strip().startswith(f"{start.value} --> {end.value}:")]
        assert len(lines) == 1
        assert label.replace("_", " ") in lines[0]


def test_stale_part_is_replaced() -> None:
    text = DOCUMENT.read_text().replace("Protocol version", "Protocol vversion")
    assert "vversion" not in protocol(text)


@pytest.mark.parametrize("change", [("<!-- generated: round -->", ""), ("generated: push", "generated: pull")])
def test_missing_or_unknown_part_is_an_error(change: tuple[str, str]) -> None:
    with pytest.raises(ConfigError):
        protocol(DOCUMENT.read_text().replace(*change))


def test_every_part_is_in_the_document() -> None:
    text = DOCUMENT.read_text()
    assert all(text.count(f"<!-- generated: {name} -->") == 1 for name in PARTS)
