"""What many runs together are told as, and what of it is a failure: nothing that was to be shown may be missing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

from dips.lab.sim import seeds as totals
from dips.lab.sim.counts import RunCounts
from dips.lab.sim.faults import register
from dips.lab.sim.seed_run import SeedOutcome, SeedRun
from dips.lab.sim.seeds import PHASES, SEEDS_FOR_ARROWS, SEEDS_FOR_FAULTS, Totals, complaints


@cache
def an_outcome() -> SeedOutcome:
    return SeedRun(1).run()


def outcome_with(violations: tuple[str, ...] = (), counts: RunCounts | None = None) -> SeedOutcome:
    return replace(an_outcome(), violations=violations, counts=counts or RunCounts())


def all_fired(but: str = "") -> RunCounts:
    """Every kind was planned and struck, and a process was killed in every phase of the round."""
    counts = RunCounts()
    for name in register.names():
        counts.planned[name] += 1
        if name != but:
            counts.struck(name, "IDLE")
    for phase in PHASES:
        counts.kills["slave", phase] += 1
    return counts


def totals_of(n: int, outcome: SeedOutcome) -> Totals:
    found = Totals()
    for _ in range(n):
        found.add(outcome, 0.1)
    return found


def test_a_violation_is_named_with_its_seed_and_how_to_see_its_story() -> None:
    said = complaints(totals_of(1, outcome_with(("I7: a push is lost",))))
    assert said == ["seed 1: I7: a push is lost\n    its event history: python -m dips.lab.sim.seeds --seed 1 --trace"]


def test_what_totals_complain_of() -> None:
    said = complaints(totals_of(SEEDS_FOR_FAULTS, outcome_with(counts=all_fired(but="crash_master"))))
    assert said == [f"fault crash_master never fired ({SEEDS_FOR_FAULTS} were planned)"]
    counts = RunCounts(planned=Counter({"swizzle": 3}))
    assert complaints(totals_of(3, outcome_with(counts=counts))) == []
    assert complaints(totals_of(4, outcome_with(counts=counts))) == ["fault swizzle never fired (12 were planned)"]
    counts = all_fired()
    del counts.kills["slave", "JUDGE"]
    said = complaints(totals_of(totals.SEEDS_FOR_PHASES, outcome_with(counts=counts)))
    assert "no process was killed in phase JUDGE of the round" in said
    said = complaints(totals_of(SEEDS_FOR_ARROWS, outcome_with(counts=all_fired())))
    assert any(line.startswith("never taken: ") for line in said)
    assert not any("push: SEALED -> DECIDED upon aborted" in line for line in said)
