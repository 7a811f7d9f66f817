"""`dips demo` as it is: a short run with both faults, its report, and the model that it leaves."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.dips_command import dips

from dips.local.log_files import records, tape_path, training_losses

TEXT = Path(asyncio.__file__).parent


@pytest.fixture(scope="module")
def demo_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "run"


@pytest.fixture(scope="module")
def report(demo_dir: Path) -> dict[str, Any]:
    wish = ["--clusters", 2, "--minutes", 0.5, "--data", TEXT, "--json"]
    told = dips("demo", "--run-dir", demo_dir, *wish)
    assert told.returncode == 0, told.stderr[-4000:]
    loaded: dict[str, Any] = json.loads(told.stdout)
    assert loaded == json.loads((demo_dir / "report.json").read_text())
    return loaded


def test_the_report_says_what_happened(report: dict[str, Any]) -> None:
    assert set(report["checks"].values()) == {True}
    assert report["tokens"] >= report["tk_max_tokens"] > 0
    assert report["version"] == report["rounds"]  # version 0 is no round's
    assert report["merged_rounds"] >= 1  # how many depends on how busy the machine is
    assert sum(cluster["tokens"] for cluster in report["clusters"].values()) == report["tokens"]
    losses = [loss for _, loss in report["heldout_loss"]]
    assert losses[-1] < 4.5, "who knows nothing has ln 256 = 5.5"
    assert losses[-1] < losses[0]  # of the first version that was measured, which need not be the seed
    assert [tokens for tokens, _ in report["heldout_loss"]] == sorted(tokens for tokens, _ in report["heldout_loss"])
    assert report["heldout_versions"][-1]["version"] == report["version"]
    cluster, slave = report["faults"]
    assert (cluster["target"], slave["target"]) == ("b", "s1")
    for fault in (cluster, slave):
        assert 0 < fault["when"] < fault["back_when"] <= report["seconds"]
        assert fault["back_as"] != fault["incarnation"]
    assert report["clusters"]["b"]["incarnations"] >= 2
    assert report["slaves"]["s1"]["incarnations"] >= 2
    fast, slow = report["clusters"]["a"], report["clusters"]["b"]
    assert (fast["speed_gap"], slow["speed_gap"]) == (0.0, 0.5)
    assert fast["measured_speed"] > slow["measured_speed"] > 0
    assert fast["steps"] > 0
    assert slow["pushes_applied"] > 0


def test_the_launchers_tape_and_the_picture_tell_the_same(report: dict[str, Any], demo_dir: Path) -> None:
    tape = list(records(tape_path(demo_dir, "launch")))
    killed = [record["pid"] for record in tape if record["kind"] == "child_killed"]
    assert killed == [fault["pid"] for fault in report["faults"]]
    assert len([record for record in tape if record["kind"] == "child_started"]) == 6 + 2
    assert (demo_dir / "loss.png").stat().st_size > 10_000
    assert all(training_losses(tape_path(demo_dir, name)) for name in report["clusters"])


def test_the_exported_model_has_the_runs_loss(report: dict[str, Any], demo_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    told = dips("export", demo_dir, "--to", model, "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["version"] == report["version"]
    measured = dips("eval", model, "--data", TEXT, "--json", "--threads", os.cpu_count() or 1)
    assert measured.returncode == 0, measured.stderr
    assert json.loads(measured.stdout)["loss"] == pytest.approx(report["heldout_loss"][-1][1], abs=1e-6)


def test_a_version_before_the_last_can_be_exported(report: dict[str, Any], demo_dir: Path, tmp_path: Path) -> None:
    before = f"{report['timeline']}:{report['version'] - 1}"
    told = dips("export", demo_dir, "--to", tmp_path / "m.safetensors", "--version", before)
    assert told.returncode == 0, told.stderr
    assert f"version {before}" in told.stdout
