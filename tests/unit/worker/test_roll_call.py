"""Ranks wait until all of them have entered, under a clock that the test moves."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from queue import SimpleQueue
from time import monotonic

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from dips.core.errors import ConfigError, FatalError
from dips.worker.parallel import ranks
from dips.worker.parallel.ranks import ROLL_CALL_S, WORD_S, Attendance, wait_for_ranks


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
        r"\[0, 1, 2\]: give all ranks of a cluster the same dips\.Parallel\(group=\.\.\.\)$"
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
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    assert ranks.ranks_here() is None, "the only one has no others"
    with pytest.raises(FatalError):
        ranks.ranks_here(cut=True)


class Leaving(Time):
    """Ranks 1 and 2 leave, or wait in the next meeting, at their times."""

    def pause(self, seconds: float) -> None:
        self.now_s += seconds
        for rank in (1, 2):
            if rank != self.dead:
                self.store.add(f"alive/{rank}", 1)
        for key, at_s in self.at_s.items():
            if at_s <= self.now_s:
                self.store.set(key, "")

    def __init__(self, *, dead: int | None = None, **at_s: float) -> None:
        super().__init__({}, [0, 1, 2])
        self.dead = dead
        self.at_s = {key.replace("_", "/"): when_s for key, when_s in at_s.items()}
        self.attendance = Attendance(self.store, 0, 3)

    def leaves(self, limit_s: float = 300.0) -> float:
        try:
            self.attendance.leave(limit_s, self.now, self.pause)
        finally:
            self.attendance.end()
        return self.now_s


def test_a_rank_that_has_left_waits_until_all_have_and_says_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert Leaving(left_1=0.0, left_2=0.0).leaves() < 1
    assert not caplog.records
    assert 200 <= Leaving(left_1=0.0, left_2=200.0).leaves() < 201
    assert [r.getMessage() for r in caplog.records] == [
        "rank 0 has left the loop, and waits for rank 2 of this cluster"
    ]


def test_a_rank_that_has_left_attends_the_meeting_in_which_another_waits() -> None:
    """Where all of them hear that they made other numbers of steps."""
    assert 20 <= Leaving(left_1=0.0, meets_1_2=20.0).leaves() < 21
    with pytest.raises(FatalError):
        Leaving(meets_0_1=0.0, meets_2_1=0.0).leaves()  # of other meetings


def test_a_rank_that_has_left_notices_one_that_ended_meanwhile() -> None:
    assert 20 <= Leaving(left_1=0.0, gone_2=20.0).leaves() < 21
    with pytest.raises(FatalError, match="rank 2 of this cluster says nothing any longer, while rank 0 waits"):
        Leaving(left_1=0.0, dead=2).leaves()


def test_ranks_that_make_no_step_while_one_has_left_end_the_cluster_after_the_limit() -> None:
    with pytest.raises(FatalError, match=r"ranks 1, 2 of this cluster did not leave the loop with rank 0, and made no"):
        Leaving(left_2=301.0).leaves()


def test_the_ranks_that_others_wait_for_are_known_to_the_leader() -> None:
    here = Leaving()
    here.attendance.end()
    assert here.attendance.late_ranks(0.0) == []
    here.attendance.begin()
    begun_s = monotonic()
    here.store.set("meets/1/0", "")
    assert here.attendance.late_ranks(begun_s + WORD_S - 1) == []
    assert here.attendance.late_ranks(begun_s + WORD_S + 1) == [1, 2]
    here.attendance.over()
    assert here.attendance.late_ranks(begun_s + WORD_S + 1) == []


def test_a_rank_that_has_left_waits_for_those_that_train_on() -> None:
    """They may wait for it in a collective of the training, and can say nothing themselves."""
    here = Leaving(left_1=0.0)
    gone = Attendance(here.store, 2, 3)
    gone.end()
    with pytest.raises(FatalError):
        gone.leave(1.0, here.now, here.pause)
    here.attendance.end()
    assert here.attendance.late_ranks(100.0) == []
    assert here.attendance.late_ranks(100.0 + WORD_S) == [0]
    here.store.set("left/0", "")
    assert here.attendance.late_ranks(101.0 + WORD_S) == []


def test_a_meeting_that_lasts_names_the_ranks_that_are_missing_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    here = Leaving()
    here.attendance.end()
    assert here.attendance.look(0, 1e9) == 0, "no meeting is under way"
    here.attendance.begin()
    begun_s = monotonic()
    assert here.attendance.look(0, begun_s) == 0
    assert not here.store.check(["meets/1/0"])
    assert here.attendance.look(0, begun_s + 2) == 0
    assert here.store.check(["meets/1/0"]), "a rank that has left looks for it"
    here.store.set("left/1", "")
    assert here.attendance.look(0, begun_s + WORD_S + 1) == 1
    assert here.attendance.look(1, begun_s + WORD_S + 9) == 1
    assert [r.getMessage() for r in caplog.records] == ["rank 0 waits for rank 2 of this cluster to make a step"]
    here.attendance.over()
    assert here.attendance.look(0, begun_s + WORD_S + 9) == 0
    here.attendance.begin()
    here.store.set("meets/2/2", "")
    assert here.attendance.look(1, monotonic() + WORD_S + 1) == 2
    assert len(caplog.records) == 1, "all are here or have left"


def test_a_rank_that_waits_in_a_meeting_says_so_and_for_whom_until_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MEETS_AFTER_S", 0.001)
    monkeypatch.setattr(ranks, "WORD_S", 0.001)  # no word before its own key is there
    store, late = HashStore(), SimpleQueue[Sequence[int]]()
    attendance = Attendance(store, 0, 3)
    attendance.late = late.put
    attendance.begin()
    assert late.get(timeout=60) == [1, 2]
    store.set("meets/1/1", "")
    assert late.get(timeout=60) == [2]
    store.set("left/2", "")
    assert late.get(timeout=60) == []
    assert store.check(["meets/1/0"])
    assert store.add("alive/0", 0) > 0
    attendance.end()
    assert store.check(["gone/0"])
