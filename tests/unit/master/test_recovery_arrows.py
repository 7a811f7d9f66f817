"""Every arrow of the recovery's table, and those that recovery added to the other tables, is taken by a scenario."""

from __future__ import annotations

import pytest
from support.master_bench import Bench

from dips.core.ids import Version
from dips.core.messages import SendCommitRecord
from dips.master.state.records import RecoveryPhase

V0, V1 = Version(1, 0), Version(1, 1)


def standing(*names: str) -> Bench:
    bench = Bench().running(*names)
    for name in names:
        bench.beat(name)
    return bench


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
