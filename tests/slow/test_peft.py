"""A LoRA of peft that two clusters train, one of them with wrapped blocks: exported, and opened by a fresh process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from support.dips_command import ROOT, dips, run_python
from support.three_facts import PATIENT, assert_three_facts
from support.up_run import UpRun

LOOP = ROOT / "tests" / "support" / "peft_loop.py"


def heldout(said: str) -> list[float]:
    line = next(line for line in reversed(said.splitlines()) if line.startswith("HELDOUT "))
    return [float(loss) for loss in line.split()[1:]]


def test_an_adapter_is_exported_as_it_was_trained(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("a", "b", "adapter", "merged", "whole")}
    programs = {
        name: (sys.executable, LOOP, "train", how, folders[name]) for name, how in (("a", "plain"), ("b", "wrapped"))
    }
    with UpRun(tmp_path, programs, master=PATIENT + 'tk_max = "16k"') as run:
        run.until_end()
    (before, of_a), (_, of_b) = (heldout(log.read_text()) for log in run.logs.values())
    assert_three_facts(run, {"a": folders["a"]})  # b's blocks are wrapped: its names are others
    told = dips("export", run.directory, "--to", folders["adapter"])
    assert told.returncode == 0, told.stderr
    assert "It is an adapter: load it with peft" in told.stdout
    told = dips("export", run.directory, "--to", folders["merged"], "--fill", folders["a"] / "base")
    assert told.returncode == 0, told.stderr
    trained, exported = (
        load_file(folders["a"] / "adapter.safetensors"),
        load_file(folders["adapter"] / "adapter_model.safetensors"),
    )
    assert trained.keys() == exported.keys()
    assert all(trained[name].tobytes() == exported[name].tobytes() for name in trained)
    assert json.loads((folders["adapter"] / "adapter_config.json").read_text())["peft_type"] == "LORA"
    told = run_python(LOOP, "open", folders["adapter"], folders["merged"])
    assert told.returncode == 0, told.stderr
    adapter, merged = heldout(told.stdout)
    assert adapter == of_a < before - 0.1
    assert [of_b, merged] == pytest.approx([of_a, of_a], abs=1e-5)
