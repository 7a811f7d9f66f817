"""Every arrow of the recovery's table, and those that recovery added to the other tables, is taken by a scenario."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.master_bench import Bench

from dips.core.errors import RefusalCode
from dips.core.ids import Version
from dips.core.machine import Transition, forget, observe
from dips.core.messages import Commit, LeaveRequest, Refusal, SendCommitRecord
from dips.master.state.records import PUSH_TABLE, RECOVERY_TABLE, ROUND_TABLE, RecoveryPhase

Arrow = tuple[str, str, str, str]

V0, V1 = Version(1, 0), Version(1, 1)


@pytest.fixture
def taken() -> Iterator[set[Arrow]]:
    """The arrows that any machine takes while the test runs."""
    arrows: set[Arrow] = set()

    def see(move: Transition[Any]) -> None:
        arrows.add(move.arrow)

    observe(see)
    yield arrows
    forget(see)


def standing(*names: str) -> Bench:
    bench = Bench().running(*names)
    for name in names:
        bench.beat(name)
    return bench


def no_loss() -> None:
    bench = standing("a")
    kept = dict(bench.slaves[0].snapshots)
    bench.slaves[1].die()
    bench.slaves[0].come_back_without()
    bench.slaves[0].die()
    bench.slaves[0].snapshots = kept
    bench.attach_all()


def rolled_back_and_committed() -> None:
    bench = standing("a")
    bench.push("a")
    bench.slaves[0].hold.add(Commit)
    bench.pull("a")
    bench.push("a")
    bench.slaves[0].hold.clear()
    bench.slaves[0].come_back_without(Version(1, 2))


def adopted(refuses: bool) -> None:
    bench = standing("a")
    old = bench.snapshot
    bench.push("a")
    if refuses:
        bench.slaves[0].refuse["record"] = Refusal(RefusalCode.DISK, "x")
    bench.restart(old)


def donated() -> None:
    bench = standing("a")
    bench.slaves[0].come_back_without()
    bench.donate("a", V0)
    assert bench.status().published == Version(2, 0)


def donor_gone() -> None:
    bench = standing("a")
    bench.slaves[0].come_back_without()
    bench.call(LeaveRequest(bench.caller("a"), ""))


def snapshot_back() -> None:
    bench = standing("a")
    kept = dict(bench.slaves[0].snapshots)
    bench.slaves[0].come_back_without()
    bench.slaves[0].die()
    bench.slaves[0].snapshots = kept
    bench.slaves[0].attach()
    assert bench.status().published == V0


def test_every_arrow_of_a_recovery_is_taken(taken: set[Arrow]) -> None:
    no_loss()
    rolled_back_and_committed()
    adopted(False)
    adopted(True)
    donated()
    donor_gone()
    snapshot_back()
    table = {(RECOVERY_TABLE.name, a.value, name, b.value) for a, name, b in RECOVERY_TABLE.arrows()}
    assert table - taken == set()
    assert (ROUND_TABLE.name, "SEALED", "it is a donation", "PREPARE") in taken
    assert (ROUND_TABLE.name, "COMMIT", "recovery", "IDLE") in taken
    assert (PUSH_TABLE.name, "SEALED", "rolled back", "DECIDED") in taken


@pytest.mark.parametrize("phase", list(RecoveryPhase))
def test_status_is_told_in_every_phase(phase: RecoveryPhase) -> None:
    """What people see names the phase's reason; nothing else moves meanwhile."""
    bench = standing("a")
    bench.push("a")
    old = bench.snapshot
    if phase is RecoveryPhase.GATHERING:
        bench.slaves[1].die()
        bench.slaves[0].come_back_without(V1)
    elif phase is RecoveryPhase.DONATING:
        bench.pull("a")
        bench.beat("a")
        bench.slaves[0].come_back_without()
    elif phase is RecoveryPhase.ASKING:
        bench.pull("a")
        bench.push("a")
        bench.slaves[0].hold.add(SendCommitRecord)
        bench.restart(old)
    assert bench.state.shared.recovery.phase.now is phase
    recovery = bench.status().recovery
    assert bool(recovery) == (phase is not RecoveryPhase.NONE)
    assert bench.status().waiting_for == recovery or not recovery
