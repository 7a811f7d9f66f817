"""The worker's compiled loops, run as twins beside the Python loop: whatever a slave answers, both send the same and
hold the same, and the twins touch nothing outside their buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from support.carried_twice import Differs, Transfers
from support.checked_memory import Outside
from support.checked_zmq import Misused

from dips.core.net import header_numba
from dips.core.net.carry_numba import _answers
from dips.core.net.flow import slot_of


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A kept log record would keep the frames that it complains of."""
    caplog.set_level(logging.CRITICAL, "dips.data")


@pytest.mark.parametrize("kind", ["pull", "push", "BF16", "INT8", "pull INT8", "pull INT4"])
def test_right_answers_and_hostile_ones(kind: str) -> None:
    transfers = Transfers(kind, 1)
    transfers.run(n_hostile=0)
    assert transfers.n_done == 1
    transfers.run(n_hostile=100)
    assert transfers.n_answers > 50


def every_answer(columns: object, lane: int, texts: object, scratch: object, numbers: object) -> int:
    return 0


def any_slot(flow: object, lane: int, request: int) -> int:
    return 0


def always(address: int, n_bytes: int, expected: object) -> bool:
    return True


@pytest.mark.parametrize(
    ("of", "careless"),
    [(_answers, every_answer), (slot_of, any_slot), (header_numba.same, always)],
    ids=["answers", "slot_of", "same"],
)
def test_a_loop_that_checks_less_is_found_out(of: Callable[..., object], careless: Callable[..., object]) -> None:
    with pytest.raises((Outside, Misused, Differs)):  # noqa: PT012
        for seed in range(5):
            Transfers("pull", seed, {of: careless}).run(n_hostile=100)
