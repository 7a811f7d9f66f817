"""Paper 3.1: argmax_i B_i^T p, ties, and what a file with a mistake is told."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dips.core.errors import ConfigError
from dips.core.server_site import choose_server_site, from_toml

GOOD = """
[sites]
names = ["north", "south", "west"]
bandwidth_gbps = [[100.0, 1.0, 2.0], [1.0, 100.0, 10.0], [2.0, 10, 100.0]]
tokens_per_s = [10, 20.0, 15.0]
"""


@pytest.mark.parametrize(
    ("bandwidth", "tokens", "complaint"),
    [
        ([], [1.0], "no rows"),
        ([[1.0]], [], "tokens_per_s is empty"),
        ([[1.0, 2.0], [1.0]], [1.0, 1.0], "row 1 has 1 numbers"),
        ([[1.0, -2.0]], [1.0, 1.0], "-2.0 at place 1"),
        ([[1.0, math.nan]], [1.0, 1.0], "nan at place 1"),
        ([[1.0]], [math.inf], "inf at place 0"),
        ([[0.0], [0.0]], [1.0], "every site's demand is 0"),
    ],
)
def test_impossible_numbers_are_refused(bandwidth: list[list[float]], tokens: list[float], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        choose_server_site(bandwidth, tokens)


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "sites.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_of_equal_sites_the_first_is_chosen() -> None:
    choice = choose_server_site([[1.0, 2.0], [0.0, 6.0], [6.0, 3.0]], [2.0, 4.0])
    assert (choice.index, choice.demand) == (1, (10.0, 24.0, 24.0))


def test_a_file_is_read_and_explained(tmp_path: Path) -> None:
    sites = from_toml(_written(tmp_path, GOOD))
    assert sites.clusters == ("north", "south", "west")
    assert sites.to_json() == {
        "site": "south",
        "index": 1,
        "demand": {"north": 1050.0, "south": 2160.0, "west": 1720.0},
    }
    lines = sites.explain().splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["site", "south", "west", "north"]
    assert lines[2].split()[-1] == "79.6%"
    assert lines[-1] == (
        "Place the parameter servers at south: 1 x 10 (north) + 100 x 20 (south) + 10 x 15 (west) = 2160"
    )
    text = '[sites]\nnames=["s"]\nclusters=["a","b"]\nbandwidth_gbps=[[1,2]]\ntokens_per_s=[3,4]\n'
    sites = from_toml(_written(tmp_path, text))
    assert sites.explain().endswith("at s: 1 x 3 (a) + 2 x 4 (b) = 11")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("[sites]", "[site]", "names is not given"),
        ('"south"', '"north"', "a name twice"),
        ('"north", ', "", "names has 2 sites, bandwidth_gbps has 3 rows"),
        ("[10, 20.0, 15.0]", "[10, 20.0]", "2 numbers for 3 clusters"),
        ("[100.0, 1.0, 2.0]", '"fast"', r"bandwidth_gbps = .*: Input should be a list \(entry 1\)"),
    ],
)
def test_a_mistake_in_the_file_names_file_and_key(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in GOOD
    path = _written(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=complaint) as caught:
        from_toml(path)
    assert str(path) in str(caught.value)
