"""The report says what happened, in the promised keys, and its checks cannot be fooled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.run_status import cluster_status, run_status

from dips.core.ids import Version
from dips.core.release import software_versions
from dips.local.report import (
    CLUSTER,
    Fault,
    LocalRunOutcome,
    Moment,
    PlannedFault,
    build_report,
    checks,
    failed_checks,
    write_report,
)
from dips.master.page.history import HeldoutPoint

HELDOUT = [HeldoutPoint(Version(1, 0), 0, 5.6), HeldoutPoint(Version(1, 12), 1_000_000, 2.21)]
FAULT = Fault(PlannedFault(CLUSTER, "b", 0.35), 71, "1.4", Moment(40.0, 350_000, 5), Moment(46.5, 370_000, 6), "1.5")


def outcome(**changes: Any) -> LocalRunOutcome:
    """A run that went well."""
    left = tuple(cluster_status(name, alive=False, phase="LEFT") for name in ("a", "b"))
    status = run_status(stopped=True, tokens=1_000_000, clusters=left)
    usual = LocalRunOutcome(
        status=status,
        seconds=181.5,
        command="dips demo",
        speeds={"a": 5200.0, "b": 4400.0},
        gaps={"a": 0.0, "b": 0.16},
        faults=[FAULT],
        exit_codes={"master": 0, "s0": 0, "a": 0, "b": 0},
        heldout=HELDOUT,
        verify="ok",
        verified={"I1": 33},
    )
    return replace(usual, **changes)


def test_the_promised_keys_are_there() -> None:
    report = build_report(outcome())
    assert (report["timeline"], report["version"], report["rounds"], report["merged_rounds"]) == (1, 12, 13, 9)
    assert report["tokens"] == 1_000_000
    assert report["heldout_loss"] == [[0, 5.6], [1_000_000, 2.21]]
    assert report["heldout_versions"][-1] == {"timeline": 1, "version": 12, "tokens": 1_000_000, "loss": 2.21}
    pushed = {"pushes_applied": 12, "pushes_excluded": 0, "pushes_aborted": 0, "incarnations": 1, "tokens": 400_000}
    trained = {"steps": 480, "measured_speed": 4400.0, "speed_gap": 0.16, "parallel": ""}
    unknown = dict.fromkeys(("last_norm", "last_z", "last_cosine", "cosine_usual"))
    judged = {**unknown, "cosine_rounds": 0, "direction_alarm": False}
    assert report["clusters"]["b"] == {**pushed, **trained, **judged}
    assert report["seconds"] == 181.5
    assert (report["verify"], report["verified"]) == ("ok", {"I1": 33})
    assert report["command"] == "dips demo"
    assert report["software"]["dips"] == software_versions()["dips"]


def test_what_was_measured_of_a_clusters_pushes_and_when_a_fault_was_made_and_over() -> None:
    judged = cluster_status("b", last_norm=0.8, last_z=1.5, last_cosine=0.4, cosine_usual=0.0, cosine_rounds=9)
    report = build_report(outcome(status=run_status(clusters=(replace(judged, direction_alarm=True),))))
    found = report["clusters"]["b"]
    assert (found["last_norm"], found["last_z"], found["last_cosine"]) == (0.8, 1.5, 0.4)
    assert (found["cosine_usual"], found["cosine_rounds"], found["direction_alarm"]) == (0.0, 9, True)
    [fault] = report["faults"]
    assert (fault["what"], fault["when"], fault["back_when"]) == ("cluster b killed with SIGKILL", 40.0, 46.5)
    assert (fault["when_tokens"], fault["back_tokens"], fault["when_version"]) == (350_000, 370_000, 5)
    assert (fault["incarnation"], fault["back_as"]) == ("1.4", "1.5")


WELL = outcome().status
HERE = (cluster_status("a", alive=True),)


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, set()),
        ({"status": run_status(stopped=False, tokens=1_000_000, clusters=())}, {"run_stopped", "every_cluster_left"}),
        ({"exit_codes": {"a": 0, "b": 1}}, {"every_process_ended_well"}),
        ({"exit_codes": {"a": 0, "b": None}}, {"every_process_ended_well"}),
        ({"heldout": HELDOUT[:1]}, {"final_version_evaluated"}),
        ({"heldout": []}, {"final_version_evaluated"}),
        ({"faults_never_made": [FAULT.planned]}, {"every_fault_made"}),
        ({"faults": [replace(FAULT, back=None)]}, {"everything_killed_came_back"}),
        ({"verify": "I6 violated"}, {"records_prove_the_promises"}),
        ({"verified": {}}, {"records_prove_the_promises"}),
        ({"status": replace(WELL, tokens=999_999)}, {"final_version_published"}),
        ({"status": replace(WELL, published=None)}, {"final_version_published", "final_version_evaluated"}),
        ({"status": replace(WELL, tk_max_tokens=0)}, {"final_version_published"}),
        ({"status": replace(WELL, clusters=HERE)}, {"every_cluster_left"}),
    ],
)
def test_what_went_wrong_fails_its_check(changes: dict[str, Any], failed: set[str]) -> None:
    assert {name for name, held in checks(outcome(**changes)).items() if not held} == failed
    assert set(failed_checks(build_report(outcome(**changes)))) == failed


def test_the_file_is_whole_and_plain_json_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = build_report(outcome())
    write_report(report, path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(report))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_report({"loss": float("nan")}, path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(report))
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
