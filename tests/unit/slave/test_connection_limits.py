"""Which connections are cut when memory or files run out: those that bring and deliver nothing, and none too soon."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.slave.connections import QUIET_S, SETTLE_S, ConnectionLimits, Cut, Pressure

LIMIT = 1000
CALM = Pressure(memory_bytes=400, limit_bytes=LIMIT, headroom_bytes=200, n_files=10, most_files=1000)
NEAR = replace(CALM, memory_bytes=900)
OVER = replace(CALM, memory_bytes=1001)
FILES = replace(CALM, n_files=801)


@pytest.fixture
def guard() -> ConnectionLimits:
    return ConnectionLimits()


def keys(cut: Cut | None) -> tuple[int, ...] | None:
    assert cut is not None, "nothing was cut"
    return cut.connections


def test_nothing_is_cut_while_memory_is_within_its_budget(guard: ConnectionLimits) -> None:
    for now_s, pressure in enumerate((CALM, NEAR, NEAR, CALM)):
        assert guard.look(pressure, {1: 10**9 * (now_s + 1)}, (), now_s) is None


def test_the_one_that_brings_bytes_and_delivers_no_message_is_cut_and_nobody_else(guard: ConnectionLimits) -> None:
    assert guard.look(NEAR, {1: 0, 2: 0, 3: 5000}, (), 0.0) is None
    cut = guard.look(OVER, {1: 10**6, 2: 10**7, 3: 5000}, (2,), 0.05)
    assert keys(cut) == (1,), "2 delivers, 3 is idle"
    assert cut is not None
    assert "1001 bytes" in cut.sentence
    assert "1000" in cut.sentence


def test_one_that_came_after_the_watch_began_is_watched_from_its_first_byte(guard: ConnectionLimits) -> None:
    guard.look(NEAR, {1: 10**6}, (), 0.0)
    assert keys(guard.look(OVER, {1: 10**6, 2: 10**6}, (), 0.05)) == (2,)


def test_one_that_delivered_at_any_time_of_the_watch_stays(guard: ConnectionLimits) -> None:
    guard.look(NEAR, {1: 0, 2: 0}, (), 0.0)
    guard.look(NEAR, {1: 500, 2: 500}, (1,), 0.05)
    assert keys(guard.look(OVER, {1: 5000, 2: 5000}, (), 0.10)) == (2,)


def test_everybody_is_cut_when_nobody_stands_out_but_only_once_the_first_cut_had_its_time() -> None:
    guard = ConnectionLimits()
    guard.look(NEAR, {1: 0, 2: 0}, (), 0.0)
    assert keys(guard.look(OVER, {1: 5000, 2: 0}, (), 0.1)) == (1,)
    assert guard.look(OVER, {2: 0}, (), 0.2) is None, "what was cut is being freed"
    assert keys(guard.look(OVER, {2: 0}, (), 0.1 + SETTLE_S)) is None


def cut_all(guard: ConnectionLimits) -> None:
    """No connection stands out at 0 s, nor in the next look."""
    assert guard.look(OVER, {1: 0}, (), -0.05) is None
    assert keys(guard.look(OVER, {1: 0}, (), 0.0)) is None


def test_one_that_fills_the_memory_between_two_looks_is_found_in_the_next(guard: ConnectionLimits) -> None:
    """From far below the budget to above it: when the watch begins, no connection has brought anything yet."""
    assert guard.look(OVER, {1: 10**8, 2: 300}, (), 0.0) is None
    assert keys(guard.look(OVER, {1: 2 * 10**8, 2: 300}, (), 0.05)) == (1,)


def test_one_that_fills_the_memory_again_is_cut_before_what_was_cut_has_had_its_time(guard: ConnectionLimits) -> None:
    cut_all(guard)
    assert guard.look(OVER, {3: 1000}, (), 0.05) is None, "memory has not grown"
    grown = replace(OVER, memory_bytes=1001 + CALM.headroom_bytes + 1)
    assert keys(guard.look(grown, {3: 10**6}, (), 0.10)) == (3,)


def test_memory_that_is_not_of_connections_costs_them_one_cut_a_minute_unless_it_grows(guard: ConnectionLimits) -> None:
    cut_all(guard)
    for now_s in (0.5, 1.5, QUIET_S - 1):
        assert guard.look(OVER, {1: 10**6}, (), now_s) is None
    grown = replace(OVER, memory_bytes=1001 + CALM.headroom_bytes + 1)
    assert keys(guard.look(grown, {1: 2 * 10**6}, (), QUIET_S - 0.5)) == (1,)
    other = ConnectionLimits()
    cut_all(other)
    assert other.look(OVER, {1: 10**6}, (), QUIET_S - 1) is None
    assert keys(other.look(OVER, {1: 2 * 10**6}, (), QUIET_S + 1)) == (1,)


def test_a_cut_that_helped_leaves_the_guard_ready_for_the_next_attack(guard: ConnectionLimits) -> None:
    cut_all(guard)
    assert guard.look(CALM, {}, (), 0.5) is None
    guard.look(NEAR, {1: 0}, (), 1.0)
    assert keys(guard.look(OVER, {1: 10**6}, (), 1.05)) == (1,)


def test_when_files_run_out_silent_connections_go_too(guard: ConnectionLimits) -> None:
    guard.look(replace(CALM, n_files=500), {1: 0, 2: 0}, (), 0.0)
    cut = guard.look(FILES, {1: 0, 2: 300, 3: 0}, (2,), 0.05)
    assert keys(cut) == (1, 3)
    assert cut is not None
    assert "801 of the 1000 files" in cut.sentence


def test_files_that_stay_short_are_seen_to_every_second(guard: ConnectionLimits) -> None:
    guard.look(FILES, {1: 0}, (1,), 0.0)
    assert keys(guard.look(FILES, {1: 0}, (1,), SETTLE_S)) is None
    assert guard.look(FILES, {1: 0}, (), 1.5 * SETTLE_S) is None
    assert keys(guard.look(FILES, {7: 0}, (), 2.1 * SETTLE_S)) == (7,)
