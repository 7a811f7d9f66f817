"""Why nothing moves, in a sentence: the same words in answers, in logs and on the status page."""

from __future__ import annotations

from dips.master.state.records import Slave
from dips.master.state.tables import RecoveryPhase, ReshardPhase, RoundPhase, SlavePhase
from dips.master.state.world import World


def slaves_away(world: World) -> str:
    """Which slaves keep rounds from going on; empty when all are ready."""
    expected, n = world.slaves_expected(), world.config.n_slaves
    if world.ledger.placement is None and len(expected) < n:
        return f"waiting for slaves: {len(expected)} of {n} have attached"
    words = [_trouble(name, world.slaves.get(name)) for name in expected]
    away = "; ".join(word for word in words if word)
    here = [name for name in expected if name in world.slaves and world.slaves[name].phase.now is SlavePhase.PROMISED]
    what = "the decision what to load" if world.ledger.placement else "the model's layout"
    return away or (f"slave {', '.join(here)} waits for {what}" if here else "")


def recovery_words(world: World) -> str:
    """What a recovery waits for; empty when there is none, or a master that just started waits for its slaves."""
    state, version = world.recovery, world.ledger.version
    match state.phase.now:
        case RecoveryPhase.NONE if world.ledger.origin is not None and not world.everything_out:
            return f"the slaves go back to version {world.ledger.origin[0]}, which becomes {version}"
        case RecoveryPhase.NONE:
            return ""
        case RecoveryPhase.GATHERING:
            away = _absent(world)
            parts = [state.reason, state.words, f"waiting for slave {', '.join(away)}" if away else ""]
            return "; ".join(part for part in parts if part) if state.reason else ""
        case RecoveryPhase.ASKING:
            wanted = state.wanted[0] if state.wanted else None
            return f"{state.reason}; slave {state.asked} is asked for the record of version {wanted}"
        case RecoveryPhase.DONATING:
            donor = state.donor
            who = f"cluster {donor.cluster} gives its copy of version {donor.commit.version}" if donor else "no donor"
            return f"{state.reason}; no version is on every slave: {who}"


def _absent(world: World) -> list[str]:
    """Slaves that have yet to attach and promise."""
    here = {name for name, slave in world.slaves.items() if slave.phase.now is SlavePhase.PROMISED}
    return [name for name in world.slaves_expected() if name not in here]


def lagging(world: World) -> str:
    """Why no round may begin although all are here: disks are too far behind (durability async only)."""
    published, durable = world.published, world.durable
    if published is None or world.config.settings.durability != "async":
        return ""
    lag = published.version.v - durable.v if durable is not None else published.version.v
    if lag <= world.config.async_lag_versions:
        return ""
    behind = f"only {durable}" if durable is not None else "none"
    return f"version {published.version} is published, but {behind} is on every slave's disk: rounds wait"


def reshard_waits_for(world: World) -> str:
    """What must come before blocks may move, the end of the open round aside; empty when nothing."""
    wish = world.ledger.reshard
    if world.recovery.active:
        return recovery_words(world) or "the slaves tell what their disks hold"
    if world.ledger.stopping or world.ledger.stop_asked:
        return "the run ends"
    if world.ledger.version is None:
        return "no version exists yet"
    if away := slaves_away(world):
        return away
    if not world.everything_out:
        return f"version {world.ledger.version} is about to be published"
    new = [(name, world.slaves.get(name)) for name in (wish.add if wish else ())]
    missing = [name for name, slave in new if slave is None or slave.phase.now is not SlavePhase.PROMISED]
    return f"slave {', '.join(missing)} has yet to attach: start it" if missing else ""


def reshard_words(world: World) -> str:
    """What a RESHARD that was asked for is doing, or waits for; empty when there is none."""
    state, wish = world.reshard, world.ledger.reshard
    if state.phase.now is ReshardPhase.LISTING:
        missing = [name for name in world.slaves_expected() if name not in state.lists]
        return f"slave {', '.join(missing)} has yet to list its shard"
    if state.phase.now is ReshardPhase.MOVING:
        missing = [name for name in sorted(state.digests) if name not in state.prepared]
        return f"slave {', '.join(missing)} has yet to put its new shard together"
    if wish is None:
        return ""
    waits = reshard_waits_for(world)
    if not waits and state.trouble and world.now_s < state.not_before_s:
        waits = f"{state.trouble}; it is tried again in {state.not_before_s - world.now_s:.0f} s"
    names = [f"{what} {', '.join(who)}" for what, who in (("add", wish.add), ("remove", wish.remove)) if who]
    return f"{'; '.join(names)}: {waits or 'the open round ends first'}"


def moving_words(world: World) -> str:
    """Why no push begins while blocks move; empty when none do."""
    return f"blocks move to other slaves: {reshard_words(world)}" if world.reshard.moving else ""


def waiting_for(world: World) -> str:
    """What the run waits for; empty when it is doing something."""
    if world.stopped_s is not None:
        return "the run has ended: no cluster is left"
    if recovery := recovery_words(world):
        return recovery
    if (away := slaves_away(world)) and world.ledger.placement is not None:
        return away
    if moving := moving_words(world):
        return moving
    if world.ledger.paused:
        return f"paused by the operator: {world.ledger.paused}"
    if lag := lagging(world):
        return lag
    if not world.members:
        return away or "no cluster is here"
    return _round_words(world)


def _round_words(world: World) -> str:
    state = world.round
    match state.phase.now:
        case RoundPhase.IDLE if world.ledger.version is None:
            seeder = world.seeder()
            return f"cluster {seeder} is to push the first parameters" if seeder else "no cluster can seed the run"
        case RoundPhase.WINDOW if state.last_abort and world.now_s < state.not_before_s:
            return f"the last round was aborted ({state.last_abort}); it begins again"
        case RoundPhase.WINDOW if world.ledger.version is not None and not world.enough_clusters():
            return f"the run begins with {world.config.min_clusters} clusters, {len(world.members)} are here"
        case RoundPhase.MEASURE:
            return _missing(world, set(state.measured), "measure the pushes")
        case RoundPhase.PREPARE:
            return _missing(world, set(state.digest_of_slave), "prepare the update")
        case RoundPhase.COMMIT:
            return _missing(world, state.flipped, "flip to the new version")
        case _:
            return ""


def _missing(world: World, done: set[str], what: str) -> str:
    names = [name for name in world.slaves_expected() if name not in done]
    return f"slave {', '.join(names)} has yet to {what}" if names else ""


def _trouble(name: str, slave: Slave | None) -> str:
    if slave is None or slave.phase.now is SlavePhase.ABSENT:
        return f"slave {name} is away"
    if slave.trouble:
        return f"slave {name}: {slave.trouble}"
    if slave.phase.now is SlavePhase.READY:
        return ""
    if slave.phase.now is SlavePhase.CONFIGURING:
        return f"slave {name} makes its memory and loads its snapshot"
    if slave.phase.now is SlavePhase.PROMISED:
        return ""
    return f"slave {name} has yet to promise the epoch"
