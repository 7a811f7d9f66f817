"""The formulas of the simulation at scale, against figures worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.sim.scale import rates

PARAMETERS = 100_000_000_000
SHARE = PARAMETERS // 16


def test_400_gb_take_the_paper_s_push_time_at_the_fitted_rate() -> None:
    assert rates.transfer_s(4 * PARAMETERS, 16.41e9) == pytest.approx(195.0, abs=0.1)


def test_measure_reads_theta_and_every_staging_once() -> None:
    assert rates.measure_bytes(SHARE, 3) == 4 * SHARE * 4
    assert rates.measure_s(SHARE, 3, 10e9) == pytest.approx(10.0)


def test_prepare_moves_both_vectors_twice_and_writes_them_durably() -> None:
    moved, written = rates.outer_step_bytes(SHARE, 2), rates.snapshot_bytes(SHARE)
    assert (moved, written) == (24 * SHARE, 8 * SHARE)
    assert rates.prepare_s(SHARE, 2, 3e9, 1e9) == pytest.approx(moved / 3e9 + written / 1e9)


def test_a_round_of_one_cluster_takes_the_paper_s_update_time() -> None:
    update_s = rates.measure_s(SHARE, 1, 1.9e9) + rates.prepare_s(SHARE, 1, 1.9e9, 3e9)
    assert update_s == pytest.approx(110.0, rel=0.02)  # Table 2 of the Di-PS paper


def test_loading_reads_what_was_written() -> None:
    assert rates.load_s(SHARE, 2e9) == rates.snapshot_bytes(SHARE) / 2e9


def test_a_copy_passes_over_the_parameters_once() -> None:
    assert rates.copy_s(10, 8.0) == 5.0


def test_flows_that_fit_get_what_they_want() -> None:
    assert rates.fair_shares([1.0, 2.0, 3.0], 10.0) == [1.0, 2.0, 3.0]


def test_a_slow_flow_leaves_its_rest_to_the_others() -> None:
    assert rates.fair_shares([1.0, 50.0, 50.0], 21.0) == [1.0, 10.0, 10.0]


def test_a_closed_flow_takes_nothing_away() -> None:
    assert rates.fair_shares([0.0, 8.0], 5.0) == [0.0, 5.0]


@given(st.lists(st.floats(0, 1e12), max_size=8), st.floats(0, 1e12))
def test_shares_never_exceed_wishes_or_capacity(wanted: list[float], capacity: float) -> None:
    shares = rates.fair_shares(wanted, capacity)
    assert all(0 <= share <= wish for share, wish in zip(shares, wanted, strict=True))
    assert sum(shares) <= capacity * (1 + 1e-9) + 1e-9
    idle = capacity - sum(shares)
    hungry = [share < wish * (1 - 1e-9) - 1e-9 for share, wish in zip(shares, wanted, strict=True)]
    assert idle <= capacity * 1e-9 + 1e-9 or not any(hungry), "capacity is left while a flow wants more"
