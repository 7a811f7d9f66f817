"""What simulated processes record, through crashes and lost disks, proves the promises when it is read file by file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dips.core.messages import SnapshotInfo
from dips.sim import world as simulated
from dips.sim.judge import Judge
from dips.sim.verify import check_records
from dips.sim.verify_records import Line, RunRecords, StoredManifest


class Recording(Judge):
    """Keeps what a run's directory would hold in the end; a lost journal is gone."""

    def __init__(self, world: simulated.World) -> None:
        super().__init__(world)
        self.records = RunRecords(Path("simulated"))
        self._clock = world.kernel

    def journal(self, record: Mapping[str, Any]) -> None:
        super().journal(record)
        self.records.journal.append(json.loads(json.dumps(record)))

    def tape(self, role: str, name: str, kind: str, fields: Mapping[str, Any]) -> None:
        super().tape(role, name, kind, fields)
        self.records.tapes.add((role, name))
        if role in self.records.lines:
            self.records.lines[role].append(Line(role, name, kind, self._clock.now_s, "-", dict(fields)))

    def manifest(self, slave: str, info: SnapshotInfo, record: bytes) -> None:
        super().manifest(slave, info, record)
        body = {"version": str(info.version), "round": str(info.round), "digest": info.digest.hex()}
        body |= {"commit_hash": info.commit_hash.hex(), "commit_record": record.decode()}
        self.records.manifests.append(StoredManifest(slave, Path("manifest"), body, {}))

    def lost_journal(self, left: Iterable[Mapping[str, Any]]) -> None:
        super().lost_journal(left)
        self.records.journal.clear()


@pytest.mark.parametrize("seed", range(12))
def test_records_read_source_by_source_prove_what_was_true_all_along(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "Judge", Recording)
    world = simulated.World(seed)
    outcome = world.run()
    assert outcome.violations == ()
    judge = world.judge
    assert isinstance(judge, Recording)
    checker = check_records(judge.records)
    assert checker.violations == []
    assert judge.records.problems == []
    # A run that is stopped before it goes on from a lost journal publishes nothing that could be judged.
    nothing_since = any("what only it knew is not judged" in note for note in judge.records.notes)
    assert checker.counts()["I4"] > 0 or nothing_since
