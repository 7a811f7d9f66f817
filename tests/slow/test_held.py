"""What ranks hold that cut no model into parts of one, or hybrid and uneven shards: real processes under gloo."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.rank_script import run_ranks

from dips.core.errors import ConfigError


def said_by_ranks(n_ranks: int, kinds: Sequence[str], folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank says of each kind."""
    for code, lines in run_ranks("held_process", n_ranks, folder, *kinds):
        assert code == 0, lines
    return [
        [json.loads(line) for line in (folder / f"rank-{r}.jsonl").read_text().splitlines()] for r in range(n_ranks)
    ]


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
