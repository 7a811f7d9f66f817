"""Canonical records of simulated runs: changed by behaviour alone. `make frozen` compares them with the frozen ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from canonical_records import Frozen, RecordedSeedRun, main, read

from dips.lab.sim.seed_run import SeedRun

SEED = 3


def test_recording_changes_nothing_in_the_run() -> None:
    assert RecordedSeedRun(SEED).run().trace_hash == SeedRun(SEED).run().trace_hash


def test_the_command_names_the_seed_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "seeds.txt"
    assert main(["--first", "3", "--seeds", "2", "--jobs", "1", "--write", str(file)]) == 0
    check = ["--first", "3", "--seeds", "2", "--jobs", "1", "--check", str(file)]
    assert main([*check, "--raw"]) == 0
    known = read(file)
    file.write_text(f"{known[3]}\n{Frozen(4, 'f' * 32, known[4].digest, known[4].records)}\n")
    assert main(check) == 0
    assert main([*check, "--raw"]) == 1
    file.write_text(f"{Frozen(3, known[3].trace_hash, '0' * 64, 1)}\n")
    capsys.readouterr()
    assert main(check) == 1
    told = capsys.readouterr().out
    assert f"seed 3: {known[3].records} records" in told
    assert "seed 4: not in the file" in told
