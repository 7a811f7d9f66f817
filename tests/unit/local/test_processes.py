"""The command lines of a run's processes are exactly the settings of its plan."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dips.core.config import load
from dips.local.demo import DemoOptions, make_plan, train_settings
from dips.local.processes import (
    STOP_MARGIN_S,
    OwnCluster,
    RunPlan,
    cluster_specs,
    evaluation_options,
    evaluator_spec,
    master_spec,
    slave_specs,
)
from dips.local.run_directory import DEMO, Mark, RunDirectory, claim
from dips.local.supervisor import StopStage
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


def option(command: tuple[str, ...], name: str) -> list[str]:
    return [value for word, value in itertools.pairwise(command) if word == name]


def test_every_process_is_this_python_and_this_dips(plan: RunPlan, directory: RunDirectory) -> None:
    evaluator = evaluator_spec(plan, directory, ADDRESS)
    assert evaluator is not None
    specs = [
        master_spec(plan, directory),
        *slave_specs(plan, directory, ADDRESS),
        *cluster_specs(plan, directory, ADDRESS),
    ]
    for spec in [*specs, evaluator]:
        assert spec.command[:3] == (sys.executable, "-m", "dips.cli")
        assert spec.log_path.parent == directory.path / "logs"
    assert [spec.name for spec in specs] == ["master", "s0", "s1", "a", "b", "c", "d"]
    assert [spec.stage for spec in specs] == [
        StopStage.LAST,
        StopStage.SECOND,
        StopStage.SECOND,
        *[StopStage.FIRST] * 4,
    ]


def test_a_cluster_is_given_the_time_that_it_may_take_to_leave(plan: RunPlan, directory: RunDirectory) -> None:
    master = plan.master.model_copy(update={"round_timeout_s": 100.0, "grace_s": 7.0})
    for grown, leaves_s in ((plan, 30 + 6), (replace(plan, master=master), 100 + 6 + 7)):
        assert {spec.stop_s for spec in cluster_specs(grown, directory, ADDRESS)} == {leaves_s + STOP_MARGIN_S}
    own = OwnCluster("x", ("python", "loop.py"), ClientConfig(leave_wait_s=200.0))
    [spec] = cluster_specs(replace(plan, clusters=(own,)), directory, ADDRESS)
    assert spec.stop_s == 200 + 6 + STOP_MARGIN_S
    assert master_spec(plan, directory).stop_s == 15.0


def test_everybody_but_the_master_is_told_where_the_master_is(plan: RunPlan, directory: RunDirectory) -> None:
    evaluator = evaluator_spec(plan, directory, ADDRESS)
    assert evaluator is not None
    for spec in [*slave_specs(plan, directory, ADDRESS), *cluster_specs(plan, directory, ADDRESS)]:
        assert option(spec.command, "--master") == [ADDRESS]
    assert evaluator.command[evaluator.command.index("eval") + 1] == ADDRESS
    assert option(master_spec(plan, directory).command, "--master") == []


def test_the_settings_are_on_the_command_line(plan: RunPlan, directory: RunDirectory) -> None:
    master = master_spec(plan, directory).command
    assert option(master, "--tk-max") == ["500000"]
    last = cluster_specs(plan, directory, ADDRESS)[-1].command
    assert option(last, "--emulate-gap") == ["0.5"]
    assert option(last, "--data") == ["some text", "more"]
    assert option(last, "--cluster-id") == ["d"]


def test_a_cluster_of_ranks_is_started_by_torchrun_and_dies_with_it(directory: RunDirectory) -> None:
    wish = DemoOptions(run_dir=directory.path, minutes=1, parallel=True)
    plan = make_plan(wish, train_settings(wish), 500_000)
    alone, *of_ranks = cluster_specs(plan, directory, ADDRESS)
    assert alone.command[:4] == (sys.executable, "-m", "dips.cli", "train")
    assert [option(spec.command, "--parallel") for spec in of_ranks] == [["fsdp=2"], ["tensor=2"], ["pipeline=2"]]
    for spec in of_ranks:
        starts, ranks = spec.command[: spec.command.index("--")], spec.command[spec.command.index("--") + 1 :]
        assert starts[:3] == (sys.executable, "-m", "dips.worker.torchrun")
        assert "--nproc-per-node=2" in starts
        assert ranks[:5] == (sys.executable, "-m", "dips.local.child", "0", "0")
        assert ranks[5:9] == (sys.executable, "-m", "dips.cli", "train")
        leaves_s = float(spec.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        assert 30 + 60 <= leaves_s < spec.stop_s, "torchrun must not kill what still leaves, nor outlive its own end"


def test_the_evaluator_uses_the_text_of_the_training_and_nothing_else_of_it(
    plan: RunPlan, directory: RunDirectory
) -> None:
    spec = evaluator_spec(plan, directory, ADDRESS)
    assert spec is not None
    assert option(spec.command, "--data") == ["some text", "more"]
    assert "--follow" in spec.command
    assert "--model-size" not in spec.command
    assert plan.evaluate is not None
    assert evaluation_options(plan.evaluate) == ["--data", "some text", "--data", "more"]


def test_a_command_of_ones_own_finds_the_run_in_its_environment(plan: RunPlan, directory: RunDirectory) -> None:
    own = RunPlan("mine", plan.master, plan.slaves, (OwnCluster("x", ("python", "loop.py")),))
    spec = cluster_specs(own, directory, ADDRESS)[0]
    assert spec.command == ("python", "loop.py")
    found = {name: spec.environment[name] for name in ("DIPS_MASTER", "DIPS_RUN", "DIPS_CLUSTER")}
    assert found == {"DIPS_MASTER": ADDRESS, "DIPS_RUN": "mine", "DIPS_CLUSTER": "x"}
    assert spec.environment["DIPS_WORKER_TAPE"].endswith("/tapes/x.tape.jsonl"), "`dips verify` wants it"
    assert evaluator_spec(own, directory, ADDRESS) is None


def test_a_command_of_ones_own_gets_the_settings_of_its_table_without_those_that_the_run_decides(
    plan: RunPlan, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPS_WORKER_SYNC_EVERY", "7")  # the launcher read it, and the table has it where it counts
    client = ClientConfig(
        wire_dtype="int8",
        checkpoint_dir=Path("here"),
        resume=True,
        check_tokens=False,
        leave_wait_s=40.0,
        cluster_id="y",
    )
    own = replace(plan, clusters=(OwnCluster("x", ("python", "loop.py"), client),))
    [spec] = cluster_specs(own, directory, ADDRESS)
    found = {name: value for name, value in spec.environment.items() if name.startswith("DIPS_WORKER_")}
    assert found.pop("DIPS_WORKER_TAPE").endswith("/tapes/x.tape.jsonl")
    assert set(found) == {f"DIPS_WORKER_{name}" for name in (
        "WIRE_DTYPE", "CHECKPOINT_DIR", "RESUME", "CHECK_TOKENS", "LEAVE_WAIT_S"
    )}  # fmt: skip
    loaded = load(ClientConfig, "worker", environment=found).value
    assert loaded == client.model_copy(update={"checkpoint_dir": Path("here").resolve(), "cluster_id": ""})


def test_with_metrics_every_process_serves_them_and_says_where_in_a_file_of_its_name(
    plan: RunPlan, directory: RunDirectory
) -> None:
    own = OwnCluster("x", ("python", "loop.py"))
    slave = plan.slaves[0].model_copy(update={"metrics_listen": "127.0.0.1:9400"})
    with_metrics = replace(plan, metrics=True, slaves=(slave, *plan.slaves[1:]), clusters=(*plan.clusters, own))
    evaluator = evaluator_spec(with_metrics, directory, ADDRESS)
    assert evaluator is not None
    assert evaluator.environment["DIPS_RUN"] == plan.run_id
    slaves, clusters = (make(with_metrics, directory, ADDRESS) for make in (slave_specs, cluster_specs))
    for spec in (master_spec(with_metrics, directory), *slaves, *clusters[:-1], evaluator):
        options = dict(itertools.pairwise(spec.command))
        assert options["--metrics-file"] == str((directory.path / "metrics" / f"{spec.name}.json").resolve())
        assert options["--metrics-listen"] == ("127.0.0.1:9400" if spec.name == slave.slave_id else "127.0.0.1:0")
    assert clusters[-1].environment["DIPS_WORKER_METRICS_LISTEN"] == "127.0.0.1:0"
    assert clusters[-1].environment["DIPS_WORKER_METRICS_FILE"].endswith("/metrics/x.json")
    assert not {"--metrics-listen", "--metrics-file"} & {*master_spec(plan, directory).command}


def test_the_launchers_own_settings_are_not_inherited(
    plan: RunPlan, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DIPS_MASTER", "DIPS_MASTER_TK_MAX", "DIPS_SLAVE_MEMORY_BYTES", "DIPS_TRAIN_LR", "DIPS_KEYS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/somewhere")
    for name in ("DIPS_SEEN_LOG", "DIPS_SECOND_TRIES"):  # of the test run, where it is noted what all tests see
        monkeypatch.delenv(name, raising=False)
    environment = master_spec(plan, directory).environment
    assert {k: v for k, v in environment.items() if k.startswith("DIPS_")} == {"DIPS_LOG_FORMAT": "human"}
    assert environment["NUMBA_CACHE_DIR"] == "/somewhere"
    assert environment["PYTHONUNBUFFERED"] == "1"


def test_each_process_gets_the_keys_of_its_name_and_no_others(plan: RunPlan, directory: RunDirectory) -> None:
    evaluator = evaluator_spec(plan, directory, ADDRESS)
    assert evaluator is not None
    specs = [
        master_spec(plan, directory),
        *slave_specs(plan, directory, ADDRESS),
        *cluster_specs(plan, directory, ADDRESS),
        evaluator,
    ]
    for spec in specs:
        assert option(spec.command, "--keys") == [str(directory.path / "keys" / spec.name)]
        assert "--insecure" not in spec.command
        assert "DIPS_KEYS" not in spec.environment
    own = RunPlan("mine", plan.master, plan.slaves, (OwnCluster("x", ("python", "loop.py")),))
    assert cluster_specs(own, directory, ADDRESS)[0].environment["DIPS_KEYS"] == str(directory.path / "keys" / "x")


def test_an_insecure_run_says_so_to_every_process(plan: RunPlan, directory: RunDirectory) -> None:
    plain = replace(plan, insecure=True, clusters=(*plan.clusters, OwnCluster("x", ("python", "loop.py"))))
    *trained, own = cluster_specs(plain, directory, ADDRESS)
    for spec in [master_spec(plain, directory), *slave_specs(plain, directory, ADDRESS), *trained]:
        assert spec.command.count("--insecure") == 1
        assert "--keys" not in spec.command
    assert own.environment["DIPS_INSECURE"] == "1"
    assert "DIPS_KEYS" not in own.environment
