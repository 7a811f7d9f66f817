"""Measures the direction of pushes: their cosine with the other clusters' updates, and the alarm
(docs/algorithm.md, Direction).

The update of cluster j, p_j = theta_base - theta_j, is compared with the others' since its base: the model's movement
from that base, s_j = theta_base - theta_v, plus the mean update of the others accepted in this round. It never changes
what is merged: it only informs a person. No tolerance of hostile clusters is claimed.

Legend: k participants in cluster-id order; directions: the Gram matrix of p_1 .. p_k, s_1 .. s_k, NaN where a slave
did not know a base.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dips.master.state.penalty_config import PenaltyConfig
from dips.master.state.penalty_detect import Detection
from dips.master.state.penalty_statistics import ClusterStatistics, DetectorState

MIN_OTHERS = 2
"""The least number of other clusters with a known usual cosine: of two that disagree, either one may be wrong."""

MIN_AGREEMENT = 0.25
"""The others' usual cosine must be at least this: where clusters hardly agree, one that does not is not unusual. They
hardly agree when the model oscillates (rho = 1 and too large a learning rate): good clusters then move it back."""


def cosines(findings: Sequence[Detection], directions: Sequence[Sequence[float]] | None) -> tuple[float, ...]:
    """cos(p_j, s_j + sum_i w_i p_i), i over the other accepted participants, w_i = T_i over their sum.

    NaN where it is not known: no directions, a base that the slaves do not hold, elements that are not finite, or
    no update of others since the base.
    """
    if directions is None:
        return (math.nan,) * len(findings)
    return tuple(_cosine(findings, directions, j) for j in range(len(findings)))


def _cosine(findings: Sequence[Detection], directions: Sequence[Sequence[float]], j: int) -> float:
    k = len(findings)
    others = [
        i for i, finding in enumerate(findings) if finding.accepted and i != j and math.isfinite(directions[i][i])
    ]
    tokens = sum(findings[i].participant.tokens for i in others)
    way = {k + j: 1.0} | {i: findings[i].participant.tokens / tokens for i in others}
    product = sum(part * directions[j][row] for row, part in way.items())
    squared = sum(a * b * directions[row][column] for row, a in way.items() for column, b in way.items())
    return cosine(product, _root(directions[j][j]), _root(squared))


def _root(squared: float) -> float:
    return math.sqrt(squared) if squared > 0.0 else math.nan


def cosine(product: float, norm: float, other_norm: float) -> float:
    """Within [-1, 1]; NaN where a norm is 0 or anything is not finite."""
    size = norm * other_norm
    if not (math.isfinite(product) and math.isfinite(size) and size > 0.0):
        return math.nan
    return min(1.0, max(-1.0, product / size))


def remembered(config: PenaltyConfig, known: ClusterStatistics, value: float) -> ClusterStatistics:
    """The statistics with one more cosine; unchanged when that is NaN."""
    if math.isnan(value):
        return known
    last = (*known.cosines, value)[-config.cosine_window_pushes :]
    return replace(known, cosines=last, cosine_rounds=known.cosine_rounds + 1)


def alarms(
    config: PenaltyConfig, state: DetectorState, judged: Sequence[str]
) -> tuple[Mapping[str, ClusterStatistics], tuple[str, ...]]:
    """The clusters just judged whose alarm begins or ends, and a sentence for each that begins.

    state: with the cosines of this round. It begins below the limit and ends above twice that: a cluster near the limit
    must not raise it every few rounds. The least agreeing cluster is checked first: while its alarm is active, the
    others' limit is the fixed one, because merged bad pushes are a part of the movement that theirs are compared with.
    """
    changed: dict[str, ClusterStatistics] = {}
    sentences: list[str] = []
    known_enough = [name for name in judged if state.of(name).cosine_rounds >= config.cosine_warm_up_pushes]
    for cluster in sorted(known_enough, key=lambda name: state.of(name).usual_cosine):
        known = state.of(cluster)
        accused = any(changed.get(name, other).cosine_alarmed for name, other in state.clusters if name != cluster)
        others = None if accused else _others(config, state, cluster)
        if not known.cosine_alarmed and known.usual_cosine < _limit(config, others):
            changed[cluster] = replace(known, cosine_alarmed=True)
            sentences.append(_sentence(config, cluster, known, others))
        elif known.cosine_alarmed and known.usual_cosine > max(0.0, 2.0 * _limit(config, others)):
            changed[cluster] = replace(known, cosine_alarmed=False)
    return changed, tuple(sentences)


def _others(config: PenaltyConfig, state: DetectorState, cluster: str) -> float | None:
    """The median of the other clusters' usual cosines. None while too few are known."""
    others = [
        known.usual_cosine
        for name, known in state.clusters
        if name != cluster and known.cosine_rounds >= config.cosine_warm_up_pushes
    ]
    return statistics.median(others) if len(others) >= MIN_OTHERS else None


def _limit(config: PenaltyConfig, others: float | None) -> float:
    """Noise of the usual norm has a cosine of 0, which is low only in comparison with clusters that agree."""
    if others is None or others < MIN_AGREEMENT:
        return config.cosine_alarm
    return config.cosine_share * others


def _sentence(config: PenaltyConfig, cluster: str, known: ClusterStatistics, others: float | None) -> str:
    compared = "" if others is None else f", of the other clusters' {others:.2f}"
    return (
        f"cluster {cluster} pushes in another direction than the others: the usual cosine of its pushes is "
        f"{known.usual_cosine:.2f}{compared} (alarm below {_limit(config, others):.2g}). Norms do not show it and its "
        "pushes are merged: check its data, its learning rate and its code"
    )
