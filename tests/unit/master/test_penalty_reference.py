"""Whole histories, judged by judge() and by the reference that a person would type (tests/support/plain_penalty.py).

Both must agree in every round on what is accepted, on every number and on all that is remembered. Norms carry noise of
their own, so that none stands exactly on a threshold, where rounding would decide. penalty_goldens.json holds one
history, failures included, and what the reference makes of it. After a change of the rules
`PYTHONPATH=tests python tests/unit/master/test_penalty_reference.py` writes the file again; review the diff.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plain_penalty import Straightforward
from support.rounds import Master, Push

from dips.master.state.penalty_types import Judgement
from dips.master.state.reasons import VerdictCode

CLUSTERS = "abcd"
ROUND_TOKENS = 4000.0
LEVELS = {"": 1.0, "times30": 30.0, "times3": 3.0, "small": 0.2, "tiny": 0.01, "more steps": 8.0}
IMPOSSIBLE = ("nan", "inf", "still", "no tokens", "nan tokens", "counted")
CODES = {VerdictCode.NORM: "gate", VerdictCode.SCORE: "score"}


class Both:
    """The two implementations side by side."""

    def __init__(
        self, seed: int, noise: float = 0.01, clusters: Sequence[str] = CLUSTERS, round_tokens: float = ROUND_TOKENS
    ) -> None:
        self.rng = random.Random(seed)
        self.noise = noise
        self.master = Master(live=frozenset(clusters), round_tokens=round_tokens)
        self.plain = Straightforward(clusters, round_tokens)

    def round(self, kinds: Mapping[str, str], level: float = 1.0) -> Judgement:
        """One round of these clusters, each with a fault by name, "=norm" or none; both outcomes must be equal."""
        return self.judged({name: self._push(kind, level) for name, kind in sorted(kinds.items())})[0]

    def judged(self, pushes: dict[str, dict[str, Any]]) -> tuple[Judgement, dict[str, Any]]:
        """The outcome of both."""
        judgement = self.master.round(
            {
                name: Push(
                    [float(x) for x in p["vector"]], p["tokens"], p["nonfinite_elems"], p["local_steps"],
                    p.get("made_steps", 0),
                )
                for name, p in pushes.items()
            }
        )  # fmt: skip
        expected = self.plain.round(pushes)
        self._compare(judgement, expected)
        return judgement, expected

    def all(self, kind: str = "", level: float = 1.0) -> Judgement:
        return self.round(dict.fromkeys(CLUSTERS, kind), level)

    def _push(self, kind: str, level: float) -> dict[str, Any]:
        direction = [1.0 + 0.5 * self.rng.gauss(0.0, 1.0) for _ in range(5)]
        factor = float(kind[1:]) if kind.startswith("=") else LEVELS.get(kind, 1.0)
        norm = level * factor * (1.0 if kind.startswith("=") else self.rng.lognormvariate(0.0, self.noise))
        vector = [norm * x / math.sqrt(sum(y * y for y in direction)) for x in direction]
        if kind in ("nan", "inf"):
            vector[1] = math.nan if kind == "nan" else math.inf
        if kind == "still":
            vector = [0.0] * 5
        tokens = {"no tokens": 0.0, "nan tokens": math.nan, "double": 2000.0, "half": 500.0, "more steps": 1e4}.get(
            kind, 1000.0
        )
        bad = 3 if kind in ("nan", "inf", "counted") else 0
        made = {"more steps": 640, "fewer steps": 20}.get(kind, 64)
        return {"vector": vector, "tokens": tokens, "nonfinite_elems": bad, "local_steps": 64, "made_steps": made}

    def _compare(self, judgement: Judgement, expected: dict[str, Any]) -> None:
        assert list(judgement.accepted) == expected["accepted"]
        rejected = {cluster: CODES.get(reason.code, "invalid") for cluster, reason in judgement.rejected.items()}
        assert rejected == expected["rejected"]
        assert judgement.threshold == pytest.approx(expected["tau"])
        assert sorted(judgement.quarantined) == expected["quarantined"]
        scores = {m.cluster: m.score for m in judgement.measures if not math.isnan(m.score)}
        assert scores == pytest.approx(expected["scores"], rel=1e-6, abs=1e-9)
        if judgement.accepted:
            assert judgement.weights == pytest.approx(expected["weights"])
            numbers = (judgement.merged_norm, judgement.kappa, judgement.rho)
            assert numbers == pytest.approx((expected["merged_norm"], expected["kappa"], expected["rho"]))
            cosines = {m.cluster: m.cosine for m in judgement.measures if m.cluster in judgement.accepted}
            known = {cluster: cosine for cluster, cosine in cosines.items() if not math.isnan(cosine)}
            assert known == pytest.approx(expected["cosines"], abs=1e-9)
        else:
            assert judgement.weights == ()
            assert np.isnan([judgement.kappa, judgement.rho, judgement.merged_norm, judgement.scale]).all()
        self._compare_memory(expected["memory"])

    def _compare_memory(self, expected: Mapping[str, Mapping[str, Any]]) -> None:
        state = self.master.state
        assert sorted(expected) == [cluster for cluster, _ in state.clusters]
        for cluster, known in state.clusters:
            other = expected[cluster]
            assert known.accepted == other["n"]
            assert (known.mean, known.variance) == pytest.approx((other["mu"], other["V"]), rel=1e-6, abs=1e-12)
            assert known.mean_tokens == pytest.approx(other["T"])
        assert list(state.norms) == pytest.approx(self.plain.norms[-64:])
        assert list(state.scores) == pytest.approx(self.plain.scores[-64:], rel=1e-6, abs=1e-9)
        assert state.voids_in_a_row == self.plain.voids


KINDS = st.sampled_from(["", "", "", "", *LEVELS, *IMPOSSIBLE, "double", "half", "fewer steps"])
HISTORIES = st.lists(st.dictionaries(st.sampled_from(CLUSTERS), KINDS, min_size=1), min_size=1, max_size=30)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**16), warm_up=st.integers(0, 12), history=HISTORIES)
def test_any_history_is_judged_as_by_the_reference(seed: int, warm_up: int, history: list[dict[str, str]]) -> None:
    both = Both(seed, noise=0.05)
    for _ in range(warm_up):
        both.all()
    for kinds in history:
        both.round(kinds)


@settings(max_examples=8)
@given(seed=st.integers(0, 2**16), fall=st.floats(0.8, 0.97))
def test_falling_norms_are_never_flagged(seed: int, fall: float) -> None:
    both, level = Both(seed), 5.0
    for i in range(50):
        assert len(both.round({CLUSTERS[i % 4]: "", CLUSTERS[(i + 1) % 4]: ""}, level).accepted) == 2
        level *= fall


@settings(max_examples=8)
@given(seed=st.integers(0, 2**16))
def test_a_level_shift_of_one_cluster_is_learnt_after_eight_rejections(seed: int) -> None:
    both = Both(seed)
    for _ in range(20):
        both.all()
    rounds = [both.round({"a": "times3", "b": "", "c": "", "d": ""}) for _ in range(12)]
    assert ["a" in judgement.accepted for judgement in rounds] == [False] * 8 + [True] * 4
    told = ["statistics start again" in alarm.sentence for judgement in rounds for alarm in judgement.alarms]
    assert told == [False, True], "the third flag puts it into quarantine"
    assert both.master.state.of("a").mean == pytest.approx(3.0, rel=0.05)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**16), kind=st.sampled_from(IMPOSSIBLE), known=st.integers(0, 12))
def test_what_is_impossible_is_rejected_at_any_time_and_leaves_no_trace(seed: int, kind: str, known: int) -> None:
    both = Both(seed)
    for _ in range(known):
        both.all()
    before = both.master.state
    judgement = both.round({"a": "", "b": kind, "c": ""})
    assert judgement.accepted == ("a", "c")
    assert np.isfinite([judgement.merged_norm, judgement.kappa, judgement.rho, *judgement.weights]).all()
    after, was = both.master.state.of("b"), before.of("b")
    assert (after.accepted, after.mean, after.variance, after.mean_tokens, after.cosines) == (
        *(was.accepted, was.mean, was.variance, was.mean_tokens, was.cosines),
    )
    assert len(both.master.state.norms) == min(64, len(before.norms) + 2)


@settings(max_examples=8)
@given(seed=st.integers(0, 2**16), kind=st.sampled_from(["times30", "nan", "inf"]))
def test_all_flagged_is_void_and_the_third_time_in_a_row_clears_what_is_shared(seed: int, kind: str) -> None:
    both = Both(seed)
    for _ in range(12):
        both.all()
    for i in range(3):
        assert len(both.master.state.norms) == 48
        judgement = both.all(kind)
        assert judgement.accepted == ()
        assert math.isnan(judgement.scale)
        assert any("3 void rounds in a row" in alarm.sentence for alarm in judgement.alarms) is (i == 2)
    assert (both.master.state.norms, both.master.state.scores) == ((), ())
    assert both.all().accepted == tuple(CLUSTERS), "what each cluster remembers of itself stands"


@settings(max_examples=8)
@given(seed=st.integers(0, 2**16), level=st.sampled_from([0.2, 3.0]))
def test_a_cluster_that_returns_after_a_change_of_regime_is_let_in_again(seed: int, level: float) -> None:
    """The others fell, or rose, while it was away; it is rejected at most eight times and then never."""
    both = Both(seed, noise=0.02)
    for _ in range(20):
        both.all()
    for _ in range(40):
        both.round({"b": "", "c": "", "d": ""}, level)
    accepted = ["a" in both.all(level=level).accepted for _ in range(15)]
    assert True in accepted[:9]
    assert all(accepted[accepted.index(True) :])


@settings(max_examples=8)
@given(seed=st.integers(0, 2**16))
def test_thirtyfold_at_the_begin_is_rejected_and_locks_nobody_out(seed: int) -> None:
    """A median of two says nothing, so the first ones pass; as soon as good norms are the most, the gate holds."""
    together = Both(seed)
    assert together.round({"a": "times30", "b": "", "c": ""}).accepted == ("b", "c")
    alone = Both(seed)
    for name in "bcd":
        assert alone.round({name: ""}).accepted == (name,)
    for _ in range(20):
        assert alone.round({"a": "times30"}).accepted == ()
        assert alone.round({"b": "", "c": ""}).accepted == ("b", "c")
    assert alone.master.state.quarantined == {"a"}
    both = Both(seed)
    assert both.round({"a": "times30", "b": ""}).accepted == ("a", "b")
    for _ in range(10):
        assert {"b", "c", "d"} <= set(both.round({"a": "times30", "b": "", "c": "", "d": ""}).accepted)
    assert "a" not in both.round({"a": "times30", "b": "", "c": "", "d": ""}).accepted


@settings(max_examples=8)
@given(seed=st.integers(0, 2**16), greed=st.floats(0.5, 0.999))
def test_a_ratchet_cannot_open_the_threshold(seed: int, greed: float) -> None:
    """A cluster that pushes as much as it gets away with: tau stays within beta^2, and thirtyfold never passes."""
    both = Both(seed)
    for _ in range(15):
        both.all()
    for _ in range(40):
        known, tau = both.master.state.of("a"), both.master.judge({"a": Push([1.0])}).threshold
        assert tau <= 9.0
        norm = known.mean + greed * tau * max(math.sqrt(known.variance), 0.05 * known.mean)
        both.round({"a": f"={min(norm, 9.0)!r}", "b": "", "c": "", "d": ""})
    assert both.round({"a": "times30", "b": "", "c": "", "d": ""}).accepted == ("b", "c", "d")


# ---- one history in a file ----

GOLDENS = Path(__file__).with_name("penalty_goldens.json")
PLACES = ("east", "north", "south", "west")
GOLDEN_TOKENS = 3600.0


def test_the_file_is_judged_by_both_as_it_says() -> None:
    both = Both(0, clusters=PLACES, round_tokens=GOLDEN_TOKENS)
    for number, golden in enumerate(json.loads(GOLDENS.read_text())):
        _, found = both.judged(golden["pushes"])
        assert sorted(found) == sorted(golden["expected"])
        for key, value in golden["expected"].items():
            parts = value.items() if key == "memory" else [("", value)]
            for name, expected in parts:
                actual = found[key][name] if name else found[key]
                assert actual == (
                    expected if key in ("accepted", "rejected", "quarantined") else pytest.approx(expected, rel=1e-9)
                ), f"round {number}: {key} {name}"


if __name__ == "__main__":
    plain = Straightforward(PLACES, GOLDEN_TOKENS)
    histories = [golden["pushes"] for golden in json.loads(GOLDENS.read_text())]
    lines = ",\n".join(json.dumps({"pushes": pushes, "expected": plain.round(pushes)}) for pushes in histories)
    GOLDENS.write_text(f"[\n{lines}\n]\n")
