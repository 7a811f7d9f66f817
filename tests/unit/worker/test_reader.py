"""When a reader renews the pin on what it reads: while bytes arrive, and not for a trickle."""

from __future__ import annotations

import pytest

from dips.core.net.transfer import LEAST_BYTES_PER_S
from dips.worker.reader import OLDER_PIN_S, PinRenewal

BEGAN_S = 1000.0


def renewals(bytes_per_s: float, pin_s: float = 60.0, for_s: int = 300, from_s: int = 0) -> list[int]:
    """The seconds in which the pin is renewed; nothing arrives before from_s."""
    renewal = PinRenewal(pin_s, BEGAN_S)
    return [s for s in range(for_s + 1) if renewal.due(int(max(0, s - from_s) * bytes_per_s), BEGAN_S + s)]


def test_a_pin_is_renewed_three_times_in_its_time() -> None:
    assert renewals(1e6) == list(range(20, 301, 20))
    assert renewals(1e6, pin_s=9.0, for_s=12) == [3, 6, 9, 12]


def test_an_older_master_does_not_say_how_long_a_pin_lasts() -> None:
    assert renewals(1e6, pin_s=0.0) == renewals(1e6, pin_s=OLDER_PIN_S)


@pytest.mark.parametrize(("bytes_per_s", "times"), [(LEAST_BYTES_PER_S, 15), (LEAST_BYTES_PER_S / 10, 0), (0, 0)])
def test_who_gets_a_trickle_does_not_renew(bytes_per_s: float, times: int) -> None:
    assert len(renewals(bytes_per_s)) == times


def test_a_transfer_that_goes_on_after_a_stall_is_renewed_before_the_pin_ends() -> None:
    first, *_ = renewals(1e6, from_s=40)
    assert 40 < first < 60


def test_bytes_count_once() -> None:
    """What arrived before the last renewal does not keep the pin of a reader that stands still."""
    renewal = PinRenewal(60.0, BEGAN_S)
    assert renewal.due(1 << 30, BEGAN_S + 20.0)
    assert not any(renewal.due(1 << 30, BEGAN_S + 20.0 + s) for s in range(200))
