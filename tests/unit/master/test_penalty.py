"""JUDGE and COMMIT, rule by rule (docs/algorithm.md), presets by name, and when momentum is warned of."""

from __future__ import annotations

import math

import pytest
from support.rounds import Master, Push, along, gram_of

from dips.core.errors import ConfigError, LocalProtocolError
from dips.master.state.penalty import judge, momentum_warning, round_tokens
from dips.master.state.penalty_types import DetectorState, Participant, PenaltyConfig, dynamic_local_steps_of
from dips.master.state.reasons import VerdictCode


@pytest.mark.parametrize(
    ("push", "complaint", "code"),
    [
        (Push(along(1.0), nonfinite_elems=3), "3 elements are not finite", VerdictCode.NOT_FINITE),
        (Push(along(math.nan), nonfinite_elems=1), "1 elements are not finite", VerdictCode.NOT_FINITE),
        (Push(along(math.inf)), "norm of its pseudo-gradient is inf", VerdictCode.NOT_FINITE),
        (Push(along(math.nan)), "norm of its pseudo-gradient is nan", VerdictCode.NOT_FINITE),
        (Push(along(1.0), tokens=0.0), "tokens are 0", VerdictCode.TOKENS),
        (Push(along(1.0), tokens=-5.0), "tokens are -5", VerdictCode.TOKENS),
        (Push(along(1.0), tokens=math.nan), "tokens are nan", VerdictCode.TOKENS),
        (Push(along(1.0), tokens=math.inf), "tokens are inf", VerdictCode.TOKENS),
        (Push(along(0.0)), "the norm is 0", VerdictCode.ZERO),
        (Push(along(1.0), all_zero=True), "every parameter that it sent is 0", VerdictCode.ZERO),
    ],
)
@pytest.mark.parametrize("preset", ["safe", "paper", "paper-literal", "edit"])
def test_every_preset_rejects_impossible_pushes(preset: str, push: Push, complaint: str, code: VerdictCode) -> None:
    judgement = Master(PenaltyConfig.of(preset)).round({"a": Push(along(1.0)), "b": push, "c": Push(along(1.0, 2))})
    assert judgement.accepted == ("a", "c")
    assert complaint in judgement.rejected["b"].sentence
    assert judgement.rejected["b"].code is code
    assert math.isfinite(judgement.merged_norm)
    assert sum(judgement.weights) == pytest.approx(1.0)


def test_the_gate_is_exclusive_at_ten_times() -> None:
    master = Master(live=frozenset("abc"))
    for _ in range(3):
        master.norms(a=1.0, b=1.0, c=1.0)
    assert master.judge({"d": Push(along(10.0))}).accepted == ("d",)
    assert master.judge({"d": Push(along(10.001))}).accepted == ()


@pytest.mark.parametrize(
    ("steps", "restarts"), [(64, False), (80, False), (48, False), (81, True), (47, True), (0, False)]
)
def test_average_tokens_restart_when_the_local_steps_change_by_more_than_a_quarter(steps: int, restarts: bool) -> None:
    """Where steps_change is that of earlier releases."""
    master = Master(PenaltyConfig(steps_change=0.25)).warmed_up()
    judgement = master.round({"a": Push(along(1.0), tokens=4000.0, local_steps=steps)})
    assert judgement.measures[0].scaled_norm == pytest.approx(1.0 if restarts else 0.25)
    known = master.state.of("a")
    assert (known.mean_tokens == 4000.0) is restarts
    assert known.steps == (steps if restarts else 64)


@pytest.mark.parametrize("before", [20, 200])
@pytest.mark.parametrize(("times", "growth"), [(2, 0.5), (4, 0.5), (4, 1.0), (8, 0.8), (0.25, 0.5), (0.25, 1.0)])
def test_no_push_is_excluded_after_the_run_got_another_h(before: int, times: float, growth: float) -> None:
    """Of pushes with more steps, the norms are larger: in time nearly as H, late in training as its root."""
    master = Master().warmed_up(before)
    for i in range(150):
        norm = times**growth * (1.0 + 0.05 * (i % 3 - 1))
        pushes = {
            name: Push(along(norm, axis), tokens=1000.0 * times, local_steps=int(64 * times))
            for axis, name in enumerate("abcd")
        }
        assert not master.round(pushes).rejected, i


def test_three_flags_quarantine_and_the_first_accepted_push_ends_it() -> None:
    master = Master().warmed_up()
    for i in range(4):
        judgement = master.norms(a=30.0, b=1.0)
        assert ("a" in judgement.quarantined) is (i >= 2)
        assert any("in quarantine after 3" in alarm.sentence for alarm in judgement.alarms) is (i == 2)
    assert master.state.quarantined == {"a"}
    judgement = master.norms(a=1.0, b=1.0)
    assert judgement.accepted == ("a", "b")
    assert judgement.quarantined == frozenset()
    assert master.state.of("a").flags_in_a_row == 0


@pytest.mark.parametrize("names", [[], ["b", "a"], ["a", "a"]])
def test_participants_must_stand_in_cluster_order(names: list[str]) -> None:
    participants = [Participant(name, 1.0, 0, 64) for name in names]
    with pytest.raises(LocalProtocolError, match="cluster-id order"):
        judge(DetectorState.empty(), PenaltyConfig(), participants, gram_of([[1.0]] * len(names)), frozenset(), 1.0)


@pytest.mark.parametrize("gram", [[[1.0]], [[1.0, 0.0], [0.0]]])
def test_the_gram_matrix_must_fit(gram: list[list[float]]) -> None:
    participants = [Participant(name, 1.0, 0, 64) for name in "ab"]
    with pytest.raises(LocalProtocolError, match="Gram matrix of 2"):
        judge(DetectorState.empty(), PenaltyConfig(), participants, gram, frozenset(), 1.0)


def test_who_names_a_bound_means_it_for_the_whole_run() -> None:
    assert PenaltyConfig.of("dynamic", beta=4.0).clip_scope == "auto"
    assert PenaltyConfig.of("dynamic", clip_norm=0.3).clip_scope == "global"
    assert PenaltyConfig.of("dynamic", clip_norm=0.3, clip_scope="auto").clip_scope == "auto"


@pytest.mark.parametrize(
    ("knobs", "complaint"),
    [
        ({"clip_nrom": 1.0}, "did you mean 'clip_norm'"),
        ({"clip_scope": "slave"}, "not available in this release: use 'global'"),
        ({"clip_scope": "layer"}, "not available in this release: use 'global'"),
        ({"clip_scope": "globl"}, "did you mean 'global'"),
        ({"detector": "none"}, "one of score, literal, edit, off"),
        ({"weighting": "equal"}, "one of tokens, softmax"),
        ({"momentum_scaling": "token"}, "did you mean 'tokens'"),
        ({"outer_optimizer": "heavyball"}, "did you mean 'heavy-ball'"),
        ({"delay_rounds": 2, "outer_optimizer": "nesterov"}, "delay_rounds belongs to .* 'delayed-nesterov'"),
        ({"delay_rounds": 0, "outer_optimizer": "delayed-nesterov"}, "delay_rounds is 0"),
        ({"outer_momentum": 0.1, "outer_optimizer": "averaging"}, "'averaging' has no momentum"),
        ({"momentum_scaling": "tokens", "outer_optimizer": "delayed-nesterov"}, "made for outer_optimizer 'nesterov'"),
        ({"alpha": 1.5}, "between .* and 1"),
        *(({name: value}, f"{name} is {value}") for name, value in (
            ("outer_momentum", 1.0), ("outer_momentum", -0.1), ("clip_norm", 0.0), ("clip_norm", math.nan),
            ("alpha", 0.0), ("beta", 0.5), ("hard_gate", 0.5), ("warm_up_pushes", 0), ("window_pushes", 0),
            ("clear_after_voids", -1), ("cosine_alarm", -2.0),
        )),
    ],
)  # fmt: skip
def test_impossible_values_are_a_config_error(knobs: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        PenaltyConfig.of("safe", **knobs)


@pytest.mark.parametrize("make", [PenaltyConfig.of, lambda name: PenaltyConfig(preset=name), dynamic_local_steps_of])
def test_an_unknown_preset_is_a_config_error(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"preset 'save' is not known; .*did you mean 'safe'"):
        make("save")


SAFE = PenaltyConfig()
TOKENS = PenaltyConfig(momentum_scaling="tokens")


@pytest.mark.parametrize(
    ("rates", "intervals_s"),
    [({}, {}), ({"a": 1.0}, {}), ({"a": 1.0, "b": 0.0}, {"a": 1.0}), ({"a": 1.0}, {"a": 0.0}), ({}, {"a": 1.0})],
)
def test_one_unknown_rate_makes_the_tokens_of_a_round_unknown(
    rates: dict[str, float], intervals_s: dict[str, float]
) -> None:
    assert round_tokens(rates, intervals_s) == 0.0


def test_the_master_warns_of_one_big_slow_cluster() -> None:
    rates, intervals_s = {"a": 1.0, "b": 1.0, "slow": 20.0}, {"a": 1.0, "b": 1.2, "slow": 10.0}
    warning = momentum_warning(SAFE, rates, intervals_s)
    assert warning is not None
    assert "cluster slow makes 91% of the tokens and pushes every 10.0 s, the others every 1.2 s" in warning
    assert "momentum_scaling to 'tokens'" in warning
    other = momentum_warning(PenaltyConfig(outer_optimizer="heavy-ball"), rates, intervals_s)
    assert other is not None
    assert ("smaller outer_momentum" in other, "momentum_scaling" in other) == (True, False)


@pytest.mark.parametrize(("config", "rates", "intervals_s"), [
    (PenaltyConfig(outer_momentum=0.0), {"a": 1.0, "slow": 20.0}, {"a": 1.0, "slow": 10.0}),
    (TOKENS, {"a": 1.0, "slow": 20.0}, {"a": 1.0, "slow": 10.0}),
    (SAFE, {"a": 10.0, "slow": 20.0}, {"a": 1.0, "slow": 10.0}),
    (SAFE, {"a": 1.0, "slow": 20.0}, {"a": 1.0, "slow": 7.0}), (SAFE, {"slow": 20.0}, {"slow": 7.0}),
    (SAFE, {"a": 1.0, "slow": 20.0}, {}), (SAFE, {}, {}),
])  # fmt: skip
def test_no_warning_otherwise(config: PenaltyConfig, rates: dict[str, float], intervals_s: dict[str, float]) -> None:
    assert momentum_warning(config, rates, intervals_s) is None
