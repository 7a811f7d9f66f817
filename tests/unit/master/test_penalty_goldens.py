"""Numeric goldens: mocked updates, failures included, and what docs/algorithm.md makes of them.

penalty_goldens.json holds the updates (vectors) and the expected outcomes. The outcomes come from the
straightforward implementation below: numpy on the vectors themselves, dictionaries, no Gram matrix, no code
of dips. The tests check that the file is what it makes, and that judge() agrees with the file. After a change
of the rules: `python tests/unit/master/test_penalty_goldens.py` writes the file again; review the diff.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


class Straightforward:
    """docs/algorithm.md as a person would type it in an afternoon; the defaults of the preset safe."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, Any]] = {}
        self.norms: list[float] = []
        self.scores: list[float] = []
        self.voids = 0

    def round(self, pushes: dict[str, dict[str, Any]]) -> dict[str, Any]:
        names = sorted(pushes)
        for name in names:
            self.of.setdefault(
                name, {"n": 0, "mu": 0.0, "V": 0.0, "T": None, "H": 0, "flags": 0, "z_flags": 0, "q": False}
            )
        quarantined = {name for name, me in self.of.items() if me["q"]}
        delta = {name: np.array([float(x) for x in pushes[name]["vector"]]) for name in names}
        G, Gn, z, why = {}, {}, {}, {}
        for name in names:
            me, push = self.of[name], pushes[name]
            G[name] = float(np.linalg.norm(delta[name]))
            T = push["tokens"]
            if push["nonfinite_elems"] or not np.isfinite(G[name]) or not np.isfinite(T) or T <= 0 or G[name] == 0:
                why[name] = "invalid"
                continue
            T_bar = T if me["T"] is None or (me["H"] and abs(push["local_steps"] / me["H"] - 1) > 0.25) else me["T"]
            Gn[name] = G[name] / max(1.0, T / T_bar)
        known = self.norms[-64:] + list(Gn.values())
        tau = 3.0 * float(np.clip(max(self.scores[-64:] or [1.0]), 1.0, 3.0))
        for name in Gn:
            me = self.of[name]
            if me["n"] >= 8:
                z[name] = (Gn[name] - me["mu"]) / max(math.sqrt(me["V"]), 0.05 * me["mu"], 1e-12)
            if len(known) >= 3 and Gn[name] > 10 * float(np.median(known)):
                why[name] = "gate"
            elif name in z and z[name] > tau:
                why[name] = "score"
        c = [name for name in names if name not in why]
        outcome: dict[str, Any] = {"accepted": c, "rejected": why, "tau": tau}
        outcome["scores"] = {name: z[name] for name in sorted(z)}
        if c:
            tokens = sum(pushes[name]["tokens"] for name in c)
            weights = [pushes[name]["tokens"] / tokens for name in c]
            d = sum(w * delta[name] for w, name in zip(weights, c, strict=True))
            size = float(np.linalg.norm(d))
            everybody = set(CLUSTERS) - quarantined <= set(c)
            outcome |= {
                "weights": weights,
                "merged_norm": size,
                "kappa": min(1.0, 1.0 / max(size, 1e-12)),
                "rho": 1.0 if everybody else min(1.0, tokens / ROUND_TOKENS),
                "cosines": {name: float(delta[name] @ d) / (G[name] * size) for name in c},
            }
        self._remember(pushes, c, why, Gn, z)
        outcome["quarantined"] = sorted(name for name, me in self.of.items() if me["q"])
        outcome["memory"] = {
            name: {"n": me["n"], "mu": me["mu"], "V": me["V"], "T": me["T"]} for name, me in sorted(self.of.items())
        }
        return outcome

    def _remember(
        self,
        pushes: dict[str, dict[str, Any]],
        c: list[str],
        why: dict[str, str],
        Gn: dict[str, float],
        z: dict[str, float],
    ) -> None:
        for name in c:
            me, push = self.of[name], pushes[name]
            me["n"] += 1
            a = max(0.02, 1.0 / me["n"])
            me["mu"] = a * Gn[name] + (1 - a) * me["mu"]
            me["V"] = (1 - a) * me["V"] + a * (Gn[name] - me["mu"]) ** 2
            if me["T"] is None or abs(push["local_steps"] / me["H"] - 1) > 0.25:
                me["T"], me["H"] = push["tokens"], push["local_steps"]
            else:
                me["T"] = a * push["tokens"] + (1 - a) * me["T"]
            me["flags"], me["z_flags"], me["q"] = 0, 0, False
            self.norms.append(Gn[name])
            if name in z:
                self.scores.append(z[name])
        for name, kind in why.items():
            me = self.of[name]
            me["flags"] += 1
            me["z_flags"] = me["z_flags"] + 1 if kind == "score" else 0
            if me["z_flags"] >= 8:
                me.update(n=0, mu=0.0, V=0.0, T=None, H=0, z_flags=0)
            me["q"] = me["q"] or me["flags"] >= 3
        self.voids = 0 if c else self.voids + 1
        if self.voids >= 3:
            self.norms, self.scores, self.voids = [], [], 0


def expected_goldens() -> list[dict[str, Any]]:
    implementation = Straightforward()
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
    from support.rounds import Master, Push

    master = Master(live=frozenset(CLUSTERS), round_tokens=ROUND_TOKENS)
    for number, golden in enumerate(json.loads(GOLDENS.read_text())):
        pushes = {
            name: Push([float(x) for x in push["vector"]], push["tokens"], push["nonfinite_elems"], push["local_steps"])
            for name, push in golden["pushes"].items()
        }
        assert_close(_outcome(master.round(pushes), master), golden["expected"], f"round {number}")


def _outcome(judgement: Any, master: Any) -> dict[str, Any]:
    kinds = {
        " are not finite": "invalid",
        "its tokens": "invalid",
        "norm is 0": "invalid",
        "median": "gate",
        "score": "score",
    }
    rejected = {
        rejection.cluster: next(kind for words, kind in kinds.items() if words in rejection.reason)
        for rejection in judgement.rejected
    }
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
            "cosines": {m.cluster: m.cosine for m in judgement.measures if m.cluster in judgement.accepted},
        }
    return outcome


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(golden) for golden in expected_goldens())
    GOLDENS.write_text(f"[\n{lines}\n]\n")
