"""A script as many people have one, with one seed for everything, started twice."""

from __future__ import annotations

import sys
from pathlib import Path

from support.dips_command import ROOT, dips, end_at_a_limit, operator_of
from support.three_facts import PATIENT, assert_three_facts
from support.up_run import UpRun
from support.waiting import until

PROGRAM = ROOT / "tests" / "support" / "small_gpt.py"


def test_two_clusters_with_one_seed(tmp_path: Path) -> None:
    """`dips status` says that they train on the same data. Both end with the version that they pulled last, so models
    are equal to the bit."""
    folders = {name: tmp_path / name for name in ("a", "b")}
    programs = {name: (sys.executable, PROGRAM, folder) for name, folder in folders.items()}
    with UpRun(tmp_path, programs, master=PATIENT) as run:
        with operator_of(run.directory) as master:
            until(lambda: any(alarm.kind == "same_data" for alarm in master.status().alarms), "the alarm", run.log)
        told = dips("status", run.directory)
        assert told.returncode == 0, told.stderr
        assert "they train on the same data" in " ".join(told.stdout.split()).lower()
        end_at_a_limit(run.directory)
        run.until_end()
    assert_three_facts(run, folders)
