"""What the run waits for, as a code and in a sentence; and its status for people, made at the time of the request.

Answers, logs, the page and metrics say the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dips.core.ids import SlaveId
from dips.core.messages import ClusterStatus, SlaveStatus, StatusReply
from dips.core.units import format_seconds
from dips.core.wire import encoded_bytes
from dips.master.state import pacing
from dips.master.state.alarms import standing, usual_per_step
from dips.master.state.leases import TokenState
from dips.master.state.ledger import Ledger
from dips.master.state.penalty_detect import threshold
from dips.master.state.reasons import Waiting, WaitingCode
from dips.master.state.records import Kept, Push, RecoveryPhase, ReshardPhase, RoundPhase, Slave, SlavePhase
from dips.master.state.schedule import LinkRate
from dips.master.state.shared import RunConfig, SharedState

# ---- what the run waits for ----


_NOTHING = Waiting(WaitingCode.NONE, "")


def _slaves(names: Sequence[str], one: str = "", several: str = "") -> str:
    """The slaves as the subject of a sentence, whose verb follows their number."""
    return f"slave {names[0]}{one}" if len(names) == 1 else f"slaves {', '.join(names)}{several}"


def _yet(names: Sequence[str], what: str) -> str:
    return _slaves(names, f" has yet to {what}", f" have yet to {what}")


def slaves_away(shared: SharedState) -> str:
    """The slaves that rounds wait for, in words; empty when all are ready."""
    expected, n = shared.slaves_expected(), shared.config.n_slaves
    if shared.ledger.placement is None and len(expected) < n:
        return f"only {len(expected)} of {n} slaves have attached"
    words = [_trouble(name, shared.slaves.get(name)) for name in expected]
    away = "; ".join(word for word in words if word)
    here = [name for name in expected if name in shared.slaves and shared.slaves[name].phase.now is SlavePhase.PROMISED]
    what = "the decision what to load" if shared.ledger.placement else "the model's layout"
    return away or (_slaves(here, f" waits for {what}", f" wait for {what}") if here else "")


def _not_attached(shared: SharedState) -> list[SlaveId]:
    """The slaves that a recovery waits for."""
    here = {name for name, slave in shared.slaves.items() if slave.phase.now is SlavePhase.PROMISED}
    return [name for name in shared.slaves_expected() if name not in here]


def recovery_words(shared: SharedState) -> str:
    """What a recovery waits for; empty when there is none, or when a restarted master waits for its slaves."""
    state, version = shared.recovery, shared.ledger.version
    match state.phase.now:
        case RecoveryPhase.NONE if shared.ledger.origin is not None and not shared.everything_out:
            return f"the slaves go back to version {shared.ledger.origin[0]}, which becomes {version}"
        case RecoveryPhase.NONE:
            return ""
        case RecoveryPhase.GATHERING:
            away = _not_attached(shared)
            parts = [state.reason, state.words, f"waiting for {_slaves(away)}" if away else ""]
            return "; ".join(part for part in parts if part) if state.reason else ""
        case RecoveryPhase.ASKING:
            wanted = state.wanted[0] if state.wanted else None
            return f"{state.reason}; slave {state.asked} is asked for the record of version {wanted}"
        case RecoveryPhase.DONATING:
            donor = state.donor
            who = f"cluster {donor.cluster} gives its copy of version {donor.commit.version}" if donor else "no donor"
            return f"{state.reason}; no version is on every slave: {who}"


NAMED_CLUSTERS = 8
"""The most clusters whose names a sentence has."""


def too_few_clusters(shared: SharedState) -> str:
    """Who is here, and how many are missing, while the run's first round waits for min_clusters; else empty."""
    if shared.ledger.version is None or shared.enough_clusters():
        return ""
    n, here = shared.config.min_clusters, sorted(shared.members)
    were = sorted(name for name in shared.ledger.clusters if name not in shared.members)
    known = f" ({_clusters(were, 'was', 'were')} here before)" if were else ""
    return f"the run begins with {n} clusters: {_clusters(here, 'is', 'are')} here, {n - len(here)} missing{known}"


def few_pushes(shared: SharedState) -> str:
    """Whom a window waits for that has fewer pushes than min_clusters_per_round; empty while it does not."""
    if not shared.round.awaited:
        return ""
    n, minimum = pacing.n_mergeable(shared, shared.admitted()), shared.config.min_clusters_per_round
    of_all = f"the round has {n} of {minimum} pushes (min_clusters_per_round)"
    return f"{of_all} and waits for {named(shared.round.awaited)}"


def named(names: Sequence[str]) -> str:
    """The names of clusters, of many only the first ones."""
    more = f" and {len(names) - NAMED_CLUSTERS} more" if len(names) > NAMED_CLUSTERS else ""
    return f"{', '.join(names[:NAMED_CLUSTERS]) or 'none'}{more}"


def _clusters(names: Sequence[str], one: str, several: str) -> str:
    return f"{named(names)} {several if len(names) > 1 else one}"


def restart_words(shared: SharedState) -> str:
    """What a restarted master goes on from, and with whom; empty once all slaves are here."""
    state, version = shared.recovery, shared.ledger.version
    away = _not_attached(shared)
    if state.phase.now is not RecoveryPhase.GATHERING or state.reason or version is None or not away:
        return ""
    with_whom, since_s = _slaves(away, " is here", " are here"), shared.now_s - state.phase.since_s
    return f"the master was started again {since_s:.0f} s ago, and goes on from version {version} once {with_whom}"


def lagging(shared: SharedState) -> str:
    """Why no round may begin although all slaves are here: disks are too far behind (durability async only)."""
    published, durable = shared.published, shared.durable
    if published is None or shared.config.settings.durability != "async":
        return ""
    lag = published.version.v - durable.v if durable is not None else published.version.v
    if lag <= shared.config.settings.async_lag_versions:
        return ""
    behind = f"only {durable}" if durable is not None else "none"
    return f"version {published.version} is published, but {behind} is on every slave's disk: rounds wait"


def reshard_waits_for(shared: SharedState) -> str:
    """What a RESHARD waits for, apart from the end of the open round; empty when nothing."""
    pending = shared.ledger.reshard
    if shared.recovery.active:
        return recovery_words(shared) or "the slaves report what their disks hold"
    if shared.ledger.stopping or shared.ledger.stop_asked:
        return "the run ends"
    if shared.ledger.version is None:
        return "no version exists yet"
    if away := slaves_away(shared):
        return away
    if not shared.everything_out:
        return f"version {shared.ledger.version} is about to be published"
    new = [(name, shared.slaves.get(name)) for name in (pending.add if pending else ())]
    missing = [name for name, slave in new if slave is None or slave.phase.now is not SlavePhase.PROMISED]
    starting = [f"slave {name} {slave.beat.note}" for name, slave in new if slave is not None and slave.beat.note]
    if starting and not missing:
        return "; ".join(starting)
    return _slaves(missing, " has yet to attach: start it", " have yet to attach: start them") if missing else ""


def reshard_words(shared: SharedState) -> str:
    """What the requested RESHARD does or waits for; empty when there is none."""
    state, pending = shared.reshard, shared.ledger.reshard
    if state.phase.now is ReshardPhase.LISTING:
        missing = [name for name in shared.slaves_expected() if name not in state.lists]
        return _yet(missing, "list the shard")
    if state.phase.now is ReshardPhase.MOVING:
        missing = [name for name in sorted(state.digests) if name not in state.prepared]
        return _yet(missing, "put the new shard together")
    if pending is None:
        return ""
    waits = reshard_waits_for(shared)
    if not waits and state.trouble and shared.now_s < state.not_before_s:
        waits = f"{state.trouble}; it is tried again in {state.not_before_s - shared.now_s:.0f} s"
    names = [f"{what} {', '.join(who)}" for what, who in (("add", pending.add), ("remove", pending.remove)) if who]
    return f"{'; '.join(names)}: {waits or 'the open round ends first'}"


def moving_words(shared: SharedState) -> str:
    """Why no push begins while blocks move; empty when none do."""
    return f"blocks move to other slaves: {reshard_words(shared)}" if shared.reshard.moving else ""


def waiting_for(shared: SharedState) -> Waiting:
    """What the run waits for; its code is NONE and its sentence empty while it is active."""
    if shared.stopped_s is not None:
        return Waiting(WaitingCode.ENDED, "the run has ended: no cluster is left")
    if recovery := recovery_words(shared):
        return Waiting(WaitingCode.RECOVERY, recovery, since_s=shared.recovery.since_s)
    ready = {slave.id for slave in shared.ready_slaves()}
    not_ready = tuple(name for name in shared.slaves_expected() if name not in ready)
    away = Waiting(WaitingCode.SLAVES, slaves_away(shared), not_ready)
    if away.sentence and shared.ledger.placement is not None:
        return away
    if moving := moving_words(shared):
        return Waiting(WaitingCode.RESHARD, moving)
    if shared.ledger.paused:
        return Waiting(WaitingCode.PAUSED, f"paused by the operator: {shared.ledger.paused}")
    if shared.waits_for_replica:
        return Waiting(WaitingCode.REPLICA, f"the journal's replica: {shared.replica_trouble}")
    if lag := lagging(shared):
        return Waiting(WaitingCode.DISKS, lag)
    if not shared.members and _slaves_wait_for_layout(shared):
        return Waiting(WaitingCode.NO_CLUSTERS, f"no cluster is here: {away.sentence}")
    if not shared.members:
        return away if away.sentence else Waiting(WaitingCode.NO_CLUSTERS, "no cluster is here")
    return _round(shared)


def _slaves_wait_for_layout(shared: SharedState) -> bool:
    """Whether all slaves are here and hold no blocks yet, because no cluster has joined with the model's layout."""
    here = sum(slave.phase.now is SlavePhase.PROMISED for slave in shared.slaves.values())
    return shared.ledger.placement is None and here == len(shared.slaves) >= shared.config.n_slaves


def _round(shared: SharedState) -> Waiting:
    state = shared.round
    match state.phase.now:
        case RoundPhase.IDLE if shared.ledger.version is None:
            seeder = shared.seeder()
            words = f"cluster {seeder} is to push the first parameters" if seeder else "no cluster can seed the run"
            return Waiting(WaitingCode.FIRST_PUSH, words)
        case RoundPhase.WINDOW if state.last_abort and shared.now_s < state.not_before_s:
            words = f"the last round was aborted ({state.last_abort}); it begins again"
            return Waiting(WaitingCode.ABORTED_ROUND, words)
        case RoundPhase.WINDOW if words := too_few_clusters(shared):
            return Waiting(WaitingCode.MIN_CLUSTERS, words, since_s=state.phase.since_s)
        case RoundPhase.WINDOW if words := few_pushes(shared):
            return Waiting(WaitingCode.FEW_PUSHES, words, until_s=state.few_until_s)
        case RoundPhase.MEASURE:
            code, done, what = WaitingCode.MEASURE, set(state.measured), "measure the pushes"
        case RoundPhase.PREPARE:
            code, done, what = WaitingCode.PREPARE, set(state.digest_of_slave), "prepare the update"
        case RoundPhase.COMMIT:
            code, done, what = WaitingCode.COMMIT, state.flipped, "flip to the new version"
        case _:
            return _NOTHING
    names = tuple(name for name in shared.slaves_expected() if name not in done)
    return Waiting(code, _yet(names, what), names) if names else _NOTHING


def _trouble(name: str, slave: Slave | None) -> str:
    if slave is None or slave.phase.now is SlavePhase.ABSENT:
        return f"slave {name} is away"
    if slave.trouble:
        return f"slave {name}: {slave.trouble}"
    if slave.phase.now is SlavePhase.READY:
        return ""
    if slave.beat.note:
        return f"slave {name} {slave.beat.note}"
    if slave.phase.now is SlavePhase.CONFIGURING:
        return f"slave {name} allocates its memory and loads its snapshot"
    if slave.phase.now is SlavePhase.PROMISED:
        return ""
    return _yet([name], "promise the epoch")


# ---- status ----------------------------------------------------------------------------------------------------------


NAN = float("nan")


def status(shared: SharedState) -> StatusReply:
    ledger, state = shared.ledger, shared.round
    totals = ledger.leases.totals() if ledger.leases else {}
    leased_tokens = ledger.leases.leased_tokens() if ledger.leases else {}
    waiting = waiting_for(shared)
    lasts = "" if waiting.since_s is None else f", for {format_seconds(round(shared.now_s - waiting.since_s))}"
    if waiting.until_s is not None:  # it may have passed, and no Tick come yet
        lasts += f", for at most {format_seconds(round(max(0.0, waiting.until_s - shared.now_s)))}"
    return StatusReply(
        shared.config.run_id,
        shared.epoch,
        shared.published.version if shared.published else None,
        ledger.tokens,
        shared.settings().tk_max_tokens,
        state.phase.now.value,
        state.id,
        shared.now_s - state.phase.since_s,
        pacing.window_left_s(shared) if state.phase.now is RoundPhase.WINDOW else 0.0,
        f"{waiting.sentence}{lasts}",
        max(0, ledger.rounds_committed - 1),  # the first one only sets version 0
        ledger.rounds_merged,
        ledger.rounds_void,
        shared.rounds_aborted,
        tuple(_cluster(shared, name, leased_tokens.get(name, 0)) for name in sorted(ledger.clusters)),
        tuple(_slave(shared, slave) for _, slave in sorted(shared.slaves.items())),
        tuple(shared.recent),
        bool(ledger.paused),
        bool(ledger.stopping),
        shared.stopped_s is not None,
        totals.get(TokenState.LEASED, 0),
        totals.get(TokenState.EXCLUDED, 0),
        shared.settings(),
        shared.durable,
        f"{waiting.sentence}{lasts}" if waiting.code is WaitingCode.RECOVERY else restart_words(shared),
        reshard=reshard_words(shared),
        alarms=standing(shared),
        waiting_code=waiting.code,
        waiting_slaves=waiting.slaves,
        decided=shared.ledger.version,
    )


def at_rest(ledger: Ledger, epoch: int) -> StatusReply:
    """The status of a run without a master, from the newest ledger of its journal. What only the settings say, such as
    the token limit, has its default."""
    shared = SharedState(RunConfig(ledger.run_id, max(1, len(ledger.slaves))), epoch, ledger, 0.0)
    if ledger.commit is not None:
        shared.published = Kept(ledger.commit, ledger.tokens)
    if not ledger.stopping:
        return replace(status(shared), waiting_for="no master runs")
    shared.stopped_s = 0.0
    return replace(status(shared), waiting_for=f"the run has ended: {ledger.stopping}")


def _cluster(shared: SharedState, name: str, leased_tokens: int) -> ClusterStatus:
    entry, member = shared.ledger.clusters[name], shared.members.get(name)
    beat = member.beat if member else None
    last = entry.last_verdict
    statistics = shared.ledger.detector.of(name)
    draining = shared.ledger.draining.get(name, "") if member else ""
    return ClusterStatus(
        name,
        entry.incarnation,
        member is not None,
        beat.phase if beat else ("joined" if member else "away"),
        shared.now_s - member.beat_s if member else 0.0,
        beat.steps if beat else 0,
        beat.tokens_per_s if beat else entry.rate_tokens_per_s,
        beat.steps_per_s if beat else 0.0,
        beat.loss if beat else NAN,
        beat.base if beat else None,
        entry.tokens_applied,
        entry.pushes_applied,
        entry.pushes_excluded,
        shared.aborted_of.get(name, 0),
        entry.incarnations,
        last.kind.name if last else "",
        last.reason if last else "",
        member.local_steps if member else 0,
        _known(statistics.last_norm),
        _known(statistics.last_score),
        _known(statistics.last_cosine),
        statistics.quarantined,
        leased_tokens,
        f"draining: {draining}" if draining else beat.note if beat else "",
        max(entry.steps_before + entry.steps_heard, entry.steps_applied),  # it may have left before its next beat
        statistics.usual_cosine,
        statistics.cosine_rounds,
        statistics.cosine_alarmed,
        tokens_per_step=usual_per_step(shared, name),
        draining=bool(draining),
        ranks=member.pushers if member else 0,
        late_ranks=tuple(rank for rank in beat.late_ranks if rank < member.pushers) if member and beat else (),
    )


def _known(value: float | None) -> float:
    return NAN if value is None else value


def _slave(shared: SharedState, slave: Slave) -> SlaveStatus:
    return SlaveStatus(
        slave.id,
        slave.incarnation,
        slave.link is not None,
        slave.phase.now.value,
        shared.now_s - slave.beat_s if slave.link is not None else 0.0,
        slave.endpoint,
        slave.version,
        slave.beat.staging_bytes,
        slave.beat.served_bytes,
        slave.beat.refused_chunks,
        slave.beat.resident_bytes,
        slave.incarnations,
        slave.durable if shared.config.settings.durability == "async" else slave.version,
        slave.beat.refused_connections,
        slave.trouble,
    )


# ---- run view --------------------------------------------------------------------------------------------------------
#
# One value for all who look at a run: `dips status` gets its StatusReply, the page and the metrics render all of it.
#
# Made between two events, about a millisecond with 64 clusters. Its ages are those of the moment at which one looks,
# and not of the last event. It must never change the state, nor hold a reference that could.


@dataclass(frozen=True)
class OpenPushView:
    """An undecided push."""

    cluster: str
    phase: str
    landed: float  # the share of its bytes that slaves have received, 0 to 1
    landed_bytes: Mapping[str, int] = field(default_factory=dict)  # by slave


@dataclass(frozen=True)
class RunView:
    """A run at one moment. Times are None where there is no such moment."""

    status: StatusReply
    planned_window_in_s: float | None = None
    since_publish_s: float | None = None  # since the newest version was published in this epoch; None when none was
    publish_interval_s: float = 0.0
    evict_after_s: float = 0.0
    staleness_limit: int = 0  # versions
    threshold: float = NAN  # score above which a push is excluded
    slaves_expected: int = 0
    without_blocks: frozenset[str] = frozenset()  # slaves on which no blocks are placed (yet)
    pinned_versions: int = 0
    recovers: bool = False
    reshards: bool = False
    links: tuple[LinkRate, ...] = ()
    pushes: tuple[OpenPushView, ...] = ()
    # of the clusters that have beaten, seconds of the last push and of the last pull, 0 where there was none
    transfer_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    data_tokens: Mapping[str, int] = field(default_factory=dict)  # by state, empty where the run leases no data


def look(shared: SharedState, now_s: float) -> RunView:
    """Makes the view of the run as it is now, which may be after the last event."""
    shared = copy.copy(shared)
    shared.now_s = max(shared.now_s, now_s)
    config, ledger = shared.config, shared.ledger
    planned_s, published_s = shared.planned_window_s, shared.published_s
    placed = ledger.placement.slaves if ledger.placement is not None else ()
    totals = {TokenState.FREE: 0, **ledger.leases.totals()} if ledger.leases is not None else {}
    return RunView(
        status(shared),
        planned_window_in_s=planned_s - shared.now_s if planned_s is not None else None,
        since_publish_s=shared.now_s - published_s if published_s is not None else None,
        publish_interval_s=shared.publish_interval_s,
        evict_after_s=config.evict_after_s,
        staleness_limit=shared.s_max(),
        threshold=threshold(ledger.detector, config.penalty),
        slaves_expected=len(shared.slaves_expected()) if ledger.placement else config.n_slaves,
        without_blocks=frozenset(name for name in shared.slaves if name not in placed),
        pinned_versions=len({pin.version for pin in shared.pins.values()}),
        recovers=shared.recovery.active,
        reshards=ledger.reshard is not None or shared.reshard.moving,
        links=shared.link_rates.links(shared.members, ledger.layout, ledger.placement, shared.now_s),
        pushes=tuple(_open(shared, push) for push in shared.pushes()),
        transfer_s={
            member.cluster: (member.beat.push_s, member.beat.pull_s) for member in shared.live() if member.beat
        },
        data_tokens={state.value: tokens for state, tokens in totals.items()},
    )


def progress(shared: SharedState) -> dict[str, object]:
    """What the tape has of the clusters when a version is published: by their last beats, and their links' rates."""
    layout = shared.ledger.layout
    clusters = {
        member.cluster: {
            "loss": _short(beat.loss),
            "tokens_per_s": _short(beat.tokens_per_s),
            "steps": beat.steps,
            "push_s": _short(beat.push_s),
            "pull_s": _short(beat.pull_s),
        }
        for member in shared.live()
        if (beat := member.beat) is not None
    }
    for link in shared.link_rates.links(clusters, layout, shared.ledger.placement, shared.now_s):
        seen = clusters[link.cluster]
        for key, rate in (("push_bytes_per_s", link.push_bytes_per_s), ("pull_bytes_per_s", link.pull_bytes_per_s)):
            if rate:
                seen[key] = _short(seen.get(key, 0.0) + rate)
    return {"elems": layout.n_elems if layout is not None else 0, "clusters": clusters}


def _short(value: float) -> float:
    """For a curve: half of the line's bytes would be digits that no one sees."""
    return float(f"{value:.6g}")


def _open(shared: SharedState, push: Push) -> OpenPushView:
    layout, landed_bytes = shared.ledger.layout, dict(push.landed_bytes)
    whole_bytes = encoded_bytes(push.wire, layout.n_elems) if layout is not None else 0
    staged = len(push.digest_of_slave) / max(1, len(shared.slaves_expected()))
    landed = sum(landed_bytes.values()) / whole_bytes if whole_bytes else 0.0
    return OpenPushView(push.cluster, push.phase.now.value, min(1.0, max(staged, landed)), landed_bytes)
