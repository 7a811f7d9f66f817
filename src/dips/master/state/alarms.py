"""What a person should look at: token counts that are hardly possible, clusters with the same data, rounds without a
version.

An alarm is reported once when it begins (SharedState.alarm); the status lists it until it is over.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import Alarm, BeginPushRequest, RoundSummary
from dips.master.state.effects import ReplicaNews
from dips.master.state.penalty_detect import cosine
from dips.master.state.reasons import STANDING, AlarmKind
from dips.master.state.shared import SharedState

# ---- token counts ----------------------------------------------------------------------------------------------------
#
# Checks whether a cluster's token counts are plausible (docs/algorithm.md, token counts).
#
# Clusters with their own data count the tokens themselves, and a count decides the weight of a push and the run's end.
# The tokens per step of a push are compared with those of this cluster's accepted pushes and with those of the other
# live clusters. Batches differ, so there are two limits: far beyond both, the push is refused before it counts; above
# the nearer limit, a person is warned and the push counts. Too few tokens only waste that cluster's own work, so they
# are never refused. Leased data needs no such check: there the ranges give the number of tokens.


DOUBTFUL_RATIO = 10.0
"""The limit of the warning. One device compared with a node of eight is below it; tokens compared with samples of a
short text are above."""

LEAST_STEPS = 8
OWN_PUSHES = 8
"""Steps before a cluster's counts are compared with another's, and accepted pushes before they are compared with its
own: one step, and with H = 1 one push, may have been a short batch."""

REMEDY = (
    "let tokens_per_step, or count(), say what one optimizer.step() of this cluster was trained on, in the same unit "
    "(tokens, not samples) on every cluster; a checkpoint that was taken in the meantime holds the wrong count"
)


@dataclass(frozen=True)
class _Usual:
    """The usual tokens per step of some clusters."""

    per_step: float
    whose: str  # a phrase that names them


def usual_per_step(shared: SharedState, cluster: str) -> float:
    """The tokens per step that the cluster counts in its pushes, with the open one, or in its beats, whichever is more.
    0.0: unknown."""
    entry, member = shared.ledger.clusters.get(cluster), shared.members.get(cluster)
    tokens, steps = (entry.tokens_applied, entry.steps_applied) if entry is not None else (0, 0)
    if member is not None and member.push is not None:
        tokens, steps = tokens + member.push.request.tokens, steps + member.push.request.steps
    pushed = tokens / steps if steps >= LEAST_STEPS else 0.0
    beat = member.beat if member is not None else None
    known = beat is not None and beat.steps >= LEAST_STEPS and beat.steps_per_s > 0
    return max(pushed, beat.tokens_per_s / beat.steps_per_s if beat is not None and known else 0.0)


def check_token_count(shared: SharedState, cluster: str, request: BeginPushRequest) -> None:
    """Refuses an impossible count; reports a doubtful one, and ends the report once a count is not doubtful.

    Raises Refused(TOKENS). Only for a push of training where clusters bring their own data.
    """
    member = shared.members.get(cluster)
    # The steps that the cluster is to take between two pushes.
    round_steps = (member.local_steps if member is not None else 0) or shared.config.settings.sync_every_steps
    usual = _usual(shared, cluster)
    per_step = request.tokens / (request.steps or round_steps)
    if why := _why_not(shared, request, per_step, usual, round_steps):
        _doubt(shared, cluster, f"a push of cluster {cluster} is refused: {why}")
        raise Refused(RefusalCode.TOKENS, why)
    _doubt(shared, cluster, _why_doubtful(shared, cluster, request, per_step, usual))


def _why_not(
    shared: SharedState, request: BeginPushRequest, per_step: float, usual: list[_Usual], round_steps: int
) -> str:
    limit, tk_max = shared.config.token_ratio_max, shared.settings().tk_max_tokens
    for other in usual:
        if per_step > limit * other.per_step:
            return (
                f"{request.tokens} tokens in {request.steps} steps, {_short(per_step)} a step, are "
                f"{_short(per_step / other.per_step)} times what {other.whose}: {REMEDY}; or start the master with a "
                f"larger token_ratio_max (it is {limit:g}) if this is meant"
            )
    counted = min(request.tokens, per_step * round_steps)  # after an outage a push has more steps than a round
    if not usual and 0 < tk_max < counted:
        return (
            f"{_short(counted)} tokens in one round are more than the whole run is to train on (tk_max is {tk_max}), "
            f"and nothing is known yet to compare them with: {REMEDY}; or raise tk_max, or lower sync_every"
        )
    return ""


def _usual(shared: SharedState, cluster: str) -> list[_Usual]:
    """The known counts to compare with; none for the first push of the only cluster."""
    known: list[_Usual] = []
    entry = shared.ledger.entry(cluster)
    if entry.pushes_applied >= OWN_PUSHES and entry.steps_applied >= LEAST_STEPS:
        own = entry.tokens_applied / entry.steps_applied
        known.append(_Usual(own, f"its accepted pushes counted, {_short(own)}"))
    names = [other.cluster for other in shared.live() if other.cluster != cluster]
    others = {name: per_step for name in names if (per_step := usual_per_step(shared, name)) > 0}
    if others:
        median = statistics.median(others.values())
        who = "the other clusters count" if len(others) > 1 else f"cluster {next(iter(others))} counts"
        known.append(_Usual(median, f"{who}, {_short(median)}"))
    return known


def _why_doubtful(
    shared: SharedState, cluster: str, request: BeginPushRequest, per_step: float, usual: list[_Usual]
) -> str:
    entry = shared.ledger.entry(cluster)
    tokens, steps = entry.tokens_applied + request.tokens, entry.steps_applied + request.steps
    lately = tokens / steps if steps >= LEAST_STEPS else math.inf
    for other in usual:
        ratio = per_step / other.per_step
        if ratio > DOUBTFUL_RATIO:
            return (
                f"cluster {cluster} counts {_short(per_step)} tokens a step, {_short(ratio)} times what {other.whose}; "
                f"its weight is as much larger: {REMEDY}; nothing to do if its batches are so much larger"
            )
        if max(lately / other.per_step, ratio) < 1.0 / DOUBTFUL_RATIO:
            return (
                f"cluster {cluster} counts {_short(per_step)} tokens a step, 1/{_short(1 / ratio)} of what "
                f"{other.whose}; its work hardly counts: {REMEDY}; nothing to do if its batches are so much smaller"
            )
    return ""


def _short(number: float) -> str:
    """Whole from 100 on, else three digits; never with an exponent."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _doubt(shared: SharedState, cluster: str, sentence: str) -> None:
    """Reports a doubt once, when it begins; the sentence is then updated with the newest numbers."""
    if not sentence:
        shared.token_doubts.pop(cluster, None)
        return
    alarm = Alarm(AlarmKind.TOKEN_COUNTS, (cluster,), sentence)
    if cluster not in shared.token_doubts:
        shared.alarm(alarm)
    shared.token_doubts[cluster] = alarm, shared.now_s


# ---- same data -------------------------------------------------------------------------------------------------------
#
# Detects two clusters with the same pushes, which train on the same data in the same order (docs/algorithm.md,
# Direction).
#
# Compares the updates p_j = theta_base - theta_j of pushes that a round accepts together, in pairs. It changes nothing
# that is merged. It detects only pushes from one base with about as many steps, as in rounds of all clusters. Under
# dynamic steps and overlap clusters with one seed drift apart after their first rounds: so one round is enough where
# the pushes are equal in nearly every bit, which different data never gives.
#
# Legend: directions: the Gram matrix of p_1 .. p_k, s_1 .. s_k (penalty_detect.py), NaN where it is not known.


ALIKE_COSINE = 0.99
ALIKE_NORMS = 0.95
"""The smaller norm as a part of the larger one. Norms of clusters with different data are often equal, but their
cosines are far lower: 0.27 to 0.84 in the byte model (docs/algorithm.md, Direction)."""

ALIKE_ROUNDS = 3
"""Common rounds with both pushes alike, less those without, before the alarm begins; it ends when none are left."""

EQUAL_WITHIN = 1e-6
"""Pushes whose cosine and norms differ by at most this from those of equal pushes are equal."""

EQUAL_ROUNDS = 20
"""Rounds without pushes alike before an alarm that equal pushes began ends: what was shown once stays true for two
clusters that are only out of step since."""


def compare_pushes(
    shared: SharedState, participants: Sequence[str], accepted: Sequence[str], directions: Sequence[Sequence[float]]
) -> None:
    """Compares a judged round's accepted pushes, and reports when an alarm begins."""
    here = [(j, name) for j, name in enumerate(participants) if name in accepted]
    for at, (j, name) in enumerate(here):
        for k, other in here[at + 1 :]:
            _compare(shared, (name, other), directions[j][j], directions[k][k], directions[j][k])
    for pair in [pair for pair in shared.alike if not shared.members.keys() >= set(pair)]:
        _forget(shared, pair)


def forget_pushes(shared: SharedState, cluster: str) -> None:
    """A new process has this cluster's name: it may have other data than the one before, whose pushes were alike."""
    for pair in [pair for pair in shared.alike if cluster in pair]:
        _forget(shared, pair)


def _forget(shared: SharedState, pair: tuple[str, str]) -> None:
    shared.alike.pop(pair)
    shared.same_data.pop(pair, None)


def _compare(shared: SharedState, pair: tuple[str, str], squared: float, other_squared: float, product: float) -> None:
    if not (math.isfinite(product) and squared > 0.0 and other_squared > 0.0):
        return
    norm, other_norm = math.sqrt(squared), math.sqrt(other_squared)
    likeness = cosine(product, norm, other_norm)
    norms = min(norm, other_norm) / max(norm, other_norm)
    alike, equal = likeness >= ALIKE_COSINE and norms >= ALIKE_NORMS, min(likeness, norms) >= 1.0 - EQUAL_WITHIN
    before = shared.alike.get(pair, 0)
    n_rounds = max(before, min(ALIKE_ROUNDS, before + 1)) if alike else max(0, before - 1)
    n_rounds = EQUAL_ROUNDS if equal else n_rounds
    shared.alike[pair] = n_rounds
    if n_rounds == 0:
        _forget(shared, pair)
    elif alike and n_rounds >= ALIKE_ROUNDS:
        how_long = "in a round" if equal else f"in at least {ALIKE_ROUNDS} rounds"
        sentence = (
            f"clusters {pair[0]} and {pair[1]} push the same: the cosine of their updates is {likeness:.2f}, the norms "
            f"are {norm:.3g} and {other_norm:.3g}, {how_long}. They train on the same data in the same order, so one "
            "of them adds nothing: give each its own part of the data, or at least another seed"
        )
        alarm = Alarm(AlarmKind.SAME_DATA, pair, sentence)
        if pair not in shared.same_data:
            shared.alarm(alarm)
        shared.same_data[pair] = alarm


# ---- what beats tell -------------------------------------------------------------------------------------------------
#
# Clusters with one seed read the same batches from the beginning, whatever the lengths of their pushes: each says the
# digest of its first ones. And a cluster whose disk takes no records pushes nothing, while its beats go on.


UNRECORDED_S = 60.0
"""So long a push may wait for its record before a person should know."""


def look_at_beats(shared: SharedState) -> None:
    """Reports what the live clusters' beats begin to show, and ends what they no longer do."""
    found: list[Alarm] = []
    of_digest: dict[bytes, list[str]] = {}
    for member in shared.live():
        beat = member.beat
        if beat is not None and beat.first_batches:
            of_digest.setdefault(beat.first_batches, []).append(member.cluster)
        if beat is not None and beat.unrecorded_s >= UNRECORDED_S:
            sentence = (
                f"cluster {member.cluster} cannot record its push for {beat.unrecorded_s:.0f} s, so that it is not "
                f"sent ({beat.note or 'its log says why'}): look at the disk of its checkpoint_dir"
            )
            found.append(Alarm(AlarmKind.NOT_RECORDED, (member.cluster,), sentence))
    for clusters in of_digest.values():
        if len(clusters) > 1:
            sentence = (
                f"clusters {' and '.join(clusters)} began with the same batches: they train on the same data in the "
                "same order, so that all but one of them add nothing: give each its own part of the data, or at least "
                "another seed"
            )
            found.append(Alarm(AlarmKind.SAME_DATA, tuple(clusters), sentence))
    for alarm in found:
        if (alarm.kind, alarm.clusters) not in shared.told_by_beats and alarm.clusters not in shared.same_data:
            shared.alarm(alarm)
    shared.told_by_beats = {(alarm.kind, alarm.clusters): alarm for alarm in found}


# ---- active alarms ---------------------------------------------------------------------------------------------------
#
# Lists the active alarms: the same list in the status, on the page and in the metrics. The direction of a cluster's
# pushes has its own field in ClusterStatus.


GONE_S = 3600.0
"""Seconds for which a refused token count stays listed: the cluster's process ends after the refusal. A later push
of the cluster with a correct count removes the alarm earlier."""

FRUITLESS_ROUNDS = 5
"""Rounds in a row without a version before the alarm. Three VOID rounds clear the shared histories, so that more than
three are unusual."""


def standing(shared: SharedState) -> tuple[Alarm, ...]:
    """All active alarms, in the order of their kinds."""
    fruitless = _fruitless(shared)
    nothing = [_nothing_merged(fruitless)] if len(fruitless) >= FRUITLESS_ROUNDS else []
    counts = [
        alarm
        for name, (alarm, at_s) in sorted(shared.token_doubts.items())
        if name in shared.members or shared.now_s - at_s < GONE_S
    ]
    told = [alarm for key, alarm in shared.told_by_beats.items() if key[1] not in shared.same_data]
    of_live = [each for each in (*shared.same_data.values(), *told) if shared.members.keys() >= set(each.clusters)]
    found = (*nothing, *counts, *of_live, *_no_replica(shared))
    return tuple(sorted(found, key=lambda alarm: (STANDING.index(AlarmKind(alarm.kind)), alarm.clusters)))


def replica_news(shared: SharedState, news: ReplicaNews) -> None:
    """Reports what is wrong with the journal's replica, or with its standby's lease, when it begins."""
    before = shared.lease_trouble if news.of_lease else shared.replica_trouble
    if news.of_lease:
        shared.lease_trouble = news.trouble
    else:
        shared.replica_trouble = news.trouble
    if news.trouble and not before:
        shared.alarm(*_no_replica(shared))


def _no_replica(shared: SharedState) -> list[Alarm]:
    said = []
    if shared.replica_trouble:
        meanwhile = "no round begins" if shared.config.pause_without_replica else "the run goes on"
        said.append(f"{shared.replica_trouble}; {meanwhile} until a standby follows and has them: look at its log")
    if shared.lease_trouble:
        said.append(f"the lease is not renewed, and a standby that is cut off may take over: {shared.lease_trouble}")
    return [Alarm(AlarmKind.NO_REPLICA, (), "; ".join(said))] if said else []


def round_was_fruitless(shared: SharedState) -> None:
    """Records that a round ended without a version; raises an alarm when there were too many in a row."""
    fruitless = _fruitless(shared)
    if len(fruitless) == FRUITLESS_ROUNDS:
        shared.alarm(_nothing_merged(fruitless))


def _fruitless(shared: SharedState) -> list[RoundSummary]:
    """The last rounds that made no version, newest first, as far as they are remembered."""
    return list(takewhile(lambda summary: summary.outcome != "commit", reversed(shared.recent)))


def _nothing_merged(fruitless: list[RoundSummary]) -> Alarm:
    last, n_void = fruitless[0], sum(summary.outcome == "void" for summary in fruitless)
    kinds = ((n_void, "void"), (len(fruitless) - n_void, "given up"))
    how = ", ".join(f"{n} {word}" for n, word in kinds if n)
    sentence = (
        f"nothing was merged in the last {len(fruitless)} rounds ({how}), so the model does not change while clusters "
        f"train; the last one: {last.reason}"
    )
    return Alarm(AlarmKind.NOTHING_MERGED, (), sentence)
