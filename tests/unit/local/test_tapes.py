"""What is read back from tapes is what was recorded."""

from __future__ import annotations

import json
from pathlib import Path

from support.manual_clock import ManualClock

from dips.core.ids import Version
from dips.core.observe.tape import Tape
from dips.local.log_files import LossPoint, heldout_losses, training_losses


def write(path: Path, *lines: dict[str, object]) -> Path:
    with Tape(path, "worker", "a", ManualClock()) as tape:
        for line in lines:
            tape.write(str(line["kind"]), "-", **{k: v for k, v in line.items() if k != "kind"})
    return path


def test_training_losses_and_missing_tapes(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.tape.jsonl",
        {"kind": "step", "tokens": 100, "loss": 5.5, "version": "1:0"},
        {"kind": "pulled", "tokens": 150},
        {"kind": "step", "tokens": 200, "loss": float("nan")},
        {"kind": "step", "tokens": 180, "loss": 4.5},
    )
    assert training_losses(path) == [LossPoint(100, 5.5), LossPoint(180, 4.5)]
    assert [*heldout_losses(tmp_path / "none"), *training_losses(tmp_path / "none")] == []
    path = write(tmp_path / "torn.tape.jsonl", {"kind": "step", "tokens": 1, "loss": 2.0})
    with path.open("a") as tape:
        tape.write(json.dumps({"kind": "step", "tokens": 2, "loss": 1.0})[:-5])
    assert training_losses(path) == [LossPoint(1, 2.0)]


def test_heldout_losses_by_version_each_once(tmp_path: Path) -> None:
    path = write(
        tmp_path / "h.tape.jsonl",
        {"kind": "heldout", "version": "1:2", "tokens": 200, "loss": 3.0},
        {"kind": "heldout", "version": "1:1", "tokens": 100, "loss": 4.0},
        {"kind": "heldout", "version": "1:2", "tokens": 200, "loss": 3.0},
        {"kind": "heldout", "version": "2:1", "tokens": 300, "loss": 2.0},
        {"kind": "heldout", "version": "1:3", "tokens": 250, "loss": float("inf")},
    )
    assert [(point.version, point.tokens, point.loss) for point in heldout_losses(path)] == [
        (Version(1, 1), 100, 4.0),
        (Version(1, 2), 200, 3.0),
        (Version(2, 1), 300, 2.0),
    ]
