"""trl's SFTTrainer with our callback: two clusters, and trl's own defaults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.dips_command import ROOT
from support.three_facts import PATIENT, assert_three_facts
from support.up_run import UpRun

PROGRAM = ROOT / "tests" / "support" / "sft_trainer.py"


def test_two_clusters_fine_tune_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both end with the version that they pulled last, so models are equal to the bit."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folders = {name: tmp_path / name for name in ("a", "b")}
    programs = {name: (sys.executable, PROGRAM, folder) for name, folder in folders.items()}
    with UpRun(tmp_path, programs, master=PATIENT + 'tk_max = "80k"') as run:
        run.until_end()
    assert_three_facts(run, folders)
