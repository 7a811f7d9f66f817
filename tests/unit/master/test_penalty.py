"""JUDGE and COMMIT, rule by rule (docs/algorithm.md)."""

from __future__ import annotations

import math
import statistics

import pytest
from support.rounds import Master, Push, along, gram_of

from dips.core.errors import LocalProtocolError
from dips.master.state.penalty import judge
from dips.master.state.penalty_types import DetectorState, Judgement, Participant, PenaltyConfig
from dips.master.state.reasons import VerdictCode


def reason_of(judgement: Judgement, cluster: str) -> str:
    return judgement.rejected[cluster].sentence


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
    assert complaint in reason_of(judgement, "b")
    assert judgement.rejected["b"].code is code
    assert math.isfinite(judgement.merged_norm)
    assert sum(judgement.weights) == pytest.approx(1.0)


def test_pushes_that_are_no_known_norm() -> None:
    participants = [Participant("a", 1.0, 0, 64), Participant("b", 1.0, 0, 64)]
    gram = [[-1e-30, 0.0], [0.0, 1.0]]
    judgement = judge(DetectorState.empty(), PenaltyConfig(), participants, gram, frozenset("ab"), 2.0)
    assert judgement.accepted == ("b",)
    pushes = {"a": Push(along(1.0)), "b": Push(along(30.0)), "c": Push(along(1.0), tokens=0.0)}
    assert Master().round(pushes).accepted == ("a", "b")


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
    master = Master().warmed_up()
    judgement = master.round({"a": Push(along(1.0), tokens=4000.0, local_steps=steps)})
    assert judgement.measures[0].scaled_norm == pytest.approx(1.0 if restarts else 0.25)
    known = master.state.of("a")
    assert (known.mean_tokens == 4000.0) is restarts
    assert known.steps == (steps if restarts else 64)


def test_slow_drift_of_the_local_steps_restarts_too() -> None:
    """The reference is the step count at the last restart, not the last push's."""
    master = Master().warmed_up()
    for steps in (70, 76, 82):
        master.round({"a": Push(along(1.0), local_steps=steps)})
    assert master.state.of("a").steps == 82


def test_pushes_against_each_other_and_no_clip() -> None:
    judgement = Master().round({"a": Push(along(1.0)), "b": Push(along(-1.0))})
    assert judgement.merged_norm == 0.0
    assert judgement.kappa == 1.0
    assert [measure.cosine for measure in judgement.measures] == [-1.0, -1.0]
    assert Master(PenaltyConfig(clip_norm=math.inf)).norms(a=1e6).kappa == 1.0


@pytest.mark.parametrize(("norm", "kappa"), [(0.5, 1.0), (1.0, 1.0), (4.0, 0.25)])
def test_clip(norm: float, kappa: float) -> None:
    assert Master().norms(a=norm).kappa == kappa


def test_the_clip_comes_before_participation_scaling() -> None:
    """A full cycle of K partial rounds, each clipped, moves as far as one clipped full round."""
    full = Master().norms(a=4.0, b=4.0, c=4.0, d=4.0)
    assert full.rho == 1.0
    assert full.scale * full.merged_norm == pytest.approx(1.0)
    partial = Master().norms(a=4.0)
    assert (partial.kappa, partial.rho) == (0.25, 0.25)
    assert 4 * partial.scale * partial.merged_norm == pytest.approx(1.0)


def test_auto_clip_is_the_median_of_the_last_32_unscaled_merges() -> None:
    master = Master(PenaltyConfig(clip_scope="auto", clip_norm=0.5), live=frozenset("a"))
    assert master.norms(a=1.0).clip_norm == 0.5
    norms = [1.0]
    for i in range(40):
        judgement = master.norms(a=1.0 + 0.01 * (i % 7))
        assert judgement.clip_norm == statistics.median(norms[-32:])
        norms.append(judgement.merged_norm)
    assert len(master.state.merged_norms) == 32


def test_judging_changes_nothing_by_itself() -> None:
    """The state moves only with the record: an aborted round leaves no trace."""
    master = Master().warmed_up()
    before = master.state
    first = master.judge({"a": Push(along(30.0)), "b": Push(along(1.0, 1))})
    assert master.state is before
    assert master.judge({"a": Push(along(30.0)), "b": Push(along(1.0, 1))}) == first


def test_rejections_above_the_gate_break_the_row() -> None:
    master = Master().warmed_up(20)
    for _ in range(7):
        master.norms(a=3.0, b=1.0)
    assert master.state.of("a").score_rejections_in_a_row == 7
    master.norms(a=30.0, b=1.0)
    assert master.state.of("a").score_rejections_in_a_row == 0
    for _ in range(7):
        assert master.norms(a=3.0, b=1.0).accepted == ("b",)
    assert master.state.of("a").accepted == 20


def test_a_change_of_regime_locks_nobody_out() -> None:
    """All norms rise twentyfold for good: publishing resumes after at most 3 + 8 void rounds."""
    master = Master().warmed_up(30)
    outcomes = [bool(master.norms(a=20.0, b=20.0, c=20.0, d=20.0).accepted) for _ in range(20)]
    assert outcomes.index(True) <= 11
    assert all(outcomes[outcomes.index(True) :])


def test_prepare_may_turn_a_commit_into_a_void() -> None:
    master = Master().warmed_up()
    before = master.state
    judgement = master.judge({"a": Push(along(1.0)), "b": Push(along(30.0, 1))})
    void = judgement.next_state_if_void
    assert void.of("a") == before.of("a")
    assert void.of("b").flags_in_a_row == 1
    assert (void.voids_in_a_row, void.norms) == (1, before.norms)


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


def test_literal_flags_a_large_part_of_steady_norms_and_the_repaired_rule_none() -> None:
    """As printed: the first score is 0, so the threshold stays near 0 and ordinary pushes are flagged."""
    flagged = {}
    for preset in ("paper-literal", "paper"):
        master = Master(PenaltyConfig.of(preset), live=frozenset("a"))
        outcomes = [bool(master.norms(a=1.0 + 0.01 * ((7 * i) % 5 - 2)).accepted) for i in range(100)]
        flagged[preset] = outcomes.count(False)
    assert flagged["paper-literal"] >= 25
    assert flagged["paper"] == 0


def test_literal_learns_from_what_it_rejects() -> None:
    master = Master(PenaltyConfig.of("paper-literal"), live=frozenset("a"))
    for norm in (1.0, 0.9):
        master.norms(a=norm)
    before = master.state.of("a").mean
    assert before == pytest.approx(0.998)
    assert not master.norms(a=2.0).accepted
    assert master.state.of("a").mean == pytest.approx(0.02 * 2.0 + 0.98 * before)
    assert master.state.quarantined == frozenset()


def test_edit_threshold_is_three_deviations_of_the_scores() -> None:
    for scores, expected in (((), 3.0), ((1.0,), 3.0), ((-2.0, 2.0), 6.0), ((0.1, 0.2), 3.0)):
        state = DetectorState(scores=scores)
        participants = [Participant("a", 1.0, 0, 64)]
        judgement = judge(state, PenaltyConfig.of("edit"), participants, [[1.0]], frozenset("a"), 1.0)
        assert judgement.threshold == pytest.approx(expected)


def test_edit_weights_are_a_softmax_of_the_negative_norms() -> None:
    judgement = Master(PenaltyConfig.of("edit")).norms(a=1.0, b=2.0, c=1.0)
    total = 2 * math.exp(-1) + math.exp(-2)
    assert judgement.weights == pytest.approx((math.exp(-1) / total, math.exp(-2) / total, math.exp(-1) / total))
    assert judgement.rho == 1.0
    assert Master(PenaltyConfig.of("edit", hard_gate=math.inf)).norms(a=5000.0, b=5001.0).weights[0] > 0.7


def test_detector_off_merges_whatever_is_finite() -> None:
    master = Master(PenaltyConfig(detector="off")).warmed_up()
    assert master.norms(a=1e6, b=1.0).accepted == ("a", "b")


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
