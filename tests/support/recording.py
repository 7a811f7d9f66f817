"""The checker of a simulated run that also keeps what the run's processes recorded, as a run's directory would."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dips.judge.facts import Pair
from dips.judge.invariants import Checker, Violation
from dips.judge.records import RunRecords, StoredManifest, TapeLine


class Recording(Checker):
    """Keeps what a run's directory would hold in the end; a lost journal is gone."""

    def __init__(self, durability: str) -> None:
        super().__init__(durability=durability)
        self.records = RunRecords(Path("simulated"))

    def feed_journal(self, record: Mapping[str, Any]) -> list[Violation]:
        self.records.journal.append(json.loads(json.dumps(record)))
        return super().feed_journal(record)

    def feed_tape(
        self, role: str, name: str, kind: str, fields: Mapping[str, Any], at_s: float = 0.0
    ) -> list[Violation]:
        self.records.tapes.add((role, name))
        if role in self.records.lines:
            self.records.lines[role].append(TapeLine(role, name, kind, at_s, "-", dict(fields)))
        return super().feed_tape(role, name, kind, fields, at_s)

    def feed_manifest(self, slave: str, manifest: Mapping[str, Any]) -> list[Violation]:
        self.records.manifests.append(StoredManifest(slave, Path("manifest"), dict(manifest), {}))
        return super().feed_manifest(slave, manifest)

    def lost_journal(self, kept: Collection[Pair] = ()) -> None:
        super().lost_journal(kept)
        self.records.journal.clear()
