"""Properties of the detector over whole histories, and of its memory in JSON."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.rounds import Master, Push

from dips.master.state.penalty_types import DetectorState, PenaltyConfig

ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)
PUSHES = st.builds(
    Push,
    vector=st.lists(st.one_of(st.floats(-3, 3), ANY_FLOAT), min_size=4, max_size=4),
    tokens=st.one_of(st.floats(1, 1e6), ANY_FLOAT),
    nonfinite_elems=st.sampled_from([0, 0, 0, 0, 2]),
    local_steps=st.sampled_from([0, 16, 64, 64, 64, 128]),
    made_steps=st.sampled_from([0, 16, 64, 64, 64, 640]),
)
ROUNDS = st.lists(st.dictionaries(st.sampled_from("abcd"), PUSHES, min_size=1), min_size=1, max_size=25)
CONFIGS = st.sampled_from(
    [
        *(PenaltyConfig.of(preset) for preset in ("safe", "paper", "paper-literal", "edit")),
        PenaltyConfig.of("safe", momentum_scaling="tokens", clip_scope="auto", warm_up_pushes=2, window_pushes=5),
    ]
)


def every_float(state: DetectorState) -> list[float]:
    per_cluster = [
        value
        for _, known in state.clusters
        for value in (known.mean, known.variance, known.mean_tokens or 0.0, *known.cosines)
    ]
    return [*per_cluster, *state.norms, *state.scores, *state.merged_norms]


HUGE = {name: Push(vector=[0.0, 0.0, 0.0, 1.0], tokens=1e308) for name in "ab"}


@settings(max_examples=150)
@given(rounds=ROUNDS, config=CONFIGS)
@example(rounds=[HUGE], config=PenaltyConfig.of("safe"))
def test_whatever_is_pushed_the_outcome_is_sound(rounds: list[dict[str, Push]], config: PenaltyConfig) -> None:
    """NaN, infinities and nonsense: one verdict each, weights add to 1, a bounded step, finite and bounded
    memory."""
    master = Master(config)
    for pushes in rounds:
        judgement = master.round(pushes)
        rejected = list(judgement.rejected)
        assert sorted([*judgement.accepted, *rejected]) == sorted(pushes)
        assert all(reason.sentence for reason in judgement.rejected.values())
        assert [measure.cluster for measure in judgement.measures] == sorted(pushes)
        if judgement.accepted:
            assert sum(judgement.weights) == pytest.approx(1.0)
            assert min(judgement.weights) >= 0.0
            assert 0.0 < judgement.rho <= 1.0
            assert 0.0 < judgement.kappa <= 1.0
            assert judgement.kappa * judgement.merged_norm <= judgement.clip_norm * (1 + 1e-9)
        assert all(math.isfinite(value) for value in every_float(master.state))
        assert max(len(master.state.norms), len(master.state.scores)) <= config.window_pushes
        assert len(master.state.merged_norms) <= config.clip_window_rounds
        assert [cluster for cluster, _ in master.state.clusters] == sorted(
            cluster for cluster, _ in master.state.clusters
        )


@settings(max_examples=40)
@given(rounds=ROUNDS, config=CONFIGS)
def test_memory_survives_json_and_judges_the_same(rounds: list[dict[str, Push]], config: PenaltyConfig) -> None:
    master = Master(config)
    restarted = Master(config)
    for pushes in rounds:
        restarted.state = DetectorState.from_json(json.loads(json.dumps(restarted.state.to_json(), allow_nan=False)))
        assert restarted.state == master.state
        assert repr(restarted.round(pushes)) == repr(master.round(pushes))
