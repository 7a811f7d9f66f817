"""examples/04-plan-a-schedule: every command of its README, in its order, does what the README says.

And a cluster whose pipeline runs in the order of a plan takes part in a run, beside one of one process.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from support.dips_command import dips, dips_started, ended, master_file, started, until
from support.documents import blocks
from support.repository import ROOT

from dips.cli import main

README = ROOT / "examples" / "04-plan-a-schedule" / "README.md"
PLANNED = README.with_name("planned_cluster.py")

ZERO_BUBBLE_V = "0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0I1,0W0,0W1\n1F0,1F1,2F0,2F1,2B0,1B0,2B1,1B1\n"
"""Four stages on two ranks: the first and the last on one, those between on the other."""

RUN = """
[run]
id = "planned"
directory = "{directory}"
slaves = 1
evaluate = false
keys_for = ["a", "b"]

[slave]
memory_bytes = "128 MiB"
record_pushes = true

[master]
sync_every = 8
min_clusters = 2
tk_max = "100k"
"""


def test_the_readmes_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    block, _ = blocks(README)
    lines = block.text.splitlines()
    assert [line.split()[:2] for line in lines] == [["dips", "plan"]] * 7
    told = []
    for line in lines:
        assert main.run(tuple(shlex.split(line)[1:])) == int("replan" in line), line
        told.append(capsys.readouterr().out)
    first, second, third, fourth, groups, explored, replanned = told
    for word in ("chosen: ", "iteration: ", "amsterdam to stockholm: ", "what would help", "1f1b"):
        assert word in first
    assert second.startswith(first.rstrip("\n"))
    assert {file.name for file in (tmp_path / "runs" / "plan").iterdir()} == {
        "plan.json", "plan.csv", "trace.json", "timeline.svg", "timeline.png",
    }  # fmt: skip
    assert len([line for line in third.splitlines() if line.lstrip()[:1].isdigit()]) == 8
    assert "wider" in fourth
    assert "cross_ud/1" in fourth
    assert "group 2: 32 devices" in groups
    assert "32 accelerators in 2 buildings, 64 sequences an iteration" in explored
    assert "swap: it gains " in replanned


def test_a_planned_pipeline_is_a_cluster_like_any_other(tmp_path: Path) -> None:
    file, run_dir, plan = tmp_path / "run.toml", tmp_path / "run", tmp_path / "plan.csv"
    file.write_text(RUN.format(directory=run_dir))
    plan.write_text(ZERO_BUBBLE_V)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
    commands = {"a": (*torchrun, PLANNED, plan), "b": (sys.executable, PLANNED)}
    logs = {name: tmp_path / f"{name}.log" for name in ("up", *commands)}
    with dips_started("up", file, log=logs["up"]) as up:
        until(lambda: "address" in master_file(run_dir), "the master's address", log=logs["up"])
        of = {
            name: {
                "DIPS_MASTER": master_file(run_dir)["address"], "DIPS_CLUSTER": name, "OMP_NUM_THREADS": "1",
                "DIPS_KEYS": str(run_dir / "keys" / name),
                "DIPS_WORKER_TAPE": str(run_dir / "tapes" / f"{name}.tape.jsonl"),
            }
            for name in commands
        }  # fmt: skip
        with (
            started(*commands["a"], log=logs["a"], cwd=tmp_path, **of["a"]) as planned,
            started(*commands["b"], log=logs["b"], cwd=tmp_path, **of["b"]) as alone,
        ):
            assert ended(planned, 100, logs["a"]) == 0, logs["a"].read_text()
            assert ended(alone, 100, logs["b"]) == 0, logs["b"].read_text()
        assert ended(up, 60, logs["up"]) == 0, logs["up"].read_text()
    assert all("the run has ended" in logs[name].read_text() for name in commands)
    told = dips("verify", run_dir, "--replay", "--json")
    report = json.loads(told.stdout)
    assert (told.returncode, report["verdict"]) == (0, "ok"), told.stdout
    assert report["replayed"]["versions"] >= 3
    assert report["replayed"]["wrong"] == report["replayed"]["skipped"] == []
