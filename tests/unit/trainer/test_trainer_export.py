"""Held-out loss, and a version as a file: the same number from the file as from the model."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from support.trainer_models import fetched_of, published

from dips.core.errors import ConfigError
from dips.core.ids import Version
from dips.core.layout import Layout, Parameter, PublishedModel
from dips.trainer.config import TrainConfig
from dips.trainer.evaluate import EVAL_BATCH, Evaluator, heldout_loss, windows_of
from dips.trainer.export import export_model, read_export
from dips.trainer.model import ByteModel
from dips.trainer.sizes import SIZES, ModelConfig


def fetched(config: ModelConfig = SIZES["tiny"], seed: int = 0) -> PublishedModel:
    return fetched_of(ByteModel(config, seed), "run-1", Version(3, 17))


def own_model() -> PublishedModel:
    layout = Layout((Parameter("w", (3, 4), "bfloat16", "w"), Parameter("b", (), "float32", "b")))
    return published(layout, np.arange(13, dtype=np.float32), version=Version(1, 2), tokens=7)


def test_windows_cover_the_text_and_share_their_ends() -> None:
    text = bytes(range(1, 101))
    windows = windows_of(text, 9)
    assert windows.shape == (11, 10)
    assert windows[:, :-1].reshape(-1).tolist() == list(text[:99])
    assert windows[:, -1].tolist() == [*windows[1:, 0].tolist(), text[99]]


@pytest.mark.parametrize("length", [0, 1, 9])
def test_too_little_held_out_text_names_the_remedy(length: int) -> None:
    with pytest.raises(ConfigError, match="needs 10: give more text"):
        windows_of(b"x" * length, 9)


def test_the_loss_is_the_mean_over_all_bytes() -> None:
    model = ByteModel(ModelConfig(32, 1, 16))
    windows = np.random.default_rng(0).integers(0, 256, (EVAL_BATCH + 5, 17))
    with torch.no_grad():
        logits = model(torch.from_numpy(windows[:, :-1])).double().log_softmax(-1)
    picked = logits.gather(-1, torch.from_numpy(windows[:, 1:, None])).mean().item()
    assert heldout_loss(model, windows) == pytest.approx(-picked, abs=1e-6)


def test_an_evaluation_asks_before_each_batch_whether_it_goes_on() -> None:
    asked = iter(range(2))

    def ask() -> None:
        next(asked)

    model, windows = ByteModel(ModelConfig(32, 1, 16)), np.zeros((2 * EVAL_BATCH, 17), np.int64)
    heldout_loss(model, windows, ask)
    with pytest.raises(StopIteration):
        heldout_loss(model, windows, ask)


def test_an_export_gives_back_every_bit(tmp_path: Path) -> None:
    original = fetched()
    export_model(original, tmp_path / "model.safetensors", sequence_tokens=128)
    read = read_export(tmp_path / "model.safetensors")
    assert (read.run_id, read.version, read.tokens) == ("run-1", Version(3, 17), 12345)
    assert read.layout == original.layout
    assert read.sequence_tokens == 128
    assert np.array_equal(read.flat.view(np.uint32), original.flat.view(np.uint32))
    model = ByteModel(SIZES["tiny"], seed=99)  # and any tool reads its tensors by name
    model.load_state_dict({name: torch.from_numpy(t) for name, t in load_file(tmp_path / "model.safetensors").items()})
    assert torch.equal(model.embedding.weight, ByteModel(SIZES["tiny"], seed=0).embedding.weight)


def test_a_users_own_model_can_be_exported(tmp_path: Path) -> None:
    export_model(own_model(), tmp_path / "own")
    tensors = load_file(tmp_path / "own")
    assert tensors["w"].tolist() == np.arange(12.0).reshape(3, 4).tolist()
    assert tensors["b"].shape == ()
    assert read_export(tmp_path / "own").sequence_tokens is None
    with pytest.raises(ConfigError, match="not a dips byte model"):
        Evaluator(TrainConfig())(read_export(tmp_path / "own"))


@pytest.mark.usefixtures("restored_threads")
def test_an_exported_model_has_the_loss_that_was_reported_for_it(tmp_path: Path, text: Path) -> None:
    small: dict[str, Any] = {"heldout_max_bytes": 1500, "chunk_tokens": 64, "sequence_tokens": 64}
    train = TrainConfig(data=(text,), heldout_fraction=0.2, **small)
    original = fetched(seed=5)
    reported = Evaluator(train)(original)
    export_model(original, tmp_path / "m")
    for threads in (1, 2):
        evaluated = Evaluator(train.model_copy(update={"threads": threads}))(read_export(tmp_path / "m"))
        assert evaluated.loss == pytest.approx(reported.loss, abs=1e-6)
        assert replace(evaluated, loss=reported.loss) == reported


def test_a_failed_export_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dips.core.files.os.fsync", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        export_model(own_model(), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match=r"nowhere/m cannot be written: No such file"):
        export_model(own_model(), tmp_path / "nowhere" / "m")


def test_a_missing_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model file .*dips export"):
        read_export(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"a+ cannot be read as a safetensors file: .*File name too long"):
        read_export(tmp_path / ("a" * 300))


@pytest.mark.parametrize("content", [b"", b"not a model", struct.pack("<Q", 1 << 40) + b"{}"])
def test_a_file_that_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read as a safetensors file"):
        read_export(path)


def test_a_foreign_safetensors_file_is_not_taken_for_an_export(tmp_path: Path) -> None:
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "m")
    with pytest.raises(ConfigError, match="not one that `dips export` wrote"):
        read_export(tmp_path / "m")


def _metadata(**changes: str | None) -> dict[str, str]:
    layout = own_model().layout
    names = {"format": "dips-export-1", "run_id": "mine", "version": "1:2", "tokens": "7"}
    good = {**names, "layout_hash": layout.layout_hash.hex(), "layout": layout.canonical_json()}
    return {key: value for key, value in {**good, **changes}.items() if value is not None}


TENSORS = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.array(12, np.float32)}


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "{}"},
        {"layout": None},
        {"version": "17"},
        {"tokens": "many"},
        {"layout_hash": "00"},
        {"run_id": None},
        {"sequence_tokens": "all"},
    ],
)
def test_damaged_metadata_is_refused(tmp_path: Path, changes: dict[str, str | None]) -> None:
    save_file(TENSORS, tmp_path / "m", _metadata(**changes))
    with pytest.raises(ConfigError, match=r"is damaged|layout's hash"):
        read_export(tmp_path / "m")


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"w": TENSORS["w"]}, "lacks tensor 'b'"),
        ({**TENSORS, "w": TENSORS["w"].T.copy()}, "tensor 'w' .* does not fit"),
        ({**TENSORS, "w": TENSORS["w"].astype(np.float64)}, "tensor 'w' .* does not fit"),
    ],
)
def test_tensors_that_do_not_fit_the_layout_are_refused(
    tmp_path: Path, tensors: dict[str, NDArray[np.float32]], says: str
) -> None:
    save_file(tensors, tmp_path / "m", _metadata())
    with pytest.raises(ConfigError, match=says):
        read_export(tmp_path / "m")
