"""`dips compare` as a person meets it: what is asked for, what is refused, what is said and written."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.compare_records import record, speed_comparison

from dips.cli import compare as command_compare
from dips.cli import main
from dips.compare.jobs import ComparisonJob, Results
from dips.compare.methods import METHODS
from dips.compare.record import RunRecord
from dips.compare.setup import ComparisonSetup, shipped
from dips.compare.speed import SpeedFigure, SpeedResult


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ComparisonJob]:
    """Instead of being run, jobs are noted here; each has a made-up result, which is kept."""
    jobs: list[ComparisonJob] = []

    def gather(todo: Sequence[ComparisonJob], run_dir: Path, *_: Any, **__: Any) -> list[RunRecord]:
        jobs.extend(todo)
        found = [record(job.method, job.seed, inject=job.inject) for job in todo]
        for job, made in zip(todo, found, strict=True):
            Results(run_dir).keep(job, made)
        return found

    monkeypatch.setattr(command_compare, "gather", gather)
    return jobs


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main.run(["compare", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_the_list_names_methods_with_their_settings_and_set_ups(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "--list")
    assert code == 0
    for name in (*METHODS, *(f"set-up {name}" for name in shipped())):
        assert name in out
    assert "--preset safe" in out


def test_the_default_methods_run(
    tmp_path: Path, asked: list[ComparisonJob], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = told(capsys, "--run-dir", tmp_path)
    assert code == 0
    assert ",".join(job.method for job in asked) == command_compare.DEFAULT_METHODS
    assert {(job.seed, job.setup.name, job.inject) for job in asked} == {(1, "small", "")}
    for words in ("one step", "links up", "AdamW", "seeds", "held-out loss after", "rounds and pushes", "One seed"):
        assert words in out
    assert str(tmp_path / "loss-time.png") in out


def test_what_is_said_is_run(tmp_path: Path, asked: list[ComparisonJob], capsys: pytest.CaptureFixture[str]) -> None:
    wish = "--methods dips,dynamic,dips --seeds 3,1 --gaps 0,50% --inner-steps 8 --tokens 20k --inject x30"
    code, out, _ = told(capsys, *wish.split(), "--run-dir", tmp_path)
    assert code == 0
    assert [(job.method, job.seed) for job in asked] == [("dips", 3), ("dynamic", 3), ("dips", 1), ("dynamic", 1)]
    setup = asked[0].setup
    assert (setup.clusters.gaps, setup.run.inner_steps, setup.run.tokens) == ((0.0, 0.5), 8, 20_000)
    assert {job.inject for job in asked} == {"x30"}
    assert "x30, into pushes of cluster a" in out


def test_files_and_json(tmp_path: Path, asked: list[ComparisonJob], capsys: pytest.CaptureFixture[str]) -> None:
    wish = "--methods dp,dips --against dips --seeds 1,2 --json"
    code, out, _ = told(capsys, *wish.split(), "--run-dir", tmp_path / "new")
    assert code == 0
    plain = json.loads(out)
    assert plain == json.loads((tmp_path / "new" / "compare.json").read_text())
    assert list(plain["methods"]["dp"]["minus"]) == ["dips"]
    assert list(plain["methods"]["dips"]["seeds"]) == ["1", "2"]
    for name in ("loss-tokens", "loss-time", "norms", "cosines"):
        assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_clean_runs_beside_spoilt(
    tmp_path: Path, asked: list[ComparisonJob], capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--methods", "dips", "--json", "--run-dir", tmp_path]
    assert json.loads(told(capsys, *run)[1])["methods"]["dips"]["minus_clean"] is None
    assert json.loads(told(capsys, *run, "--inject", "nan")[1])["methods"]["dips"]["minus_clean"] == 0.0
    assert (
        json.loads(told(capsys, *run, "--inject", "nan", "--tokens", "9k")[1])["methods"]["dips"]["minus_clean"] is None
    )


def test_a_figure_of_losses(tmp_path: Path, asked: list[ComparisonJob], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "--figure", "12", "--seeds", "1,2", "--tokens", "20k", "--run-dir", tmp_path)
    assert code == 0
    assert [job.setup.run.inner_steps for job in asked] == [4, 8, 16, 32, 64, 128] * 2
    assert {job.setup.run.tokens for job in asked} == {20_000}
    assert "Figure 12: Di-PS, inner steps between two pushes" in out
    assert str(tmp_path / "figure-12.png") in out
    _, out, _ = told(capsys, "--figure", "12", "--json", "--run-dir", tmp_path)
    assert json.loads(out) == json.loads((tmp_path / "figure-12.json").read_text())


def test_throughput_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ComparisonSetup] = []

    def run_speed(figure: SpeedFigure, setups: Sequence[ComparisonSetup], seed: int, *_: Any) -> list[SpeedResult]:
        seen.extend(setups)
        return [SpeedResult(setup, [("1 Gbit/s", speed_comparison(setup))]) for setup in setups]

    monkeypatch.setattr(command_compare, "run_speed", run_speed)
    code, out, _ = told(capsys, "--figure", "9", "--inner-steps", 16, "--run-dir", tmp_path)
    assert code == 0
    assert [(setup.name, setup.run.inner_steps) for setup in seen] == [("emulated", 16), ("real", 16)]
    assert "Figure 9, real: tokens a second, of ideal" in " ".join(out.split())
    assert str(tmp_path / "figure-9-emulated.png") in out
    seen.clear()
    assert told(capsys, "--figure", "9", "--setup", "small", "--run-dir", tmp_path)[0] == 0
    assert [setup.name for setup in seen] == ["small"]


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ("--methods dipz", "there is no method 'dipz': did you mean 'dips'?"),
        ("--methods ,", "names no method: write names with commas"),
        ("--methods safe --against dips", "--against dips: that method is not in --methods safe: add it there"),
        ("--seeds 1,two", "--seeds '1,two': write numbers with commas, such as 1,2,3"),
        ("--seeds -1", "write numbers with commas"),
        ("--gaps 0,wide", "--gaps '0,wide': write numbers with commas, such as 0,16,33,50"),
        ("--gaps 0,-5", "a gap is the additional time of a step, so 0 or more"),
        ("--tokens many", "--tokens: 'many' is not a count"),
        ("--inject magic", "--inject 'magic' is not known: choose one of nan, x30, flip, noise"),
        ("--setup nowhere", "neither a file nor a set-up that comes with dips"),
        ("--data nowhere.txt", "data path nowhere.txt does not exist"),
        ("--run-dir pyproject.toml/x", "cannot be made: "),
        ("--figure 3", "--figure '3' is not known: choose one of 2b, 7, 9, 10, 12"),
        ("--figure 7 --methods dips", "figure 7 does not use --methods: leave --methods out, or leave --figure out"),
        ("--figure 2b --gaps 0,10", "figure 2b does not use --gaps"),
        ("--figure 9 --tokens 5k", "figure 9 does not use --tokens"),
        ("--figure 7 --rounds 8", "--rounds is for the figures 9 and 10: leave it out"),
        ("--rounds 8", "--rounds is for the figures 9 and 10: leave it out"),
        ("--figure 10 --inject nan", "figure 10 does not use --inject"),
        ("--figure 9 --seeds 1,2", "figure 9 does not use several --seeds"),
        ("--figure 9 --again", "figure 9 does not use --again"),
        ("--figure 9 --lr 1e-3", "figure 9 does not use --lr"),
        ("--figure 9 --inner-optimizer muon", "figure 9 does not use --inner-optimizer"),
        ("--inner-optimizer sgd", "inner_optimizer = 'sgd': Input should be 'adamw' or 'muon'"),
        ("--lr 0", "lr"),
        ("--setup emulatd", "weak-scaling): did you mean 'emulated'?"),
        ("--inner-steps 0", "Invalid value for '--inner-steps'"),
        ("--jobs 0", "Invalid value for '--jobs'"),
    ],
)
def test_a_slip_is_one_sentence_with_its_remedy(
    wish: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    code, out, error = told(capsys, *wish.split())
    assert (code, out) == (2, "")
    assert sentence in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("package", ["torch", "matplotlib", "numba"])
def test_a_missing_package_is_told_before_anything_runs(
    package: str,
    tmp_path: Path,
    asked: list[ComparisonJob],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    code, _, error = told(capsys, "--run-dir", tmp_path)
    assert code == 2
    assert f"this command needs {package}: pip install 'dips-training[" in error
    assert not asked
