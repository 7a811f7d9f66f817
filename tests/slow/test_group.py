"""Clusters that are parts of one torch.distributed world (group=): four real processes, under gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.rank_script import run_ranks
from support.whole_run import WholeRun

from dips.core.errors import ConfigError

STEPS = 6
"""As in support.group_process."""


def four_ranks(folder: Path, master: str, *kinds: str) -> tuple[list[int], list[list[str]]]:
    """Exit code and lines of each rank."""
    folder.mkdir(exist_ok=True)
    ended = run_ranks("group_process", 4, folder, master, *kinds)
    return [code for code, _ in ended], [lines for _, lines in ended]


def told(line: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(line)
    return said


def test_two_halves_of_one_world_are_two_clusters(tmp_path: Path) -> None:
    with WholeRun(tmp_path / "run", sync_every=2, grace_s=60.0, verdict_wait_s=240.0, round_timeout_s=120.0) as run:
        codes, lines = four_ranks(tmp_path / "ranks", run.address, "halves", "one", "half")
        clusters = {str(each.cluster_id) for each in run.status().clusters}
    assert codes == [0] * 4, lines
    assert [len(of) for of in lines] == [3] * 4, lines
    halves, ones, half = ([told(of[kind]) for of in lines] for kind in range(3))
    assert [each["talks"] for each in halves] == [True, False, True, False], "the first rank of each group leads"
    assert all(each["steps"] == STEPS for each in halves)
    first = halves[0]["got"]
    assert len(first) >= 2, "the seed, and what both made of it"
    for each in halves[1:]:
        common = first.keys() & each["got"].keys()
        assert len(common) >= 2
        assert all(first[version] == each["got"][version] for version in common), "to the bit, on all ranks"
    assert [each.get("talks") for each in ones] == [True, True, False, None]
    assert ones[1]["got"] == ones[2]["got"]
    assert [each.get("talks") for each in half] == [True, False, None, None]
    assert half[0]["got"] == half[1]["got"]
    assert clusters <= set("abcde")


def test_wrong_groups_are_one_sentence_on_every_rank(tmp_path: Path) -> None:
    kinds = ["strangers", "kind_of_group", "differ", "shards"]
    codes, lines = four_ranks(tmp_path, "127.0.0.1:1", *kinds)
    assert codes == [ConfigError.exit_code] * 4, lines
    assert not any("Traceback" in line for of in lines for line in of)
    said = {kind: [of[at] for of in lines] for at, kind in enumerate(kinds)}
    assert all(len(of) == len(kinds) for of in lines), "one line each"
    assert [told(line)["steps"] for line in said["strangers"][:2]] == [STEPS] * 2
    for kind, refused, words in (
        ("strangers", said["strangers"][2:], "of torch.distributed's world is not in its dips.Parallel(group=...)"),
        ("kind_of_group", said["kind_of_group"], "group is a list: give a process group or a DeviceMesh"),
        ("differ", said["differ"], "ConfigError: rank 0 of torch.distributed's world enters a cluster of ranks [0, 1]"),
        ("shards", said["shards"], "is cut over ranks [0, 1, 2, 3]"),
    ):
        assert all(words in line for line in refused), kind
