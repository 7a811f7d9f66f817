"""The exchange between four ranks of a cluster, and ranks that end, or do not agree."""

from __future__ import annotations

import json
from pathlib import Path

from support.rank_script import run_ranks


def test_every_bit_is_collected_and_spread(tmp_path: Path) -> None:
    kinds = ["hsdp", "dpxtp", "ppxtp", "ppxtp:16", "irregular", "fsdp", "idle"]
    for code, lines in run_ranks("exchange_process", 4, tmp_path, *kinds):
        assert code == 0, lines
        assert [json.loads(line)["owned"] > 0 for line in lines] == [True] * len(kinds)


def test_a_rank_that_ends_is_said_on_the_others(tmp_path: Path) -> None:
    (code, lines), _ = run_ranks("exchange_process", 2, tmp_path, "dies")
    assert code == 6, lines
    assert lines == [
        "FatalError: this rank has lost another rank of its cluster, which ended or left its loop while parameters "
        "were exchanged: its own error says why"
    ]


def test_a_rank_that_closes_and_lives_on_lets_the_others_go(tmp_path: Path) -> None:
    """As one that failed in its part of an exchange, and whose program catches the error."""
    (code, lines), (other_code, other_lines) = run_ranks("exchange_process", 2, tmp_path, "leaves")
    assert (code, other_code) == (6, 0), (lines, other_lines)
    assert lines[-1].startswith("FatalError: this rank has lost another rank of its cluster")


def test_ranks_that_share_the_model_out_in_two_ways_copy_nothing(tmp_path: Path) -> None:
    for code, lines in run_ranks("exchange_process", 2, tmp_path, "differs"):
        assert code == 2
        assert lines == [
            "ConfigError: rank 1 of this cluster shares the model out among the ranks in another way than rank 0: run "
            "the same version of dips on all of them"
        ]


def test_an_exchange_goes_on_when_the_user_has_destroyed_all_groups(tmp_path: Path) -> None:
    for code, lines in run_ranks("exchange_process", 2, tmp_path, "destroy", "tp"):
        assert code == 0, lines
        assert json.loads(lines[-1])["owned"] > 0
