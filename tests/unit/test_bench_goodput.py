"""What bench_goodput.py makes of the steps that clusters made and those that are in the model."""

from __future__ import annotations

import pytest
from goodput.score import Counted, Step, lost_s, share, spans, twice

STEP_S, H, WAIT_S = 1.0, 4, 1.0
FIRST, SECOND = 11, 12
"""Processes of a cluster, one after the other."""


def life(process: int, begin_s: float, rounds: int, *, cluster: str = "c0") -> tuple[list[Step], list[Counted]]:
    """Inner loops of H steps, each followed by an exchange of WAIT_S."""
    steps, counted, now_s = list[Step](), list[Counted](), begin_s
    for i in range(rounds):
        for _ in range(H):
            now_s += STEP_S
            steps.append(Step(cluster, process, len(steps) + 1, now_s, 0.01))
        now_s += WAIT_S
        counted.append(Counted(cluster, process, H * i + 1, H * (i + 1), 0, 1, now_s))
    return steps, counted


def test_a_cluster_that_waits_trains_for_the_rest_of_each_round() -> None:
    steps, counted = life(FIRST, 0.0, 5)
    found = spans(steps, counted, {"c0": STEP_S}, (3.0, 14.0))
    assert (found["c0"].begin_s, found["c0"].end_s, found["c0"].exchanges) == (5.0, 15.0, 2)
    assert share(found, {"c0": STEP_S}) == pytest.approx(H * STEP_S / (H * STEP_S + WAIT_S))
    assert lost_s(found, {"c0": STEP_S}) == pytest.approx(WAIT_S)
    assert found["c0"].longest_pause_s == pytest.approx(WAIT_S)


def test_what_a_killed_process_had_not_pushed_is_lost_and_what_is_open_at_the_end_counts() -> None:
    steps, counted = life(FIRST, 0.0, 1)
    steps += [Step("c0", FIRST, 5, 6.0, 0.01), Step("c0", FIRST, 6, 7.0, 0.01)]  # then the kill, at 7
    steps += [Step("c0", SECOND, 1, 9.0, 0.01), Step("c0", SECOND, 2, 10.0, 0.01)]
    found = spans(steps, counted, {"c0": STEP_S}, (7.0, 10.0), whole_before=True)
    assert (found["c0"].begin_s, found["c0"].end_s) == (5.0, 10.0)
    assert found["c0"].credit == pytest.approx(2.0)
    assert found["c0"].longest_pause_s == pytest.approx(1.0)


def test_a_cluster_that_comes_to_a_stop_is_measured_to_the_end() -> None:
    steps, counted = life(FIRST, 0.0, 2)
    found = spans(steps, counted, {"c0": STEP_S}, (4.0, 105.0))
    assert found["c0"].end_s == 105.0
    assert share(found, {"c0": STEP_S}) == pytest.approx(4 / 100)
    assert found["c0"].longest_pause_s == pytest.approx(96.0 - STEP_S)


def test_a_step_that_is_in_half_of_the_model_is_half_a_step() -> None:
    steps, _ = life(FIRST, 0.0, 2)
    halves = [Counted("c0", FIRST, 1, 8, 0, 2, 10.0), Counted("c0", FIRST, 5, 8, 1, 2, 10.0)]
    found = spans(steps, halves, {"c0": STEP_S}, (0.0, 10.0))
    assert found["c0"].credit == pytest.approx(0.5 * 4 + 4)


def test_only_the_same_steps_in_the_same_part_are_there_twice() -> None:
    once = [Counted("c0", FIRST, 1, 4, 0, 1, 5.0), Counted("c0", FIRST, 5, 8, 0, 1, 10.0)]
    assert twice([*once, Counted("c0", SECOND, 1, 4, 0, 1, 15.0), Counted("c1", FIRST, 1, 4, 0, 1, 5.0)]) == 0
    assert twice([*once, Counted("c0", FIRST, 7, 12, 0, 1, 15.0)]) == 2
    assert twice([Counted("c0", FIRST, 1, 4, part, 2, 5.0) for part in (0, 1)]) == 0
    assert twice([Counted("c0", FIRST, 1, 4, 0, 2, 5.0), Counted("c0", FIRST, 1, 4, 0, 2, 6.0)]) == 2
