"""Makes the StatusReply, the run's status for people, from the state at the time of the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dips.core.messages import ClusterStatus, SlaveStatus, StatusReply
from dips.core.units import format_seconds
from dips.core.wire import encoded_bytes
from dips.master.state import pacing
from dips.master.state.alarms import standing, usual_per_step
from dips.master.state.leases import TokenState
from dips.master.state.ledger import Ledger
from dips.master.state.penalty_detect import threshold
from dips.master.state.records import Kept, Push, RoundPhase, Slave
from dips.master.state.schedule import LinkRate
from dips.master.state.shared import RunConfig, SharedState
from dips.master.state.waits import recovery_words, reshard_words, restart_words, waiting_for

# ---- status ----------------------------------------------------------------------------------------------------------


NAN = float("nan")


def status(shared: SharedState) -> StatusReply:
    ledger, state = shared.ledger, shared.round
    totals = ledger.leases.totals() if ledger.leases else {}
    leased_tokens = ledger.leases.leased_tokens() if ledger.leases else {}
    waiting = waiting_for(shared)
    lasts = "" if waiting.since_s is None else f", for {format_seconds(round(shared.now_s - waiting.since_s))}"
    lasts += "" if waiting.until_s is None else f", for at most {format_seconds(round(waiting.until_s - shared.now_s))}"
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
        recovery_words(shared) or restart_words(shared),
        reshard=reshard_words(shared),
        alarms=standing(shared),
        waiting_code=waiting.code,
        waiting_slaves=waiting.slaves,
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
# Made between two events, about a millisecond with 64 clusters. It must never change the state, nor hold a reference
# that could.


@dataclass(frozen=True)
class OpenPushView:
    """An undecided push."""

    cluster: str
    phase: str
    landed: float  # the share of its bytes that slaves have received, 0 to 1
    age_s: float
    landed_bytes: Mapping[str, int] = field(default_factory=dict)  # by slave


@dataclass(frozen=True)
class RunView:
    """A run at one moment. Times are None where there is no such moment."""

    status: StatusReply
    as_of_s: float  # the monotonic time of the state's last event, from which all ages are counted
    planned_window_in_s: float | None = None
    since_publish_s: float | None = None  # since the newest version was published in this epoch; None when none was
    publish_interval_s: float = 0.0
    evict_after_s: float = 0.0
    staleness_limit: int = 0  # versions
    threshold: float = NAN  # score above which a push is excluded
    max_clusters: int = 0
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


def look(shared: SharedState) -> RunView:
    """Makes the view of the run as it is now."""
    config, ledger = shared.config, shared.ledger
    planned_s, published_s = shared.planned_window_s, shared.published_s
    placed = ledger.placement.slaves if ledger.placement is not None else ()
    totals = {TokenState.FREE: 0, **ledger.leases.totals()} if ledger.leases is not None else {}
    return RunView(
        status(shared),
        shared.now_s,
        planned_window_in_s=planned_s - shared.now_s if planned_s is not None else None,
        since_publish_s=shared.now_s - published_s if published_s is not None else None,
        publish_interval_s=shared.publish_interval_s,
        evict_after_s=config.evict_after_s,
        staleness_limit=shared.s_max(),
        threshold=threshold(ledger.detector, config.penalty),
        max_clusters=config.max_clusters,
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
    age_s = shared.now_s - push.began_s
    return OpenPushView(push.cluster, push.phase.now.value, min(1.0, max(staged, landed)), age_s, landed_bytes)
