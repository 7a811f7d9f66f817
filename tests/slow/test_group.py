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
    outside = "ConfigError: rank {} of torch.distributed's world is not in its dips.Parallel(group=...): make"
    assert [told(line)["steps"] for line in said["strangers"][:2]] == [STEPS] * 2
    assert all(line.startswith(outside.format(rank)) for rank, line in enumerate(said["strangers"]) if rank > 1)
    no_group = "group is a list: give a process group or a DeviceMesh"
    of_other = f"rank 1 of this cluster cannot take part: {no_group}"
    assert said["kind_of_group"] == [f"ConfigError: {why}" for why in (of_other, no_group, of_other, no_group)]
    other = (
        "ConfigError: rank 0 of torch.distributed's world enters a cluster of ranks [0, 1], and rank {} one of ranks "
    )
    assert said["differ"][0].startswith(
        other.format(1) + "[0, 1, 2, 3]: give all ranks of a cluster the same dips.Parallel(group="
    )
    assert all(line.startswith(other.format(rank)) for rank, line in enumerate(said["differ"]) if rank)
    for rank, line in enumerate(said["shards"]):
        own = [[0, 1], [2, 3]][rank // 2]
        assert "is cut over ranks [0, 1, 2, 3]" in line
        assert f"and this cluster has ranks {own} (dips.Parallel(group=...))" in line
