"""A finished run with leases, an archive and a -wal file: whatever is changed in its files, `dips verify` says.

What can go wrong with any run is in tests/unit/judge/test_recorded_run.py; all single bits with `--long`.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.corruptions import FLIPS, OF_A_LONG_RUN, Corruption, Flips, content, flip, judged, tape_of
from support.dips_command import dips
from support.whole_run import LEASED, WholeRun

from dips.master.archive import FILE_NAME

N_FLIPS = 200
"""Of each kind of file, that changed what the file says."""

BY_COMMAND = 2
"""Of each kind through the command; all others in this process."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two slaves that record pushes, two clusters, lent data, an archive; the master is killed at last, so that a -wal
    file stays."""
    directory = tmp_path_factory.mktemp("corruptions") / "run"
    run = WholeRun(directory, plan=LEASED, journal_records=64)
    run.slave = {"record_pushes": True, "snapshots_kept": 2}
    with run:
        clusters = [run.cluster(name, seed, step_s=0.01) for seed, name in enumerate("ab")]
        run.wait_for_version(4)
        run.kill("master")
        run.start_master()
        run.wait_for_version(8)
        run.stop(*clusters)
        run.kill("master")
    return directory


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Iterator[Path]:
    yield copied(recorded, tmp_path)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


def copied(recorded: Path, folder: Path) -> Path:
    return Path(shutil.copytree(recorded, folder / "run"))


def test_the_run_itself_is_proven(run: Path) -> None:
    assert (run / "master" / f"{FILE_NAME}-wal").stat().st_size > 0
    assert judged(run)[0] == 0, judged(run)[1]
    assert dips("verify", run, "--replay").returncode == 0


@pytest.mark.parametrize("corruption", OF_A_LONG_RUN, ids=lambda item: f"{item.kind}: {item.name}")
def test_each_corruption_of_a_long_run_is_said_by_name(run: Path, corruption: Corruption) -> None:
    corruption.apply(run)
    code, said = judged(run)
    assert code != 0
    assert corruption.finds in said


def is_of_an_earlier_kill(run: Path, before: object, after: object) -> bool:
    """Whether the changed journal is one that the master leaves if it is killed a moment earlier: the last records are
    missing of which its tape does not say yet that they were written, or archived records are not removed yet."""
    if not isinstance(before, list) or not isinstance(after, list):
        return False
    records = before[0]
    kept = [row for row in after[0] if row[0] >= records[0][0]]
    lines = (json.loads(line) for line in tape_of(run, "master").read_text().splitlines())
    journaled = max(line["number"] for line in lines if line["kind"] == "journaled")
    return bool(kept) and kept == records[: len(kept)] and kept[-1][0] >= journaled


@pytest.mark.long
@pytest.mark.parametrize("flips", FLIPS, ids=lambda item: item.kind)
def test_every_single_bit_that_changed_a_file_is_found(recorded: Path, tmp_path: Path, flips: Flips) -> None:
    """Each in the file as it was recorded; most are judged here, the first two by the command."""
    rng, found, missed = random.Random(flips.kind), 0, []
    run = copied(recorded, tmp_path)
    flips.prepare(run)
    path = flips.path(run)
    whole, meant = path.read_bytes(), content(path)
    for _ in range(20 * N_FLIPS):
        if found == N_FLIPS:
            break
        place = flip(path, rng)
        changed = content(path)
        if changed != meant and not is_of_an_earlier_kill(run, meant, changed):
            found += 1
            code, said = judged(run)
            if code == 0:
                missed.append(place)
            assert said, "a sentence"
            if found <= BY_COMMAND:
                told = dips("verify", run, "--replay")
                assert told.returncode == code
                assert "Traceback" not in told.stderr
        path.write_bytes(whole)
        (run / "master" / f"{FILE_NAME}-shm").unlink(missing_ok=True)
    assert (found, missed) == (N_FLIPS, [])
