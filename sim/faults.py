"""Faults by name: what each does, when it strikes, and the count of those that really did.

Each is planned for a time, or for a moment (a slave has just prepared, a push has just been sealed), and tries again
for a while when it cannot strike yet. What one leaves behind is ended by its own later action or by heal(). A name
here that no seed of a large set ever saw fire is an error: run_seeds.py checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dips.sim import fault_disks, fault_links, fault_processes, mischief
from dips.sim.kernel import Process

if TYPE_CHECKING:
    from dips.sim.world import World

Begin = Callable[["World"], bool]
"""Strike now; False: there is nothing to strike at yet."""

FAULTS: Mapping[str, Begin] = {
    **fault_processes.FAULTS,
    **fault_links.FAULTS,
    **fault_disks.FAULTS,
    **fault_disks.LOSSES,
    **mischief.FAULTS,
}

COUNTED_ELSEWHERE = frozenset({*fault_links.WEATHERS, *fault_disks.ARMED, *fault_processes.ARMED, *mischief.ARMED})
"""Armed when they are begun; counted only where they really strike."""

SIDE_EFFECTS = ("lost_journal_entries", "lost_unsynced_data", "base_gone")
"""Not planned by themselves: what crashes, lost disks and rounds that go on without a slow cluster bring with them.
Counted like the others."""

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


def names() -> tuple[str, ...]:
    """Every kind that is counted."""
    return tuple(sorted({*FAULTS, *SIDE_EFFECTS}))


def plan_faults(world: World, planned: tuple[str, ...] | None) -> None:
    """Choose, or take as told, what will strike and when."""
    rng, known = world.kernel.rng, sorted(FAULTS)
    chosen = planned if planned is not None else [rng.choice(known) for _ in range(world.plan.n_faults)]
    for name in chosen:
        at_s = rng.uniform(world.FIRST_FAULT_S, world.plan.faults_for_s * 0.9)
        if rng.random() < 0.5:
            world.kernel.at(at_s, None, _wait_for_moment, world, name, rng.choice(MOMENTS))
        else:
            world.kernel.at(at_s, None, _strike, world, name, 0)


def _wait_for_moment(world: World, name: str, moment: tuple[str, str, str]) -> None:
    # A moment that does not come (no recovery without a loss) is not waited for in vain.
    last_s = world.plan.faults_for_s * 0.95

    def too_late() -> None:
        if watch in world.watchers:
            world.watchers.remove(watch)
            _strike(world, name, 0)

    def watch(role: str, process: Process, kind: str, fields: Mapping[str, Any]) -> None:
        if (role, kind) == moment[:2] and moment[2] in ("", fields.get("phase")):
            world.watchers.remove(watch)
            world.struck = process
            world.kernel.after(world.kernel.rng.choice((0.0, 0.0, 0.01)), None, _strike, world, name, 0)

    world.watchers.append(watch)
    world.kernel.at(last_s, None, too_late)


def _strike(world: World, name: str, tries: int) -> None:
    if world.healed or world.ended:
        return
    world.kernel.aside("world", f"fault {name}?")
    if FAULTS[name](world):
        world.kernel.note("world", f"fault {name}")
        if name not in COUNTED_ELSEWHERE:
            world.fired(name)
    elif tries < TRIES:
        world.kernel.after(RETRY_S, None, _strike, world, name, tries + 1)


def heal(world: World) -> None:
    """Nothing strikes any more."""
    world.watchers.clear()
