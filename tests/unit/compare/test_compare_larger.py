"""The set-up of a larger model: its size, its device, its threads, and the six runs of its figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.compare_records import record

from dips.cli import main
from dips.core.errors import ConfigError
from dips.lab.compare.figures import FIGURES, Figure
from dips.lab.compare.jobs import ComparisonJob, Results, on_device, threads_of
from dips.lab.compare.setup import load_setup

LARGER = load_setup("larger")
ON_CPU = LARGER.with_overrides(device="cpu")


def test_auto_becomes_the_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LARGER.run.device == "auto"
    for available, device in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert on_device(LARGER).run.device == device
        assert on_device(LARGER, "cpu").run.device == "cpu"
        assert on_device(load_setup("small")).run.device == "cpu"


def test_a_missing_device_is_one_sentence_and_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for what in (["--methods", "dips"], ["--figure", "2b"]):
        assert main.run(["compare", *what, "--device", "cuda", "--run-dir", str(tmp_path / "run")]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("dips: device is cuda, but this PyTorch finds no CUDA device: give --device cpu")
        assert len(told.err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_result_of_another_device_is_not_taken(tmp_path: Path) -> None:
    on_cpu = ComparisonJob("dips", 1, ON_CPU, text="t")
    on_cuda = replace(on_cpu, setup=LARGER.with_overrides(device="cuda"))
    assert on_cpu.digest() != on_cuda.digest()
    results = Results(tmp_path)
    results.keep(replace(on_cpu, threads=2), record())
    kept = json.loads(results.path(on_cpu).read_text())
    assert (kept["device"], kept["threads"]) == ("cpu", 2)
    assert results.load(on_cuda) is None
    assert results.load(on_cpu) == record(), "with one thread or two it is the same run"


@pytest.mark.parametrize(("at_once", "n_cores", "threads"), [(2, 2, 1), (1, 2, 2), (6, 16, 2), (1, 64, 8), (4, 2, 1)])
def test_cores_without_a_run_become_threads(at_once: int, n_cores: int, threads: int) -> None:
    assert threads_of(LARGER, at_once, n_cores) == threads
    assert threads_of(load_setup("small"), at_once, n_cores) == 1


@pytest.mark.parametrize(
    ("figure", "labels", "words"),
    [
        (FIGURES["7"], ("DiLoCo, clip 1", "Async-50"), "there is no line 'Async-50': choose from 'DP', 'DiLoCo'"),
        (FIGURES["2b"], ("DP", "Async-40"), "give 'DiLoCo, clip 1', with which the others are compared"),
        (FIGURES["12"], (), "give a line"),
    ],
)
def test_lines_that_cannot_be_are_refused_with_their_place(figure: Figure, labels: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        figure.chosen(LARGER.model_copy(update={"figures": {figure.name: labels}}))
    assert str(caught.value).startswith(f"set-up larger [figures] {figure.name}: ")
    assert words in str(caught.value)
