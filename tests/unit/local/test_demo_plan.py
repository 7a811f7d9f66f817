"""What the demo runs follows from what was asked and measured."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console
from support.manual_clock import ManualClock

from dips.core.errors import ConfigError
from dips.local import demo
from dips.local.processes import TrainedCluster
from dips.local.report import CLUSTER, SLAVE
from dips.local.view import PlainProgress


def test_gaps_lengths_and_durations() -> None:
    gaps = [demo.speed_gaps(how_many) for how_many in (1, 2, 3, 4)]
    assert gaps == [[0.0], [0.0, 0.5], [0.0, 0.25, 0.5], [0.0, 0.16, 0.33, 0.50]]
    for how_many in range(1, 27):
        gaps = [demo.speed_gaps(how_many)]
        assert len(gaps[0]) == len(set(demo.cluster_names(how_many))) == how_many
        assert gaps[0] == sorted(gaps[0])
    assert demo.cluster_names(26)[-1] == "z"
    for how_many in (0, 27):
        with pytest.raises(ConfigError, match="1 to 26 clusters"):
            demo.cluster_names(how_many)
    two_cores = demo.tokens_to_train(20_000.0, demo.speed_gaps(4), cores=2, minutes=3)
    assert two_cores == int(20_000 * 2 * (1 - demo.SPENT_ELSEWHERE) * 180)
    many_cores = demo.tokens_to_train(20_000.0, demo.speed_gaps(4), cores=64, minutes=3)
    assert many_cores == pytest.approx(20_000 * 3.01 * (1 - demo.SPENT_ELSEWHERE) * 180, abs=1)
    assert str(demo.Duration(17.2, 181.0, 4.8)) == (
        "about 3 min 20 s from now: 15 s until all processes work, 3 min of training, 5 s for the report"
    )


@pytest.mark.parametrize(("minutes", "share"), [(3.0, 1.0), (10.0, 1.0), (1.5, 0.5)])
def test_a_slow_machine_still_trains_on_enough_to_see_something(minutes: float, share: float) -> None:
    assert demo.tokens_to_train(1.0, demo.speed_gaps(4), 1, minutes) == share * demo.LEAST_TOKENS


def test_the_duration_has_the_start_of_all_processes_and_the_training() -> None:
    wanted = demo.DemoOptions()
    speed = demo.run_tokens_per_s(10_000.0, demo.speed_gaps(4), 2)
    found = demo.expected_duration(wanted, demo.tokens_to_train(10_000.0, demo.speed_gaps(4), 2, 3.0), speed, 5.0, 2)
    assert found.training_s == pytest.approx(180.0, rel=1e-3)
    # Five processes with PyTorch and three without on two cores, after the master.
    assert found.start_s == pytest.approx(5.0 * (0.4 + 6.2 / 2))
    slow = demo.expected_duration(wanted, demo.LEAST_TOKENS, speed / 100, 5.0, 2)
    assert slow.training_s == pytest.approx(demo.LEAST_TOKENS / speed * 100), "longer than asked for"
    many = demo.expected_duration(wanted, 1, speed, 5.0, 64)
    assert many.start_s == pytest.approx(5.0 * 1.4), "no faster than the master and then one trainer"
    assert demo.expected_duration(demo.DemoOptions(parallel=True), 1, speed, 5.0, 2).start_s > found.start_s


def test_a_machine_too_busy_to_be_measured_trains_on_the_fewest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_busy(*_: object) -> float:
        raise demo.NotMeasured("the speed of this machine could not be measured in 300 s")

    monkeypatch.setattr(demo, "measure_tokens_per_s", too_busy)
    out = io.StringIO()
    progress = PlainProgress(Console(file=out, width=200), ManualClock())
    assert demo._choose_length(demo.DemoOptions(minutes=3.0), [], progress) == demo.LEAST_TOKENS
    assert "could not be measured in 300 s: training on 1M tokens, however long that takes" in out.getvalue()


def test_one_cluster_in_the_middle_and_the_last_slave_are_killed() -> None:
    cluster, slave = demo.planned_faults(demo.DemoOptions(clusters=4, slaves=3))
    assert (cluster.kind, cluster.target, slave.kind, slave.target) == (CLUSTER, "b", SLAVE, "s2")
    assert 0 < cluster.at_share < slave.at_share < 1
    assert demo.planned_faults(demo.DemoOptions(clusters=1, slaves=1))[0].target == "a"
    assert demo.planned_faults(demo.DemoOptions(faults=False)) == []


def test_the_plan_has_what_was_asked_for(tmp_path: Path) -> None:
    wish = demo.DemoOptions((Path("text"),), clusters=3, slaves=1, run_dir=tmp_path, model_size="small", seed=7)
    plan = demo.make_plan(wish, demo.train_settings(wish), 123_456)
    assert (plan.cluster_ids, plan.run.slave_ids, plan.master.tk_max) == (["a", "b", "c"], ("s0",), 123_456)
    assert plan.master.to_run_config().settings.dynamic_local_steps
    assert plan.master.min_clusters == 3
    trained = [cluster for cluster in plan.clusters if isinstance(cluster, TrainedCluster)]
    assert [cluster.train.emulate_gap for cluster in trained] == [0.0, 0.25, 0.5]
    for cluster in trained:
        assert (cluster.train.model_size, cluster.train.seed, cluster.train.data_seed) == ("small", 7, 7)
        assert (cluster.train.threads, cluster.train.data) == (1, (Path("text"),))
        assert cluster.client.checkpoint_dir == tmp_path / "checkpoints" / cluster.cluster_id
        assert cluster.client.resume, "the killed one goes on"
    recorded = demo.make_plan(dataclasses.replace(wish, record_pushes=True), demo.train_settings(wish), 1)
    assert [one.slaves[0].record_pushes for one in (plan, recorded)] == [False, True]
    with pytest.raises(ConfigError, match="choose one of tiny, small"):
        demo.train_settings(demo.DemoOptions(model_size="huge"))


def test_with_parallel_the_kinds_take_turns_and_pushes_are_recorded(tmp_path: Path) -> None:
    wish = demo.DemoOptions(clusters=5, run_dir=tmp_path, parallel=True)
    plan = demo.make_plan(wish, demo.train_settings(wish), 1_000)
    trained = [cluster.train for cluster in plan.clusters if isinstance(cluster, TrainedCluster)]
    assert [train.parallel for train in trained] == ["", "fsdp=2", "tensor=2", "pipeline=2", ""]
    assert {train.model_size for train in trained} == {"wide"}
    assert all(slave.record_pushes for slave in plan.slaves)
    tiny = dataclasses.replace(wish, model_size="tiny")
    with pytest.raises(ConfigError, match="the 3 heads of model_size tiny"):
        demo.make_plan(tiny, demo.train_settings(tiny), 1_000)
