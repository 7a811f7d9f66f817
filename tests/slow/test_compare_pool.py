"""Jobs on several processes: results, failures, and nothing left behind."""

from __future__ import annotations

import os

import pytest
from support.pool_work import die, double, threads

from dips.lab.compare.pool import PoolJobFailed, run_jobs


class Told:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.notes: list[tuple[object, ...]] = []

    def began(self, index: int) -> None:
        self.notes.append(("began", index))

    def moved(self, index: int, tokens: int, virtual_s: float) -> None:
        self.notes.append(("moved", index, tokens, virtual_s))

    def ended(self, index: int) -> None:
        self.notes.append(("ended", index))


def test_every_job_gives_its_result_and_tells_how_far_it_is() -> None:
    told = Told()
    assert dict(run_jobs([3, 4, 5], double, 2, told)) == {0: 6, 1: 8, 2: 10}
    for index, number in enumerate((3, 4, 5)):
        own = [note for note in told.notes if note[1] == index]
        assert own == [("began", index), ("moved", index, number, 0.5), ("ended", index)]


def test_a_process_has_one_thread_and_ctrl_c_is_not_for_it() -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    assert dict(run_jobs([1], threads, 1, Told())) == {0: ("1", True)}
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_a_process_that_is_killed_is_noticed() -> None:
    with pytest.raises(PoolJobFailed, match=r"was killed by signal 9 before it was done: .*--jobs"):
        list(run_jobs([1], die, 1, Told()))
