"""Why nothing moves, in a sentence: the same words in answers, in logs and on the status page."""

from __future__ import annotations

from dips.master.state.records import Slave
from dips.master.state.tables import RoundPhase, SlavePhase
from dips.master.state.world import World


def slaves_away(world: World) -> str:
    """Which slaves keep rounds from going on; empty when all are ready."""
    expected, n = world.slaves_expected(), world.config.n_slaves
    if world.ledger.placement is None and len(expected) < n:
        return f"waiting for slaves: {len(expected)} of {n} have attached"
    words = [_trouble(name, world.slaves.get(name)) for name in expected]
    return "; ".join(word for word in words if word)


def waiting_for(world: World) -> str:
    """What the run waits for; empty when it is doing something."""
    if world.stopped_s is not None:
        return "the run has ended: no cluster is left"
    if (away := slaves_away(world)) and world.ledger.placement is not None:
        return away
    if world.paused:
        return f"paused by the operator: {world.paused}"
    if not world.members:
        return away or "no cluster is here"
    return _round_words(world)


def _round_words(world: World) -> str:
    state = world.round
    match state.phase.now:
        case RoundPhase.IDLE if world.ledger.version is None:
            return f"cluster {world.seed_cluster} is to push the first parameters"
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
    return (
        f"slave {name} waits for the model's layout"
        if slave.phase.now is SlavePhase.PROMISED
        else (f"slave {name} has yet to promise the epoch")
    )
