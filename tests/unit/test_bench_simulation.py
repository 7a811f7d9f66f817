"""What bench_simulation.py makes of the lines of clusters' tapes."""

from __future__ import annotations

from typing import Any

import pytest
from bench_simulation import enough, exchanges_of, score

H, ROUND_S = 16, 10.0
"""Of these 10 s the steps take 8 s; push, wait and pull 1.0, 0.25 and 0.75 s."""


def tape(rounds: int, late_s: float = 0.0) -> list[dict[str, Any]]:
    """A cluster's: a seed, whose push has no tokens, and so many rounds."""
    lines: list[dict[str, Any]] = [
        {"kind": "push_begun", "monotonic_s": 0.0, "tokens": 0, "base": None},
        {"kind": "push_sent", "monotonic_s": 1.0},
        {"kind": "verdict", "monotonic_s": 2.0, "verdict": "APPLIED", "version": "1:0"},
        {"kind": "installed", "monotonic_s": 3.0},
    ]
    for i in range(rounds):
        begun_s = ROUND_S * (i + 1) + late_s
        lines += [
            {"kind": "push_begun", "monotonic_s": begun_s, "tokens": H, "base": f"1:{i}"},
            {"kind": "push_sent", "monotonic_s": begun_s + 1.0},
            {"kind": "verdict", "monotonic_s": begun_s + 1.25, "verdict": "APPLIED", "version": f"1:{i + 1}"},
            {"kind": "installed", "monotonic_s": begun_s + 2.0},
        ]
    return lines


def test_two_clusters_that_wait_are_merged_and_train_for_a_part_of_the_time() -> None:
    runs = {"c0": exchanges_of(tape(8)), "c1": exchanges_of(tape(8, late_s=0.1))}
    assert enough(runs, 5)
    assert not enough(runs, 6)
    found = score(runs, {"c0": 0.5, "c1": 0.5}, 5)
    assert found.tokens_per_s == pytest.approx(2 * H / ROUND_S)
    assert found.share_of_ideal == pytest.approx(0.8)
    assert (found.push_s, found.wait_s, found.pull_s) == pytest.approx((1.0, 0.25, 0.75))
    assert (found.merged, found.staleness) == (2, 0)


def test_a_push_that_is_not_applied_is_no_tokens() -> None:
    lines = tape(8)
    lines[4 * 5 + 2]["verdict"] = "EXCLUDED"
    found = score({"c0": exchanges_of(lines)}, {"c0": 0.5}, 5)
    assert found.tokens_per_s == pytest.approx(H / ROUND_S * 4 / 5)
