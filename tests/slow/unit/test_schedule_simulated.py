"""What the transfer schedule makes of slow links, beside a free-for-all and the naive order, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest
from bench_schedule import races, slowdowns
from flows.simulated import MIB, Race, TransferMethod, run

from dips.lab.sim.network import ProcessRates
from dips.master.state.schedule import Way

GBIT = 1e9
LINK = ProcessRates(GBIT, GBIT)
SLOW = ProcessRates(0.1 * GBIT, 0.1 * GBIT)
DELAYS_S = (0.0002, 0.025)
FAST = ("a", "b", "c")

ONE_SLOW_CLUSTER = Race({**dict.fromkeys(FAST, LINK), "slow": SLOW}, {f"s{i}": LINK for i in range(4)}, 0.025)


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("delay_s", DELAYS_S)
def test_fast_clusters_take_hardly_longer_than_alone_beside_one_ten_times_slower(way: Way, delay_s: float) -> None:
    race = replace(ONE_SLOW_CLUSTER, way=way, delay_s=delay_s)
    found = {method: slowdowns(race, method) for method in TransferMethod}
    assert max(found[TransferMethod.SCHEDULED][name] for name in FAST) <= 1.1
    assert found[TransferMethod.SCHEDULED]["slow"] <= 1.05
    for other in (TransferMethod.FREE, TransferMethod.NAIVE):
        fast = [mean(found[method][name] for name in FAST) for method in (TransferMethod.SCHEDULED, other)]
        assert fast[0] <= 1.02 * fast[1]
    assert mean(found[TransferMethod.NAIVE][name] for name in FAST) >= 1.2


@pytest.mark.parametrize("delay_s", DELAYS_S)
def test_clusters_that_begin_at_different_times_keep_out_of_each_others_way(delay_s: float) -> None:
    race = replace(ONE_SLOW_CLUSTER, delay_s=delay_s, begins_s={"slow": 0.0, "a": 1.0, "b": 1.4, "c": 1.9})
    assert max(slowdowns(race, TransferMethod.SCHEDULED)[name] for name in FAST) <= 1.1


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("delay_s", DELAYS_S)
def test_where_slaves_are_the_narrow_place_some_end_early_and_none_later(way: Way, delay_s: float) -> None:
    """8 clusters on 2 slaves: a free-for-all makes all end at the end."""
    race = Race({f"c{i}": LINK for i in range(8)}, {"s0": LINK, "s1": LINK}, delay_s, way=way)
    scheduled, free = run(race, TransferMethod.SCHEDULED), run(race, TransferMethod.FREE)
    assert mean(scheduled.values()) <= 0.98 * mean(free.values())
    assert max(scheduled.values()) <= 1.05 * max(free.values())


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("delay_s", DELAYS_S)
def test_the_schedule_is_never_worse_than_the_others(way: Way, delay_s: float) -> None:
    """On average over the clusters with fast links, in all races of docs/performance.md."""
    for name, race in races(way, delay_s).items():
        found = {method: slowdowns(race, method) for method in TransferMethod}
        means = {m: mean(x for cluster, x in each.items() if cluster != "slow") for m, each in found.items()}
        assert means[TransferMethod.SCHEDULED] <= 1.1 * min(means.values()), name


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("delay_s", DELAYS_S)
def test_ranks_of_two_clusters_keep_out_of_each_others_way(way: Way, delay_s: float) -> None:
    """2 clusters of 4 ranks, 4 slaves that are just wide enough for all: each takes hardly longer than alone."""
    race = races(way, delay_s)["the same, slaves at 2"]
    found = {method: list(slowdowns(race, method).values()) for method in TransferMethod}
    assert max(found[TransferMethod.SCHEDULED]) <= 1.16
    least = (3.0 if way is Way.PUSH else 1.3) * mean(found[TransferMethod.SCHEDULED])
    assert mean(found[TransferMethod.NAIVE]) >= least


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_ranks_with_a_link_each_fetch_and_send_as_many_times_faster(n_ranks: int) -> None:
    wide = {f"s{i}": ProcessRates(4 * GBIT, 4 * GBIT) for i in range(4)}
    for way in Way:
        one = Race({"a": LINK}, wide, 0.0002, model_bytes=192 * MIB, way=way)
        took_s = [run(race, TransferMethod.SCHEDULED)["a"] for race in (one, replace(one, ranks={"a": n_ranks}))]
        assert took_s[0] >= 0.9 * n_ranks * took_s[1]


def test_a_push_that_is_nearly_done_is_let_through() -> None:
    """One slave; the last to come has a tenth of the others' bytes left, as after a broken attempt."""
    race = Race(dict.fromkeys("abcd", LINK), {"s0": LINK}, 0.0002, has_left={"d": 0.1})
    scheduled, free = run(race, TransferMethod.SCHEDULED), run(race, TransferMethod.FREE)
    assert scheduled["d"] <= 0.75 * free["d"]
    assert max(scheduled.values()) <= 1.02 * max(free.values())


def test_a_slave_whose_link_slows_down_delays_only_its_own_share() -> None:
    """At 0.3 s one of four falls to a twentieth: the other three shares are done as if nothing were."""
    race = Race({"a": LINK}, {f"s{i}": LINK for i in range(4)}, 0.025, changes=((0.3, "s0", ProcessRates(5e7, 5e7)),))
    took_s = run(race, TransferMethod.SCHEDULED)["a"]
    share_s = 64 * MIB * 8 / 5e7
    assert share_s * 0.5 <= took_s <= share_s + 0.5


def test_a_cluster_whose_link_slows_down_makes_room() -> None:
    """One slave, two clusters; the one that goes first falls to a twentieth: the other one is not held back by it."""
    race = Race({"a": LINK, "b": LINK}, {"s0": LINK}, 0.0002, changes=((0.5, "a", ProcessRates(5e7, 5e7)),))
    alone_s = run(race.alone("b"), TransferMethod.SCHEDULED)["b"]
    assert run(race, TransferMethod.SCHEDULED)["b"] <= alone_s + 1.0


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("n_slaves", [1, 2, 4])
def test_one_transfer_fills_a_gigabit_over_25_ms_each_way(way: Way, n_slaves: int) -> None:
    race = Race({"a": LINK}, {f"s{i}": ProcessRates() for i in range(n_slaves)}, 0.025, way=way)
    assert 256 * MIB * 8 / GBIT / run(race, TransferMethod.SCHEDULED)["a"] >= 0.9


def test_ten_gigabits_are_filled_too() -> None:
    fast = ProcessRates(10 * GBIT, 10 * GBIT)
    race = Race({"a": fast}, {f"s{i}": fast for i in range(4)}, 0.025, model_bytes=4096 * MIB)
    assert 4096 * MIB * 8 / (10 * GBIT) / run(race, TransferMethod.SCHEDULED)["a"] >= 0.9
