"""Says what the run waits for, as a code and in a sentence: the same in answers, logs, the page and metrics."""

from __future__ import annotations

from collections.abc import Sequence

from dips.core.ids import SlaveId
from dips.master.state import pacing
from dips.master.state.reasons import Waiting, WaitingCode
from dips.master.state.records import RecoveryPhase, ReshardPhase, RoundPhase, Slave, SlavePhase
from dips.master.state.shared import SharedState

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
    since_s = shared.now_s - state.phase.since_s
    with_whom = _slaves(away, " is here", " are here")
    return f"the master was started again {since_s:.0f} s ago, and goes on from version {version} once {with_whom}"


def lagging(shared: SharedState) -> str:
    """Why no round may begin although all slaves are here: disks are too far behind (durability async only)."""
    published, durable = shared.published, shared.durable
    if published is None or shared.config.settings.durability != "async":
        return ""
    lag = published.version.v - durable.v if durable is not None else published.version.v
    if lag <= shared.config.async_lag_versions:
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
        return Waiting(WaitingCode.RECOVERY, recovery)
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
