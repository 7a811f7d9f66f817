"""`dips plan`: what it prints, and what it says to a person's mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dips.launch import cli
from dips.planner.schedules.static import zb_h1
from dips.planner.sweep import STATIC


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(("plan", *arguments))
    out, error = capsys.readouterr()
    return code, out, error


def test_sweep_as_json_has_a_row_for_each_schedule_and_case(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = told(capsys, "sweep", "--stages", "2,4", "--sites", "2", "--latency", "0,1", "--json")
    rows = json.loads(out)
    assert (code, error) == (0, "")
    assert len(rows) == 2 * 2 * (len(STATIC) + 3)
    assert rows[0] == {
        "n_pp": 2, "n_mb": 8, "n_sites": 2, "latency": 0.0, "bandwidth": 0.0, "memory": 1.0, "schedule": "gpipe",
        "makespan": 27.0, "device_span": 27.0, "stage0_span": 27.0, "peak_activations": 8.0,
    }  # fmt: skip


def test_sweep_with_the_solver_states_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(
        capsys,
        "sweep",
        "--stages",
        "2",
        "--microbatches",
        "2",
        "--latency",
        "0.5",
        "--memory",
        "2",
        "--optimal",
        "--json",
    )
    rows = {row["schedule"]: row for row in json.loads(out)}
    assert code == 0
    best = rows["cross_ud/optimal"]
    assert best["lower_bound"] <= best["makespan"] <= rows["cross_ud/1"]["makespan"]
    assert "lower_bound" in rows["cross_wave/optimal"]
    assert "lower_bound" not in rows["1f1b"]


def test_sweep_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "sweep", "--latency", "0.5")
    assert code == 0
    assert "cross_ud/4" in out
    assert "31.5" in out


def test_show_draws_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(zb_h1(4, 8).to_csv())
    code, out, _ = told(capsys, "show", str(file))
    lines = out.splitlines()
    assert code == 0
    assert [line[:5] for line in lines[:4]] == ["  0 |", "  1 |", "  2 |", "  3 |"]
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[4] == "makespan 27 T_F, bubble 11.1%"


def test_show_as_json_gives_every_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    code, out, _ = told(capsys, "show", str(file), "--latency", "1", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["makespan"] == 8
    assert found["devices"][1] == [{"op": "1F0", "start": 2.0, "end": 3.0}, {"op": "1B0", "start": 3.0, "end": 5.0}]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["sweep", "--stages", "four"],
            "--stages 'four' is no list of whole numbers: write them with commas, as in 4,8",
        ),
        (["sweep", "--latency", "1,x"], "--latency '1,x' is no list of numbers"),
        (["sweep", "--stages", "4", "--sites", "3"], "4 devices do not divide into 3 equal sites"),
        (["sweep", "--bandwidth", "-1"], "bandwidth -1: neither is negative"),
        (["sweep", "--bandwidth", "nan"], "is no number that can be planned with"),
        (["sweep", "--seconds", "0"], "--seconds 0 is no time"),
        (["show", "nowhere.csv"], "nowhere.csv cannot be read as a schedule"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = told(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert sentence in error
    assert error.count("\n") == 1


def test_a_schedule_that_cannot_be_names_its_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cycle.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    code, _, error = told(capsys, "show", str(file))
    assert code == 2
    assert "device 0 waits at cell 2 (0B0), device 1 waits at cell 1 (1F1)" in error
