"""`dips plan run` with real ranks, and own loops: gradients, plans that are swapped, stages that are shared, and no
process that outlives the command."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from support.dips_command import ROOT, children, dips, dips_started, ended, is_running, started
from support.up_run import TORCHRUN
from support.waiting import until

LONG = ("zb_v", "--stages", "2", "--microbatches", "4", "--operation-ms", "5000")
"""Two ranks that run for minutes."""


@pytest.mark.parametrize(("name", "stages"), [("zb_v", 4), ("compact_zb", 2), ("dora_pp", 8), ("interleaved_zb_v", 8)])
def test_two_ranks_have_the_gradients_of_one_process(name: str, stages: int) -> None:
    done = dips("plan", "run", name, "--stages", "2", "--microbatches", "4", "--check-gradients", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["stages"], found["schedule"], found["good"]) == (2, stages, name, True)
    assert found["gradients"]["parameters"] == stages * 6
    assert found["gradients"]["largest_difference"] < 1e-13


def test_the_example_trains_in_the_order_of_a_plan(tmp_path: Path) -> None:
    plan, log = tmp_path / "plan.csv", tmp_path / "log"
    plan.write_text("0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0I1,0W0,0W1\n1F0,1F1,2F0,2F1,2B0,1B0,2B1,1B1\n")
    example = ROOT / "examples" / "04-plan-a-schedule" / "train_planned.py"
    with started(*TORCHRUN, example, plan, log=log) as ranks:
        assert ended(ranks, log) == 0, log.read_text()[-3000:]
    losses = [float(line.split()[-1]) for line in log.read_text().splitlines() if line.startswith("step ")]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.02


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
