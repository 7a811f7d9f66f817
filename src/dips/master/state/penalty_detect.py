"""Detects outliers (docs/algorithm.md, paper 4.1 step 2): which pushes of a round are bad, against the state before
it.

It must never change what is remembered; a finding is provisional until the round is committed or void.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dips.core.messages import Alarm, BlockGram
from dips.core.placement import Placement
from dips.master.state.penalty_types import ClusterStatistics, DetectorState, Participant, PenaltyConfig
from dips.master.state.reasons import AlarmKind, Reason, VerdictCode

# ---- gram ------------------------------------------------------------------------------------------------------------
#
# Adds up what the slaves measured, block by block in block-id order, so that the bits do not depend on placement.


class GramError(Exception):
    """A slave's measurement has the wrong blocks or sizes."""


def add_blocks(
    measured: Mapping[str, Sequence[BlockGram]], placement: Placement, k: int
) -> tuple[list[list[float]], list[int]]:
    """The symmetric k x k Gram matrix over all blocks, and the non-finite elements of each participant.

    Raises GramError when a slave measured other blocks than its own, or matrices of another size.
    """
    by_block: dict[int, BlockGram] = {}
    for index, slave in enumerate(placement.slaves):
        own = {block for block, owner in enumerate(placement.slave_of_block) if owner == index}
        given = {item.block: item for item in measured.get(slave, ())}
        if set(given) != own or len(measured.get(slave, ())) != len(own):
            raise GramError(f"slave {slave} measured {len(given)} blocks, not the {len(own)} that it holds")
        by_block |= given
    upper = [0.0] * (k * (k + 1) // 2)
    nonfinite = [0] * k
    for block in range(len(placement.slave_of_block)):
        item = by_block[block]
        if len(item.gram) != len(upper) or len(item.nonfinite_elems) != k:
            raise GramError(f"block {block} was measured for another number of pushes than {k}")
        upper = [total + value for total, value in zip(upper, item.gram, strict=True)]
        nonfinite = [total + value for total, value in zip(nonfinite, item.nonfinite_elems, strict=True)]
    return _square(upper, k), nonfinite


def add_directions(measured: Mapping[str, Sequence[float]], k: int) -> list[list[float]] | None:
    """The symmetric 2k x 2k matrix of directions over all slaves, in slave order; None when a slave measured none.

    Raises GramError for a matrix of another size.
    """
    n_entries = k * (2 * k + 1)
    if not measured or not all(measured.values()):
        return None
    if any(len(entries) != n_entries for entries in measured.values()):
        sizes = {slave: len(entries) for slave, entries in sorted(measured.items())}
        raise GramError(f"directions of {k} pushes have {n_entries} entries, the slaves sent {sizes}")
    rows = zip(*(measured[slave] for slave in sorted(measured)), strict=True)
    return _square([sum(entries) for entries in rows], 2 * k)


def zero_everywhere(measured: Mapping[str, Sequence[bool]], k: int) -> list[bool]:
    """For each participant, whether all slaves measured only zeros; of none where a slave measured nothing.

    Raises GramError for another number of participants.
    """
    if not measured or not all(measured.values()):
        return [False] * k
    if any(len(each) != k for each in measured.values()):
        raise GramError(f"slaves looked for zeros in {sorted(map(len, measured.values()))} pushes, not in {k}")
    return [all(of_push) for of_push in zip(*measured.values(), strict=True)]


def _square(upper: Sequence[float], k: int) -> list[list[float]]:
    """From the upper triangle by rows; the diagonal is clamped to >= 0 (NaN stays NaN)."""
    matrix = [[0.0] * k for _ in range(k)]
    values = iter(upper)
    for row in range(k):
        for column in range(row, k):
            value = next(values)
            matrix[row][column] = matrix[column][row] = 0.0 if row == column and value < 0 else value
    return matrix


# ---- penalty detect --------------------------------------------------------------------------------------------------


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
    """One participant, measured and checked."""

    participant: Participant
    known: ClusterStatistics
    norm: float  # G_j
    scaled_norm: float  # Gn_j, NaN unless `valid`
    score: float | None  # z_j, None while undefined
    valid: bool  # norm and tokens are finite and positive
    reason: Reason | None = None  # why it is rejected; None when it is accepted

    @property
    def cluster(self) -> str:
        return self.participant.cluster

    @property
    def accepted(self) -> bool:
        return self.reason is None


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
    if (fault := _fault(participant, norm)) is not None:
        return Detection(participant, known, norm, math.nan, None, False, fault)
    scaled = _scaled_norm(config, known, participant, norm)
    return Detection(participant, known, norm, scaled, _score(config, known, scaled), True)


def _fault(participant: Participant, norm: float) -> Reason | None:
    """Why no detector may accept this push; None when one may."""
    if participant.nonfinite_elems > 0:
        return Reason(VerdictCode.NOT_FINITE, f"{participant.nonfinite_elems} elements are not finite")
    if not math.isfinite(norm):
        return Reason(VerdictCode.NOT_FINITE, f"the norm of its pseudo-gradient is {norm}")
    if not 0 < participant.tokens <= MAX_TOKENS:  # NaN is neither
        return Reason(VerdictCode.TOKENS, f"its tokens are {participant.tokens:g}, not a positive count")
    if participant.all_zero:
        return Reason(VerdictCode.ZERO, "every parameter that it sent is 0, which no training gives")
    if norm == 0.0:
        return Reason(VerdictCode.ZERO, "its parameters equal the current version's: the norm is 0")
    return None


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
    norm, median = finding.scaled_norm, statistics.median(pool)
    if len(pool) >= MIN_KNOWN_NORMS and norm > config.hard_gate * median:
        times = f"{norm / median:.3g} times the median {median:.3g} of recent ones (limit {config.hard_gate:g})"
        return replace(finding, reason=Reason(VerdictCode.NORM, f"norm {norm:.3g} is {times}"))
    if finding.score is not None and finding.score > tau:
        return replace(finding, reason=Reason(VerdictCode.SCORE, f"score {finding.score:.3g} above {tau:.3g}"))
    return finding


# ---- penalty direction -----------------------------------------------------------------------------------------------
#
# Measures the direction of pushes: their cosine with the other clusters' updates, and the alarm
# (docs/algorithm.md, Direction).
#
# The update of cluster j, p_j = theta_base - theta_j, is compared with the others' since its base: the model's movement
# from that base, s_j = theta_base - theta_v, plus the mean update of the others accepted in this round. It never
# changes what is merged: it only informs a person. No tolerance of hostile clusters is claimed.
#
# Legend: k participants in cluster-id order; directions: the Gram matrix of p_1 .. p_k, s_1 .. s_k, NaN where a slave
# did not know a base.


MIN_OTHERS = 2
"""The least number of other clusters with a known usual cosine: of two that disagree, either one may be wrong."""

MIN_AGREEMENT = 0.25
"""The others' usual cosine must be at least this: where clusters hardly agree, one that does not is not unusual. They
hardly agree when the model oscillates (rho = 1 and too large a learning rate): good clusters then move it back."""


def cosines(
    findings: Sequence[Detection], directions: Sequence[Sequence[float]] | None, accused: Collection[str] = ()
) -> tuple[float, ...]:
    """cos(p_j, s_j + sum_i w_i p_i), i over the other accepted participants, w_i = T_i over their sum.

    accused: the clusters whose alarm is active. None is compared with them, and while another one's is, s_j counts
    nothing: it has merged pushes of theirs in it.

    NaN where it is not known: no directions, a base that the slaves do not hold, elements that are not finite, or
    no update of others since the base.
    """
    if directions is None:
        return (math.nan,) * len(findings)
    return tuple(_cosine(findings, directions, j, accused) for j in range(len(findings)))


def _cosine(
    findings: Sequence[Detection], directions: Sequence[Sequence[float]], j: int, accused: Collection[str]
) -> float:
    k = len(findings)
    others = [
        i
        for i, finding in enumerate(findings)
        if finding.accepted and i != j and math.isfinite(directions[i][i]) and finding.cluster not in accused
    ]
    tokens = sum(findings[i].participant.tokens for i in others)
    way = {i: findings[i].participant.tokens / tokens for i in others}
    if all(name == findings[j].cluster for name in accused):
        way[k + j] = 1.0
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
    config: PenaltyConfig, state: DetectorState, judged: Sequence[str], present: Collection[str]
) -> tuple[Mapping[str, ClusterStatistics], tuple[Alarm, ...]]:
    """The clusters whose statistics change, and an alarm for each of those just judged whose alarm begins.

    state: with the cosines of this round. An alarm begins below the limit and ends above twice that, or above twice the
    lowest limit that a share gives: a cluster near the limit must not raise it every few rounds. The others of a bad
    cluster look bad too, as they are compared with what it pushed. So only the least agreeing one is named, and none
    while the last push of another that is present agreed less, excluded or not; the others' cosines are then forgotten.
    Of two that disagree either one may be wrong: both are named.
    """
    quiet = {name: known for name, known in state.clusters if not known.cosine_alarmed}
    last = {name: one.last_cosine for name, one in quiet.items() if name in present and one.last_cosine is not None}
    changed: dict[str, ClusterStatistics] = {}
    begun: list[Alarm] = []
    for cluster in sorted(_known(config, state, judged), key=lambda name: state.of(name).usual_cosine):
        known, others = state.of(cluster), _others(config, state, cluster)
        limit = _limit(config, others)
        if known.cosine_alarmed:
            if known.usual_cosine > 2.0 * max(limit, config.cosine_share * MIN_AGREEMENT):
                changed[cluster] = replace(known, cosine_alarmed=False)
        elif known.usual_cosine < min([limit, *(value for name, value in last.items() if name != cluster)]):
            begun.append(Alarm(AlarmKind.DIRECTION, (cluster,), _sentence(config, cluster, known, others)))
            changed[cluster] = replace(quiet.pop(cluster), cosine_alarmed=True)
            last.pop(cluster, None)
            if others is not None:
                changed |= {name: replace(other, cosines=(), cosine_rounds=0) for name, other in quiet.items()}
                break
    return changed, tuple(begun)


def _known(config: PenaltyConfig, state: DetectorState, names: Sequence[str]) -> list[str]:
    return [name for name in names if state.of(name).cosine_rounds >= config.cosine_warm_up_pushes]


def _others(config: PenaltyConfig, state: DetectorState, cluster: str) -> float | None:
    """The median of the usual cosines of the other clusters without an alarm. None while too few are known."""
    names = [name for name, known in state.clusters if name != cluster and not known.cosine_alarmed]
    others = [state.of(name).usual_cosine for name in _known(config, state, names)]
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
