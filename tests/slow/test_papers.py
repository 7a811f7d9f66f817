"""`make papers` as a user types it, for a paper that takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from papers.papers import ONLY_HERE
from support.dips_command import ROOT, dips, run_python

BENCHMARKS = ROOT / "benchmarks"


def test_a_report_is_made_kept_and_the_same_again(tmp_path: Path) -> None:
    out, docs = tmp_path / "papers", tmp_path / "docs"
    arguments = ("-m", "papers", "--paper", "jeeves", "--out", out, "--docs", docs)
    told = run_python(*arguments, PYTHONPATH=str(BENCHMARKS))
    assert told.returncode == 0, told.stderr
    assert "jeeves: 24 rows (19 fitted, 5 computed)" in told.stdout
    made = [path.read_text() for path in (out / "report.html", out / "report.json", docs / "jeeves.md")]
    rows = [row for place in json.loads(made[1])["papers"][0]["places"] for row in place["rows"]]
    assert all(row["command"] == "dips plan validate --paper jeeves" for row in rows)
    assert made[0].count("data:image/png;base64,") == 1
    again = run_python(*arguments, PYTHONPATH=str(BENCHMARKS))
    assert again.stderr.count("(kept from before)") == 2
    assert [path.read_text() for path in (out / "report.html", out / "report.json", docs / "jeeves.md")] == made


@pytest.mark.parametrize("command", [c for _, c in ONLY_HERE if c.startswith("dips size") or c.endswith("--help")])
def test_what_shows_that_something_is_only_here_does_so(command: str) -> None:
    told = dips(*command.split()[1:])
    assert told.returncode == 0, told.stderr
    assert len(told.stdout) > 500
