"""When a dead process is started again, and when it is given up."""

from __future__ import annotations

import pytest

from dips.local.supervisor import FailureCount, RestartPolicy

POLICY = RestartPolicy(first_delay_s=0.5, max_delay_s=3.0, quick_s=20.0, quick_failures_max=5)


def test_delays_double_up_to_the_bound_and_the_fifth_quick_failure_gives_up() -> None:
    failures = FailureCount(POLICY)
    assert [failures.failed(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, None]


def test_a_life_that_lasted_is_forgiven() -> None:
    failures = FailureCount(POLICY)
    for _ in range(4):
        failures.failed(1.0)
    assert failures.failed(20.0) == 0.0
    assert failures.failed(19.9) == 1.0


def test_lives_that_last_are_never_given_up() -> None:
    failures = FailureCount(POLICY)
    assert {failures.failed(60.0) for _ in range(50)} == {0.0}


@pytest.mark.parametrize("quick_failures_max", [1, 2, 7])
def test_gives_up_after_exactly_the_stated_number(quick_failures_max: int) -> None:
    failures = FailureCount(RestartPolicy(quick_failures_max=quick_failures_max))
    answers = [failures.failed(0.0) for _ in range(quick_failures_max)]
    assert answers.count(None) == 1
    assert answers[-1] is None


def test_the_time_until_giving_up_is_bounded() -> None:
    assert POLICY.longest_s() == 5 * 23.0
