"""The report of the papers: how each number was made, that no place is forgotten, and what happens to a failure."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from papers import source as module
from papers.findings import Finding, Kind, shown
from papers.papers import PAPERS
from papers.planning import SECTIONS, Checks, section_of
from papers.report import chapter, page, report_html, report_json
from papers.source import Commands, Outcome, Picture, Runner, Source
from support.waiting import until

from dips.core.errors import DipsError
from dips.planner.validation.checks import holds, within

SOURCES = [source for paper in PAPERS.values() for source in paper.sources]
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


def test_a_finding_is_fitted_whatever_its_command(runner: Runner) -> None:
    def both(told: Any) -> list[Finding]:
        return [Finding("Figure 9", "free", 1.0, 1.0), Finding("Figure 9", "chosen", 1.0, 1.0, kind=Kind.FITTED)]

    for program, kind in (
        (("bench_x.py",), Kind.MEASURED),
        (("simulate",), Kind.SIMULATED),
        (("plan",), Kind.COMPUTED),
    ):
        outcome = Outcome(a_source(program=program, findings=both), {})
        (entry,) = [one for one in chapter(PAPERS["di-ps"], [outcome], runner).entries if one.rows]
        assert [row.kind for row in entry.rows] == [kind, Kind.FITTED]


@pytest.mark.parametrize("paper", SECTIONS)
def test_every_section_is_at_a_place_of_its_paper(paper: str) -> None:
    for section in SECTIONS[paper]:
        assert not PAPERS[paper].place(section.place).without


def test_an_unknown_place_is_an_error_that_names_it() -> None:
    with pytest.raises(DipsError, match="Figure 99: add it"):
        PAPERS["jeeves"].place("Figure 99")
    with pytest.raises(DipsError, match="JEEVES, section 7"):
        section_of("jeeves", "JEEVES, section 7: new", "x")


@pytest.mark.parametrize(
    ("about", "what", "fitted"),
    [
        ("SpanTrain, section 3.2.2 (Figure 5)", "setting 2: one group, since all networks are alike", True),
        ("SpanTrain, section 3.2.2 (Figure 5)", "FG2 keeps all devices single", False),
        ("SpanTrain, section 3.3.1 (Figure 6)", "the compact order is never longer over slow links", True),
        ("SpanTrain, section 3.3.1 (Figure 6)", "and shorter where a message takes T_F or more", True),
    ],
)
def test_what_follows_from_a_threshold_that_was_chosen_for_it_is_fitted(about: str, what: str, fitted: bool) -> None:
    assert section_of("spantrain", about, what).fitted is fitted


def test_statements_hold_or_do_not() -> None:
    about = "JEEVES, section 4: GPT-3\nassumed: much"
    told = [holds(about, "faster", True).to_json(), holds(about, "slower", False).to_json()]
    told.append(within(about, "time", 2.0, 3.0, 0.1).to_json())
    yes, no, number = Checks("jeeves")(told)
    assert (yes.published, yes.ours, no.ours) == ("holds", "holds", "does not hold")
    assert (number.ratio, number.assumption, number.kind) == ("1.50", "section 4: GPT-3; assumed: much", Kind.FITTED)


@pytest.mark.parametrize(
    ("published", "ours", "ratio"),
    [
        (2.0, 3.0, "1.50"),
        ((1.0, 2.0), (1.0, 3.0), "1.00 to 1.50"),
        ((1.0, 2.0), 3.0, "1.50 to 3.00"),
        (2.0, (1.0, 3.0), "0.50 to 1.50"),
        (None, 3.0, ""),
        ("grows", 3.0, ""),
        (0.0, 1.0, ""),
        (1.0, 0.0, "0.00"),
    ],
)
def test_the_ratio_is_of_numbers_alone(published: Any, ours: Any, ratio: str) -> None:
    assert Finding("Figure 9", "it", published, ours).ratio == ratio


def test_values_have_units() -> None:
    assert shown(0.982, "%") == "98.2 %"
    assert shown((1.23, 1.38), "x") == "1.230 to 1.380 x"
    assert (shown(None, "x"), shown("it grows", "x"), shown(2.3e12, "")) == ("", "it grows", "2.3e+12")


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


def test_a_place_with_all_of_its_pictures_misses_nothing(benchmark: Path, runner: Runner) -> None:
    def draw(told: Any, folder: Path) -> None:
        (folder / "it.png").write_bytes(PNG)

    drawn = a_source(pictures=(Picture("Figure 8", "it.png", "Clusters"),), draw=draw)
    left_out = a_source(name="larger", program=("bench_absent.py", "--setup", "larger"))
    outcomes = replace(runner, without=("--setup larger",)).run([drawn, left_out])
    found = {entry.place.name: entry for entry in chapter(PAPERS["di-ps"], outcomes, runner).entries}
    assert (len(found["Figure 8"].pictures), found["Figure 8"].missing) == (1, ())


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


def test_what_is_measured_runs_first_and_results_keep_their_order(benchmark: Path, runner: Runner) -> None:
    said: list[str] = []
    groups = next(source for source in PAPERS["spantrain"].sources if source.name.startswith("groups-"))
    outcomes = replace(runner, say=said.append).run([groups, a_source()])
    assert said == ["2 of 2: python benchmarks/bench_own.py", f"1 of 2: {groups.command(quick=True)}"]
    assert [outcome.source.name for outcome in outcomes] == [groups.name, "links"]


MEETS = """import pathlib, signal, sys
signal.alarm(20)  # ends the process
open(pathlib.Path(__file__).with_name('fifo'), sys.argv[1])  # waits for who opens the other end
print('{"n": 2}')"""


def test_what_needs_little_runs_side_by_side(benchmark: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark.write_text(MEETS)
    os.mkfifo(benchmark.with_name("fifo"))
    monkeypatch.setattr(Source, "wants_the_machine", False)
    monkeypatch.setattr(module, "usable_processors", lambda: 2)
    sources = [a_source(name=name, program=("bench_own.py", name)) for name in ("r", "w")]
    assert [outcome.told for outcome in runner.run(sources)] == [{"n": 2}, {"n": 2}]


WAITS = """import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background ignores it
print('waits', file=sys.stderr, flush=True)
signal.pause()"""


def test_an_interrupt_ends_the_commands_and_none_begins(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with ThreadPoolExecutor(1) as pool:
        with suppress(KeyboardInterrupt), Commands() as running:
            waiting = pool.submit(running.run, [sys.executable, "-c", WAITS], tmp_path)
            until(lambda: log.exists() and log.read_text() == "waits\n", "it began")
            raise KeyboardInterrupt
        assert waiting.result().complaint == "KeyboardInterrupt"
        with pytest.raises(DipsError, match="interrupted"):
            running.run([sys.executable, "-c", ""], tmp_path)


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
