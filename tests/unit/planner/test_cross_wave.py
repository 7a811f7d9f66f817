"""CrossPipe's greedy for waves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dips.core.errors import ConfigError
from dips.planner.costs import Costs, StageCost, Wire, uniform
from dips.planner.schedules.greedy import cross_wave
from dips.planner.simulate import validate

UNIT = 1 << 20


def test_memory_for_less_is_refused() -> None:
    with pytest.raises(ConfigError, match="device 0 holds 1048576 for one microbatch, its memory allows 1048575"):
        cross_wave(2, 2, uniform(4, 2, activation=UNIT), [UNIT - 1, UNIT])


@settings(max_examples=80)
@given(
    st.integers(1, 5),
    st.integers(1, 8),
    st.lists(st.tuples(*[st.integers(0, 9)] * 3, st.integers(1, 5)), min_size=10, max_size=10),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(0, 20),
)
def test_it_never_jams_and_never_exceeds_memory(
    n: int, microbatches: int, stage: list[tuple[int, int, int, int]], busy: int, latency: int, spare: int
) -> None:
    stages = tuple(StageCost(f, d, w, held, held // 2) for f, d, w, held in stage[: 2 * n])
    wires = {(a, b): Wire(a * 10 + b, busy, latency) for a in range(n) for b in (a - 1, a + 1)}
    limits = [stages[d].activation + stages[2 * n - 1 - d].activation + spare for d in range(n)]
    validate(cross_wave(n, microbatches, Costs(stages, wires), limits), Costs(stages, wires), limits)
