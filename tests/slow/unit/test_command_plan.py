"""`dips plan`: what it prints, and what it says to a person's mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.plan_command import told
from support.repository import ROOT

EXAMPLE = ROOT / "examples" / "04-plan-a-schedule"


def test_one_system_can_be_asked_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(EXAMPLE / "sites.toml")
    code, out, _ = told(capsys, file, "--system", "jeeves", "--no-sensitivity", "--json")
    found = json.loads(out)
    assert code == 0
    assert [row["system"] for row in found["systems"]] == [found["use"]] == ["jeeves"]
    assert {row["schedule"] for row in found["candidates"]} == {"jeeves"}
    assert found["systems"][0]["iteration_s"] == found["chosen"]["iteration_s"]
    code, out, error = told(capsys, file, "--system", "compass")
    assert code == 2
    assert "compass" in error
    code, out, error = told(capsys, file, "--system", "dips", "--out", str(tmp_path / "plan"))
    assert (code, out) == (2, "")
    assert "no plan of the file's pipelines to write: neither jeeves nor crosspipe was asked" in error
    code, out, _ = told(capsys, file, "--system", "dips")
    assert code == 0
    assert "a round of 64 steps" in out
    for setup, system in (("spantrain-setting-1", "spantrain"), (file, "scaleacross")):
        code, out, _ = told(capsys, setup, "--system", system)
        assert (code, f"{system} cannot see: " in out, "chosen: " in out) == (0, True, False)
