"""`dips plan groups`: what it prints, and what it says to a person's mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.plan_command import EXAMPLE, refused, told


def test_groups_subgroups_and_why_and_thresholds_decide(capsys: pytest.CaptureFixture[str]) -> None:
    """Links of 0.1 Gbit/s make one group of all; the subgroups of one device more are then alike, too."""
    code, out, error = told(capsys, "groups", "spantrain-figure-5")
    assert (code, error) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[:11] == [
        "group 1: 6 devices",
        "1.1 cloud-1 x 2: 312 TFLOP/s each",
        "1.2 cloud-2 x 2: 62.4 TFLOP/s each",
        "1.3 cloud-3 x 2: 18.7 TFLOP/s each",
        "group 2: 2 devices",
        "2.1 end-1 x 1: 82.58 TFLOP/s each",
        "2.2 end-2 x 1: 59.54 TFLOP/s each",
        "group 3: 4 devices",
        "3.1 edge-1 x 2: 82.58 TFLOP/s each",
        "3.2 edge-2 x 1: 59.54 TFLOP/s each",
        "3.3 edge-3 x 1: 5.5 TFLOP/s each",
    ]
    assert "groups stay the same while no measurement is off by more than 60.2% (by cloud-1 and end-1)" in lines
    assert "merges of groups: a message of 24 MiB must go at 0.25 Gbit/s or faster" in lines
    assert "end-1 x 1 end-2 x 1 0.9975 merged" in lines
    assert "end-1 x 1, end-2 x 1 edge-1 x 2, edge-2 x 1, edge-3 x 1 0.09951 refused" in lines
    assert "3 edge-1 x 2 edge-2 x 1 38.7% refused" in lines
    code, out, _ = told(capsys, "groups", "spantrain-figure-5", "--threshold", "0.09", "--alike", "2000", "--json")
    found = json.loads(out)
    assert code == 0
    assert [one["devices"] for one in found["groups"]] == [12]
    assert len(found["groups"][0]["subgroups"]) == 1
    assert (found["threshold_gbps"], found["alike"]) == (0.09, 20)
    assert {"left", "right", "gbps", "merged"} == set(found["steps"][0])


def test_a_network_that_costs_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Sites that give no network of their own: messages in them take no time."""
    file = tmp_path / "free.toml"
    file.write_text(re.sub(r"(?m)^network_.*\n", "", EXAMPLE.read_text()))
    code, out, _ = told(capsys, "groups", str(file), "--threshold", "20")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert lines[0] == "group 1: 32 devices"
    assert "amsterdam x 32 each other no time merged" in lines
    assert "amsterdam x 32 stockholm x 32 16.04 refused" in lines
    found = json.loads(told(capsys, "groups", str(file), "--threshold", "20", "--json")[1])
    assert found["steps"][0]["gbps"] is None


def test_groups_that_an_error_can_change(capsys: pytest.CaptureFixture[str]) -> None:
    """RTX 3080 is 19.5 % from RTX 3090, which has joined RTX 4090: their mean is more than 30 % away."""
    code, out, _ = told(capsys, "groups", "spantrain-setting-2", "--alike", "30")
    assert code == 0
    assert "1.1  cloud-1 x 4, cloud-2 x 4, cloud-3 x 4, edge-1 x 2" in out
    assert "subgroups may change with any error: edge-1 and end-1 are on the other side of the threshold" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["spantrain-figure-5", "--threshold", "0"], "--threshold 0 is no rate: give Gbit/s, more than 0"),
        (["spantrain-figure-5", "--threshold", "nan"], "--threshold nan is no rate"),
        (["spantrain-figure-5", "--alike", "-1"], "--alike -1 is no difference: give percent, at least 0"),
        (["crosspipe-m70-4dc"], "crosspipe-m70-4dc.toml: no link from dc1 to dc3, which groups need of every pair of"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in refused(capsys, "groups", *arguments)
