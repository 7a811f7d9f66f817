"""`dips plan run` with real ranks, and own loops: gradients, plans that are swapped, stages that are shared, and no
process that outlives the command. Times: tests/endurance."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from support.dips_command import children, dips, dips_started, ended, is_running
from support.waiting import until

LONG = ("zb_v", "--stages", "2", "--microbatches", "4", "--operation-ms", "5000")
"""Two ranks that run for minutes."""


def test_two_ranks_have_the_gradients_of_one_process() -> None:
    done = dips("plan", "run", "zb_v", "--stages", "2", "--microbatches", "4", "--check-gradients", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["stages"], found["good"]) == (2, 4, True)
    assert found["gradients"]["parameters"] == 4 * 6
    assert found["gradients"]["largest_difference"] < 1e-13


@pytest.mark.parametrize(("name", "stages"), [("compact_zb", 2), ("dora_pp", 8), ("interleaved_zb_v", 8)])
def test_other_schedules_have_them_too(name: str, stages: int) -> None:
    done = dips("plan", "run", name, "--stages", "2", "--microbatches", "4", "--check-gradients", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["stages"], found["schedule"]) == (2, stages, name)
    assert found["gradients"]["largest_difference"] < 1e-13


def test_a_plan_is_swapped_while_ranks_train(tmp_path: Path) -> None:
    """Two stages on each rank become one: layers move, with their momentum. Times are those of a busy machine here."""
    near = ("--stages", 2, "--microbatches", 4, "--latency", 0, "--bandwidth", 0)
    far = ("--then-latency", 3, "--then-bandwidth", 3, "--links-after", 1)
    times = ("--operation-ms", 40, "--repeats", 2)
    done = dips("plan", "run", "zb_v", *near, *far, *times, "--out", tmp_path, "--json")
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert [part["part"] for part in found["parts"]] == [
        "before the change",
        "old plan",
        "swapped plan",
        "plan for these links",
    ]
    assert found["verdict"]["advised"]
    assert found["layers_moved"] > 0
    assert found["gradients_equal"]
    assert max(part["gradient_difference"] for part in found["parts"]) < 1e-12
    assert (tmp_path / "plan" / "plan.csv").is_file()
    assert json.loads((tmp_path / "profile.json").read_text()) == found["profile"]


@pytest.mark.parametrize("victim", ["a rank", "the command"])
def test_all_end_when_one_is_killed_or_the_command_is_interrupted(tmp_path: Path, victim: str) -> None:
    log = tmp_path / "log"
    with dips_started("plan", "run", *LONG, "--out", tmp_path / "run", log=log) as command:
        rank_log = tmp_path / "run" / "ranks" / "rank-1.log"
        until(lambda: (tmp_path / "run" / "ranks" / "rendezvous").exists(), "ranks that meet", log)
        ranks = children(command.pid)
        assert len(ranks) == 2
        if victim == "a rank":
            os.kill(max(ranks), signal.SIGKILL)
        else:
            command.send_signal(signal.SIGINT)
        code = ended(command, log)
        until(lambda: not any(map(is_running, ranks)), "the end of the ranks", log)
    said = log.read_text()
    if victim == "the command":
        assert (code, said) == (130, "")
    else:
        assert code == 6
        assert said.startswith(f"dips: rank 1 was ended by SIGKILL: start it again; its log is {rank_log}")
        assert said.count("\n") == 1
