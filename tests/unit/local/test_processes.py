"""The command lines of a run's processes are exactly the settings of its plan."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.repository import ROOT

from dips.core.config import load
from dips.core.net.security import VARIABLES, ProcessKnobs
from dips.local.demo import DemoOptions, make_plan, train_settings
from dips.local.processes import (
    STOP_MARGIN_S,
    OwnCluster,
    RunKnobs,
    RunPlan,
    cluster_specs,
    master_spec,
    other_specs,
)
from dips.local.run_directory import DEMO, Mark, RunDirectory, claim
from dips.local.supervisor import ChildSpec
from dips.worker.config import ClientConfig

ADDRESS = "127.0.0.1:4711"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with claim(tmp_path / "run", Mark("demo", DEMO, "dips demo")) as claimed:
        yield claimed


@pytest.fixture
def plan(directory: RunDirectory) -> RunPlan:
    wish = DemoOptions(run_dir=directory.path, data=(Path("some text"), Path("more")), minutes=1)
    return make_plan(wish, train_settings(wish), 500_000)


GOLDEN = ROOT / "tests" / "golden" / "local" / "commands.txt"
"""`DIPS_REWRITE_GOLDEN=1 pytest tests/unit/local/test_processes.py` writes it again; then read the difference."""


def specs_of(plan: RunPlan, directory: RunDirectory) -> list[ChildSpec]:
    return [master_spec(plan, directory), *other_specs(plan, directory, ADDRESS)]


def test_command_lines_are_golden(plan: RunPlan, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's own settings are not inherited, and each process gets the keys of its name and no others."""
    for name in list(os.environ):
        if name.startswith("DIPS_") and name != "DIPS_REWRITE_GOLDEN":
            monkeypatch.delenv(name)
    own = OwnCluster("x", ("python", "loop.py"), ClientConfig(wire_dtype="int8", leave_wait_s=200.0))
    wanted = DemoOptions(run_dir=directory.path, minutes=1, parallel=True)
    slave = plan.slaves[0].model_copy(update={"metrics_listen": "127.0.0.1:9400"})

    def of_run(**settings: bool) -> RunKnobs:
        return plan.run.model_copy(update=settings)

    plans = {
        "demo": plan,
        "parallel": make_plan(wanted, train_settings(wanted), 500_000),
        "insecure, own program": replace(plan, run=of_run(insecure=True), clusters=(own,), evaluate=None),
        "metrics, own program": replace(
            plan, run=of_run(metrics=True), slaves=(slave, *plan.slaves[1:]), clusters=(*plan.clusters[:1], own)
        ),
    }
    for name in ("DIPS_MASTER", "DIPS_MASTER_TK_MAX", "DIPS_SLAVE_MEMORY_BYTES", "DIPS_TRAIN_LR", "DIPS_KEYS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/somewhere")
    lines = []
    for title, one in plans.items():
        lines.append(f"==== {title}")
        for spec in specs_of(one, directory):
            lines.append(
                f"{spec.name} ({spec.stage.name}, {spec.stop_s:g} s, {spec.log_path}): {shlex.join(spec.command)}"
            )
            told = {**spec.environment}
            names = sorted(name for name in told if name.startswith(("DIPS_", "NUMBA", "PYTHONUN", "TORCH_ELASTIC")))
            lines += [f"  {name}={told[name]}" for name in names if name != "DIPS_REWRITE_GOLDEN"]
    text = "\n".join(lines).replace(str(directory.path.resolve()), "RUN").replace(str(directory.path), "RUN")
    text = text.replace(sys.executable, "PYTHON") + "\n"
    if os.environ.get("DIPS_REWRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text.splitlines() == GOLDEN.read_text().splitlines()


def test_a_cluster_is_given_the_time_that_it_may_take_to_leave(plan: RunPlan, directory: RunDirectory) -> None:
    master = plan.master.model_copy(update={"round_timeout_s": 100.0, "grace_s": 7.0})
    waits = master.model_copy(update={"min_clusters_per_round": 2, "round_deadline_s": 90.0})
    for grown, leaves_s in (
        (plan, 30 + 6),
        (replace(plan, master=master), 100 + 6 + 7),
        (replace(plan, master=waits), 100 + 6 + 90),
    ):
        assert {spec.stop_s for spec in cluster_specs(grown, directory, ADDRESS)} == {leaves_s + STOP_MARGIN_S}
    own = OwnCluster("x", ("python", "loop.py"), ClientConfig(leave_wait_s=200.0))
    [spec] = cluster_specs(replace(plan, clusters=(own,)), directory, ADDRESS)
    assert spec.stop_s == 200 + 6 + STOP_MARGIN_S
    assert master_spec(plan, directory).stop_s == 15.0


def test_torchrun_ends_its_ranks_before_it_is_ended_itself(directory: RunDirectory) -> None:
    wish = DemoOptions(run_dir=directory.path, minutes=1, parallel=True)
    alone, *of_ranks = cluster_specs(make_plan(wish, train_settings(wish), 500_000), directory, ADDRESS)
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in alone.environment
    for spec in of_ranks:
        leaves_s = float(spec.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        assert 30 + 60 <= leaves_s < spec.stop_s, "torchrun must not kill what still leaves, nor outlive its own end"


def test_each_process_gives_its_files_to_the_runs_group(
    plan: RunPlan, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DIPS_FILES_GROUP", raising=False)
    specs = specs_of(replace(plan, run=plan.run.model_copy(update={"files_group": "team"})), directory)
    assert len(specs) > 3
    for spec in specs:
        assert load(ProcessKnobs, "x", environment=spec.environment, variables=VARIABLES).value.files_group == "team"
    assert all("DIPS_FILES_GROUP" not in spec.environment for spec in specs_of(plan, directory))


def test_a_command_of_ones_own_gets_the_settings_of_its_table_without_those_that_the_run_decides(
    plan: RunPlan, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPS_WORKER_SYNC_EVERY", "7")  # the launcher read it, and the table has it where it counts
    chosen: dict[str, Any] = {"wire_dtype": "int8", "resume": True, "check_tokens": False, "leave_wait_s": 40.0}
    client = ClientConfig(checkpoint_dir=Path("here"), cluster_id="y", **chosen)
    own = replace(plan, clusters=(OwnCluster("x", ("python", "loop.py"), client),))
    [spec] = cluster_specs(own, directory, ADDRESS)
    found = {name: value for name, value in spec.environment.items() if name.startswith("DIPS_WORKER_")}
    assert found.pop("DIPS_WORKER_TAPE").endswith("/tapes/x.tape.jsonl")
    assert set(found) == {f"DIPS_WORKER_{name}" for name in (
        "WIRE_DTYPE", "CHECKPOINT_DIR", "RESUME", "CHECK_TOKENS", "LEAVE_WAIT_S"
    )}  # fmt: skip
    loaded = load(ClientConfig, "worker", environment=found).value
    assert loaded == client.model_copy(update={"checkpoint_dir": Path("here").resolve(), "cluster_id": ""})
