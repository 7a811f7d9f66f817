"""The report of the papers: how each number was made, that no place is forgotten, and what happens to a failure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from papers import source as module
from papers.findings import Finding
from papers.papers import PAPERS
from papers.planning import SECTIONS
from papers.report import chapter, page, report_html, report_json
from papers.source import Picture, Runner, Source

PNG = b"\x89PNG\r\n\x1a\n"


def a_source(**more: Any) -> Source:
    """One whose command is a benchmark of a test's own."""
    found = Source("links", ("bench_own.py",), lambda told: [Finding("Figure 9", "speed", 2.0, told["n"], "x")], ())
    return replace(found, **more)


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    monkeypatch.setattr(module, "BENCHMARKS", folder)
    script = folder / "bench_own.py"
    script.write_text("print('{\"n\": 3.0}')")
    return script


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path / "results", True, lambda line: None)


@pytest.mark.parametrize("paper", SECTIONS)
def test_every_section_is_at_a_place_of_its_paper(paper: str) -> None:
    for section in SECTIONS[paper]:
        assert not PAPERS[paper].place(section.place).without


def test_a_result_is_kept_until_its_program_changes(benchmark: Path, runner: Runner) -> None:
    assert runner.run([a_source()])[0].told == {"n": 3.0}
    said: list[str] = []
    again = replace(runner, say=said.append)
    assert again.run([a_source()])[0].told == {"n": 3.0}
    assert said == ["1 of 1: python benchmarks/bench_own.py (kept from before)"]
    benchmark.write_text("print('{\"n\": 4.0}')")
    assert again.run([a_source()])[0].told == {"n": 4.0}


@pytest.mark.parametrize(
    ("script", "failed", "why"),
    [
        ("import sys; sys.exit('no namespaces here')", True, "failed with exit code 1: no namespaces here"),
        (
            "import sys; print('bench_own cannot run here: it needs root', file=sys.stderr); sys.exit(2)",
            False,
            "not possible on this machine: bench_own cannot run here: it needs root",
        ),
        ("import argparse; argparse.ArgumentParser().parse_args(['--new'])", True, "failed with exit code 2: "),
        ("import sys; print('{}'); sys.exit(1)", True, "failed with exit code 1: it said nothing"),
    ],
)
def test_what_could_not_be_made_says_why(benchmark: Path, runner: Runner, script: str, failed: bool, why: str) -> None:
    benchmark.write_text(script)
    (outcome,) = runner.run([a_source()])
    assert (outcome.failed, outcome.findings()) == (failed, [])
    assert why in outcome.why_not
    told = report_json([chapter(PAPERS["di-ps"], [outcome], runner)], quick=True)
    (place,) = [one for one in told["papers"][0]["places"] if one["place"] == "Figure 9"]
    assert place["missing"] == [{"command": "python benchmarks/bench_own.py", "why": outcome.why_not}]


def test_what_is_left_out_is_not_run_and_the_place_says_so(benchmark: Path, runner: Runner) -> None:
    pictures = (Picture("Figure 9", "it.png", "Speed"),)
    left_out = a_source(name="larger", program=("bench_absent.py", "--setup", "larger"), pictures=pictures)
    outcomes = replace(runner, without=("--setup larger",)).run([a_source(), left_out])
    assert [outcome.failed for outcome in outcomes] == [False, False]
    found = {entry.place.name: entry for entry in chapter(PAPERS["di-ps"], outcomes, runner).entries}
    why = ("python benchmarks/bench_absent.py --setup larger", "left out (--without '--setup larger')")
    assert len(found["Figure 9"].rows) == 1
    assert found["Figure 9"].missing == (why,)
    assert found["Figure 10"].missing == (why,)


def test_a_quick_report_leaves_the_pictures_of_a_full_one(benchmark: Path, runner: Runner) -> None:
    def draw(told: Any, folder: Path) -> None:
        (folder / "it.png").write_bytes(PNG + told["n"].encode())

    benchmark.write_text("import json, sys; print(json.dumps({'n': sys.argv[1]}))")
    source = a_source(quick=("q",), full=("f",), pictures=(Picture("Figure 9", "it.png", "Speed"),), draw=draw)
    full = replace(runner, quick=False)
    for one in (full, runner, full):
        (outcome,) = one.run([source])
        assert (one.files(source) / "it.png").read_bytes() == PNG + outcome.told["n"].encode()
    assert (outcome.told, runner.run([source])[0].told) == ({"n": "f"}, {"n": "q"})


def test_a_picture_that_is_missing_is_a_failure(benchmark: Path, runner: Runner) -> None:
    (outcome,) = runner.run([a_source(pictures=(Picture("Figure 9", "it.png", "Speed"),))])
    assert outcome.failed
    assert "drew no it.png: see " in outcome.why_not


def test_the_same_results_give_the_same_report(benchmark: Path, runner: Runner) -> None:
    def draw(told: Any, folder: Path) -> None:
        (folder / "it.png").write_bytes(PNG)

    source = a_source(pictures=(Picture("Figure 9", "it.png", "Speed & <time>"),), draw=draw)
    made = []
    for _ in range(2):
        chapters = [chapter(PAPERS["di-ps"], runner.run([source]), runner)]
        made.append((json.dumps(report_json(chapters, True)), report_html(chapters, True), page(chapters[0], True)))
    assert made[0] == made[1]
    _, html, markdown = made[0]
    assert "<td>speed</td><td>2 x</td><td>3 x</td><td>1.50</td>" in html
    assert "Speed &amp; &lt;time&gt;" in html
    assert "<time>" not in html
    assert "| speed | 2 x | 3 x | 1.50 | measured |" in markdown
    assert "Made by `python benchmarks/bench_own.py`." in markdown
