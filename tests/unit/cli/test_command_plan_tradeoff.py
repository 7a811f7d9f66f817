"""`dips plan tradeoff`: what it prints, and what it says to a person's mistake."""

from __future__ import annotations

import json

import pytest
from support.plan_command import refused, told


def test_ways_as_a_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = told(capsys, "tradeoff", "crosspipe-figure-8")
    assert (code, error) == (0, "")
    assert "stages x replicas = 4, 8 microbatches in all" in out
    assert "long links carry" in out
    assert "not possible: 1 x 4, long links carry activations: " in out
    assert "assumed: " in out
    code, out, _ = told(capsys, "tradeoff", "crosspipe-figure-8", "--json")
    found = json.loads(out)
    assert code == 0
    ways = found["choices"] + found["impossible"]
    assert len(ways) == 3 * 2
    first = found["choices"][0]
    assert first["slower_by"] == 0
    assert first["pipeline"] * first["data"] == 4
    assert {row["long_links_carry"] for row in ways} == {"activations", "gradients"}
    assert [row["iteration_s"] for row in found["choices"]] == sorted(row["iteration_s"] for row in found["choices"])
    crossing = next(row for row in found["choices"] if row["pipeline"] == 4 and row["groups"] == 1)
    crossings = 2 if crossing["schedule"] in ("zb_v", "cross_wave") else 1
    assert [link["bytes"] for link in crossing["links"]] == [crossings * 8 * 2 * 4096 * 4096] * 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.toml"], "nowhere.toml is not a file that can be read"),
        (["crosspipe-figure-8", "--seconds", "-1"], "-1 seconds are not a valid time for a solver: give 0 to 3600"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in refused(capsys, "tradeoff", *arguments)
