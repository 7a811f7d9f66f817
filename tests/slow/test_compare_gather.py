"""A comparison's runs on processes: kept when finished, told with one sentence when one fails."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from support.compare_records import record
from support.manual_clock import ManualClock
from support.pool_work import fail_for_seed_two, made_up, stumble

from dips.core.errors import DipsError
from dips.lab.compare.jobs import ComparisonJob, Results, gather
from dips.lab.compare.setup import load_setup

JOBS = [ComparisonJob("dips", seed, load_setup("small"), text="t") for seed in (1, 2, 3)]


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(by: Console) -> str:
    assert isinstance(by.file, io.StringIO)
    return by.file.getvalue()


def test_results_come_in_the_order_of_the_jobs_and_are_kept(tmp_path: Path) -> None:
    first, second = console(), console()
    records = gather(JOBS, tmp_path, 2, first, ManualClock(), work=made_up)
    assert [record.seed for record in records] == [1, 2, 3]
    assert "3 to do, 2 at a time" in said(first)
    assert gather(JOBS, tmp_path, 2, second, ManualClock(), work=stumble) == records
    assert said(second) == "", "nothing was to do"


def test_a_run_that_fails_leaves_the_finished_ones(tmp_path: Path) -> None:
    with pytest.raises(DipsError) as failed:
        gather(JOBS, tmp_path, 1, console(), ManualClock(), work=fail_for_seed_two)
    assert failed.value.exit_code == 1
    assert str(failed.value) == (
        f"dips, seed 2: two is too much: give one; 1 of 3 runs are kept in {tmp_path / 'runs'}, and the same command "
        "goes on from there"
    )
    on = console()
    assert len(gather(JOBS, tmp_path, 1, on, ManualClock(), work=made_up)) == 3
    assert "1 of 3 runs are kept" in said(on)
    assert "2 to do, 1 at a time" in said(on)


def test_a_bug_leaves_its_trace_in_a_file(tmp_path: Path) -> None:
    with pytest.raises(DipsError, match="a bug: ZeroDivisionError") as failed:
        gather(JOBS[1:2], tmp_path, 1, console(), ManualClock(), work=stumble)
    trace = tmp_path / "logs" / "dips-2.txt"
    assert f"place in the program: {trace}; the run had not ended" in str(failed.value)
    assert "pool_work.py" in trace.read_text()


def test_again_repeats_what_is_kept(tmp_path: Path) -> None:
    Results(tmp_path).keep(JOBS[0], record())
    on = console()
    gather(JOBS[:1], tmp_path, 1, on, ManualClock(), again=True, work=made_up)
    assert "1 to do" in said(on)
