"""The loop inside of a trainer: how many of the cluster's checkpoints are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dips.worker.integrations.trainer_loop import KEPT, CallbackOptions, TrainerLoop

RUN = {"master": "127.0.0.1:1", "cluster_id": "a", "insecure": True}


@pytest.mark.parametrize(
    ("variable", "given", "kept"),
    [("", {}, KEPT), ("5", {}, 5), ("5", {"checkpoints_kept": 1}, 1), ("", {"checkpoints_kept": 1}, 1)],
)
def test_the_variable_says_how_many_checkpoints_are_kept_unless_the_callback_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, given: dict[str, Any], kept: int
) -> None:
    monkeypatch.setenv("DIPS_WORKER_CHECKPOINTS_KEPT", variable)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    loop = TrainerLoop(model, optimizer, CallbackOptions(8, None, {**RUN, **given}), tmp_path, None)
    assert loop._config is not None
    assert loop._config.checkpoints_kept == kept
    assert not loop._config.resume, "it has no checkpoint to go on from"


def test_paths_of_a_callback_stay_where_they_were_when_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path)
    options = CallbackOptions(8, Path("kept"), {"tape": "tape", "master": "h:1"})
    monkeypatch.chdir("else")
    assert (options.checkpoint_dir, options.loop["tape"]) == (tmp_path / "kept", tmp_path / "tape")
