"""What `dips export --format dcp` writes is loaded by ranks of any parallelism: the same bits, and the same loss."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.load_process import loss_of
from support.parallel_models import full_model, merged
from support.rank_script import run_ranks
from support.trainer_models import published
from torch.distributed.checkpoint.state_dict_loader import load

from dips.core.layout import PublishedModel
from dips.local.model_folder import write_folder
from dips.trainer.dcp import CheckpointFolder
from dips.worker.torch_model import TorchParameters

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


M = TypeVar("M", bound=torch.nn.Module)

IN_PIECES_OF = 1_000
"""Bytes: so that shards begin and end inside of pieces, and span several."""


def publish(model: torch.nn.Module, folder: Path) -> PublishedModel:
    """A version of this model with other values, exported to folder/checkpoint."""
    layout = TorchParameters(model, torch.optim.SGD(model.parameters(), lr=0.1)).layout()
    flat = np.random.default_rng(3).standard_normal(layout.n_elems, np.float32) * np.float32(0.125)
    fetched = published(layout, flat)
    write_folder(CheckpointFolder(fetched, piece_bytes=IN_PIECES_OF), folder / "checkpoint")
    return fetched


def loaded(model: M, folder: Path) -> M:
    """By one process."""
    load({name: p for name, p in model.named_parameters() if p.requires_grad}, checkpoint_id=folder / "checkpoint")
    return model


@pytest.mark.parametrize(("n_ranks", "kinds"), [(2, ("fsdp2", "tp2", "pp2", "ddp2")), (4, ("hsdp4", "fsdp-tp4"))])
def test_every_rank_loads_its_part(tmp_path: Path, n_ranks: int, kinds: tuple[str, ...]) -> None:
    fetched = publish(full_model(), tmp_path)
    told = run_ranks("load_process", n_ranks, tmp_path, *kinds)
    assert [code for code, _ in told] == [0] * n_ranks, told
    alone = loss_of(loaded(full_model(), tmp_path))
    for kind in kinds:
        full = merged([load_file(tmp_path / f"{kind}-{rank}.safetensors") for rank in range(n_ranks)])
        flat = torch.cat([full[span.parameter.name].flatten() for span in fetched.layout.spans])
        assert np.array_equal(flat.numpy(), fetched.flat), kind
        said = [line.split()[2] for _, lines in told for line in lines if line.startswith(f"loss {kind} ")]
        stages = 0 if kind != "pp2" else n_ranks  # no stage alone has a loss
        assert [float(loss) for loss in said] == pytest.approx([alone] * (n_ranks - stages), abs=1e-5), kind
