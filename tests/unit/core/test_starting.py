"""What a start that takes long says, and what it keeps to itself."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType

import numba
import pytest
from support.manual_clock import ManualClock

from dips.core import allocator
from dips.core.math import compiling
from dips.core.math.compiling import folder, watched, where_kept
from dips.core.observe.tape import EVERY_S, STARTING, Starting, Tape, read_tape

GIB = 1 << 30


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_memory_is_told_now_and_then_and_at_its_end(
    clock: ManualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with Tape(tmp_path / "s0.tape.jsonl", "slave", "s0", clock) as tape:
        starting = Starting("memory", logging.getLogger("dips.slave"), tape, clock)
        starting.touched(GIB, 4 * GIB)  # within the first second
        clock.advance(2.0)
        starting.touched(2 * GIB, 4 * GIB)
        clock.advance(EVERY_S / 2)
        starting.touched(3 * GIB, 4 * GIB)
        clock.advance(EVERY_S / 2)
        starting.touched(4 * GIB, 4 * GIB)
        starting.end()
    said = ["memory: 2 GiB of 4 GiB are made", "memory: 4 GiB of 4 GiB are made", "memory: ready after 7 s"]
    assert caplog.messages == said
    records = [record for record in read_tape(tmp_path / "s0.tape.jsonl") if record["kind"] == STARTING]
    assert [record["sentence"] for record in records] == said
    assert (records[0]["what"], records[0]["done"], records[0]["of"]) == ("memory", 2 * GIB, 4 * GIB)


def test_what_is_over_at_once_says_nothing(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    starting = Starting("memory", logging.getLogger("dips.slave"), Tape(None, "slave", "s0"), clock)
    clock.advance(0.5)
    starting.touched(GIB, GIB)
    starting.end()
    assert caplog.messages == []


def test_a_kernel_is_told_by_name_when_it_is_compiled_and_not_when_it_is_there(
    clock: ManualClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    kernels = ModuleType("kernels")

    def _half(x: float) -> float:
        return x / 2

    def _never_called(x: float) -> float:
        return x

    for function in (_half, _never_called):
        function.__module__ = "kernels"
        setattr(kernels, function.__name__, numba.njit(function))
    told: list[tuple[str, int, int]] = []
    starting = Starting("kernels", logging.getLogger("dips.slave"), Tape(None, "slave", "s0"), clock, quiet_s=0.0)
    for _ in range(2):
        with watched(lambda name, done, of: told.append((name, done, of)), kernels):
            kernels._half(1.0)
    assert told == [("half", 1, 2)]
    starting.compiles(*told[0], kept=where_kept())
    assert caplog.messages == [f"kernels: compiling 1 of 2 (half); kept in {folder()} for later starts"]
    monkeypatch.setattr(compiling, "folder", lambda: None)
    assert "every start compiles it again: set NUMBA_CACHE_DIR" in where_kept()


def test_memory_is_touched_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "PIECE_ELEMS", 1000)
    told: list[int] = []
    array = allocator.zeros(3, 700, touched=told.append)
    assert told == [4000, 4000, 400]
    assert array.shape == (3, 700)
    assert not array.any()
