"""The plan and the judgement of a soak (tests/soak.py); the storm itself is played by tests/faults/test_storm.py."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.storm import (
    FIRST_SHARE,
    LAST_SHARE,
    WITHIN_NATS,
    ClusterNumbers,
    Death,
    Storm,
    compared,
    loss_at,
    miscounted,
    planned,
    table,
    worse_than_calm,
)

from dips.core.ids import Version
from dips.local.log_files import HeldoutPoint

CLUSTERS, SERVERS = ("a", "b", "c", "d"), ("master", "s0", "s1")


def points(*pairs: tuple[int, float]) -> list[HeldoutPoint]:
    return [HeldoutPoint(Version(1, n), tokens, loss) for n, (tokens, loss) in enumerate(pairs)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [1, 8, 40])
def test_everybody_dies_and_the_spread_is_the_papers(seed: int, n: int) -> None:
    kills = planned(CLUSTERS, SERVERS, n, random.Random(seed))
    deaths = Counter(kill.victim for kill in kills)
    assert set(deaths) == {*CLUSTERS, *SERVERS}
    assert [kill.at_share for kill in kills] == sorted(kill.at_share for kill in kills)
    assert all(FIRST_SHARE <= kill.at_share <= LAST_SHARE for kill in kills)
    if n == 40:
        assert deaths["d"] / deaths["a"] > 25, "31 failures in one cluster, one in another"
        assert 40 <= len(kills) <= 40 + len(deaths)
    assert planned(CLUSTERS, SERVERS, n, random.Random(seed)) == kills


def test_the_loss_between_two_versions_lies_between_theirs() -> None:
    curve = points((100, 4.0), (200, 3.0), (400, 2.0))
    assert [loss_at(curve, tokens) for tokens in (50, 100, 150, 300, 400, 900)] == [4.0, 4.0, 3.5, 2.5, 2.0, 2.0]
    with pytest.raises(ValueError, match="no held-out loss"):
        loss_at([], 1)


def test_losses_are_compared_at_equal_tokens() -> None:
    calm, storm = points((100, 4.0), (200, 3.0)), points((100, 4.2), (150, 3.6))
    assert compared(calm, storm) == (150, 3.5, 3.6)
    [sentence] = worse_than_calm(calm, storm)
    assert "at 150 tokens the held-out loss is 3.600" in sentence
    assert not worse_than_calm(calm, points((150, 3.5 + WITHIN_NATS)))
    assert not worse_than_calm(calm, points((150, 2.0))), "better is no violation"


def test_tokens_that_do_not_add_up_and_a_run_that_ended_early_are_violations() -> None:
    numbers = {"a": ClusterNumbers(1.0, 1.0, 70), "b": ClusterNumbers(1.0, 1.0, 30)}
    assert not miscounted(Storm(clusters=numbers, tokens=100), 100)
    assert len(miscounted(Storm(clusters=numbers, tokens=101), 100)) == 1
    assert len(miscounted(Storm(clusters=numbers, tokens=100), 200)) == 1


def test_the_table_has_three_numbers_for_each_cluster() -> None:
    numbers = {"b": ClusterNumbers(0.5, 0.25, 30), "a": ClusterNumbers(1.0, 1.0, 70)}
    _, first, second = table(numbers, [Death("b", "IDLE"), Death("master", "COMMIT"), Death("b", "WINDOW")])
    assert first.split() == ["a", "0", "100%", "100%", "70"]
    assert second.split() == ["b", "2", "50%", "25%", "30"]
