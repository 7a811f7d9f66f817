"""Evidence is durable before the record that names it is, and any safetensors reader opens it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from support.slave_bench import prepare
from support.slave_values import snapshot

from dips.core.ids import RoundId, Version
from dips.slave.push_evidence import PushEvidence

ROW = np.linspace(-1, 1, 301, dtype=np.float32)
ROUND = RoundId(1, 7)


def write(directory: Path) -> None:
    what = snapshot(Version(1, 6), ROUND, committed=False)
    PushEvidence(directory, "run", "s0").write(prepare(ROUND, what.version, None), what, [ROW], 1024)


def test_a_push_is_an_ordinary_safetensors_file_that_says_what_it_is(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "pushes" / "r1.7-0.safetensors"
    np.testing.assert_array_equal(load_file(path)["push"], ROW)
    (said,) = json.loads((tmp_path / "pushes" / "round-r1.7.json").read_text())["accepted"]
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    assert (metadata["round"], metadata["run_id"], metadata["slave_id"]) == ("r1.7", "run", "s0")
    assert (said["file"], said["push"]) == (path.name, metadata["push"])


def test_the_record_gets_its_name_only_after_the_pushes_and_their_names_are_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: after a loss of power a record could name pushes whose bytes were never written."""
    steps: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(handle: int) -> None:
        steps.append("flush " + Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real_fsync(handle)

    def replace(old: Path, new: Path) -> None:
        steps.append("name " + Path(new).name)
        real_replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write(tmp_path)
    assert steps == [
        "flush r1.7-0.safetensors", "flush pushes", "flush .tmp-round-r1.7.json", "name round-r1.7.json",
        "flush pushes",
    ]  # fmt: skip
