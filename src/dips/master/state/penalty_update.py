"""Updates the detector's memory after a round (docs/algorithm.md, COMMIT and the rules below it).

Rejected values never enter it (the preset `paper-literal` excepted: the paper's recurrence has no condition).
Rejections change only counters, and these lead to restarted statistics, cleared histories and
quarantine. Nothing here may exclude a cluster for ever because its norms changed permanently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dips.master.state import penalty_direction
from dips.master.state.penalty_config import PenaltyConfig
from dips.master.state.penalty_detect import Detection, steps_changed
from dips.master.state.penalty_statistics import ClusterStatistics, DetectorState

UpdatedStatistics = tuple[ClusterStatistics, list[str]]
"""A cluster's statistics after the round, and alarms."""


def after_commit(
    state: DetectorState,
    config: PenaltyConfig,
    findings: Sequence[Detection],
    merged_norm: float,
    cosines: Sequence[float],
) -> tuple[DetectorState, tuple[str, ...]]:
    """The state that the COMMIT record carries, and alarms.

    cosines: of each finding (penalty_direction.cosines), NaN where not known.
    """
    accepted = [finding for finding in findings if finding.accepted]
    changed, alarms = _move_clusters(config, findings, cosines)
    ways = {f.cluster: cosine for f, cosine in zip(findings, cosines, strict=True) if f.accepted}
    changed |= {
        cluster: penalty_direction.remembered(config, changed[cluster], cosine) for cluster, cosine in ways.items()
    }
    turned, direction_alarms = penalty_direction.alarms(config, state.with_clusters(changed), list(ways))
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
) -> tuple[DetectorState, tuple[str, ...]]:
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
    return replace(next_state, norms=(), scores=(), merged_norms=(), voids_in_a_row=0), (*alarms, sentence)


def _move_clusters(
    config: PenaltyConfig, findings: Sequence[Detection], cosines: Sequence[float]
) -> tuple[dict[str, ClusterStatistics], tuple[str, ...]]:
    changed: dict[str, ClusterStatistics] = {}
    alarms: list[str] = []
    for finding, cosine in zip(findings, cosines, strict=True):
        moved, sentences = (_accepted(config, finding), []) if finding.accepted else _rejected(config, finding)
        norm, score, way = (_finite(value) for value in (finding.scaled_norm, finding.score, cosine))
        changed[finding.cluster] = replace(moved, last_norm=norm, last_score=score, last_cosine=way)
        alarms += sentences
    return changed, tuple(alarms)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _accepted(config: PenaltyConfig, finding: Detection) -> ClusterStatistics:
    learned = _learned(config, finding, finding.known)
    return replace(learned, flags_in_a_row=0, score_rejections_in_a_row=0, quarantined=False)


def _learned(config: PenaltyConfig, finding: Detection, known: ClusterStatistics) -> ClusterStatistics:
    """n_j, mu_j, V_j and Tbar_j with the average factor a = max(alpha, 1 / n_j); in the paper's text a = alpha after
    the first."""
    n = known.accepted + 1
    a = max(config.alpha, 1.0 / n)
    if config.detector == "literal" and n > 1:
        a = config.alpha
    mean = a * finding.scaled_norm + (1.0 - a) * known.mean
    variance = (1.0 - a) * known.variance + a * (finding.scaled_norm - mean) ** 2
    tokens, steps = _mean_tokens(config, finding, known, a)
    return replace(known, accepted=n, mean=mean, variance=variance, mean_tokens=tokens, steps=steps)


def _mean_tokens(config: PenaltyConfig, finding: Detection, known: ClusterStatistics, a: float) -> tuple[float, int]:
    """(Tbar_j, the local steps that it belongs to)."""
    pushed = finding.participant
    if known.mean_tokens is None or steps_changed(known, pushed, config):
        return pushed.tokens_for_local_steps, pushed.local_steps
    return a * pushed.tokens + (1.0 - a) * known.mean_tokens, known.steps or pushed.local_steps


def _rejected(config: PenaltyConfig, finding: Detection) -> UpdatedStatistics:
    known = finding.known
    if config.detector == "literal" and finding.valid:
        known = _learned(config, finding, known)
    flags = known.flags_in_a_row + 1
    in_a_row = known.score_rejections_in_a_row + 1 if finding.by_score else 0
    counted = replace(known, flags_in_a_row=flags, score_rejections_in_a_row=in_a_row)
    restarted, restart_alarms = _restart_if_due(config, finding, counted)
    moved, quarantine_alarms = _quarantine_if_due(config, finding, restarted)
    return moved, restart_alarms + quarantine_alarms


def _restart_if_due(config: PenaltyConfig, finding: Detection, counted: ClusterStatistics) -> UpdatedStatistics:
    in_a_row = counted.score_rejections_in_a_row
    if not 0 < config.restart_after_rejections <= in_a_row:
        return counted, []
    sentence = (
        f"{in_a_row} finite pushes of cluster {finding.cluster} in a row were rejected by their score: its "
        "statistics start again, so that a lasting change of its norms does not exclude it for ever"
    )
    return counted.restarted(), [sentence]


def _quarantine_if_due(config: PenaltyConfig, finding: Detection, counted: ClusterStatistics) -> UpdatedStatistics:
    flags = counted.flags_in_a_row
    if counted.quarantined or not 0 < config.quarantine_after_flags <= flags:
        return counted, []
    sentence = (
        f"cluster {finding.cluster} is in quarantine after {flags} rejections in a row (last: {finding.reason}): "
        "it pulls and resets its inner optimizer; its first accepted push ends the quarantine"
    )
    return replace(counted, quarantined=True), [sentence]
