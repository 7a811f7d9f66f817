"""`dips plan explore`: what it prints, and what it says to a person's mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.plan_command import told
from support.scaleacross import FILE

PRESENT = """
[present]
tensor = 8
pipeline = 2
data = 4
microbatch_sequences = 2
chunk_layers = 4
source = "here"

[search]
microbatches = [2]
samples = 10
top = 20
variations = 5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "topology.toml"
    found.write_text(FILE + PRESENT)
    return found


def test_as_json_with_links(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    code, out, _ = told(capsys, "explore", str(file), "--links", "--json")
    found = json.loads(out)
    assert (code, found["searched_with_links"]) == (0, True)
    times = [row["links_s"] for row in found["best_of_each_kind"]]
    assert times == sorted(times)
    assert found["present"]["links_s"] >= times[0]
    assert sum(found["parts"].values()) == pytest.approx(times[0])
    assert all(sum(row["layers"]) == 32 for row in found["best_of_each_kind"])
    assert [row["about"] for row in found["network"]] == ["load balancing", "congestion control", "loss of packets"]
    text = " ".join(told(capsys, "explore", str(file), "--links")[1].split())  # lines are as wide as the terminal
    for part in ("64 accelerators in 2 buildings, 64 sequences", "next: ", "the present configuration takes"):
        assert part in text


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path, file: Path) -> None:
    code, out, error = told(capsys, "explore", "nowhere.toml")
    assert (code, out) == (2, "")
    assert "nowhere.toml is not a file that can be read, and none of the shipped topologies (scaleacross-100k" in error
    file.write_text(FILE + PRESENT.replace("data = 4", "data = 8"))
    code, _, error = told(capsys, "explore", str(file))
    assert code == 2
    assert "[present]: tensor x context x pipeline x data = 128, there are 64 accelerators: correct it" in error
