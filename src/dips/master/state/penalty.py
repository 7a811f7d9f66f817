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
from collections.abc import Sequence
from dataclasses import dataclass

from dips.core.errors import LocalProtocolError
from dips.master.state import penalty_direction
from dips.master.state.penalty_config import PRESETS, PenaltyConfig
from dips.master.state.penalty_detect import Detection, detect
from dips.master.state.penalty_scaling import momentum_warning, participation, round_tokens
from dips.master.state.penalty_statistics import ClusterStatistics, DetectorState
from dips.master.state.penalty_types import JudgeInputs, Judgement, Participant, ParticipantMeasure, Rejection
from dips.master.state.penalty_update import after_commit, after_void

__all__ = [
    "PRESETS",
    "ClusterStatistics",
    "DetectorState",
    "JudgeInputs",
    "Judgement",
    "Participant",
    "ParticipantMeasure",
    "PenaltyConfig",
    "Rejection",
    "judge",
    "momentum_warning",
    "round_tokens",
]

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
    _check(participants, gram, directions)
    findings, tau = detect(state, config, participants, [gram[j][j] for j in range(len(participants))])
    merge = _merge(config, findings, gram)
    kappa, rho = math.nan, math.nan
    clip_norm = _clip_norm(state, config)
    if merge.accepted:
        kappa = min(1.0, clip_norm / max(merge.norm, MIN_MERGED_NORM))
        rho = participation(config, merge.clusters, merge.tokens, live_unquarantined, round_tokens)
    cosines = penalty_direction.cosines(findings, directions)
    committed, commit_alarms = after_commit(state, config, findings, merge.norm, cosines)
    void, void_alarms = after_void(state, config, findings, cosines)
    return Judgement(
        accepted=merge.clusters,
        rejected=tuple(Rejection(f.cluster, f.reason, f.non_finite) for f in findings if not f.accepted),
        weights=merge.weights,
        kappa=kappa,
        rho=rho,
        merged_norm=merge.norm,
        clip_norm=clip_norm,
        threshold=tau,
        measures=tuple(_measure(finding, cosine) for finding, cosine in zip(findings, cosines, strict=True)),
        pair_cosines=_pair_cosines(findings, gram),
        next_state_if_committed=committed,
        next_state_if_void=void,
        alarms=commit_alarms if merge.accepted else void_alarms,
        alarms_if_void=void_alarms,
        quarantined=(committed if merge.accepted else void).quarantined,
    )


@dataclass(frozen=True)
class _Merge:
    """What is known of d from numbers alone. accepted: c; norm: ||d||, NaN when c is empty."""

    accepted: tuple[Detection, ...]
    weights: tuple[float, ...]
    norm: float

    @property
    def clusters(self) -> tuple[str, ...]:
        return tuple(finding.cluster for finding in self.accepted)

    @property
    def tokens(self) -> float:
        return sum(finding.participant.tokens for finding in self.accepted)


def _merge(config: PenaltyConfig, findings: Sequence[Detection], gram: Gram) -> _Merge:
    of_accepted = [j for j, finding in enumerate(findings) if finding.accepted]
    accepted = tuple(findings[j] for j in of_accepted)
    weights = _weights(config, accepted)
    return _Merge(accepted, weights, _merged_norm(gram, of_accepted, weights))


def _check(participants: Sequence[Participant], gram: Gram, directions: Gram | None) -> None:
    names = [participant.cluster for participant in participants]
    if not names or names != sorted(set(names)):
        raise LocalProtocolError(f"participants must be distinct and in cluster-id order, not {names}")
    _check_square("Gram matrix", gram, len(names), len(names))
    if directions is not None:
        _check_square("matrix of directions", directions, 2 * len(names), len(names))


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


def _clip_norm(state: DetectorState, config: PenaltyConfig) -> float:
    if config.clip_scope == "auto" and state.merged_norms:
        return statistics.median(state.merged_norms)
    return config.clip_norm


def _measure(finding: Detection, cosine: float) -> ParticipantMeasure:
    score = math.nan if finding.score is None else finding.score
    return ParticipantMeasure(finding.cluster, finding.norm, finding.scaled_norm, score, cosine)


def _pair_cosines(findings: Sequence[Detection], gram: Gram) -> tuple[tuple[str, str, float], ...]:
    return tuple(
        (
            findings[j].cluster,
            findings[k].cluster,
            penalty_direction.cosine(gram[j][k], findings[j].norm, findings[k].norm),
        )
        for j in range(len(findings))
        for k in range(j + 1, len(findings))
    )
