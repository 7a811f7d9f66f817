"""Properties of the detector over whole histories, and of its memory in JSON."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.rounds import Master, Push, along

from dips.master.state.penalty_types import ClusterStatistics, DetectorState, PenaltyConfig

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


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(rounds=ROUNDS, config=CONFIGS)
def test_memory_survives_json_to_the_bit_and_judges_the_same(
    rounds: list[dict[str, Push]], config: PenaltyConfig
) -> None:
    master = Master(config)
    restarted = Master(config)
    for pushes in rounds:
        restarted.state = DetectorState.from_json(json.loads(json.dumps(restarted.state.to_json(), allow_nan=False)))
        assert restarted.state == master.state
        assert repr(restarted.round(pushes)) == repr(master.round(pushes))


@given(
    known=st.builds(
        ClusterStatistics,
        accepted=st.integers(0, 10**9),
        mean=st.floats(allow_nan=False, allow_infinity=False),
        mean_tokens=st.none() | st.floats(allow_nan=False, allow_infinity=False),
        quarantined=st.booleans(),
    ),
    norms=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5),
)
def test_any_finite_memory_round_trips(known: ClusterStatistics, norms: list[float]) -> None:
    state = DetectorState(clusters=(("a", known), ("b", ClusterStatistics())), norms=tuple(norms))
    assert repr(DetectorState.from_json(json.loads(json.dumps(state.to_json())))) == repr(state)


def test_memory_orders_clusters_by_id_however_they_came() -> None:
    first, second = Master(), Master()
    for name in "cab":
        first.norms(**{name: 1.0})
    for name in "abc":
        second.norms(**{name: 1.0})
    assert [cluster for cluster, _ in first.state.clusters] == ["a", "b", "c"]
    assert first.state.clusters == second.state.clusters


@settings(max_examples=60, deadline=None)
@given(
    start=st.floats(0.1, 100.0),
    factors=st.lists(st.floats(0.5, 1.0), min_size=30, max_size=60),
)
def test_falling_norms_are_never_flagged(start: float, factors: list[float]) -> None:
    """Training that converges pushes ever less; that is no outlier."""
    master = Master(live=frozenset("a"))
    norm = start
    for factor in factors:
        norm *= factor
        assert master.norms(a=norm).accepted


@settings(max_examples=60, deadline=None)
@given(greed=st.floats(0.5, 0.999), rounds=st.integers(30, 80))
def test_a_ratchet_cannot_open_the_threshold(greed: float, rounds: int) -> None:
    """A cluster that pushes as much as it gets away with (the printed rule would give it threefold more each
    time)."""
    master = Master().warmed_up(20)
    for _ in range(rounds):
        known, tau = master.state.of("a"), master.judge({"a": Push(along(1.0))}).threshold
        assert tau <= 9.0
        deviation = max(math.sqrt(known.variance), 0.05 * known.mean)
        norm = min(known.mean + greed * tau * deviation, 10 * statistics.median([*master.state.norms, known.mean]))
        master.norms(a=norm, b=1.0, c=1.0, d=1.0)
    assert master.norms(a=30.0, b=1.0, c=1.0, d=1.0).accepted == ("b", "c", "d")


@pytest.mark.parametrize("seed", range(5))
def test_clean_noise_is_rarely_flagged(seed: int) -> None:
    """Four clusters with norms of 10 % spread that fall slowly: at most 1 % of 1200 pushes."""
    rng = random.Random(seed)
    master, flagged = Master(), 0
    for i in range(300):
        level = 0.3 + math.exp(-i / 100)
        judgement = master.norms(**{name: level * rng.lognormvariate(0.0, 0.1) for name in "abcd"})
        flagged += len(judgement.rejected)
    assert flagged <= 12


@pytest.mark.parametrize("seed", range(3))
def test_one_bad_cluster_is_always_flagged_and_the_good_never(seed: int) -> None:
    rng = random.Random(seed)
    master = Master()
    for i in range(60):
        norms = {name: rng.lognormvariate(0.0, 0.05) for name in "abc"}
        bad = 30.0 * rng.lognormvariate(0.0, 0.05) if i % 2 else 1.0
        judgement = master.norms(**norms, d=bad)
        assert list(judgement.rejected) == (["d"] if i % 2 else [])


@pytest.mark.parametrize("factor", [0.2, 3.0])
def test_a_cluster_that_returns_after_a_change_of_regime_is_let_in_again(factor: float) -> None:
    master = Master().warmed_up(20)
    for _ in range(40):
        master.norms(b=factor, c=factor, d=factor)
    outcomes = ["a" in master.norms(a=factor, b=factor, c=factor, d=factor).accepted for _ in range(15)]
    assert True in outcomes[:9]
    assert all(outcomes[outcomes.index(True) :])


@settings(max_examples=60, deadline=None)
@given(
    norms=st.lists(
        st.lists(st.sampled_from([0.9, 0.95, 1.0, 1.05, 1.3, 2.0, 30.0]), min_size=4, max_size=4),
        min_size=1,
        max_size=30,
    ),
    names=st.permutations(["north", "east", "x", "b2"]),
)
def test_names_do_not_matter(norms: list[list[float]], names: list[str]) -> None:
    """The same histories under other names: the same verdicts, each with its own history."""
    plain = Master(live=frozenset("abcd"))
    renamed = Master(live=frozenset(names))
    for values in norms:
        left = plain.round({name: Push(along(v, i)) for i, (name, v) in enumerate(zip("abcd", values, strict=True))})
        right = renamed.round({name: Push(along(v, i)) for i, (name, v) in enumerate(zip(names, values, strict=True))})
        to_plain = dict(zip(names, "abcd", strict=True))
        assert sorted(to_plain[name] for name in right.accepted) == list(left.accepted)
        assert right.merged_norm == pytest.approx(left.merged_norm, nan_ok=True)
