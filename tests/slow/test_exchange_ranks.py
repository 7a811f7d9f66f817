"""The exchange between ranks of a cluster in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

from support.rank_script import run_ranks


def test_every_bit_is_collected_and_spread(tmp_path: Path) -> None:
    kinds = ["hsdp", "dpxtp", "ppxtp", "ppxtp:16", "irregular", "fsdp", "idle"]
    for code, lines in run_ranks("exchange_process", 4, tmp_path, *kinds):
        assert code == 0, lines
        assert [json.loads(line)["owned"] > 0 for line in lines] == [True] * len(kinds)


def test_an_exchange_goes_on_when_the_user_has_destroyed_all_groups(tmp_path: Path) -> None:
    for code, lines in run_ranks("exchange_process", 2, tmp_path, "destroy", "tp"):
        assert code == 0, lines
        assert json.loads(lines[-1])["owned"] > 0
