"""Registers the faults by name, plans when they strike, and counts those that did.

Each is planned for a time, or for a moment (a slave has just prepared, a push has just been sealed), and tries again
for a while when it cannot strike yet. Its effects are ended by its own later action or by heal(). Every
planned fault is counted as struck, or with the reason why not (dips.lab.sim.counts). A name here that never fires in a
large set of seeds is an error: dips.lab.sim.seeds checks that.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from dips.lab.sim.counts import NOTHING, OVER
from dips.lab.sim.disks import LOST_DATA, LOST_NAMES, TORN_DATA
from dips.lab.sim.faults import bad_requests
from dips.lab.sim.faults import disks as fault_disks
from dips.lab.sim.faults import links as fault_links
from dips.lab.sim.faults import operations as fault_operations
from dips.lab.sim.faults import processes as fault_processes
from dips.lab.sim.faults import standby as fault_standby
from dips.lab.sim.faults.world import OLD_ATTEMPT, OLD_LIFE, Begin, Faults, FaultWorld
from dips.lab.sim.hosts.cluster import OTHER_RANKS
from dips.lab.sim.kernel import SimulatedProcess

GROUPS: Mapping[str, tuple[Faults, ...]] = {
    "processes": (fault_processes.FAULTS,),
    "links": (fault_links.FAULTS,),
    "messages": (fault_links.MESSAGES,),
    "disks": (fault_disks.FAULTS,),
    "lost state": (fault_disks.LOSSES,),
    "lies": (bad_requests.FAULTS,),
    "ranks": (fault_processes.OF_RANKS,),
    "operations": (bad_requests.OPERATORS, fault_operations.FAULTS),
    "standby": (fault_standby.FAULTS,),
}
"""Groups of faults by what they strike, for reports."""

_TABLES = [faults for group in GROUPS.values() for faults in group]

FAULTS: Mapping[str, Begin] = {name: begin for faults in _TABLES for name, begin in faults.items()}

COUNTED_ELSEWHERE = frozenset(name for faults in _TABLES for name in faults.armed)
"""Faults that are only armed when they begin, and counted when they really strike."""

SIDE_EFFECTS: Mapping[str, str] = {
    "lost_journal_entries": "disks",
    LOST_NAMES: "disks",
    LOST_DATA: "disks",
    TORN_DATA: "disks",
    "base_gone": "lost state",
    "differences_gone": "lost state",
    "second_slave_took_over": "lost state",
    **dict.fromkeys(fault_operations.CHURNED, "operations"),
    **dict.fromkeys((OLD_ATTEMPT, OLD_LIFE), "ranks"),
    **dict.fromkeys(fault_standby.BROUGHT, "standby"),
}
"""Not planned by themselves, but what crashes, lost disks and rounds that go on without a slow cluster bring with them;
with their groups. Counted like the others."""

GROUP_OF: Mapping[str, str] = {
    **{name: group for group, tables in GROUPS.items() for faults in tables for name in faults},
    **SIDE_EFFECTS,
    "stopped_and_said_so": "lost state",
    OTHER_RANKS: "ranks",
}

OF_ONE_CLUSTER = (
    "crash_cluster", "crash_cluster_in_step", "pause_cluster_short", "pause_cluster_long", "slow_cluster", "slow_links",
    "cut_cluster_from_master", "cut_cluster_from_slave", "cluster_leaves", "same_cluster_twice", "nan_push", "x30_push",
    "zero_push", "all_zero_push", "lost_checkpoint", "cluster_disk_error", "absurd_tokens", "foreign_ranges",
    "repeated_begin_push", "used_up_numbers", "returned_in_its_name", "wrong_run_id", "old_incarnation", "old_epoch",
    "unknown_cluster", "wrong_layout", "garbage_chunks", "operator_drains", "operator_evicts",
)  # fmt: skip
"""Faults of one bad cluster: slow, dead, cut off or hostile. No other cluster may wait longer for it than promised
(I15)."""

OF_RANKS = frozenset({*fault_processes.OF_RANKS, OLD_ATTEMPT, OLD_LIFE})
"""Kinds that only clusters of several ranks know; their faults, too, are of one cluster."""

OF_STANDBY = frozenset({*fault_standby.FAULTS, *fault_standby.BROUGHT})
"""Kinds that only runs with a standby know."""

NOT_FOR_LONG = frozenset({"operator_stops_early", "operator_takes_an_end_back"})
"""Would end a run of thousands of rounds after a few, the second one where the master is away for too long."""

MOMENTS: tuple[tuple[str, str, str], ...] = (
    ("master", "round", "MEASURE"),
    ("master", "round", "PREPARE"),
    ("master", "round", "COMMIT"),
    ("master", "round", "PUBLISH"),
    ("master", "round", "IDLE"),
    ("master", "ticket", ""),
    ("master", "admitted", ""),
    ("master", "slave_attached", ""),
    ("master", "recovery", "GATHERING"),
    ("master", "recovery", "ASKING"),
    ("master", "recovery", "DONATING"),
    ("master", "recovery", "NONE"),
    ("master", "reshard", "LISTING"),
    ("master", "reshard", "MOVING"),
    ("master", "resharded", ""),
    ("slave", "staged", ""),
    ("slave", "prepared", ""),
    ("slave", "committed", ""),
    ("slave", "configured", ""),
    ("slave", "promised", ""),
    ("slave", "aborted", ""),
    ("worker", "push_begun", ""),
    ("worker", "push_sent", ""),
    ("worker", "admitted", ""),
    ("worker", "verdict", ""),
    ("worker", "installed", ""),
)
"""(role, kind of tape line, phase) upon which a fault may strike at once."""

TRIES = 12
RETRY_S = 0.7

LONGEST_WATCH_S = 20.0
"""In runs with continuous faults, the longest wait of a fault for its moment."""


def names(*, ranks: bool = False) -> tuple[str, ...]:
    """Every kind that is counted. ranks: where clusters have several ranks."""
    return tuple(sorted({*FAULTS, *SIDE_EFFECTS} - (frozenset() if ranks else OF_RANKS)))


def known_to(world: FaultWorld) -> list[str]:
    """Kinds that may strike this run by themselves."""
    ranks = max((*world.plan.pushers, *world.plan.later_pushers), default=1)
    of_ranks = set(fault_processes.OF_RANKS) if ranks > 1 else set()
    if world.plan.sabotaged:
        return sorted({*OF_ONE_CLUSTER, *of_ranks})
    known = set(FAULTS) - OF_RANKS - OF_STANDBY | of_ranks
    if world.plan.standby:
        known |= set(fault_standby.FAULTS)
    return sorted(known - (NOT_FOR_LONG if world.plan.fault_every_s else frozenset()))


def plan_faults(world: FaultWorld, planned: tuple[str, ...] | None) -> None:
    """Choose what will strike and when, or take the given faults."""
    rng, known = world.kernel.rng, known_to(world)
    chosen = planned if planned is not None else [rng.choice(known) for _ in range(world.plan.n_faults)]
    if world.takes_over:
        chosen = [*chosen, Random(f"take-over of {world.seed}").choice(fault_standby.TAKE_OVERS)]
    for name in chosen:
        _plan(world, name, rng.uniform(world.FIRST_FAULT_S, world.plan.faults_for_s * 0.9))
    if planned is None and world.plan.fault_every_s:
        _plan_next(world)


def _plan_next(world: FaultWorld) -> None:
    """Plan one more fault, and so on until the run is healed."""
    if not world.healed and not world.ended:
        rng = world.kernel.rng
        _plan(world, rng.choice(known_to(world)), world.kernel.now_s)
        world.kernel.after(rng.expovariate(1 / world.plan.fault_every_s), None, _plan_next, world)


def _plan(world: FaultWorld, name: str, at_s: float) -> None:
    rng = world.kernel.rng
    world.counts.planned[name] += 1
    if rng.random() < 0.5:
        world.kernel.at(at_s, None, _wait_for_moment, world, name, rng.choice(MOMENTS))
    else:
        world.kernel.at(at_s, None, _strike, world, name, 0)


def _wait_for_moment(world: FaultWorld, name: str, moment: tuple[str, str, str]) -> None:
    # A moment that cannot come (no recovery without a loss) is not waited for.
    last_s = world.plan.faults_for_s * 0.95
    if world.plan.fault_every_s:
        last_s = min(last_s, world.kernel.now_s + LONGEST_WATCH_S)

    def too_late() -> None:
        if watch in world.watchers:
            world.watchers.remove(watch)
            _strike(world, name, 0)

    def strike(process: SimulatedProcess, fields: Mapping[str, Any]) -> None:
        world.struck = process
        world.kernel.after(world.kernel.rng.choice((0.0, 0.0, 0.01)), None, _strike, world, name, 0)

    watch = world.once(*moment, strike)
    world.kernel.at(last_s, None, too_late)


def _strike(world: FaultWorld, name: str, tries: int) -> None:
    if world.healed or world.ended:
        world.counts.cannot(name, OVER)
        return
    world.kernel.aside("world", f"fault {name}?")
    phase = world.phase
    if FAULTS[name](world):
        world.kernel.note("world", f"fault {name}")
        world.counts.begun[name] += 1
        if name not in COUNTED_ELSEWHERE:
            world.counts.struck(name, phase)
    elif tries < TRIES:
        world.kernel.after(RETRY_S, None, _strike, world, name, tries + 1)
    else:
        world.counts.cannot(name, NOTHING)
