"""Simulated runs whose clusters have several ranks: each carries its share, and every promise holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from dips.core.ids import PushId
from dips.core.layout import Chunk, chunks_of
from dips.core.messages import VerdictKind
from dips.core.wire import Codec
from dips.lab.sim.arithmetic import Key, Value
from dips.lab.sim.content import SimulatedModel
from dips.lab.sim.faults.world import OLD_ATTEMPT, OLD_LIFE
from dips.lab.sim.hosts.cluster import OTHER_RANKS
from dips.lab.sim.hosts.ranks import Rank, Ranks, shares_of_replicas
from dips.lab.sim.run_plan import make_plan
from dips.lab.sim.seed_run import SeedRun
from dips.worker.commands import from_bytes
from dips.worker.state import effects, tape
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import InstallMode


def test_every_rank_has_a_key_of_its_own() -> None:
    for seed in range(4):
        plan = make_plan(Random(seed))
        plan = replace(plan, config=replace(plan.config, encrypted=True), pushers=(2, 3))
        outcome = SeedRun(seed, plan=plan).run()
        assert outcome.violations == ()
        assert outcome.published > 1


class Watched(SeedRun):
    """Notes which rank sends what, and what slaves stage."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, planned=(), pushers=(2,))
        self.sent: dict[PushId, Counter[int]] = {}
        self.n_staged: Counter[PushId] = Counter()

    def chunk_sent(self, push: PushId, attempt: int, rank: int, chunk: Chunk) -> None:
        super().chunk_sent(push, attempt, rank, chunk)
        self.sent.setdefault(push, Counter())[rank] += 1

    def staged(self, slave: str, push: PushId, wire: Codec, values: dict[Key, Value | None]) -> None:  # type: ignore[override]
        super().staged(slave, push, wire, values)
        self.n_staged[push] += len(values)


def test_each_rank_sends_its_share_of_every_push() -> None:
    world = Watched(3)
    outcome = world.run()
    assert outcome.violations == ()
    plan = world.plan
    chunk_bytes = plan.config.settings.chunk_bytes
    shares = shares_of_replicas(plan.layout, 2, chunk_bytes)
    owned = [len(share.chunks(plan.layout, chunk_bytes)) for share in shares]
    assert min(owned) > 0
    n_chunks = len(chunks_of(plan.layout.blocks, chunk_bytes))
    whole = [push for push, n_staged in world.n_staged.items() if n_staged == n_chunks]
    assert len(whole) > outcome.published
    assert all(world.sent[push] == {0: owned[0], 1: owned[1]} for push in whole)


@pytest.mark.parametrize(
    ("fault", "shows"),
    [
        ("deaf_rank", OLD_ATTEMPT),
        ("orphaned_rank", OLD_LIFE),
    ],
)
def test_faults_of_single_ranks_break_no_promise(fault: str, shows: str) -> None:
    fired: Counter[str] = Counter()
    for seed in range(7000, 7003):
        outcome = SeedRun(seed, planned=(fault,) * 5, pushers=(2, 3)).run()
        assert outcome.violations == ()
        fired.update(outcome.fired)
    assert fired[shows]


class Counted(SeedRun):
    """Counts what the sessions of clusters of several ranks decide."""

    def __init__(self, seed: int, overlap: str) -> None:
        plan = make_plan(Random(seed))
        settings = replace(plan.config.settings, overlap=overlap)
        plan = replace(plan, config=replace(plan.config, settings=settings))
        super().__init__(seed, plan=plan, planned=STRIKING, pushers=(2, 3), later_pushers=(3, 2))
        self.decided: Counter[str] = Counter()

    def cluster_handled(
        self, name: str, machine: ClusterMachine, outputs: Sequence[effects.Effect], residuals: Any, sent_as: Any
    ) -> None:
        super().cluster_handled(name, machine, outputs, residuals, sent_as)
        for item in outputs:
            match item:
                case tape.VerdictReceived():
                    self.decided[item.verdict] += 1
                case effects.Install(mode):
                    self.decided[mode.name] += 1
                case effects.KeepResidual(wire):
                    self.decided[f"kept {wire.name}"] += 1
                case effects.ClearResidual() | tape.VersionDonated() | tape.BaseStale():
                    self.decided[type(item).__name__] += 1


STRIKING = (
    "lost_disk_in_commit", "all_slave_disks_lost", "nan_push", "nan_push", "operator_drains", "crash_cluster",
    "crash_rank", "late_rank",
)  # fmt: skip

MODES = {"none": {InstallMode.REPLACE}, "push": set(InstallMode), "full": set(InstallMode)}


@pytest.mark.parametrize("overlap", MODES)
def test_clusters_of_several_ranks_go_through_all_that_one_process_does(overlap: str) -> None:
    decided: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    for seed in (1, 5, 7, 18, 24, 35):
        world = Counted(seed, overlap)
        outcome = world.run()
        assert outcome.violations == ()
        decided.update(world.decided)
        fired.update(outcome.fired)
    verdicts = {kind.name for kind in VerdictKind}
    kept = {f"kept {wire.name}" for wire in Codec if wire.is_difference}
    rest = {"ClearResidual", "VersionDonated", "BaseStale"} | {mode.name for mode in MODES[overlap]}
    assert (verdicts | kept | rest) - decided.keys() == set()
    assert fired[OTHER_RANKS]
    assert fired["operator_drains"]


MISSED = {
    "Install": "other vectors than rank 0",
    "KeepResidual": "other vectors than rank 0",
    "ClearResidual": "other vectors than rank 0",
    "CopyBase": "another push",
    "Snapshot": "a snapshot was taken before",
}


@pytest.mark.parametrize("kind", MISSED)
def test_a_follower_that_misses_a_command_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def follow(self: Ranks, rank: Rank, model: SimulatedModel, data: bytes, leader: SimulatedModel) -> None:
        if type(from_bytes(data)).__name__ != kind:
            healthy(self, rank, model, data, leader)

    healthy = Ranks._follow
    monkeypatch.setattr(Ranks, "_follow", follow)
    found = [sentence for seed in (1, 5, 7) for sentence in Counted(seed, "full").run().violations]
    assert any(MISSED[kind] in sentence for sentence in found), found


def test_a_checkpoint_of_which_a_part_is_of_another_moment_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: Ranks, write_s: Any, done: Callable[[list[SimulatedModel]], None]) -> None:
        healthy(self, write_s, lambda parts: done([replace(part, residual=part.residual + 1) for part in parts]))

    healthy = Ranks.take_checkpoint
    monkeypatch.setattr(Ranks, "take_checkpoint", take)
    outcome = SeedRun(7000, planned=("crash_cluster",) * 4, pushers=(4,)).run()
    assert "has vectors of different moments" in outcome.violations[0]
