"""The formulas of the simulation at scale, against figures worked out by hand."""

from __future__ import annotations

import pytest

from dips.lab.sim.scale import rates

PARAMETERS = 100_000_000_000
SHARE = PARAMETERS // 16


def test_a_round_of_one_cluster_takes_the_paper_s_update_time() -> None:
    update_s = rates.measure_s(SHARE, 1, 1.9e9) + rates.outer_step_s(SHARE, 1, 1.9e9) + rates.snapshot_s(SHARE, 3e9)
    assert update_s == pytest.approx(110.0, rel=0.02)  # Table 2 of the Di-PS paper


def test_connections_and_slow_start() -> None:
    """100 Mbit/s over 50 ms hold 625 kB: six windows of ten segments, doubled each time, until they are full."""
    assert rates.connect_s(0.05, encrypted=False) == pytest.approx(0.15)
    assert rates.connect_s(0.05, encrypted=True) == pytest.approx(0.25)
    carried_bytes = 14_480 * (1 + 2 + 4 + 8 + 16 + 32)
    assert rates.ramp_s(100e6, 0.05) == pytest.approx(6 * 0.05 - carried_bytes / 12.5e6)
    assert rates.ramp_s(1e6, 0.02) == 0.0
    assert rates.ramp_s(10e9, 0.0) == 0.0
