"""`dips export --format dcp`: torch.distributed.checkpoint.load() gives the version back, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.trainer_models import fetched_of, published
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from dips.core.errors import ConfigError
from dips.core.layout import Layout, Parameter
from dips.local.model_folder import CheckpointFolder, write_folder
from dips.trainer.export import read_state
from dips.trainer.model import ByteModel
from dips.trainer.sizes import SIZES
from dips.worker.parallel import shard_files
from dips.worker.parallel.shard_files import PIECE_BYTES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def loaded(model: torch.nn.Module, folder: Path, **more: Any) -> torch.nn.Module:
    """The recipe of docs/integrations.md."""
    load({name: p for name, p in model.named_parameters() if p.requires_grad}, checkpoint_id=folder, **more)
    return model


@pytest.mark.parametrize("piece_bytes", [5_000, PIECE_BYTES])
def test_a_model_comes_back_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """Also in pieces of some rows, of which the last has fewer."""
    monkeypatch.setattr(shard_files, "PIECE_BYTES", piece_bytes)
    model, other = ByteModel(SIZES["tiny"], seed=1), ByteModel(SIZES["tiny"], seed=2)
    write_folder(CheckpointFolder(fetched_of(model)), tmp_path / "new" / "model")
    loaded(other, tmp_path / "new" / "model")
    for (name, mine), its in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its), name
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"], "nothing is left beside it"


def test_a_tensor_is_cut_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "PIECE_BYTES", 2 * 24)
    rows = (("w", (5, 2, 3), "bfloat16"), ("b", (), "float32"), ("v", (7,), "float32"))
    layout = Layout(tuple(Parameter(name, shape, dtype, name) for name, shape, dtype in rows))
    flat = np.arange(layout.n_elems, dtype=np.float32)
    write_folder(CheckpointFolder(published(layout, flat)), tmp_path / "m")
    described = FileSystemReader(tmp_path / "m").read_metadata().state_dict_metadata
    sizes = {}
    for name, told in described.items():
        assert isinstance(told, TensorStorageMetadata)
        sizes[name] = [list(chunk.sizes) for chunk in told.chunks]
    assert sizes == {"w": [[2, 2, 3], [2, 2, 3], [1, 2, 3]], "b": [[]], "v": [[7]]}
    state = {"w": torch.zeros(5, 2, 3, dtype=torch.bfloat16), "b": torch.zeros(()), "v": torch.zeros(7)}
    load(state, checkpoint_id=tmp_path / "m")
    again = torch.cat([state[span.parameter.name].float().flatten() for span in layout.spans])
    assert np.array_equal(again.numpy(), flat)


def test_what_was_filled_in_keeps_its_type(tmp_path: Path) -> None:
    base = {"table": torch.arange(4), "base": torch.randn(6, 5).bfloat16(), "mask": torch.tensor([True, False])}
    save_file(base, tmp_path / "base.safetensors")
    content = CheckpointFolder(fetched_of(torch.nn.Linear(3, 4)), read_state(tmp_path / "base.safetensors"))
    write_folder(content, tmp_path / "m")
    state = {name: torch.zeros_like(tensor) for name, tensor in base.items()}
    load(state, checkpoint_id=tmp_path / "m")
    assert all(torch.equal(state[name], base[name]) for name in base)


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, content = tmp_path / "model", CheckpointFolder(fetched_of(ByteModel(SIZES["tiny"])))
    write_folder(content, folder)
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.os.fsync", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        write_folder(content, folder, force=True)
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before
