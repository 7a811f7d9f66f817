"""Ranks wait until all of them have entered, under a clock that the test moves."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from dips.core.errors import ConfigError, FatalError
from dips.worker.parallel import ranks
from dips.worker.parallel.roll_call import ROLL_CALL_S, WORD_S, wait_for_ranks


class Time:
    """Goes on only while a rank pauses; `enters`: rank -> when it enters."""

    def __init__(self, enters: dict[int, float], of_world: Sequence[int]) -> None:
        self.now_s = 0.0
        self.of_world = of_world
        self.store = HashStore()
        self._enters = enters
        self.says: dict[int, str] = {}
        """What a rank says in place of what all do."""

    def now(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds
        for rank, at_s in self._enters.items():
            if at_s <= self.now_s:
                self.store.set(str(rank), self.says.get(rank, json.dumps(self.of_world)))


def test_a_rank_waits_for_the_others_and_says_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    time = Time({1: 1.0, 2: WORD_S + 5}, [0, 1, 2])
    wait_for_ranks(time.store, 0, [0, 1, 2], time.now, time.pause)
    assert WORD_S + 5 <= time.now_s < WORD_S + 6
    assert [r.getMessage() for r in caplog.records] == ["waiting for rank 2 of this cluster to enter the loop"]


def test_ranks_that_are_here_are_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    time = Time({}, [0, 1])
    time.store.set("0", "[0, 1]")
    wait_for_ranks(time.store, 1, [0, 1], time.now, time.pause)
    assert time.now_s == 0.0
    assert not caplog.records


def test_ranks_that_never_enter_are_named() -> None:
    time = Time({5: 0.0}, [4, 5, 6, 7])
    with pytest.raises(ConfigError, match=r"ranks 2, 3 of this cluster did not enter the loop within 600 s: make the"):
        wait_for_ranks(time.store, 4, time.of_world, time.now, time.pause)
    assert ROLL_CALL_S <= time.now_s < ROLL_CALL_S + 1


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_other_groups_say_the_same(rank: int) -> None:
    of_world = [[0, 1], [0, 1, 2]]
    time = Time({1 - rank: 3.0}, of_world[1 - rank])
    why = (
        r"^rank 0 of torch.distributed's world enters a cluster of ranks \[0, 1\], and rank 1 one of ranks "
        r"\[0, 1, 2\]: give all ranks of a cluster the same group=$"
    )
    with pytest.raises(ConfigError, match=why):
        wait_for_ranks(time.store, rank, of_world[rank], time.now, time.pause)
    assert time.now_s < WORD_S, "no rank is waited for now"


def test_a_rank_that_cannot_enter_tells_the_others() -> None:
    time = Time({7: 1.0}, [4, 7])
    time.says[7] = "!group is a list"
    with pytest.raises(ConfigError, match=r"^rank 1 of this cluster cannot take part: group is a list$"):
        wait_for_ranks(time.store, 4, time.of_world, time.now, time.pause)


def test_a_rank_that_is_lost_before_all_have_entered_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(group: object) -> None:
        raise dist.DistNetworkError("connection closed")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(ranks, "call_the_roll", lost)
    with pytest.raises(FatalError, match=r"rank 1 .* has lost another rank .* \(connection closed\)"):
        ranks.ranks_here()
