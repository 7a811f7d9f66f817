"""The trainers that most people have, around two clusters each: what is exported, counted and recorded is what was
trained.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.dips_command import ROOT
from support.three_facts import PATIENT, assert_three_facts
from support.up_run import TORCHRUN, UpRun

PROGRAM = ROOT / "tests" / "support" / "trained_by.py"


@pytest.mark.parametrize(
    ("trainer", "first"),
    [("hugging_face", (sys.executable,)), ("lightning", (sys.executable,)), ("accelerate", TORCHRUN)],
)
def test_two_clusters_train_one_model(tmp_path: Path, trainer: str, first: tuple[object, ...]) -> None:
    """Under Accelerate one of them is two ranks of FSDP2. Both end with the version that they pulled last, so models
    are equal to the bit."""
    folders = {name: tmp_path / name for name in ("a", "b")}
    commands = {"a": first, "b": (sys.executable,)}
    programs = {name: (*commands[name], PROGRAM, trainer, folder) for name, folder in folders.items()}
    with UpRun(tmp_path, programs, master=PATIENT + 'tk_max = "20k"') as run:
        run.until_end()
    assert_three_facts(run, folders)
