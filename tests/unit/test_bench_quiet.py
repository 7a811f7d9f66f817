"""benchmarks/quiet.py: which samples were taken with little other work on the machine."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import quiet


def test_a_sample_is_quiet_below_the_limit_and_where_nothing_is_known() -> None:
    gate = quiet.Gate(wait_s=0.0, limit=0.3)
    assert gate.quiet([0.1, 0.3, -0.05, math.nan, 1.7], lambda foreign: foreign)[:2] == [0.1, -0.05]
    assert gate.passes(math.nan)


def test_work_is_all_but_idle_and_waiting_for_disks() -> None:
    user, nice, system, idle, iowait, irq, softirq, steal, guest = 1, 2, 4, 1000, 2000, 8, 16, 32, 4000
    line = f"cpu  {user} {nice} {system} {idle} {iowait} {irq} {softirq} {steal} {guest} 0"
    assert quiet.busy_of(line) == (1 + 2 + 4 + 8 + 16 + 32) / quiet.TICK_HZ


def test_foreign_work_is_the_machines_less_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two seconds the machine works for three, and the processes under measurement for two of them. Of the rest
    half is of low priority."""
    machine, niced, own, now = iter([100.0, 103.0]), iter([1.0, 1.5]), iter([5.0, 7.0]), iter([10.0, 12.0, 12.0])
    busy = {quiet.BUSY_FIELDS: machine, quiet.NICED_FIELDS: niced}
    monkeypatch.setattr(quiet, "busy_s", lambda fields=quiet.BUSY_FIELDS: next(busy[fields]))
    monkeypatch.setattr(quiet, "time", SimpleNamespace(monotonic=lambda: next(now)))
    foreign = quiet.Foreign(lambda: next(own))
    assert (foreign.cores(), foreign.niced()) == (0.5, 0.25)


def test_without_proc_stat_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quiet, "STAT", tmp_path / "stat")
    slept: list[float] = []
    monkeypatch.setattr(quiet, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
    quiet.Gate(wait_s=60.0, limit=0.3).wait()
    assert len(slept) == 1
    assert math.isnan(quiet.Foreign(lambda: 0.0).cores())
