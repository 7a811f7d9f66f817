"""The figures of the paper: what each runs, and what it says beside the paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.compare_records import record
from support.papers import SOURCES_OF_DI_PS

from dips.lab.compare.figures import FIGURES, FigureResult, figure_jobs, figure_json, run_figure, write_figure
from dips.lab.compare.jobs import ComparisonJob
from dips.lab.compare.record import RunRecord
from dips.lab.compare.setup import load_setup

SETUP = load_setup("small")


def found(name: str, text: Path, losses: dict[str, float | None]) -> FigureResult:
    """The figure with a made-up loss for each line; those not named have 2.0."""
    figure = FIGURES[name]
    labels = [line.label for line in figure.lines(SETUP)]
    assert set(losses) <= set(labels)

    def gather(jobs: Sequence[ComparisonJob]) -> list[RunRecord]:
        return [record(job.method, job.seed, losses.get(label, 2.0)) for label, job in zip(labels, jobs, strict=True)]

    return run_figure(figure, SETUP, (1,), [text], gather)


@pytest.mark.parametrize("name", FIGURES)
def test_the_files_of_a_figures_runs_are_not_each_others(name: str, text: Path) -> None:
    jobs = [job for _, job in figure_jobs(FIGURES[name].lines(SETUP), (1, 2), [text])]
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    assert len({job.digest() for job in jobs}) == len(jobs)


def test_a_sweep_of_h_leaves_the_files_of_other_comparisons_alone(text: Path) -> None:
    """A run at the set-up's H is that of the plain comparison, or has a file of its own."""
    jobs = [job for _, job in figure_jobs(FIGURES["12"].lines(SETUP), (1,), [text])]
    assert [job.name for job in jobs] == [f"dips-{h}1" for h in ("h-4-", "h-8-", "", "h-32-", "h-64-", "h-128-")]
    assert jobs[2].digest() == ComparisonJob("dips", 1, SETUP, jobs[2].text).digest()
    close = SETUP.with_overrides(gaps=(0.0, 0.1, 0.2, 0.3))
    jobs = [job for _, job in figure_jobs(FIGURES["12"].lines(close), (1,), [text])]
    assert jobs[2].name == "dips-h-16-1"
    assert jobs[2].setup.clusters.gaps == pytest.approx((0.0, 0.5 / 3, 1 / 3, 0.5))


@pytest.mark.parametrize(
    ("name", "losses", "words"),
    [
        (
            "2b",
            {"Async-10": 2.6, "Async-20": 2.4, "Async-30": None, "Async-40": 6.0},
            ["Async-10 +0.60, ", "Async-30 not finite, ", "; 3 of 4 fail", "does not grow"],
        ),
        ("2b", {"Async-10": 2.6, "Async-20": 2.7, "Async-30": 2.8, "Async-40": 2.9}, ["loss grows with the gap"]),
        (
            "7",
            {"Async-40": 2.01, "Async-100": 2.2, "Async-200": None},
            ["Async-100 +0.20, ", "; lost: Async-200; 1 of 3 within"],
        ),
        ("12", {"H 4": 2.1, "H 64": 1.9, "H 128": None}, ["best is H 64 with 1.900; H 4 +0.200", "H 128 not finite"]),
        ("12", dict.fromkeys((f"H {h}" for h in (4, 8, 16, 32, 64, 128)), None), ["no run ended with a finite loss"]),
    ],
)
def test_a_figure_explains_its_losses(name: str, losses: dict[str, float | None], words: list[str], text: Path) -> None:
    result = found(name, text, losses)
    told = result.figure.reading(result.summaries)
    assert [word for word in words if word not in told] == []


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
