"""The exchange between two ranks of a cluster, over gloo: every bit arrives where it belongs."""

from __future__ import annotations

import json
from pathlib import Path

from support.rank_script import run_ranks


def test_every_bit_is_collected_and_spread(tmp_path: Path) -> None:
    kinds = ["ddp", "fsdp", "tp", "pp", "fsdp:16", "irregular", "idle"]
    told: list[list[dict[str, list[int]]]] = []
    for code, lines in run_ranks("exchange_process", 2, tmp_path, *kinds):
        assert code == 0, lines
        told.append([json.loads(line) for line in lines])
    for of_kind in told:
        assert len(of_kind) == len(kinds)
        ddp = of_kind[0]
        assert ddp["sent"] == [0, 4 * ddp["owned"]]  # replicas only have to get what another one owns
