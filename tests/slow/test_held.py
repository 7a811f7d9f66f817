"""What the ranks of each parallelism hold, as torch itself has cut it: real processes under gloo."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parallel_models import full_model, ranks_of
from support.rank_script import run_ranks

from dips.core.errors import ConfigError
from dips.worker.torch_model import TorchParameters, description_of, untrained_of

COORDINATES = {
    "ddp2": [0, 1],
    "ddp2-tied": [0, 1],
    "fsdp2": [0, 1],
    "fsdp2-tied": [0, 1],
    "fsdp2-unsharded": [0, 1],
    "tp2": [0, 0],
    "pp2": [0, 0],
    "pp2-tied": [0, 0],
    "interleaved2": [0, 0],
    "ep2": [0, 0],
    "mapped2": [0, 0],
    "fsdp4": [0, 1, 2, 3],
    "hsdp4": [0, 1, 2, 3],
    "fsdp-tp4": [0, 0, 1, 1],
    "pp-dp4": [0, 1, 0, 1],
    "fsdp-ep4": [0, 1, 2, 3],
}
"""Of each rank: which ranks train on the same data."""


def one_process(*, tied: bool) -> tuple[str, str, str]:
    """Hash of the layout, digests of what is not trained, and description of the model in one process."""
    model = full_model(tied=tied)
    parameters = TorchParameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    untrained = untrained_of(model, parameters.ids)
    described = description_of(model, parameters.ids, untrained)
    return parameters.layout().layout_hash.hex(), untrained.to_text(), described


def said_by_ranks(n_ranks: int, kinds: Sequence[str], folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank says of each kind."""
    for code, lines in run_ranks("held_process", n_ranks, folder, *kinds):
        assert code == 0, lines
    return [
        [json.loads(line) for line in (folder / f"rank-{r}.jsonl").read_text().splitlines()] for r in range(n_ranks)
    ]


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_ranks_hold_what_torch_says_and_have_the_layout_of_one_process(n_ranks: int, tmp_path: Path) -> None:
    kinds = [kind for kind in COORDINATES if ranks_of(kind) == n_ranks]
    said = said_by_ranks(n_ranks, kinds, tmp_path)
    for at, kind in enumerate(kinds):
        ranks = [lines[at] for lines in said]
        expected = one_process(tied=kind.endswith("tied"))
        for line in ranks:
            assert (line["layout"], line["untrained"], line["description"]) == expected, (kind, line)
            assert line["wrong"] == [], "every element is where the piece says, and it is the parameter's own memory"
            assert line["same memory"], kind
            assert line["coordinates"] == COORDINATES[kind], kind
        assert len({line["held"] for line in ranks}) == 1, "all ranks know what each of them holds"


def test_what_is_no_part_of_one_model_is_refused_on_every_rank(tmp_path: Path) -> None:
    sentences = {
        "partial2": "parameter 'w' is a sum over ranks (Partial) of which each holds one term: ",
        "meshes2": "parameter 'w' is cut over ranks [0, 1] on rank 0, and rank 1 has it cut over ranks [1]: ",
        "half2": "parameter 'w' is float32 of shape [3, 4] on rank 1, and float32 of shape [4, 4] on rank 0: ",
        "alone2": "rank 1 of this cluster has no master, and rank 0 has one: set DIPS_MASTER on every rank ",
    }
    said = said_by_ranks(2, [*sentences, "gone2"], tmp_path)
    waited, gone = (lines.pop() for lines in said)
    assert waited["refused"].startswith("rank 1 of this cluster did not enter the loop within 1 s: make the same ")
    assert gone == {}
    for ours, theirs, sentence in zip(*said, sentences.values(), strict=True):
        assert ours == theirs
        assert ours["exit_code"] == ConfigError.exit_code
        assert ours["refused"].startswith(sentence)


def test_hybrid_shards_from_two_seeds_and_uneven_shards_of_uneven_shards(tmp_path: Path) -> None:
    """The second half of a 2-D mesh gets the first half's values, if its ranks are said to be replicas."""
    refused, given, uneven = zip(*said_by_ranks(4, ["hybrid4", "hybrid4-replicas", "uneven4"], tmp_path), strict=True)
    assert {line["refused"].partition(":")[0] for line in refused} == {
        "parameter 'w' has other values on rank 2 than on rank 0"
    }
    whole = torch.arange(7 * 4, dtype=torch.float32).view(7, 4)
    for line, (start, stop) in zip(
        (*given, *uneven), [(0, 4), (4, 7)] * 2 + [(0, 2), (4, 6), (2, 4), (6, 7)], strict=True
    ):
        assert line["held"] == [[[start, 0], [stop - start, 4], whole[start:stop].tolist()]]
