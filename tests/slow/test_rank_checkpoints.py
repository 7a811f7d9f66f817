"""What ranks of one parallelism have written is read by ranks of another, to the bit: parameters, vectors, the
optimizer's state, masters and options; and by torch's own tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.checkpoint_process import FIRST_MOMENT, RESIDUAL
from support.parallel_models import full_model, rule
from support.rank_script import run_ranks
from torch.distributed.checkpoint.state_dict_loader import load

SAVED_BY_TWO = ["ddp2", "fsdp2", "tp2", "pp2", "interleaved2", "ep2", "mapped2", "masters2"]
SAVED_BY_FOUR = ["fsdp4", "hsdp4", "fsdp-tp4", "fsdp-ep4", "pp-dp4"]

READ_BY_TWO = [
    "load:fsdp2:fsdp2", "load:tp2:fsdp2", "load:pp2:tp2", "load:interleaved2:pp2", "load:ddp2:interleaved2",
    "load:mapped2:ddp2", "load:masters2:masters2", "load:fsdp2-unsharded:mapped2", "share:fsdp2:ep2",
]  # fmt: skip
READ_BY_FOUR = [
    "load:fsdp4:fsdp2", "load:fsdp-tp4:pp2", "load:pp-dp4:fsdp-ep4", "load:hsdp4:interleaved2", "share:fsdp-ep4:tp2"
]  # fmt: skip
READ_BY_FEWER = ["load:pp2:fsdp4", "load:tp2:fsdp-tp4", "load:ddp2:pp-dp4", "load:mapped2:hsdp4", "load:ep2:fsdp-ep4"]


def run(n_ranks: int, folder: Path, tasks: Sequence[str]) -> None:
    """Each of the tasks that load finds everything as it was."""
    folder.mkdir()
    wanted: list[dict[str, list[str]]] = [{task: []} for task in tasks if not task.startswith("save")]
    for code, lines in run_ranks("checkpoint_process", n_ranks, folder, *tasks):
        assert code == 0, lines
        assert [json.loads(line) for line in lines if line.startswith("{")] == wanted


def test_ranks_of_any_number_and_parallelism_read_what_others_wrote(tmp_path: Path) -> None:
    run(2, tmp_path / "a", [*(f"save:{kind}" for kind in SAVED_BY_TWO), *READ_BY_TWO])
    run(4, tmp_path / "b", [*(f"save:{kind}" for kind in SAVED_BY_FOUR), *READ_BY_FOUR])
    run(2, tmp_path / "c", READ_BY_FEWER)
    run(1, tmp_path / "d", ["load:one:fsdp4", "load:one:pp2", "load:one:masters2", "save:one", "load:one:one"])
    run(2, tmp_path / "e", ["load:fsdp2:one", "load:pp2:one", "share:tp2:one"])
    run(4, tmp_path / "f", ["load:fsdp-tp4:one"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_tools_read_them(tmp_path: Path) -> None:
    run(2, tmp_path / "a", ["save:tp2"])
    full, start = full_model(), 0
    wanted = {
        "vectors.residual": rule(
            torch.arange(sum(p.numel() for p in full.parameters() if p.requires_grad)), RESIDUAL, 1
        )
    }
    for name, parameter in full.named_parameters():
        if parameter.requires_grad:
            places = torch.arange(start, start + parameter.numel()).view(parameter.shape)
            wanted[f"optimizer.{name}.exp_avg"] = rule(places, FIRST_MOMENT, 1)
            start += parameter.numel()
    read = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    load(read, checkpoint_id=tmp_path / "kept" / "tp2" / "checkpoint-00000001.ranks")
    for name, tensor in wanted.items():
        assert torch.equal(read[name], tensor), name
