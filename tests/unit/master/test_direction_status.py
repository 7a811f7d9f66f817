"""Directions through the master: from what the slaves measured to the status, the records and a restart."""

from __future__ import annotations

import json
import math

import pytest
from support.master_bench import Bench

from dips.core.messages import ClusterStatus
from dips.master.state.penalty_detect import add_directions

AGREE = {"a": [1.0, 0.2, 0.0], "b": [1.0, 0.0, 0.2], "c": [1.0, -0.2, 0.0]}


def of(bench: Bench, name: str) -> ClusterStatus:
    return next(cluster for cluster in bench.status().clusters if cluster.cluster_id == name)


def alarms(bench: Bench) -> list[str]:
    return [log.sentence for log in bench.logs if "pushes in another direction than the others" in log.sentence]


def test_a_noisy_cluster_is_merged_and_shown_and_alarmed() -> None:
    bench = Bench().running("a", "b", "c", "d")
    assert math.isnan(of(bench, "d").cosine_usual)
    bench.ways = {**AGREE, "d": [0.9, 0.1, 0.1]}
    bench.rounds(8, *"abcd")
    good = of(bench, "d")
    assert good.last_cosine > 0.9
    assert (good.cosine_rounds, good.direction_alarm) == (8, False)
    assert good.last_norm == pytest.approx(0.5)
    bench.ways = {**AGREE, "d": [0.0, 0.0, 0.5]}
    bench.rounds(5, *"abcd")
    bad = of(bench, "d")
    assert (bad.cosine_rounds, bad.direction_alarm, bad.pushes_excluded) == (13, True, 0)
    assert bad.last_cosine < 0.1
    assert bad.cosine_usual < 0.3
    assert not any(of(bench, name).direction_alarm for name in "abc")
    assert len(alarms(bench)) == 1
    assert alarms(bench)[0].startswith("cluster d ")


def test_it_stands_in_the_records_and_survives_a_restart() -> None:
    bench = Bench().running("a", "b", "c", "d")
    bench.ways = {**AGREE, "d": [-1.0, 0.0, 0.0]}
    bench.rounds(9, *"abcd")
    judged = bench.entries("COMMIT")[-1]["judgement"]["norms"]
    assert [cluster for cluster, *_ in judged] == ["a", "b", "c", "d"]
    assert float(judged[3][3]) == pytest.approx(of(bench, "d").last_cosine)
    assert bench.recorded("judged")[-1]["cosines"]["d"] == float(judged[3][3])
    before = of(bench, "d")
    assert before.direction_alarm
    bench.restart()
    after = of(bench, "d")
    assert not after.alive
    assert (after.cosine_usual, after.cosine_rounds, after.direction_alarm) == (
        *(before.cosine_usual, before.cosine_rounds, True),
    )
    assert (after.last_norm, after.last_cosine) == (before.last_norm, before.last_cosine)


def test_slaves_that_measure_no_directions_leave_them_unknown() -> None:
    bench = Bench().running("a", "b", "c", "d")
    bench.rounds(9, *"abcd")
    cluster = of(bench, "a")
    assert cluster.last_norm == pytest.approx(0.5)
    assert math.isnan(cluster.last_cosine)
    assert math.isnan(cluster.cosine_usual)
    assert (cluster.cosine_rounds, cluster.direction_alarm) == (0, False)
    json.dumps(bench.entries("COMMIT")[-1], allow_nan=False)


def test_directions_of_all_slaves_are_added_in_slave_order() -> None:
    found = add_directions({"s1": (1.0, 2.0, 3.0), "s0": (0.5, 0.5, math.nan)}, 1)
    assert found is not None
    assert found[0] == [1.5, 2.5]
    assert found[1][0] == 2.5
    assert math.isnan(found[1][1])
    assert add_directions({"s0": (1.0, 2.0, 3.0), "s1": ()}, 1) is None
    assert add_directions({}, 1) is None


def test_a_slave_that_sends_another_size_aborts_the_round() -> None:
    bench = Bench(n_slaves=1).running("a", "b")
    slave = bench.slaves[0]
    bench.ways = {"a": [1.0], "b": [1.0]}
    slave._directions = lambda names: (1.0,)  # type: ignore[method-assign]
    bench.pushes("a", "b")
    assert bench.status().rounds_aborted == 1
    assert "directions of 2 pushes have 10 entries" in bench.status().recent_rounds[-1].reason
