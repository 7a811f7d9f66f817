"""Derives H_j, the grace window and T_round from the measured speed of the clusters."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dips.core.messages import HeartbeatRequest
from dips.core.protocol import MAX_RANKS
from dips.master.state.penalty import momentum_warning
from dips.master.state.records import Member, Push, PushPhase, RoundPhase, StepsAhead
from dips.master.state.schedule import TransferRequest, Way
from dips.master.state.shared import SharedState

# ---- local steps -----------------------------------------------------------------------------------------------------
#
# Computes how many inner steps a cluster makes before its next push (docs/algorithm.md, dynamic local steps).
#
# Dynamic: H_j = clamp(speed_j x (t* - now - pull_j - push_j), H/8, H), t* the next planned window. t* is one absolute
# target for all clusters, one fastest round apart, so that their phases align again after a drift.
# Static: H, but fewer for a cluster that would otherwise be more than s_max versions late.


@dataclass(frozen=True)
class ClusterPace:
    """A cluster's measured speed and its last transfers; steps_per_s 0: not measured yet."""

    steps_per_s: float
    push_s: float
    pull_s: float

    @property
    def known(self) -> bool:
        return self.steps_per_s > 0 and math.isfinite(self.steps_per_s)

    def round_s(self, steps: int) -> float:
        return steps / self.steps_per_s + self.push_s + self.pull_s


def lower_bound(sync_every: int) -> int:
    """H/8, at least one step."""
    return max(1, math.ceil(sync_every / 8))


def fastest_round_s(paces: Sequence[ClusterPace], sync_every: int, overlap: str = "none") -> float | None:
    """Seconds of the fastest measured cluster's round of H steps; None while nothing is measured."""
    rounds = [round_s(pace, sync_every, overlap) for pace in paces if pace.known]
    return min(rounds) if rounds else None


def round_s(pace: ClusterPace, sync_every: int, overlap: str) -> float:
    """Seconds between two pushes of H steps; steps made during transfers count too.

    A transfer during which the cluster trains takes no extra time; but H/8 steps are always made after the pull.
    """
    hidden_s = {"none": 0.0, "push": pace.push_s, "full": pace.push_s + pace.pull_s}[overlap]
    return max(pace.round_s(sync_every) - hidden_s, pace.round_s(lower_bound(sync_every)))


def dynamic_steps(pace: ClusterPace, sync_every: int, window_at_s: float, period_s: float, now_s: float) -> int:
    """H_j for the first planned window, window_at_s + k x period_s, that is at least H/8 steps away.

    Rounded to the nearest step: a cluster is at most half a step early or late, so that one window gets all pushes.
    """
    if not pace.known or period_s <= 0:
        return sync_every
    least = lower_bound(sync_every)
    earliest_s = now_s + pace.round_s(least)
    periods = max(0, math.ceil((earliest_s - window_at_s) / period_s - 1e-9))
    room_s = window_at_s + periods * period_s - now_s - pace.push_s - pace.pull_s
    return min(sync_every, max(least, math.floor(pace.steps_per_s * room_s + 0.5)))


def steps_within_staleness(pace: ClusterPace, sync_every: int, s_max: int, publish_interval_s: float) -> int:
    """H, or fewer when H steps would take longer than s_max published versions."""
    if not pace.known or publish_interval_s <= 0:
        return sync_every
    room_s = s_max * publish_interval_s - pace.push_s - pace.pull_s
    return min(sync_every, max(lower_bound(sync_every), math.floor(pace.steps_per_s * room_s)))


# ---- pacing ----------------------------------------------------------------------------------------------------------


GRACE_SHARE = 0.1
GRACE_LEAST_S = 1.0

SLIDES = 3.0
"""A window that starts again with each arrival lasts at most this many times the grace. Each cluster arrives once, but
one that is evicted and joins again could otherwise extend it without end (I15)."""

STRAGGLERS_SHARE = 0.25
"""A window that opens earlier than this share of a fastest round before the planned one has stragglers only."""

EARLY_SHARE = 0.95
"""A cluster is expected to need at least this share of the time that its measured speed, or its last push, says: steps
and transfers vary."""

DAY_S = 86_400.0
MAX_WORDS = 200
MAX_DIGEST_BYTES = 32
MAX_STEPS_TOLD = 1 << 48


def plausible(beat: HeartbeatRequest) -> HeartbeatRequest:
    """The beat with impossible measurements set to 0 (unknown), so that no peer's number can stop the master."""
    return replace(
        beat,
        phase=beat.phase[:MAX_WORDS],
        note=beat.note[:MAX_WORDS],
        steps=min(beat.steps, MAX_STEPS_TOLD),
        tokens_per_s=_within(beat.tokens_per_s, 1e-6, 1e12),
        steps_per_s=_within(beat.steps_per_s, 1e-6, 1e9),
        push_s=_within(beat.push_s, 0.0, DAY_S),
        pull_s=_within(beat.pull_s, 0.0, DAY_S),
        first_batches=beat.first_batches[:MAX_DIGEST_BYTES],
        unrecorded_s=_within(beat.unrecorded_s, 0.0, math.inf),
        late_ranks=tuple(sorted({rank for rank in beat.late_ranks if rank < MAX_RANKS})),
    )


def _within(value: float, least: float, most: float) -> float:
    return value if least <= value <= most else 0.0  # NaN is within nothing


def pace_of(member: Member) -> ClusterPace:
    beat = member.beat
    return ClusterPace(beat.steps_per_s, beat.push_s, beat.pull_s) if beat else ClusterPace(0.0, 0.0, 0.0)


def grace_s(shared: SharedState) -> float:
    """The grace window: as configured, or 10 % of the fastest cluster's round, at least 1 s."""
    if shared.config.grace_s is not None:
        return shared.config.grace_s
    return max(GRACE_LEAST_S, GRACE_SHARE * (_fastest_s(shared) or 0.0))


def _longest_grace_s(shared: SharedState) -> float:
    return grace_s(shared) * (SLIDES if shared.config.grace_sliding else 1.0)


def longest_window_s(shared: SharedState) -> float:
    """The longest duration of a window, from its first push on, or from when nothing but time holds it open."""
    return max(_longest_grace_s(shared), shared.config.round_deadline_s or 0.0)


def window_left_s(shared: SharedState) -> float:
    """Seconds until the window that opened last closes at the latest, as far as is known."""
    state, deadline_s = shared.round, shared.config.round_deadline_s
    ends_s = state.window_closes_s
    is_open = state.phase.now is RoundPhase.WINDOW
    if is_open and deadline_s is not None and n_mergeable(shared, shared.admitted()) < wanted(shared):
        ends_s = max(ends_s, min(state.few_until_s, shared.now_s + deadline_s))
    return max(0.0, ends_s - shared.now_s)


def open_window(shared: SharedState) -> None:
    """Opens the window now, with its first push."""
    state = shared.round
    state.grace_s = grace_s(shared)
    state.window_closes_s, state.window_ends_s = shared.now_s + state.grace_s, shared.now_s + _longest_grace_s(shared)
    state.few_until_s, state.awaited, state.few = math.inf, (), ""
    shared.window_opened_s = shared.now_s


def arrived(shared: SharedState) -> None:
    """Starts an open sliding window again, within its bound, because a push was admitted."""
    state = shared.round
    if shared.config.grace_sliding and state.phase.now is RoundPhase.WINDOW:
        starts_again_s = min(shared.now_s + state.grace_s, state.window_ends_s)
        state.window_closes_s = max(state.window_closes_s, starts_again_s)


# Whether a cluster can push before the window closes. Where that is not known, it can: a new incarnation may bring
# steps of the one before, and a push that was STALE, refused or ABORTED is pushed again at once. An estimate that was
# wrong costs a push nothing but that it is in the next round.


def push_begins(member: Member) -> None:
    """Notes that a push of this cluster is due: how it goes on is known once it is decided."""
    member.ahead = None


def push_counted(shared: SharedState, member: Member, push: Push) -> None:
    """Notes that a push was applied or excluded: all steps to the next one are still to be made, H_j is not known."""
    since_s = shared.now_s if _steps_count_from_pull(shared) else push.began_s
    member.ahead = StepsAhead(lower_bound(shared.config.settings.sync_every_steps), since_s)


def pull_ended(shared: SharedState, member: Member) -> None:
    """Notes that H_j of the steps to the next push is known."""
    if member.ahead is not None:
        since_s = shared.now_s if _steps_count_from_pull(shared) else member.ahead.since_s
        member.ahead = StepsAhead(member.local_steps, since_s)


def _steps_count_from_pull(shared: SharedState) -> bool:
    """Whether no step that a cluster makes before its pull is over counts towards its next push."""
    settings = shared.config.settings
    return settings.dynamic_local_steps or settings.overlap == "none"


def may_arrive(shared: SharedState, member: Member, by_s: float) -> bool:
    """Whether this cluster, which is not in the round, may push before then."""
    ahead, pace, push = member.ahead, pace_of(member), member.push
    if push is not None and push.phase.now is PushPhase.TICKETED and push.attempt == 1 and pace.push_s > 0:
        since_s, needs_s = push.began_s, pace.push_s
    elif push is None and ahead is not None and pace.known:
        since_s, needs_s = ahead.since_s, ahead.steps / pace.steps_per_s
    else:
        return True
    return since_s + EARLY_SHARE * needs_s < by_s


# A minimum for each round: a window with fewer pushes than it stays open past its grace, until its deadline, for the
# clusters that can still come (docs/decisions/0075).


def wanted(shared: SharedState) -> int:
    """The pushes for which a window stays open past its grace; 0: for none, also while the run ends."""
    ending = shared.ledger.stopping or shared.ledger.stop_asked
    return 0 if shared.config.round_deadline_s is None or ending else shared.config.min_clusters_per_round


def n_mergeable(shared: SharedState, pushes: Sequence[Push]) -> int:
    """How many of them count towards the minimum: not those of clusters in quarantine, which may not be merged."""
    return sum(push.cluster not in shared.ledger.detector.quarantined for push in pushes)


def can_come(shared: SharedState) -> tuple[str, ...]:
    """The clusters that the open window does not have, and that may push before its deadline: also those from before
    the master's restart that had no time yet to join; none that drains, leaves, or is in quarantine.

    One that is sending its push always may: how long its last push took says little where that waited for slaves.
    """
    ledger, by_s = shared.ledger, shared.round.few_until_s
    in_it = {push.cluster for push in shared.admitted()}
    returning = {name for name, entry in ledger.clusters.items() if entry.member and name not in shared.members}
    here = {
        member.cluster
        for member in shared.live()
        if member.leave_token is None and (member.push is not None or may_arrive(shared, member, by_s))
    }
    return tuple(sorted((returning | here) - in_it - ledger.draining.keys() - ledger.detector.quarantined))


def awaited(shared: SharedState) -> tuple[str, ...]:
    """The clusters for which the open window stays open although its grace is over: it has too few pushes."""
    if shared.now_s >= shared.round.few_until_s or n_mergeable(shared, shared.admitted()) >= wanted(shared):
        return ()
    return can_come(shared)


def local_steps(shared: SharedState, member: Member, *, pulled: bool = False) -> int:
    """H_j for the steps that begin now, or after a pull unless it was just `pulled`; logs when a static H is cut."""
    settings = shared.config.settings
    every, pace = settings.sync_every_steps, pace_of(member)
    if settings.dynamic_local_steps:
        period_s = _fastest_s(shared) or 0.0
        planned_s = shared.planned_window_s if shared.planned_window_s is not None else shared.now_s + period_s
        ahead = replace(pace, pull_s=0.0) if pulled else pace
        return dynamic_steps(ahead, every, planned_s, period_s, shared.now_s)
    steps = steps_within_staleness(pace, every, shared.s_max(), shared.publish_interval_s)
    if steps < every:
        shared.log(
            f"steps {member.cluster}",
            f"cluster {member.cluster} makes {steps} steps instead of {every} between pushes, else it would come "
            f"more than {shared.s_max()} versions late; dynamic local steps or a smaller H avoid that",
        )
    return steps


def transfer_order(shared: SharedState, owner: str, slot: int, way: Way) -> tuple[int, ...]:
    """Block ids in the order for this owner's transfer that begins now (schedule.py)."""
    placement = shared.ledger.placement
    assert placement is not None, "a joined cluster has a placement"
    known = {member.cluster: _transfer_s(member, way) for member in shared.live()}
    fastest_s = min((seconds for seconds in known.values() if seconds > 0), default=0.0)
    pushers = shared.members[owner].pushers if owner in shared.members else 1
    request = TransferRequest(owner, way, slot, known.get(owner, 0.0), fastest_s, pushers)
    return shared.schedule.begin(request, placement)


def _transfer_s(member: Member, way: Way) -> float:
    pace = pace_of(member)
    return pace.push_s if way is Way.PUSH else pace.pull_s


def warn_of_momentum(shared: SharedState) -> None:
    """Warns when one slow cluster with most of the tokens can make momentum unstable."""
    sentence = momentum_warning(shared.config.penalty, *rates_and_intervals(shared))
    if sentence is not None:
        shared.log("momentum", sentence, logging.WARNING)


def rates_and_intervals(shared: SharedState) -> tuple[dict[str, float], dict[str, float]]:
    """Tokens/s and seconds between pushes of the live clusters: measured, else declared or reported in their beats."""
    rates: dict[str, float] = {}
    intervals_s: dict[str, float] = {}
    for member in shared.live():
        entry = shared.ledger.entry(member.cluster)
        rates[member.cluster] = entry.rate_tokens_per_s or (member.beat.tokens_per_s if member.beat else 0.0)
        if entry.push_interval_s > 0:
            intervals_s[member.cluster] = entry.push_interval_s
        elif pace_of(member).known:
            settings = shared.config.settings
            intervals_s[member.cluster] = round_s(pace_of(member), settings.sync_every_steps, settings.overlap)
    return rates, intervals_s


def published(shared: SharedState) -> None:
    """Records that a version was published: updates the publish interval and plans the next window."""
    if shared.published_s is not None:
        interval_s = shared.now_s - shared.published_s
        old = shared.publish_interval_s
        shared.publish_interval_s = interval_s if old <= 0 else 0.7 * old + 0.3 * interval_s
    shared.published_s = shared.now_s
    # The next window is planned one fastest round from now; a round of stragglers alone does not change the plan. If it
    # followed every round, each cluster would follow its own last round, and no two would be in one window. But a plan
    # further away than a round was made when clusters seemed slower, and would keep all at H steps until then.
    period_s, opened_s = _fastest_s(shared), shared.window_opened_s
    if period_s is None or opened_s is None:
        return
    # Where clusters train through window and round as well, their next H steps have begun before this one opened.
    begun_s = opened_s if shared.config.settings.overlap == "full" else shared.now_s
    planned_s, next_s = shared.planned_window_s, begun_s + period_s
    if planned_s is None or planned_s > next_s or opened_s >= planned_s - STRAGGLERS_SHARE * period_s:
        shared.planned_window_s = next_s


def _fastest_s(shared: SharedState) -> float | None:
    settings = shared.config.settings
    return fastest_round_s([pace_of(m) for m in shared.live()], settings.sync_every_steps, settings.overlap)
