"""Makes the StatusReply, the run's status for people, from the state at the time of the request."""

from __future__ import annotations

from dips.core.messages import ClusterStatus, SlaveStatus, StatusReply
from dips.master.state import token_counts
from dips.master.state.alarms import standing
from dips.master.state.leases import TokenState
from dips.master.state.reasons import recovery_words, reshard_words, waiting_for
from dips.master.state.records import Slave
from dips.master.state.shared import SharedState
from dips.master.state.tables import RoundPhase

NAN = float("nan")


def status(shared: SharedState) -> StatusReply:
    ledger, state = shared.ledger, shared.round
    totals = ledger.leases.totals() if ledger.leases else {}
    in_window = state.phase.now is RoundPhase.WINDOW
    return StatusReply(
        shared.config.run_id,
        shared.epoch,
        shared.published.version if shared.published else None,
        ledger.tokens,
        shared.settings().tk_max_tokens,
        state.phase.now.value,
        state.id,
        shared.now_s - state.phase.since_s,
        max(0.0, state.window_closes_s - shared.now_s) if in_window else 0.0,
        waiting_for(shared),
        ledger.rounds_committed,
        ledger.rounds_merged,
        ledger.rounds_void,
        shared.rounds_aborted,
        tuple(_cluster(shared, name) for name in sorted(ledger.clusters)),
        tuple(_slave(shared, slave) for _, slave in sorted(shared.slaves.items())),
        tuple(shared.recent),
        bool(ledger.paused),
        bool(ledger.stopping),
        shared.stopped_s is not None,
        totals.get(TokenState.LEASED, 0),
        totals.get(TokenState.EXCLUDED, 0),
        shared.settings(),
        shared.durable,
        recovery_words(shared),
        reshard=reshard_words(shared),
        alarms=standing(shared),
    )


def _cluster(shared: SharedState, name: str) -> ClusterStatus:
    entry, member = shared.ledger.clusters[name], shared.members.get(name)
    beat = member.beat if member else None
    last = entry.last_verdict
    statistics = shared.ledger.detector.of(name)
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
        shared.ledger.leases.leased_tokens(name) if shared.ledger.leases else 0,
        _note(shared.ledger.draining.get(name, "") if member else "", beat.note if beat else ""),
        entry.steps_before + (beat.steps if beat else 0),
        statistics.usual_cosine,
        statistics.cosine_rounds,
        statistics.cosine_alarmed,
        tokens_per_step=token_counts.usual_per_step(shared, name),
    )


def _known(value: float | None) -> float:
    return NAN if value is None else value


def _note(draining: str, note: str) -> str:
    if draining:
        return f"draining: {draining}"
    return note


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
    )
