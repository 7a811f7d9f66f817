"""What ranks hold that cut no model into parts of one, or hybrid and uneven shards: real processes under gloo."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.rank_script import run_ranks


def said_by_ranks(n_ranks: int, kinds: Sequence[str], folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank says of each kind."""
    for code, lines in run_ranks("held_process", n_ranks, folder, *kinds):
        assert code == 0, lines
    return [
        [json.loads(line) for line in (folder / f"rank-{r}.jsonl").read_text().splitlines()] for r in range(n_ranks)
    ]


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
