"""The virtual clock, processes that are generators, and links that are shared."""

from __future__ import annotations

import pytest

from dips.sim.scale.kernel import Future, GeneratorProcess, Life, VirtualClock, first_of
from dips.sim.scale.links import SharedDirection


def test_events_of_one_time_happen_in_the_order_in_which_they_were_made() -> None:
    clock, seen = VirtualClock(), list[str]()
    clock.after(2.0, lambda: seen.append("late"))
    clock.after(1.0, lambda: seen.append("first"))
    clock.after(1.0, lambda: seen.append("second"))
    clock.run(10.0)
    assert seen == ["first", "second", "late"]
    assert clock.now_s == 10.0


def test_a_cancelled_event_does_not_happen() -> None:
    clock, seen = VirtualClock(), list[int]()
    clock.after(1.0, lambda: seen.append(1)).cancel()
    clock.run(2.0)
    assert seen == []


def test_a_process_goes_on_with_what_it_waited_for() -> None:
    clock, seen = VirtualClock(), list[object]()
    answer = Future(clock)

    def generation() -> Life:
        yield clock.lapse(3.0)
        seen.append(clock.now_s)
        seen.append((yield answer))

    process = GeneratorProcess(clock, generation())
    clock.after(5.0, lambda: answer.set("yes"))
    clock.run(10.0)
    assert seen == [3.0, "yes"]
    assert not process.alive


def test_a_killed_process_does_nothing_more() -> None:
    clock, seen = VirtualClock(), list[str]()

    def generation() -> Life:
        yield clock.lapse(3.0)
        seen.append("never")

    process = GeneratorProcess(clock, generation())
    clock.run(1.0)
    process.kill()
    clock.run(10.0)
    assert seen == []


def test_the_first_of_two_outcomes_wakes() -> None:
    clock = VirtualClock()
    slow, quick = clock.lapse(5.0), clock.lapse(2.0)
    woken = list[float]()
    first_of(clock, slow, quick).then(lambda: woken.append(clock.now_s))
    clock.run(10.0)
    assert woken == [2.0]


def test_only_the_first_value_of_an_outcome_counts() -> None:
    outcome = Future(VirtualClock())
    outcome.set(1)
    outcome.set(2)
    assert outcome.value == 1


def direction(clock: VirtualClock, servers_gbps: float = 16.0) -> SharedDirection:
    return SharedDirection(clock, {"a": 8e9, "b": 16e9}, servers_gbps * 1e9)


def ends(clock: VirtualClock, up: SharedDirection, cluster: str, n_bytes: float) -> list[float]:
    """Filled with the time at which a transfer of two equal parts ends."""
    found = list[float]()
    up.start(cluster, {"s0": n_bytes / 2, "s1": n_bytes / 2}).done.then(lambda: found.append(clock.now_s))
    return found


def test_a_transfer_alone_takes_bytes_over_rate() -> None:
    clock = VirtualClock()
    up = direction(clock)
    ended = ends(clock, up, "a", 10e9)
    clock.run(100.0)
    assert ended == [pytest.approx(10.0)]
    assert up.bytes_of_cluster == {"a": pytest.approx(10e9), "b": 0.0}
    assert up.bytes_of_slave == {"s0": pytest.approx(5e9), "s1": pytest.approx(5e9)}


def test_two_transfers_share_the_servers_cards() -> None:
    clock = VirtualClock()
    up = direction(clock, servers_gbps=8.0)
    first, second = ends(clock, up, "a", 1e9), ends(clock, up, "b", 2e9)
    clock.run(100.0)
    assert first == [pytest.approx(2.0)], "half of 8 Gbps each"
    assert second == [pytest.approx(3.0)], "the rest of it has all of 8 Gbps"


def test_a_cut_link_stands_still_and_goes_on() -> None:
    clock = VirtualClock()
    up = direction(clock)
    ended = ends(clock, up, "a", 1e9)
    clock.after(0.5, lambda: up.set_open("a", False))
    clock.after(4.5, lambda: up.set_open("a", True))
    clock.run(100.0)
    assert ended == [pytest.approx(5.0)]


def test_a_broken_transfer_says_so_and_keeps_what_has_landed() -> None:
    clock = VirtualClock()
    up = direction(clock)
    flow = up.start("a", {"s0": 5e8, "s1": 5e8})
    clock.after(0.25, up.break_all)
    clock.run(1.0)
    assert flow.done.value is False
    assert flow.left_of("s0") == pytest.approx(3.75e8)
