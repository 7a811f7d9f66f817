"""A rank's share of its parameters is copied and installed to the bit, in every parallelism that torch has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.parallel_models import KINDS, ranks_of
from support.rank_script import run_ranks


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_shares_are_copied_and_installed_to_the_bit(n_ranks: int, tmp_path: Path) -> None:
    kinds = [*(kind for kind in KINDS if ranks_of(kind) == n_ranks), "narrow"]
    for code, lines in run_ranks("shard_process", n_ranks, tmp_path, *kinds):
        assert code == 0, lines
        told = [json.loads(line) for line in lines if line.startswith("{")]  # torch's warnings are between them
        assert told == [{kind: []} for kind in kinds]
