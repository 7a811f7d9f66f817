"""A run with directories as `dips up` makes them, so that `dips verify --replay` can judge it afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.journals import records_of
from support.whole_run import WholeRun

from dips.judge.verify import verify_run
from dips.local.log_files import tape_path


def commits_of(run: Path) -> list[dict[str, Any]]:
    """The COMMIT records in the journal of a run's directory."""
    records = (json.loads(record.record_json) for record in records_of(run / "master"))
    return [record for record in records if record["kind"] == "COMMIT"]


def replayed(run: Path, may_skip: bool = False) -> int:
    """`dips verify --replay` of a run's directory: every promise holds, and every version made again from its seed and
    the pushes has the same bits. Returns how many versions were. may_skip: the journal was put back, so that there are
    versions that it cannot lead to."""
    report = verify_run(run, replay=True)
    said = "; ".join(str(violation) for violation in report.violations)
    assert report.ok, f"dips verify: {report.verdict}; {said}; {report.unproven}"
    assert report.replayed is not None
    skipped = report.replayed.skipped
    assert may_skip or not skipped, f"versions that were not made again: {'; '.join(skipped[:3])}"
    return report.replayed.versions


class JudgedRun(WholeRun):
    def start_master(self) -> None:
        for name in ("slaves", "tapes"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        super().start_master()

    def start_slave(self, name: str, **more: object) -> None:
        directory = self.directory / "slaves"
        tape = tape_path(self.directory, name)
        super().start_slave(name, directory=directory / name, tape=tape, record_pushes=True, **more)

    def judge(self) -> None:
        """Every published version is made again from the recorded pushes, none of which counts twice."""
        assert replayed(self.directory) > 0
        pushes = [tuple(part["push"]) for part in self.applied()]
        assert len(set(pushes)) == len(pushes), "a push was applied twice"
        counted = sum(part["tokens"] for part in self.applied())
        assert counted == self.commits()[-1]["tokens"], "the tokens of the applied pushes do not add up to the run's"

    def commits(self) -> list[dict[str, Any]]:
        return commits_of(self.directory)

    def parts(self) -> list[dict[str, Any]]:
        """The decided pushes, of all rounds that were committed; `push` begins with the cluster's name."""
        return [part for commit in self.commits() for part in commit["participants"]]

    def applied(self) -> list[dict[str, Any]]:
        return [part for part in self.parts() if part["verdict"] == "APPLIED"]

    def applied_tokens(self, name: str) -> int:
        return sum(part["tokens"] for part in self.applied() if part["push"][0] == name)
