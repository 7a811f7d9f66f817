"""The pages of docs/ that a program writes: a stale one is told, and written again."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from generate_docs import PAGES, ROLES, main
from support.repository import ROOT


def test_the_pages_of_the_repository_are_current() -> None:
    assert main([str(ROOT / "docs")]) == 0


@pytest.mark.parametrize("name", PAGES)
def test_a_stale_page_is_told_and_written_anew(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = Path(shutil.copytree(ROOT / "docs", tmp_path / "docs"))
    file = docs / name
    whole = file.read_text()
    file.write_text(whole.replace("| 1 ", "| 7 ") if name == "protocol.md" else whole + "more\n")
    assert main([str(docs)]) == 1
    assert capsys.readouterr().err == f"{file} is not current: run `make docs`\n"
    assert main(["--write", str(docs)]) == 0
    assert file.read_text() == whole


def test_names_of_metrics_are_unique_and_say_their_kind_and_unit() -> None:
    """As Prometheus wants them."""
    ending = {"s": "_seconds", "bytes": "_bytes", "bytes/s": "_bytes_per_second", "tokens/s": "tokens_per_second"}
    for _, prefix, specs in ROLES:
        assert len({spec.name for spec in specs}) == len(specs)
        for spec in specs:
            name = prefix + spec.name
            base = name.removesuffix("_total")
            assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
            assert name.endswith("_total") == (spec.kind == "counter"), name
            assert base.endswith(ending.get(spec.unit, "")), name
            assert spec.kind != "histogram" or spec.unit == "s", name
            assert spec.unit == "s" or not base.endswith("_seconds"), name
            assert spec.unit == "bytes" or not base.endswith("_bytes"), name
            assert "|" not in spec.meaning + spec.normal + spec.when, name
