"""The exit code of a node of several ranks."""

from __future__ import annotations

import pytest

from dips.worker.torchrun import exit_code


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([-9, 6], 137),  # a killed rank; the other noticed
        ([6, -9], 6),
        ([6, 2], 2),  # a wrong setting: a person must act, whatever else was said first
        ([-15, 8], 8),
        ([143, 143], 143),  # all of them were told to end
        ([0, 1], 1),
        ([], 0),
    ],
)
def test_the_first_failure_counts_unless_a_person_must_act(ends: list[int], code: int) -> None:
    assert exit_code(ends) == code
