"""Bugs that the simulator found (tests/BUGS.md), each as small as it can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from dips.core.errors import Refused
from dips.core.ids import RoundId, Version
from dips.core.messages import DataMode, DataPlan, SnapshotInfo
from dips.lab.sim.content import to_array
from dips.lab.sim.disks import SlaveDisk
from dips.lab.sim.hosts.master import MasterHost
from dips.lab.sim.kernel import SimulatedProcess
from dips.lab.sim.run_plan import make_plan
from dips.lab.sim.seed_run import SeedOutcome, SeedRun
from dips.slave.ring import Ring


def committed(v: int) -> SnapshotInfo:
    return SnapshotInfo(Version(1, v), RoundId(1, v + 1), b"l", b"p", bytes([v]), True, b"hash")


def test_a_manifest_that_failed_does_not_keep_its_file_reserved() -> None:
    disk = SlaveDisk("s")
    ring = Ring(disk, "run", "s", snapshots_kept=2)
    theta = to_array([1, 2, 3])
    ring.scan()
    ring.make(theta.size)
    for v in (0, 1):
        ring.write_committed(committed(v), theta, theta, b"record")
    disk.manifest_errors = 1
    with pytest.raises(Refused, match="cannot be written"):
        ring.write_committed(committed(2), theta, theta, b"record")
    ring.write_committed(committed(3), theta, theta, b"record")
    assert next(info for info in ring.infos() if info.committed) == committed(3)


@pytest.mark.parametrize(
    "faults",
    [("lost_slave_disk",), ("all_slave_disks_lost",), ("lost_disk_in_commit",), ("donation_fails",)],
    ids=lambda faults: faults[0],
)
def test_a_run_whose_slaves_lost_the_model_gets_it_back_from_a_cluster(faults: tuple[str, ...]) -> None:
    outcomes = [SeedRun(seed, planned=faults).run() for seed in range(8300, 8306)]
    assert [outcome.violations for outcome in outcomes if outcome.violations] == []
    assert any(("recovery", "GATHERING", "no common version", "DONATING") in outcome.arrows for outcome in outcomes)


@pytest.mark.parametrize("faults", [("lost_master_disk",), ("old_master_disk",)], ids=lambda faults: faults[0])
def test_a_master_whose_disk_was_lost_shares_no_epoch_with_its_earlier_life(faults: tuple[str, ...]) -> None:
    for seed in range(8100, 8106):
        world = SeedRun(seed, planned=faults)
        lives_of: dict[int, set[int]] = {}

        def attached(
            role: str,
            process: SimulatedProcess,
            kind: str,
            fields: Mapping[str, Any],
            lives_of: dict[int, set[int]] = lives_of,
        ) -> None:
            if (role, kind) == ("master", "slave_attached") and isinstance(process, MasterHost):
                lives_of.setdefault(process.epoch, set()).add(process.generation)

        world.watchers.append(attached)
        assert world.run().violations == ()
        assert lives_of
        assert all(len(lives) == 1 for lives in lives_of.values()), lives_of


def lost_beside_the_journal(seed: int) -> SeedOutcome:
    """Durability async: all slaves lose the version that is just published, and the master its directory."""
    plan = make_plan(Random(seed), durability="async")
    world = SeedRun(seed, plan=replace(plan, data=DataPlan(DataMode.OWN)), planned=())
    published: list[str] = []

    def strike() -> None:
        for slave in world.slaves.values():
            slave.kill()
            world.restart(slave, 0.3)
        world.masters[0].kill()
        world.disk.lose()
        world.lost_state("master", "its directory is lost, and what only memory held")
        world.rebuild = True
        world.restart(world.masters[0], 0.5)

    def watch(role: str, process: SimulatedProcess, kind: str, fields: Mapping[str, Any]) -> None:
        if (role, kind) == ("master", "publish"):
            published.append(fields["version"])
            if len(published) == 4:
                world.kernel.after(0.0, None, strike)

    world.watchers.append(watch)
    return world.run()


def test_a_version_that_was_published_and_lost_with_the_journal_gives_its_name_to_no_other() -> None:
    outcomes = [lost_beside_the_journal(seed) for seed in range(8600, 8608)]
    assert {outcome.seed: outcome.violations for outcome in outcomes if outcome.violations} == {}
    assert sum(("recovery", "GATHERING", "rolled back", "NONE") in outcome.arrows for outcome in outcomes) > 3


def test_a_disk_that_was_lost_while_a_version_was_committed_is_no_copy_of_it() -> None:
    """Or the only other copy of the run's state, the master's, is lost too."""
    assert not SeedRun(52).run().violations
