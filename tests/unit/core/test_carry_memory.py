"""The worker's compiled loops, run as twins beside the Python loop: whatever a slave answers, both send the same and
hold the same, and the twins touch nothing outside their buffers."""

from __future__ import annotations

import logging

import pytest
from support.carried_twice import Transfers


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A kept log record would keep the frames that it complains of."""
    caplog.set_level(logging.CRITICAL, "dips.data")


@pytest.mark.parametrize("kind", ["pull", "push", "parts", "BF16", "INT8", "pull INT8", "pull INT4"])
def test_right_answers_and_hostile_ones(kind: str) -> None:
    transfers = Transfers(kind, 1)
    transfers.run(n_hostile=0)
    assert transfers.n_done == 1
    transfers.run(n_hostile=100)
    assert transfers.n_answers > 50
