"""The judge of a simulated run that also keeps what the run's processes recorded, as a run's directory would."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dips.core.messages import SnapshotInfo
from dips.judge.records import RunRecords, StoredManifest, TapeLine
from dips.lab.sim import seed_run as simulated
from dips.lab.sim.checks import Judge


class Recording(Judge):
    """Keeps what a run's directory would hold in the end; a lost journal is gone."""

    def __init__(self, world: simulated.SeedRun) -> None:
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
            self.records.lines[role].append(TapeLine(role, name, kind, self._clock.now_s, "-", dict(fields)))

    def manifest(self, slave: str, info: SnapshotInfo, record: bytes) -> None:
        super().manifest(slave, info, record)
        body = {"version": str(info.version), "round": str(info.round), "digest": info.digest.hex()}
        body |= {"commit_hash": info.commit_hash.hex(), "commit_record": record.decode()}
        self.records.manifests.append(StoredManifest(slave, Path("manifest"), body, {}))

    def lost_journal(self, left: Iterable[Mapping[str, Any]]) -> None:
        super().lost_journal(left)
        self.records.journal.clear()
