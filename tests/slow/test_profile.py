"""`dips profile device` measures this machine, and the plan is made of its times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dips.cli import main
from dips.core.errors import ConfigError
from dips.planner.cluster import read_setup
from dips.planner.problem import Problem
from dips.planner.profile import read_profile

PROBLEM = """
[model]
name = "small"
layers = 4
hidden = 64
heads = 2
mlp_width = 128
vocabulary = 256
source = "a test"

[[sites]]
name = "here"
devices = 4
memory_gib = 8
source = "a test"

[training]
pipeline = 2
microbatches = 4
sequence_tokens = 64
source = "a test"

[profile]
file = "profile.toml"
source = "a test"
"""


def test_a_plan_is_made_of_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "problem.toml", tmp_path / "profile.toml"
    file.write_text(PROBLEM)
    assert main.run(["plan", str(file)]) == ConfigError.exit_code
    assert "profile.toml is not a file: make it with dips profile device" in capsys.readouterr().err
    assert main.run(["profile", "device", str(file), "--out", str(out), "--microbatch", "1,4", "--rounds", "3"]) == 0
    assert f"written: {out}" in capsys.readouterr().out
    rows = read_profile(out).layers
    assert len(rows) == 6
    layer, output = (next(row for row in rows if row.part == part) for part in ("layer", "output"))
    units = Problem(read_setup(file)).units
    assert units[0].input_gradient_s == pytest.approx(layer.input_gradient_ms / 1e3)
    assert units[-1].forward_s == pytest.approx((layer.forward_ms + output.forward_ms) / 1e3)
    assert main.run(["plan", str(file), "--no-sensitivity", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["iteration_s"] > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rounds", "2"], "--rounds 2 cannot be: give 3 to 10000"),
        (["--threads", "0"], "--threads 0 cannot be: give 1 to 1024"),
        (["--microbatch", "1,x"], "--microbatch 1,x is not a list of numbers: give 1 to 65536, such as 1,2,4"),
        (["--dtype", "int8"], "--dtype int8 is not measured: choose float32 or bfloat16"),
        (["--on", "tpu"], "--on tpu is not a device that is measured: give cpu, cuda or cuda:N"),
        (["--module", "x"], "--module x is not MODULE:FUNCTION: give both, as in mymodel.layers:make"),
    ],
)
def test_a_mistake_is_one_sentence(
    options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "problem.toml"
    file.write_text(PROBLEM)
    command = ["profile", "device", str(file), "--out", str(tmp_path / "p.toml"), *options]
    assert main.run(command) == ConfigError.exit_code
    assert capsys.readouterr().err.strip().endswith(sentence)
