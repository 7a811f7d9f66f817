"""Detects outliers (docs/algorithm.md, paper 4.1 step 2): which pushes of a round are bad, against the state before
it.

It must never change what is remembered; a finding is provisional until the round is committed or void.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dips.master.state.penalty_config import PenaltyConfig
from dips.master.state.penalty_statistics import ClusterStatistics, DetectorState
from dips.master.state.penalty_types import Participant

MIN_RELATIVE_DEVIATION = 0.05
"""The smallest deviation that a score divides by, as a part of the mean: when norms hardly vary, noise must not
become an outlier."""

MIN_DEVIATION = 1e-12

MAX_TOKENS = 2.0**63
"""The largest token count on the wire; sums of larger numbers would overflow to a merge without weights."""

MIN_KNOWN_NORMS = 3
"""Norms that must be known before the hard gate rejects: the median of fewer says nothing."""


@dataclass(frozen=True)
class Detection:
    """One participant, measured and checked. reason: empty when it is accepted.

    norm: G_j; scaled_norm: Gn_j, NaN unless `valid`; score: z_j, None while undefined. valid: norm and tokens
    are finite and positive. by_score: rejected by its score alone, below the hard gate.
    """

    participant: Participant
    known: ClusterStatistics
    norm: float
    scaled_norm: float
    score: float | None
    valid: bool
    reason: str = ""
    non_finite: bool = False
    by_score: bool = False

    @property
    def cluster(self) -> str:
        return self.participant.cluster

    @property
    def accepted(self) -> bool:
        return not self.reason


def detect(
    state: DetectorState,
    config: PenaltyConfig,
    participants: Sequence[Participant],
    squared_norms: Sequence[float],
) -> tuple[list[Detection], float]:
    """One finding for each participant, and tau. squared_norms: the diagonal of the Gram matrix, in their
    order."""
    findings = [
        _measured(state, config, participant, squared)
        for participant, squared in zip(participants, squared_norms, strict=True)
    ]
    tau = threshold(state, config)
    pool = [*state.norms, *(finding.scaled_norm for finding in findings if finding.valid)]
    return [_judged(finding, config, pool, tau) for finding in findings], tau


def threshold(state: DetectorState, config: PenaltyConfig) -> float:
    """tau: a score above it is an outlier.

    The rule of docs/algorithm.md keeps it within [beta, beta^2], so that accepted scores can raise it only so far.
    """
    if config.detector == "off":
        return math.inf
    if config.detector == "literal":
        return config.beta * max(state.scores, default=math.inf)
    if config.detector == "edit":
        return config.beta * max(1.0, statistics.pstdev(state.scores) if state.scores else 1.0)
    return config.beta * min(max(max(state.scores, default=1.0), 1.0), config.beta)


def steps_changed(known: ClusterStatistics, participant: Participant, config: PenaltyConfig) -> bool:
    """Whether H_j changed so much from the H_j of Tbar_j that Tbar_j restarts."""
    if known.steps <= 0 or participant.local_steps <= 0:
        return False
    return abs(participant.local_steps - known.steps) > config.steps_change * known.steps


def _measured(state: DetectorState, config: PenaltyConfig, participant: Participant, squared: float) -> Detection:
    known = state.of(participant.cluster)
    # Rounding may leave a tiny negative square; max() would also hide a NaN.
    norm = math.sqrt(max(squared, 0.0)) if math.isfinite(squared) else squared
    reason, non_finite = _fault(participant, norm)
    if reason:
        return Detection(participant, known, norm, math.nan, None, False, reason, non_finite)
    scaled = _scaled_norm(config, known, participant, norm)
    return Detection(participant, known, norm, scaled, _score(config, known, scaled), True)


def _fault(participant: Participant, norm: float) -> tuple[str, bool]:
    """(why no detector may accept this push, whether the reason is a number that is not finite)."""
    if participant.nonfinite_elems > 0:
        return f"{participant.nonfinite_elems} elements are not finite", True
    if not math.isfinite(norm):
        return f"the norm of its pseudo-gradient is {norm}", True
    if not 0 < participant.tokens <= MAX_TOKENS:  # NaN is neither
        return f"its tokens are {participant.tokens:g}, not a positive count", False
    if norm == 0.0:
        return "its parameters equal the current version's: the norm is 0", False
    return "", False


def _scaled_norm(config: PenaltyConfig, known: ClusterStatistics, participant: Participant, norm: float) -> float:
    """Gn_j = G_j / max(1, T_j / Tbar_j): more tokens than usual allow a larger norm."""
    if config.detector == "literal":
        return norm
    mean_tokens = known.mean_tokens
    if mean_tokens is None or steps_changed(known, participant, config):
        mean_tokens = participant.tokens_for_local_steps
    return norm / max(1.0, participant.tokens / mean_tokens)


def _score(config: PenaltyConfig, known: ClusterStatistics, scaled_norm: float) -> float | None:
    """z_j, or None before the warm-up is over. In the paper's text the deviation has no floor; there 0 / 0 is taken
    as 0."""
    if known.accepted < config.warm_up_pushes:
        return None
    deviation = math.sqrt(known.variance)
    if config.detector != "literal":
        deviation = max(deviation, MIN_RELATIVE_DEVIATION * known.mean, MIN_DEVIATION)
    elif deviation == 0.0:
        return 0.0
    return (scaled_norm - known.mean) / deviation


def _judged(finding: Detection, config: PenaltyConfig, pool: Sequence[float], tau: float) -> Detection:
    if not finding.valid or config.detector == "off":
        return finding
    gate = _gate_reason(finding, config, pool)
    if gate:
        return replace(finding, reason=gate)
    if finding.score is not None and finding.score > tau:
        return replace(finding, reason=f"score {finding.score:.3g} above {tau:.3g}", by_score=True)
    return finding


def _gate_reason(finding: Detection, config: PenaltyConfig, pool: Sequence[float]) -> str:
    if len(pool) < MIN_KNOWN_NORMS:
        return ""
    median = statistics.median(pool)
    if finding.scaled_norm <= config.hard_gate * median:
        return ""
    return (
        f"norm {finding.scaled_norm:.3g} is {finding.scaled_norm / median:.3g} times the median {median:.3g} "
        f"of recent ones (limit {config.hard_gate:g})"
    )
