"""The checker of a simulated run that also keeps what the run's processes recorded, as a run's directory would."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from dips.judge.facts import Fact, Pair
from dips.judge.invariants import Checker, Violation
from dips.judge.records import RunRecords, StoredManifest, TapeRead


class Recording(Checker):
    """Keeps what a run's directory would hold in the end; a lost journal is gone."""

    def __init__(self, durability: str) -> None:
        super().__init__(durability=durability)
        self.records = RunRecords(Path("simulated"))

    def feed(self, fact: Fact) -> list[Violation]:
        match fact.source:
            case "journal":
                self.records.journal.append(json.loads(json.dumps(fact.fields)))
            case "manifest":
                self.records.manifests.append(StoredManifest(fact.who, Path("manifest"), dict(fact.fields), {}))
            case role if role in self.records.lines:
                self.records.tapes.setdefault((role, fact.who), TapeRead())
                self.records.lines[role].append(replace(fact, fields=dict(fact.fields)))
        return super().feed(fact)

    def lost_journal(self, kept: Collection[Pair] = ()) -> None:
        super().lost_journal(kept)
        self.records.journal.clear()
