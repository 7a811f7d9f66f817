"""Models of timm with its optimizer and its scheduler in the README's loop: two clusters and random images."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.dips_command import ROOT
from support.three_facts import PATIENT, assert_three_facts
from support.up_run import UpRun

PROGRAM = ROOT / "tests" / "support" / "timm_loop.py"


@pytest.mark.parametrize("model", ["test_vit", "test_efficientnet"])
def test_two_clusters_train_one_model(tmp_path: Path, model: str) -> None:
    """Both end with the version that they pulled last, so models are equal to the bit; of the one with batch norm its
    running statistics too, since the run averages them."""
    folders = {name: tmp_path / name for name in ("a", "b")}
    programs = {name: (sys.executable, PROGRAM, model, folder) for name, folder in folders.items()}
    with UpRun(tmp_path, programs, master=PATIENT + 'tk_max = "1k"') as run:
        run.until_end()
    assert_three_facts(run, folders)
