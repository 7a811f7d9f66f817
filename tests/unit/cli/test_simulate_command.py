"""`dips simulate` as a person meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.scale_setup import write_setup

from dips.cli import main
from dips.lab.commands.simulate import draw_resources, stacked
from dips.lab.sim.scale.run import simulate
from dips.lab.sim.scale.scenario import load_scenario


def test_json_goes_to_standard_output_and_people_get_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["simulate", str(write_setup(tmp_path)), "--hours", "1", "--json"]) == 0
    out, error = capsys.readouterr()
    assert json.loads(out)["hours"] == 1.0
    assert "100%" in error
    assert main.run(["simulate", str(write_setup(tmp_path)), "--hours", "1", "--seed", "2"]) == 0
    shown = capsys.readouterr().out
    assert "(seed 2, 1 h)" in shown
    for words in ("share of ideal", "verdict wait", "downtime by cause"):
        assert words in shown


def test_what_cannot_be_simulated_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = str(tmp_path / "none" / "x.png")
    seeds, missing = ["two-sites", "--seeds", "3"], ["two-sites", "--picture", picture]
    for words, said in (([], "paper-33-days"), (seeds, "leave the set-up out"), (missing, "does not exist")):
        assert main.run(["simulate", *words]) == 2
        assert said in capsys.readouterr().err


def test_the_picture_stacks_those_who_take_part(tmp_path: Path) -> None:
    report = simulate(load_scenario(write_setup(tmp_path), hours=1))
    times_s, stacks = stacked(report)
    assert (times_s[0], times_s[-1]) == (0.0, 3600.0)
    assert max(stacks["a"]) == 8
    assert stacks["a"][0] == 0, "no cluster has joined at the beginning"
    assert stacks["b"][-1] == 4
    picture = tmp_path / "resources.png"
    draw_resources(picture, report)
    assert picture.read_bytes().startswith(b"\x89PNG")
