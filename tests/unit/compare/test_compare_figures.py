"""The figures of the paper: what each runs, and what it says beside the paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from support.compare_records import record
from support.papers import SOURCES_OF_DI_PS

from dips.compare.figures import (
    FIGURES,
    FigureResult,
    figure_jobs,
    figure_json,
    figure_table,
    run_figure,
    spread,
    tell_figure,
    write_figure,
)
from dips.compare.jobs import ComparisonJob
from dips.compare.record import RunRecord
from dips.compare.setup import load_setup

SETUP = load_setup("small")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(60):
        (folder / f"{n}.txt").write_text(f"file {n}\n" * 100)
    return folder


def found(name: str, text: Path, losses: dict[str, float | None]) -> FigureResult:
    """The figure with a made-up loss for each line; those not named have 2.0."""
    figure = FIGURES[name]
    labels = [line.label for line in figure.lines(SETUP)]
    assert set(losses) <= set(labels)

    def gather(jobs: Sequence[ComparisonJob]) -> list[RunRecord]:
        return [record(job.method, job.seed, losses.get(label, 2.0)) for label, job in zip(labels, jobs, strict=True)]

    return run_figure(figure, SETUP, (1,), [text], gather)


def test_gaps_are_at_equal_distances() -> None:
    assert spread(4, 0.3) == pytest.approx((0.0, 0.1, 0.2, 0.3))
    assert spread(1, 0.4) == (0.0,)


def test_figure_2b_is_the_naive_method_with_growing_gaps() -> None:
    lines = FIGURES["2b"].lines(SETUP)
    assert [line.method for line in lines] == ["dp", "diloco", "diloco-clip", "async", "async", "async", "async"]
    assert [max(line.setup.clusters.gaps) for line in lines[3:]] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_figure_7_is_the_default_method_with_large_gaps() -> None:
    lines = FIGURES["7"].lines(SETUP)[3:]
    assert [(line.method, line.label) for line in lines] == [("dips", f"Async-{x}") for x in (40, 100, 200)]
    assert lines[-1].setup.clusters.gaps == pytest.approx((0.0, 2 / 3, 4 / 3, 2.0))


def test_figure_12_is_a_sweep_of_h() -> None:
    lines = FIGURES["12"].lines(SETUP)
    assert [line.setup.run.inner_steps for line in lines] == [4, 8, 16, 32, 64, 128]
    assert {max(line.setup.clusters.gaps) for line in lines} == {0.5}


@pytest.mark.parametrize("name", FIGURES)
def test_the_files_of_a_figures_runs_are_not_each_others(name: str, text: Path) -> None:
    jobs = [job for _, job in figure_jobs(FIGURES[name].lines(SETUP), (1, 2), [text])]
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    assert len({job.digest() for job in jobs}) == len(jobs)


def test_runs_of_the_plain_comparison_are_shared(text: Path) -> None:
    jobs = [job for _, job in figure_jobs(FIGURES["7"].lines(SETUP), (1,), [text])]
    assert [job.name for job in jobs[:3]] == ["dp-1", "diloco-1", "diloco-clip-1"]
    assert jobs[2].digest() == ComparisonJob("diloco-clip", 1, SETUP, jobs[2].text).digest()


def test_a_sweep_of_h_leaves_the_files_of_other_comparisons_alone(text: Path) -> None:
    """A run at the set-up's H is that of the plain comparison, or has a file of its own."""
    jobs = [job for _, job in figure_jobs(FIGURES["12"].lines(SETUP), (1,), [text])]
    assert [job.name for job in jobs] == [f"dips-{h}1" for h in ("h-4-", "h-8-", "", "h-32-", "h-64-", "h-128-")]
    assert jobs[2].digest() == ComparisonJob("dips", 1, SETUP, jobs[2].text).digest()
    close = SETUP.with_overrides(gaps=(0.0, 0.1, 0.2, 0.3))
    jobs = [job for _, job in figure_jobs(FIGURES["12"].lines(close), (1,), [text])]
    assert jobs[2].name == "dips-h-16-1"
    assert jobs[2].setup.clusters.gaps == pytest.approx((0.0, 0.5 / 3, 1 / 3, 0.5))


def test_2b_says_who_fails_to_converge(text: Path) -> None:
    losses = {"Async-10": 2.6, "Async-20": 2.4, "Async-30": None, "Async-40": 6.0}
    result = found("2b", text, losses)
    assert result.figure.reading(result.summaries) == (
        "Async-10 +0.60, Async-20 +0.40, Async-30 not finite, Async-40 +4.00 above DiLoCo, clip 1; 3 of 4 fail to "
        "converge (not finite, or 0.5 above). The loss does not grow with each step of the gap."
    )
    growing = found("2b", text, {"Async-10": 2.6, "Async-20": 2.7, "Async-30": 2.8, "Async-40": 2.9})
    assert growing.figure.reading(growing.summaries).endswith("The loss grows with the gap.")


def test_7_says_who_stays_near(text: Path) -> None:
    result = found("7", text, {"Async-40": 2.01, "Async-100": 2.2, "Async-200": None})
    assert result.figure.reading(result.summaries) == (
        "Async-40 +0.01, Async-100 +0.20, Async-200 not finite above DiLoCo, clip 1; lost: Async-200; 1 of 3 within "
        "0.15 of it."
    )


def test_12_says_which_h_is_best(text: Path) -> None:
    result = found("12", text, {"H 4": 2.1, "H 64": 1.9, "H 128": None})
    assert result.figure.reading(result.summaries) == (
        "best is H 64 with 1.900; H 4 +0.200, H 8 +0.100, H 16 +0.100, H 32 +0.100, H 128 not finite."
    )
    nothing = found("12", text, dict.fromkeys((f"H {h}" for h in (4, 8, 16, 32, 64, 128)), None))
    assert nothing.figure.reading(nothing.summaries) == "no run ended with a finite loss."


def test_a_figure_is_told_with_the_papers_words_beside_ours(text: Path) -> None:
    result = found("7", text, {})
    console = Console(width=120)
    with console.capture() as capture:
        tell_figure(result, console)
    told = " ".join(capture.get().split())
    assert "Figure 7: Di-PS, gaps to 40, 100 and 200 %; loss after 786.4k tokens" in told
    assert 'the paper (4.1): "Di-PS can provide a stable convergence' in told
    assert "here: Async-40 +0.00, Async-100 +0.00" in told
    assert "times are not comparable" in told
    assert figure_table(result).row_count == 6


def test_a_figures_files(tmp_path: Path, text: Path) -> None:
    result = found("2b", text, {"Async-40": None})
    plain, picture = write_figure(result, tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    kept = json.loads(plain.read_text())
    assert kept == json.loads(json.dumps(figure_json(result)))
    assert kept["lines"]["Async-40"]["loss_mean"] is None
    assert kept["lines"]["DP"]["seeds"]["1"]["loss"] == 2.0
    assert kept["paper"]["section"] == "2.2"
    words, *losses = SOURCES_OF_DI_PS["losses-2b"].findings(kept)
    assert (words.published, words.ours) == (kept["paper"]["statement"], kept["here"])
    assert {finding.what: finding.ours for finding in losses}["Async-40: loss at the end"] == "not finite"
