"""`make papers`: what is run and reported is played."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from papers import __main__ as command
from papers.findings import Finding
from papers.papers import Paper, Place
from papers.source import Outcome, Runner, Source

from dips.core.errors import ConfigError


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """In place of the papers: two, one with a source that gives nothing and one that takes hours. What was run."""

    def finding(told: Any) -> list[Finding]:
        return [Finding("Figure 9", "speed", 2.0, told["n"], "x")]

    names = {"di-ps": ("fast", "none"), "jeeves": ("other", "slow")}
    made = {
        name: Paper(
            name,
            f"about {name}",
            "",
            (Place("Figure 9", "speeds"),),
            tuple(Source(one, ("plan", one), finding, (), only_full=one == "slow") for one in sources),
        )
        for name, sources in names.items()
    }
    runs: list[tuple[str, ...]] = []

    def run(runner: Runner, sources: Sequence[Source]) -> list[Outcome]:
        names = (one.name for one in sources)
        runs.append((str(runner.folder), "quick" if runner.quick else "full", *runner.without, *names))
        gone: dict[str, dict[str, Any]] = {
            "none": {"why_not": "it was left out"},
            "slow": {"why_not": "it broke", "failed": True},
        }
        return [Outcome(one, **gone.get(one.name, {"told": {"n": 3.0}})) for one in reversed(sources)]

    monkeypatch.setattr(command, "PAPERS", made)
    monkeypatch.setattr(Runner, "run", run)
    return runs


def test_the_papers_are_reported_as_far_as_they_could_be_made(
    paper: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, docs = tmp_path / "out", tmp_path / "docs"
    words = ["--out", str(out), "--docs", str(docs), "--without", "this", "--without", "that"]
    assert command.main(words) == 0
    assert paper == [(str(out / "results"), "quick", "this", "that", "fast", "none", "other")]
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == ["di-ps: 1 rows (1 computed)", "jeeves: 1 rows (1 computed)"]
    assert told[2].startswith("without ")
    assert told[2].endswith(": it was left out")
    written = [out / "report.html", docs / "di-ps.md", docs / "jeeves.md", out / "report.json"]
    assert told[3] == "written: " + ", ".join(map(str, written))
    assert "--full" in told[4]
    assert all(path.read_text() for path in written)
    assert command.main([*words, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in whole["papers"]] == ["di-ps", "jeeves"]
    assert whole == json.loads((out / "report.json").read_text())


def test_one_paper_alone_at_full_size_fails_with_its_commands(
    paper: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--paper", "jeeves", "--full", "--out", str(tmp_path)]) == 1
    assert paper == [(str(tmp_path / "results"), "full", "other", "slow")]
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in told[:1]] == ["jeeves"]
    assert told[1].endswith(": it broke")
    assert told[-1] == f"written: {tmp_path / 'report.html'}, {tmp_path / 'report.json'}"


def test_papers_that_cannot_be_made_are_refused_first(
    paper: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for words, said in (
        (["--paper", "x"], "--paper 'x'"),
        (["--out", str(file)], f"--out {file}"),
    ):
        assert command.main([*words]) == ConfigError.exit_code
        assert said in capsys.readouterr().err
    assert not paper
    assert command.main(["--out", str(tmp_path / "out"), "--docs", str(file / "x")]) == ConfigError.exit_code
    assert str(file) in capsys.readouterr().err
    for absent, name, code in (("torch", "jeeves", 0), ("torch", "all", 2), ("ortools", "jeeves", 2)):
        there: dict[str, object] = dict.fromkeys({"torch", "numba", "ortools", "matplotlib"} - {absent}, True)
        monkeypatch.setattr("importlib.util.find_spec", there.get)
        assert command.main(["--paper", name, "--out", str(tmp_path / "out")]) == code
