"""`dips compare`: which runs are asked for, what is written, and what a person reads; the runs are played."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.compare_records import record

from dips.cli import main
from dips.lab.commands import compare
from dips.lab.compare.figures import FIGURES
from dips.lab.compare.jobs import ComparisonJob, Results
from dips.lab.compare.methods import METHODS
from dips.lab.compare.record import RunRecord
from dips.lab.compare.report import REFERENCES
from dips.lab.compare.setup import load_setup, shipped
from dips.lab.compare.speed import ROUNDS, SPEED_FIGURES

Asked = list[tuple[Any, ...]]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Two files of text."""
    for name in "xy":
        (tmp_path / f"{name}.txt").write_text(f"{name} what is trained on and what is held out\n" * 4000)
    return tmp_path / "x.txt"


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[ComparisonJob]], Asked]:
    """Each job has a record at once; those of the second seed lose more."""
    jobs_asked, places = list[list[ComparisonJob]](), Asked()

    def played(jobs: Sequence[ComparisonJob], folder: Path, processes: int, *_: object, again: bool) -> list[RunRecord]:
        jobs_asked.append([*jobs])
        places.append((folder, processes, again))
        return [record(job.method, job.seed, 1.9 + job.seed / 10, inject=job.inject) for job in jobs]

    monkeypatch.setattr(compare, "gather", played)
    return jobs_asked, places


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """What is drawn into which file."""
    found: dict[str, tuple[Any, ...]] = {}

    def into(path: Path, *given: Any) -> None:
        found[path.name] = given

    for name in ("draw_curves", "draw_norms", "draw_cosines"):
        monkeypatch.setattr(compare, name, into)
    return found


def test_methods_are_compared_with_every_seed_on_the_set_up_as_it_was_changed(
    text: Path,
    tmp_path: Path,
    gathered: tuple[list[list[ComparisonJob]], Asked],
    drawn: dict[str, tuple[Any, ...]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "deep" / "out"
    words = ["compare", "--methods", "dips, diloco-clip,dips", "--seeds", "2,1", "--data", str(text), "--device", "cpu"]
    more = ["--gaps", "0,50 %", "--inner-steps", "4", "--tokens", "96k", "--lr", "0.01", "--inner-optimizer", "muon"]
    more += ["--outer-lr", "0.9"]
    assert main.run([*words, *more, "--run-dir", str(out), "--jobs", "3", "--again", "--against", "diloco-clip"]) == 0
    ((jobs,), places) = gathered
    assert [(job.method, job.seed, job.inject, job.data) for job in jobs] == [
        (method, seed, "", (text,)) for seed in (2, 1) for method in ("dips", "diloco-clip")
    ]
    assert places == [(out, 3, True)]
    setup = jobs[0].setup
    assert (setup.clusters.gaps, setup.run.inner_steps, setup.run.tokens) == ((0.0, 0.5), 4, 96_000)
    assert (setup.inner.lr, setup.inner.inner_optimizer, setup.run.device) == (0.01, "muon", "cpu")
    written = load_setup("small").master
    assert setup.master == {**written, "outer_lr": 0.9}
    told = capsys.readouterr().out
    kept = json.loads((out / "compare.json").read_text())
    assert kept["seeds"] == [2, 1]
    assert kept["inject"] == ""
    assert "seeds       2, 1\n" in told
    assert "injected" not in told
    assert told.splitlines()[-5:] == [str(out / name) for name in ("compare.json", *drawn)]
    assert all(f"{what:<11} {value}" in told for what, value in setup.describe())
    assert {"diloco-clip", "dips"} <= set(told.split())
    assert list(drawn) == ["loss-tokens.png", "loss-time.png", "norms.png", "cosines.png"]
    curves, axis, title = drawn["loss-time.png"]
    assert ([(name, one.seed) for name, one in curves], axis) == ([(job.method, job.seed) for job in jobs], "virtual_s")
    assert drawn["loss-tokens.png"] == (curves, "tokens", title)
    assert "H 4" in title
    assert "corrupted" not in title
    assert [[one.seed for one in drawn[name][0]] for name in ("norms.png", "cosines.png")] == [[2, 2]] * 2


def test_an_injection_is_compared_with_the_clean_runs_that_are_kept(
    text: Path,
    tmp_path: Path,
    gathered: tuple[list[list[ComparisonJob]], Asked],
    drawn: dict[str, tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    looked: list[tuple[str, str]] = []

    def kept(results: Results, job: ComparisonJob) -> RunRecord | None:
        looked.append((results.folder.parent.name, job.name))
        return record(job.method, job.seed, 1.5) if job.seed == 1 else None

    monkeypatch.setattr(Results, "load", kept)
    words = ["compare", "--methods", "dp,dips", "--seeds", "1,2", "--inject", "nan", "--data", str(text)]
    assert main.run([*words, "--run-dir", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    ((jobs,), ((_, processes, again),)) = gathered
    assert [job.inject for job in jobs] == ["", "nan"] * 2
    assert (processes >= 1, again) == (True, False)
    assert looked == [("out", "dips-1"), ("out", "dips-2")], "only those that were spoilt"
    assert "injected    nan, into pushes of cluster a" in told
    assert "(nan)" in drawn["loss-tokens.png"][2]
    whole = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert whole["inject"] == "nan"
    assert whole["methods"]["dips"]["minus_clean"] == pytest.approx(0.5)
    assert main.run([*words, "--run-dir", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == whole


# ---- figures ----


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """A figure's work is played: what it was asked is also what is told, as JSON and as text."""
    asked: Asked = []

    def run(*given: Any) -> Any:
        asked.append(given)
        return given

    def tell(*given: Any) -> None:
        given[-1].print(f"told of {given[0] if len(given) > 2 else given[0][0]}"[:40])

    for kind in ("figure", "speed"):
        monkeypatch.setattr(compare, f"run_{kind}", run)
        monkeypatch.setattr(compare, f"tell_{kind}", tell)
        monkeypatch.setattr(compare, f"write_{kind}", lambda *given: [given[-1] / "figure.png"])
        monkeypatch.setattr(compare, f"{kind}_json", lambda *given: {"found": len(given)})
    return asked


def test_a_figure_about_losses_runs_its_lines(
    text: Path, tmp_path: Path, figures: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--figure", "7", "--seeds", "1,2", "--tokens", "64k", "--inner-steps", "8", "--lr", "0.02"]
    place = ["--run-dir", str(tmp_path / "out"), "--data", str(text), "--inner-optimizer", "muon", "--setup", "real"]
    assert main.run([*words, *place]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("told of ")
    assert told[-1] == str(tmp_path / "out" / "figure.png")
    ((figure, setup, seeds, data, gather),) = figures
    assert (figure, seeds, [*data]) == (FIGURES["7"], (1, 2), [text])
    assert (setup.run.tokens, setup.run.inner_steps, setup.inner.lr) == (64_000, 8, 0.02)
    assert (setup.name, setup.inner.inner_optimizer) == ("real", "muon")
    assert setup.clusters.gaps == load_setup("real").clusters.gaps
    assert callable(gather)
    assert main.run([*words, *place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"found": 1}


@pytest.mark.parametrize(
    ("more", "setups", "rounds", "seed"),
    [
        ([], SPEED_FIGURES["9"].setups, ROUNDS, 1),
        (["--setup", "real", "--rounds", "9", "--seeds", "5"], ("real",), 9, 5),
    ],
)
def test_a_figure_about_speeds_runs_on_its_set_ups(
    more: list[str],
    setups: tuple[str, ...],
    rounds: int,
    seed: int,
    tmp_path: Path,
    figures: Asked,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["compare", "--figure", "9", "--run-dir", str(tmp_path / "out"), "--jobs", "2", "--inner-steps", "12"]
    assert main.run([*words, *more]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out" / "figure.png")
    ((figure, chosen, *others),) = figures
    assert figure is SPEED_FIGURES["9"]
    assert [(one.name, one.run.inner_steps) for one in chosen] == [(name, 12) for name in setups]
    assert others[:3] == [seed, rounds, 2]


def test_methods_and_set_ups_are_listed_with_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["compare", "--list"]) == 0
    told = capsys.readouterr().out
    for name, method in METHODS.items():
        assert any(line.split()[:1] == [name] for line in told.splitlines())
        assert all(f"(+ {flag}" in told for flag in method.flags_of_clusters()[:1])
        assert all(flag.split()[0] in told for flag in method.flags())
    for name in shipped():
        assert f"set-up {name}: {load_setup(name).run.about[:40]}" in told
    assert main.run(["compare", "--list", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["methods"]) == list(METHODS)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "9"], "--rounds is for"),
        (["--against", "dp", "--methods", "dips"], "--against dp: that method is not in --methods dips: add it there"),
        (["--against", ","], "--against"),
        (["--methods", "dipz"], "there is no method 'dipz': did you mean 'dips'?"),
        (["--methods", "zzz"], "choose from dp, diloco"),
        (["--methods", ","], "names no method: write names with commas"),
        (["--inject", "nonsense"], "--inject 'nonsense' is not known: choose one of nan, x30, flip, noise"),
        (["--seeds", "1,two"], "--seeds '1,two': write numbers with commas, such as 1,2,3"),
        (["--gaps", "much"], "--gaps 'much': write numbers with commas, such as 0,16,33,50"),
        (["--gaps", "0,-5"], "a gap is the additional time of a step, so 0 or more"),
        (["--tokens", "many"], "--tokens: 'many' is not a count"),
        (["--setup", "nowhere"], "neither a file nor a set-up that comes with dips"),
        (["--setup", "emulatd"], "weak-scaling): did you mean 'emulated'?"),
        (["--data", "nowhere.txt"], "data path nowhere.txt does not exist"),
        (["--inner-optimizer", "sgd"], "inner_optimizer = 'sgd': Input should be 'adamw' or 'muon'"),
        (["--outer-momentum", "1"], "outer_momentum is 1.0; it must be between 0 and 1"),
        (["--inner-steps", "0"], "Invalid value for '--inner-steps'"),
        (["--figure", "8"], "--figure '8' is not known: choose one of 2b, 7, 9, 10, 12"),
        (["--figure", "7", "--methods", "dips"], "figure 7 does not use --methods: leave --methods out"),
        (["--figure", "9", "--tokens", "5k"], "figure 9 does not use --tokens"),
        (["--figure", "9", "--seeds", "1,2"], "figure 9 does not use several --seeds"),
    ],
)
def test_an_option_that_cannot_be_is_named_before_anything_runs(
    words: list[str], said: str, figures: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["compare", *words]) == 2
    told = capsys.readouterr()
    assert (said in told.err, told.err.count("\n"), told.out) == (True, 1, ""), told.err
    assert not figures


def test_a_place_or_a_package_that_is_missing_is_told_before_anything_runs(
    tmp_path: Path, figures: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for words in (["--figure", "9"], ["--figure", "7"], ["--methods", "dips"]):
        assert main.run(["compare", *words, "--run-dir", str(tmp_path / "file" / "x")]) == 2
        assert "--run-dir" in capsys.readouterr().err
    for package in ("torch", "matplotlib", "numba"):
        found: Callable[[str], object] = lambda name, package=package: None if name == package else name  # type: ignore[misc]  # noqa: E731
        monkeypatch.setattr("importlib.util.find_spec", found)
        assert main.run(["compare", "--figure", "9", "--run-dir", str(tmp_path)]) == 2
        assert f"this command needs {package}: pip install '.[" in capsys.readouterr().err
    assert not figures


def test_the_references_are_those_that_are_compared() -> None:
    assert compare.references_of(None, ["dips"]) == REFERENCES
    assert compare.references_of("dips, dp", ["dp", "dips"]) == ("dips", "dp")
