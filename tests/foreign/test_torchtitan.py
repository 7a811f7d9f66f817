"""torchtitan with its own trainer on two FSDP2 ranks, and one plain process that trains the same model.

With gloo on processors. torchtitan takes CUDA where it finds no accelerator: support/titan_on_cpu.py gives it the name
`cpu`, and a stand-in of its device module, which has no memory statistics; of triton too, which builds of torch for
processors lack; and FSDP2 scales gradients apart from adding them up. All else is as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.dips_command import ROOT
from support.three_facts import PATIENT, assert_three_facts
from support.titan_files import prepare
from support.up_run import TORCHRUN, UpRun

SUPPORT = ROOT / "tests" / "support"


def test_its_trainer_on_two_ranks_and_a_plain_process_train_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both end with the version that they pulled last, so models are equal to the bit."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hugging_face"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folders = {name: tmp_path / name for name in ("a", "b")}
    prepare(folders["a"])
    programs = {
        "a": (*TORCHRUN, SUPPORT / "titan_ranks.py", "--job.config_file", folders["a"] / "settings.toml"),
        "b": (sys.executable, SUPPORT / "titan_plain.py", folders["b"]),
    }
    with UpRun(tmp_path, programs, slaves=2, master=PATIENT + 'tk_max = "30k"') as run:
        run.until_end()
    assert_three_facts(run, folders)
