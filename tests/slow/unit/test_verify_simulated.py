"""What simulated processes record, through crashes and lost disks, proves the promises when it is read file by file."""

from __future__ import annotations

import pytest
from support.recording import Recording

from dips.judge.verify import check_records
from dips.lab.sim import seed_run as simulated


@pytest.mark.parametrize("seed", range(12))
def test_records_read_source_by_source_prove_what_was_true(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "Checker", Recording)
    world = simulated.SeedRun(seed)
    outcome = world.run()
    assert outcome.violations == ()
    recorded = world.checker
    assert isinstance(recorded, Recording)
    checker = check_records(recorded.records)
    assert checker.violations == []
    assert recorded.records.problems == []
    # A run that is stopped before it goes on from a lost journal publishes nothing that could be judged.
    nothing_since = any("what only it knew is not judged" in note for note in recorded.records.notes)
    assert checker.counts["I4"] > 0 or nothing_since
