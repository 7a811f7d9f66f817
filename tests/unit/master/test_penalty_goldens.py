"""Numeric goldens: mocked updates, failures included, and what docs/algorithm.md makes of them.

penalty_goldens.json holds the updates (vectors) and the expected outcomes. The outcomes come from the
straightforward implementation of tests/support/plain_penalty.py. The tests check that the file is what it makes, and
that judge() agrees with the file. After a change of the rules:
`PYTHONPATH=tests python tests/unit/master/test_penalty_goldens.py` writes the file again; review the diff.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.plain_penalty import Straightforward
from support.rounds import Master, Push

from dips.master.state.reasons import VerdictCode

GOLDENS = Path(__file__).with_name("penalty_goldens.json")
CLUSTERS = ("east", "north", "south", "west")
SPEEDS = {"east": 1.0, "north": 0.84, "south": 0.67, "west": 0.5}  # the paper's gaps of 0 to 50 %
ROUND_TOKENS = 3600.0
FAULTS = {
    (9, "west"): "times30",
    (13, "south"): "nan",
    (14, "east"): "no_tokens",
    (17, "north"): "still",
    (20, "west"): "times30",
    (21, "west"): "inf",
    (22, "west"): "times30",
    (25, "north"): "times3",
    (28, "east"): "double_tokens",
    (31, "south"): "flip",
    (34, "east"): "fewer_steps",
    (37, "west"): "nan_alone",
    (38, "west"): "nan_alone",
    (39, "west"): "nan_alone",
}


def mocked_rounds() -> list[dict[str, dict[str, Any]]]:
    """52 rounds: each cluster arrives as often as it is fast; norms fall slowly and wobble; faults as
    scripted."""
    rng = np.random.default_rng(20)
    direction = rng.standard_normal(6)
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(52):
        arrived = [name for name in CLUSTERS if (number + 1) * SPEEDS[name] % 1.0 < SPEEDS[name] - 1e-9]
        faulty = [name for round_number, name in FAULTS if round_number == number]
        if any(FAULTS[number, name] == "nan_alone" for name in faulty):
            arrived = []
        rounds.append({})
        for name in sorted({*arrived, *faulty}):
            level = (0.8 + 0.6 * math.exp(-number / 20)) / np.linalg.norm(direction)
            vector = np.round(level * (direction + 0.25 * rng.standard_normal(6)), 4)
            push = {"vector": vector.tolist(), "tokens": 1000.0, "nonfinite_elems": 0, "local_steps": 64}
            rounds[-1][name] = _with_fault(push, FAULTS.get((number, name), ""))
    return [pushes for pushes in rounds if pushes]


def _with_fault(push: dict[str, Any], fault: str) -> dict[str, Any]:
    vector = push["vector"]
    changes: dict[str, dict[str, Any]] = {
        "times30": {"vector": [30 * x for x in vector]},
        "times3": {"vector": [3 * x for x in vector]},
        "nan": {"vector": ["nan", *vector[1:]], "nonfinite_elems": 1},
        "nan_alone": {"vector": ["nan", *vector[1:]], "nonfinite_elems": 1},
        "inf": {"vector": ["inf", *vector[1:]], "nonfinite_elems": 1},
        "no_tokens": {"tokens": 0.0},
        "still": {"vector": [0.0] * 6},
        "double_tokens": {"vector": [2 * x for x in vector], "tokens": 2000.0},
        "flip": {"vector": [-x for x in vector]},
        "fewer_steps": {"tokens": 500.0, "local_steps": 32},
    }
    return {**push, **changes.get(fault, {})}


def expected_goldens() -> list[dict[str, Any]]:
    implementation = Straightforward(CLUSTERS, ROUND_TOKENS)
    return [{"pushes": pushes, "expected": implementation.round(pushes)} for pushes in mocked_rounds()]


def assert_close(actual: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert sorted(actual) == sorted(expected), where
        for key, value in expected.items():
            assert_close(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for i, value in enumerate(expected):
            assert_close(actual[i], value, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12), where
    else:
        assert actual == expected, where


def test_the_file_is_what_the_straightforward_implementation_makes() -> None:
    assert_close(json.loads(GOLDENS.read_text()), expected_goldens(), "goldens")


def test_the_file_holds_every_kind_of_outcome() -> None:
    goldens = json.loads(GOLDENS.read_text())
    kinds = {kind for golden in goldens for kind in golden["expected"]["rejected"].values()}
    assert kinds == {"invalid", "gate", "score"}
    assert any(not golden["expected"]["accepted"] for golden in goldens)
    assert any(golden["expected"]["quarantined"] for golden in goldens)
    assert {golden["expected"].get("rho") == 1.0 for golden in goldens if golden["expected"]["accepted"]} == {
        True,
        False,
    }
    assert {golden["expected"].get("kappa") == 1.0 for golden in goldens if golden["expected"]["accepted"]} == {
        True,
        False,
    }


def test_judge_agrees_with_the_goldens() -> None:
    master = Master(live=frozenset(CLUSTERS), round_tokens=ROUND_TOKENS)
    for number, golden in enumerate(json.loads(GOLDENS.read_text())):
        pushes = {
            name: Push([float(x) for x in push["vector"]], push["tokens"], push["nonfinite_elems"], push["local_steps"])
            for name, push in golden["pushes"].items()
        }
        assert_close(_outcome(master.round(pushes), master), golden["expected"], f"round {number}")


def _outcome(judgement: Any, master: Any) -> dict[str, Any]:
    kinds = {VerdictCode.NORM: "gate", VerdictCode.SCORE: "score"}
    rejected = {cluster: kinds.get(reason.code, "invalid") for cluster, reason in judgement.rejected.items()}
    outcome = {
        "accepted": list(judgement.accepted),
        "rejected": rejected,
        "tau": judgement.threshold,
        "scores": {m.cluster: m.score for m in judgement.measures if not math.isnan(m.score)},
        "quarantined": sorted(judgement.quarantined),
        "memory": {
            name: {"n": known.accepted, "mu": known.mean, "V": known.variance, "T": known.mean_tokens}
            for name, known in master.state.clusters
        },
    }
    if judgement.accepted:
        outcome |= {
            "weights": list(judgement.weights),
            "merged_norm": judgement.merged_norm,
            "kappa": judgement.kappa,
            "rho": judgement.rho,
            "cosines": {
                m.cluster: m.cosine
                for m in judgement.measures
                if m.cluster in judgement.accepted and not math.isnan(m.cosine)
            },
        }
    return outcome


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(golden) for golden in expected_goldens())
    GOLDENS.write_text(f"[\n{lines}\n]\n")
