"""Jobs on several processes: results, failures, and nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.pool_work import die, double, hang, threads

from dips.lab.compare.pool import PoolJobFailed, run_jobs


class Told:
    """Notes what it is told; `then` is called at each message."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.notes: list[tuple[object, ...]] = []
        self._then = then

    def began(self, index: int) -> None:
        self.notes.append(("began", index))

    def moved(self, index: int, tokens: int, virtual_s: float) -> None:
        self.notes.append(("moved", index, tokens, virtual_s))
        self._then()

    def ended(self, index: int) -> None:
        self.notes.append(("ended", index))


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


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


def test_an_interruption_leaves_no_process_behind(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_jobs([tmp_path / "pid"], hang, 1, Told(interrupt)))
    assert gone(int((tmp_path / "pid").read_text()))


def test_no_jobs_need_no_process() -> None:
    assert list(run_jobs([], double, 2, Told())) == []
