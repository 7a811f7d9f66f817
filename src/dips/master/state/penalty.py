"""JUDGE: decides which pushes of a sealed round are merged, with what weights, and how far the model may move
(docs/algorithm.md, JUDGE).

Paper section 4.1 (steps 1 to 3) with the changes that docs/algorithm.md gives reasons for. Pure: it gets
numbers only, never parameters. The detector's state is replaced only by the state in a Judgement,
once the COMMIT record or the VOID record that holds it is durable.

Legend: k participants in cluster-id order; G_j norm of participant j's pseudo-gradient, T_j its tokens, c the
accepted ones, w their weights, d their weighted mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dips.core.errors import LocalProtocolError
from dips.core.messages import Alarm
from dips.master.state import penalty_detect
from dips.master.state.penalty_detect import Detection, detect, steps_changed
from dips.master.state.penalty_types import (
    ClusterStatistics,
    DetectorState,
    Judgement,
    Participant,
    ParticipantMeasure,
    PenaltyConfig,
)
from dips.master.state.reasons import AlarmKind, Reason, VerdictCode

# ---- penalty scaling -------------------------------------------------------------------------------------------------
#
# Participation scaling: how far a round may move the model, from the share of a full round that took part.
#
# The rule of docs/algorithm.md, and when to warn of momentum. It must never use norms: penalty.py judges the pushes.


WARN_TOKEN_SHARE = 0.8
WARN_PERIOD_RATIO = 8.0


def round_tokens(rates: Mapping[str, float], intervals_s: Mapping[str, float]) -> float:
    """T_round: tokens that the live clusters train on between two pushes; 0.0 when that is not known.

    rates: tokens/s of every live cluster (measured, declared until measured; <= 0: neither). intervals_s:
    their measured push intervals; clusters without one may be absent or <= 0. T_round = (sum of the rates) x
    (arithmetic mean of the intervals). One unknown rate makes it unknown, because the sum would be too small
    and rho too large.
    """
    known_s = [intervals_s[cluster] for cluster in sorted(intervals_s) if intervals_s[cluster] > 0]
    speeds = [rates[cluster] for cluster in sorted(rates)]
    if not known_s or not speeds or not all(speed > 0 for speed in speeds):
        return 0.0
    return sum(speeds) * (sum(known_s) / len(known_s))


def participation(
    config: PenaltyConfig,
    accepted: Collection[str],
    accepted_tokens: float,
    live_unquarantined: frozenset[str],
    round_tokens: float,
) -> float:
    """rho in (0, 1]: 1 when every live, unquarantined cluster is accepted, else min(1, sum_c T / T_round).

    With T_round unknown (<= 0 or not finite) the clusters count as equal: accepted / (accepted or live).
    """
    if not config.participation_scaling or live_unquarantined <= set(accepted):
        return 1.0
    if math.isfinite(round_tokens) and round_tokens > 0:
        return min(1.0, accepted_tokens / round_tokens)
    return len(accepted) / len(live_unquarantined | set(accepted))


def momentum_warning(config: PenaltyConfig, rates: Mapping[str, float], intervals_s: Mapping[str, float]) -> str | None:
    """A sentence when one slow cluster makes momentum unstable in the linear model and momentum_scaling is
    off.

    That is: it makes more than 0.8 of the tokens and pushes less than an eighth as often as each of the
    others.
    """
    total = sum(rates.values())
    if config.momentum_scaling != "off" or config.outer_momentum == 0 or total <= 0:
        return None
    scaling = "momentum_scaling to 'tokens'" if config.outer_optimizer == "nesterov" else "a smaller outer_momentum"
    for cluster in sorted(rates):
        others_s = [interval for name, interval in intervals_s.items() if name != cluster and interval > 0]
        share, period_s = rates[cluster] / total, intervals_s.get(cluster, 0.0)
        if share > WARN_TOKEN_SHARE and others_s and period_s > WARN_PERIOD_RATIO * max(others_s):
            return (
                f"cluster {cluster} makes {share:.0%} of the tokens and pushes every {period_s:.1f} s, the "
                f"others every {max(others_s):.1f} s or faster: momentum may become unstable; set {scaling}, "
                "turn dynamic local steps on, or lower that cluster's local steps"
            )
    return None


# ---- penalty update --------------------------------------------------------------------------------------------------
#
# Updates the detector's memory after a round (docs/algorithm.md, COMMIT and the rules below it).
#
# Rejected values never enter it (the preset `paper-literal` excepted: the paper's recurrence has no condition).
# Rejections change only counters, and these lead to restarted statistics, cleared histories and
# quarantine. Nothing here may exclude a cluster for ever because its norms changed permanently.


UpdatedStatistics = tuple[ClusterStatistics, list[Alarm]]
"""A cluster's statistics after the round, and alarms."""


def after_commit(
    state: DetectorState,
    config: PenaltyConfig,
    findings: Sequence[Detection],
    merged_norm: float,
    cosines: Sequence[float],
    present: Collection[str],
) -> tuple[DetectorState, tuple[Alarm, ...]]:
    """The state that the COMMIT record carries, and alarms.

    cosines: of each finding (penalty_detect.cosines), NaN where not known. present: participants and live clusters.
    """
    accepted = [finding for finding in findings if finding.accepted]
    changed, alarms = _move_clusters(config, findings, cosines)
    ways = {f.cluster: cosine for f, cosine in zip(findings, cosines, strict=True) if f.accepted}
    changed |= {
        cluster: penalty_detect.remembered(config, changed[cluster], cosine) for cluster, cosine in ways.items()
    }
    turned, direction_alarms = penalty_detect.alarms(config, state.with_clusters(changed), list(ways), present)
    scores = [finding.score for finding in accepted if finding.score is not None]
    window = config.window_pushes
    next_state = replace(
        state.with_clusters({**changed, **turned}),
        norms=(*state.norms, *(finding.scaled_norm for finding in accepted))[-window:],
        scores=(*state.scores, *scores)[-window:],
        merged_norms=(*state.merged_norms, merged_norm)[-config.clip_window_rounds :],
        voids_in_a_row=0,
    )
    return next_state, (*alarms, *direction_alarms)


def after_void(
    state: DetectorState, config: PenaltyConfig, findings: Sequence[Detection], cosines: Sequence[float]
) -> tuple[DetectorState, tuple[Alarm, ...]]:
    """The state that the VOID record carries, and alarms. cosines: as in after_commit.

    Participants that JUDGE accepted (PREPARE found a non-finite element) are not changed, because it is unknown
    which one caused it.
    """
    rejected = [(f, cosine) for f, cosine in zip(findings, cosines, strict=True) if not f.accepted]
    changed, alarms = _move_clusters(config, [f for f, _ in rejected], [cosine for _, cosine in rejected])
    next_state = replace(state.with_clusters(changed), voids_in_a_row=state.voids_in_a_row + 1)
    if not 0 < config.clear_after_voids <= next_state.voids_in_a_row:
        return next_state, alarms
    sentence = (
        f"{next_state.voids_in_a_row} void rounds in a row: the norms and scores that all clusters share are "
        "forgotten, so that a change of regime excludes no cluster for ever; look for what changed"
    )
    cleared = replace(next_state, norms=(), scores=(), merged_norms=(), voids_in_a_row=0)
    return cleared, (*alarms, Alarm(AlarmKind.HISTORIES_CLEARED, (), sentence))


def _move_clusters(
    config: PenaltyConfig, findings: Sequence[Detection], cosines: Sequence[float]
) -> tuple[dict[str, ClusterStatistics], tuple[Alarm, ...]]:
    changed: dict[str, ClusterStatistics] = {}
    alarms: list[Alarm] = []
    for finding, cosine in zip(findings, cosines, strict=True):
        if finding.reason is None:
            moved, more = _accepted(config, finding), list[Alarm]()
        else:
            moved, more = _rejected(config, finding, finding.reason)
        norm, score, way = (_finite(value) for value in (finding.scaled_norm, finding.score, cosine))
        changed[finding.cluster] = replace(moved, last_norm=norm, last_score=score, last_cosine=way)
        alarms += more
    return changed, tuple(alarms)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _accepted(config: PenaltyConfig, finding: Detection) -> ClusterStatistics:
    learned = _learned(config, finding, finding.known)
    return replace(learned, flags_in_a_row=0, score_rejections_in_a_row=0, quarantined=False)


def _learned(config: PenaltyConfig, finding: Detection, known: ClusterStatistics) -> ClusterStatistics:
    """n_j, mu_j, V_j and Tbar_j with the average factor a = max(alpha, 1 / n_j); in the paper's text a = alpha after
    the first."""
    pushed, n = finding.participant, known.accepted + 1
    a = max(config.alpha, 1.0 / n)
    if config.detector == "literal" and n > 1:
        a = config.alpha
    mean = a * finding.scaled_norm + (1.0 - a) * known.mean
    variance = (1.0 - a) * known.variance + a * (finding.scaled_norm - mean) ** 2
    if known.mean_tokens is None or steps_changed(known, pushed, config):
        # Tbar_j starts again: it belongs to the local steps that the cluster is now asked to make.
        tokens, steps = pushed.tokens_for_local_steps, pushed.local_steps
    else:
        tokens, steps = a * pushed.tokens + (1.0 - a) * known.mean_tokens, known.steps or pushed.local_steps
    return replace(known, accepted=n, mean=mean, variance=variance, mean_tokens=tokens, steps=steps)


def _rejected(config: PenaltyConfig, finding: Detection, reason: Reason) -> UpdatedStatistics:
    """One more flag; enough of them in a row restart the statistics or begin a quarantine."""
    known, cluster, alarms = finding.known, finding.cluster, list[Alarm]()
    if config.detector == "literal" and finding.valid:
        known = _learned(config, finding, known)
    flags = known.flags_in_a_row + 1
    # Only scores depend on the cluster's own statistics, so only they can be wrong because those are out of date.
    in_a_row = known.score_rejections_in_a_row + 1 if reason.code is VerdictCode.SCORE else 0
    moved = replace(known, flags_in_a_row=flags, score_rejections_in_a_row=in_a_row)
    if 0 < config.restart_after_rejections <= in_a_row:
        moved = moved.restarted()
        sentence = (
            f"{in_a_row} finite pushes of cluster {cluster} in a row were rejected by their score: its "
            "statistics start again, so that a lasting change of its norms does not exclude it for ever"
        )
        alarms.append(Alarm(AlarmKind.STATISTICS_RESTARTED, (cluster,), sentence))
    if not moved.quarantined and 0 < config.quarantine_after_flags <= flags:
        moved = replace(moved, quarantined=True)
        sentence = (
            f"cluster {cluster} is in quarantine after {flags} rejections in a row (last: {reason.sentence}): "
            "it pulls and resets its inner optimizer; its first accepted push ends the quarantine"
        )
        alarms.append(Alarm(AlarmKind.QUARANTINE, (cluster,), sentence))
    return moved, alarms


# ---- penalty ---------------------------------------------------------------------------------------------------------


MIN_MERGED_NORM = 1e-12

Gram = Sequence[Sequence[float]]


def judge(
    state: DetectorState,
    config: PenaltyConfig,
    participants: Sequence[Participant],
    gram: Gram,
    live_unquarantined: frozenset[str],
    round_tokens: float,
    directions: Gram | None = None,
) -> Judgement:
    """Judges one sealed round against the state before it.

    participants: in cluster-id order. gram: k x k, added over the blocks in block-id order; entries of
    participants with non-finite elements may be NaN or infinite. live_unquarantined: the live clusters, less
    state.quarantined. round_tokens: T_round, <= 0 when unknown (penalty_scaling.participation says what holds
    then). directions: 2k x 2k, of penalty_direction; None when no slave measured it. Raises LocalProtocolError when
    the arguments do not fit together: a bug of the caller.
    """
    names = [participant.cluster for participant in participants]
    if not names or names != sorted(set(names)):
        raise LocalProtocolError(f"participants must be distinct and in cluster-id order, not {names}")
    _check_square("Gram matrix", gram, len(names), len(names))
    if directions is not None:
        _check_square("matrix of directions", directions, 2 * len(names), len(names))

    findings, tau = detect(state, config, participants, [gram[j][j] for j in range(len(participants))])
    accepted = [j for j, finding in enumerate(findings) if finding.accepted]
    clusters = tuple(names[j] for j in accepted)
    weights = _weights(config, [findings[j] for j in accepted])
    merged_norm = _merged_norm(gram, accepted, weights)
    clip_norm = config.clip_norm
    if config.clip_scope == "auto" and state.merged_norms:
        clip_norm = statistics.median(state.merged_norms)
    kappa, rho = math.nan, math.nan
    if accepted:
        kappa = min(1.0, clip_norm / max(merged_norm, MIN_MERGED_NORM))
        tokens = sum(participants[j].tokens for j in accepted)
        rho = participation(config, clusters, tokens, live_unquarantined, round_tokens)

    present = {*names, *live_unquarantined}
    # Of two that disagree either one may be wrong, and both are named.
    accused = {name for name in present if state.of(name).cosine_alarmed and len(present) > penalty_detect.MIN_OTHERS}
    cosines = penalty_detect.cosines(findings, directions, accused)
    committed, commit_alarms = after_commit(state, config, findings, merged_norm, cosines, present)
    void, void_alarms = after_void(state, config, findings, cosines)
    return Judgement(
        accepted=clusters,
        rejected={f.cluster: f.reason for f in findings if f.reason is not None},
        weights=weights,
        kappa=kappa,
        rho=rho,
        merged_norm=merged_norm,
        clip_norm=clip_norm,
        threshold=tau,
        measures=tuple(
            ParticipantMeasure(f.cluster, f.norm, f.scaled_norm, math.nan if f.score is None else f.score, cosine)
            for f, cosine in zip(findings, cosines, strict=True)
        ),
        next_state_if_committed=committed,
        next_state_if_void=void,
        alarms=commit_alarms if accepted else void_alarms,
        alarms_if_void=void_alarms,
        quarantined=(committed if accepted else void).quarantined,
    )


def _check_square(what: str, matrix: Gram, size: int, k: int) -> None:
    if len(matrix) != size or any(len(row) != size for row in matrix):
        raise LocalProtocolError(f"the {what} of {k} participants has rows of {[len(row) for row in matrix]}")


def _weights(config: PenaltyConfig, accepted: Sequence[Detection]) -> tuple[float, ...]:
    """w_j = T_j / sum_c T (paper 4.1 step 3), or EDiT's softmax(-G)."""
    if config.weighting == "softmax":
        smallest = min((finding.norm for finding in accepted), default=0.0)  # keeps exp() within range
        parts = [math.exp(smallest - finding.norm) for finding in accepted]
    else:
        parts = [float(finding.participant.tokens) for finding in accepted]
    return tuple(part / sum(parts) for part in parts)


def _merged_norm(gram: Gram, accepted: Sequence[int], weights: Sequence[float]) -> float:
    """||d|| = sqrt(w^T Gram w), NaN when nothing is accepted; opposite pushes may leave a tiny negative
    square."""
    if not accepted:
        return math.nan
    with_merge = [sum(w * gram[j][i] for i, w in zip(accepted, weights, strict=True)) for j in accepted]
    squared = sum(weight * product for weight, product in zip(weights, with_merge, strict=True))
    return math.sqrt(max(squared, 0.0))
