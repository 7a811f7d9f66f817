"""`dips plan run` with real ranks: gradients, and no process that outlives the command. Times: tests/endurance."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from support.dips_command import children, dips, dips_started, ended, is_running, until

LONG = ("zb_v", "--stages", "2", "--microbatches", "4", "--operation-ms", "5000")
"""Two ranks that run for minutes."""


def test_two_ranks_have_the_gradients_of_one_process() -> None:
    done = dips("plan", "run", "zb_v", "--stages", "2", "--microbatches", "4", "--check-gradients", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["stages"], found["good"]) == (2, 4, True)
    assert found["gradients"]["parameters"] == 4 * 6
    assert found["gradients"]["largest_difference"] < 1e-13


@pytest.mark.parametrize("victim", ["a rank", "the command"])
def test_all_end_when_one_is_killed_or_the_command_is_interrupted(tmp_path: Path, victim: str) -> None:
    log = tmp_path / "log"
    with dips_started("plan", "run", *LONG, "--out", tmp_path / "run", log=log) as command:
        rank_log = tmp_path / "run" / "ranks" / "rank-1.log"
        until(lambda: (tmp_path / "run" / "ranks" / "rendezvous").exists(), "ranks that meet", log=log)
        ranks = children(command.pid)
        assert len(ranks) == 2
        if victim == "a rank":
            os.kill(max(ranks), signal.SIGKILL)
        else:
            command.send_signal(signal.SIGINT)
        code = ended(command, 30, log)
        until(lambda: not any(map(is_running, ranks)), "the end of the ranks", 10, log)
    said = log.read_text()
    if victim == "the command":
        assert (code, said) == (130, "")
    else:
        assert code == 6
        assert said.startswith(f"dips: rank 1 was ended by SIGKILL: start it again; its log is {rank_log}")
        assert said.count("\n") == 1
