"""`dips verify` and `dips story` on what real processes wrote: kills on the way, and versions computed again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.dips_command import dips
from support.whole_run import LEASED, WholeRun

from dips.judge.records import read_run
from dips.judge.verify import verify_run

JUDGED = [*(f"I{number}" for number in range(1, 15)), "I18", "records"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two slaves that record pushes, two clusters, lent data; a slave and the master are killed on the way."""
    directory = tmp_path_factory.mktemp("verify") / "run"
    run = WholeRun(directory, plan=LEASED, outer_optimizer="delayed-nesterov", delay_rounds=2, outer_momentum=0.5)
    run.slave = {"record_pushes": True}
    with run:
        clusters = [run.cluster(name, seed, step_s=0.01) for seed, name in enumerate("ab")]
        run.wait_for_version(2)
        run.kill("s0")
        run.start_slave("s0")
        run.wait_for_version(run.version() + 2)
        live = verify_run(directory)  # while it runs
        assert [str(violation) for violation in live.violations] == []
        version = run.version()
        run.kill("master")
        run.start_master()
        run.wait_for_version(version + 1)
        run.stop(*clusters)
    return directory


def test_every_promise_is_proven_by_what_was_recorded(run_dir: Path) -> None:
    report = verify_run(run_dir)
    assert [str(violation) for violation in report.violations] == []
    assert report.problems == []
    assert report.exit_code == 0
    assert [row.invariant for row in report.rows if row.records == 0] == []
    assert [row.invariant for row in report.rows] == JUDGED


def test_the_command_says_so_and_replays_every_version(run_dir: Path) -> None:
    told = dips("verify", run_dir, "--replay", "--json")
    assert told.returncode == 0, told.stdout + told.stderr
    report = json.loads(told.stdout)
    assert report["verdict"] == "ok"
    assert report["replayed"]["wrong"] == report["replayed"]["skipped"] == []
    records = read_run(run_dir)
    commits = [record for record in records.journal if record["kind"] == "COMMIT"]
    assert report["replayed"]["versions"] == len(commits) >= 4
    assert report["replayed"]["shards"] == 2 * len(commits)


def test_the_story_of_a_version_goes_through_every_process(run_dir: Path) -> None:
    told = dips("story", run_dir, "1:2", "--json")
    assert told.returncode == 0, told.stderr
    lines = json.loads(told.stdout)["lines"]
    assert {line["who"].split()[0] for line in lines} == {"journal", "master", "slave", "worker"}
    kinds = [line["kind"] for line in lines]
    for first, then in (("ticket", "push_sent"), ("staged", "prepared"), ("prepared", "committed")):
        assert kinds.index(first) < kinds.index(then)
