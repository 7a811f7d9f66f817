"""Bugs that the simulator found (docs/bugs.md), each as small as it can be told."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from dips.core.errors import Refused
from dips.core.ids import RoundId, Version
from dips.core.messages import SnapshotInfo
from dips.master.state.events import Stop
from dips.sim.content import to_array
from dips.sim.disk import SlaveDisk
from dips.sim.kernel import Process
from dips.sim.master_host import MasterHost
from dips.sim.plan import make_plan
from dips.sim.world import World
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
    outcomes = [World(seed, planned=faults).run() for seed in range(8300, 8306)]
    assert [outcome.violations for outcome in outcomes if outcome.violations] == []
    assert any(("recovery", "GATHERING", "no common version", "DONATING") in outcome.arrows for outcome in outcomes)


@pytest.mark.parametrize("faults", [("lost_master_disk",), ("old_master_disk",)], ids=lambda faults: faults[0])
def test_a_master_whose_disk_was_lost_shares_no_epoch_with_its_earlier_life(faults: tuple[str, ...]) -> None:
    for seed in range(8100, 8106):
        world = World(seed, planned=faults)
        lives_of: dict[int, set[int]] = {}

        def attached(
            role: str, process: Process, kind: str, fields: Mapping[str, Any], lives_of: dict[int, set[int]] = lives_of
        ) -> None:
            if (role, kind) == ("master", "slave_attached") and isinstance(process, MasterHost):
                lives_of.setdefault(process.epoch, set()).add(process.life)

        world.watchers.append(attached)
        assert world.run().violations == ()
        assert lives_of
        assert all(len(lives) == 1 for lives in lives_of.values()), lives_of


def test_the_operator_asks_again_where_the_master_died_before_it_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    operate = MasterHost.operate

    def dying(self: MasterHost, action: Any) -> int:
        token = operate(self, action)
        if isinstance(action, Stop):
            asked.append(token)
            if len(asked) == 1:
                self.kill()
                self.world.restart(self, 1.0)
        return token

    monkeypatch.setattr(MasterHost, "operate", dying)
    for seed in range(4):
        asked.clear()
        assert World(seed, planned=()).run().violations == ()
        assert len(asked) == 2, "the first was never answered, the second was"


def test_a_plan_is_made_of_the_seed_alone() -> None:
    assert make_plan(Random(5)) == make_plan(Random(5))
    assert make_plan(Random(5)) != make_plan(Random(6))
