"""Which way pushes point: cosines, what is usual, and the alarm (docs/algorithm.md, Direction)."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounds import Master, Push, Vector, along, gram_of

from dips.core.errors import LocalProtocolError
from dips.master.state.penalty import judge
from dips.master.state.penalty_detect import alarms
from dips.master.state.penalty_types import ClusterStatistics, DetectorState, Participant, PenaltyConfig

N = 200
"""Elements of the vectors below: random ones have a cosine of about 1 / sqrt(N) = 0.07 with anything."""


class Course:
    """Rounds of clusters that agree as trained ones do: a common way, that turns slowly, and noise of their own."""

    def __init__(self, seed: int, names: str = "abcd", agreement: float = 0.7, config: PenaltyConfig | None = None):
        self.rng = random.Random(seed)
        self.names, self.agreement = names, agreement
        self.master = Master(config or PenaltyConfig(), live=frozenset(names))
        self.common = self.direction()
        self.moved = [0.0] * N
        self.alarms: list[str] = []
        self.weight = 1000.0  # tokens of a bad push

    def direction(self) -> Vector:
        vector = [self.rng.gauss(0.0, 1.0) for _ in range(N)]
        norm = math.sqrt(sum(x * x for x in vector))
        return [x / norm for x in vector]

    def good(self) -> Vector:
        """cos with another one's: agreement squared."""
        own, rest = self.direction(), math.sqrt(1.0 - self.agreement**2)
        return [self.agreement * a + rest * b for a, b in zip(self.common, own, strict=True)]

    def round(self, who: str, bad: dict[str, str] | None = None, stale: float = 0.0) -> None:
        """One round; stale: how far the model went since every cluster's base, along what was merged last."""
        turned = self.direction()
        self.common = [0.98 * a + 0.2 * b for a, b in zip(self.common, turned, strict=True)]
        since = [stale * x for x in self.moved]
        pushes = {name: self._push(since, (bad or {}).get(name, "")) for name in who}
        judgement = self.master.round(pushes)
        self.alarms += [alarm.sentence for alarm in judgement.alarms]
        merged = [sum(values) / len(values) for values in zip(*(p.vector for p in pushes.values()), strict=True)]
        self.moved = [0.8 * a + 0.2 * b for a, b in zip(self.moved, merged, strict=True)]

    def _push(self, since: Vector, bad: str) -> Push:
        way = self.good()
        if bad == "flip":
            way = [-x for x in way]
        if bad == "noise":
            way = self.direction()
        tokens = self.weight if bad else 1000.0
        return Push([w - s for w, s in zip(way, since, strict=True)], tokens, since_base=since)

    def alarmed(self) -> list[str]:
        return [name for name in self.names if self.master.state.of(name).cosine_alarmed]


def cosines(pushes: dict[str, Push], config: PenaltyConfig | None = None) -> dict[str, float]:
    judgement = Master(config or PenaltyConfig()).judge(pushes)
    return {measure.cluster: measure.cosine for measure in judgement.measures}


def test_alone_and_with_nothing_merged_since_its_base_a_push_says_nothing() -> None:
    master = Master()
    for _ in range(20):
        assert math.isnan(master.norms(a=1.0).measures[0].cosine)
    assert master.state.of("a").cosine_rounds == 0


def test_rejected_pushes_are_measured_but_nobody_is_compared_with_them() -> None:
    master = Master().warmed_up()
    before = master.state.of("b").cosine_rounds
    pushes = {"a": Push(along(1.0)), "b": Push(along(-30.0)), "c": Push(along(1.0))}
    found = master.round(pushes)
    assert [measure.cosine for measure in found.measures] == [1.0, -1.0, 1.0]
    assert master.state.of("b").cosine_rounds == before


def test_elements_that_are_not_finite_spoil_no_other_cosine() -> None:
    broken = Push([math.nan, 1.0], nonfinite_elems=1)
    found = cosines({"a": Push([1.0, 0.0]), "b": broken, "c": Push([1.0, 0.0])})
    assert (found["a"], found["c"]) == (1.0, 1.0)
    assert math.isnan(found["b"])


def test_an_unknown_base_leaves_the_others_known() -> None:
    """A slave that came back does not know old versions: that push is unknown, and left out of the others' way."""
    nan = math.nan
    directions = gram_of([[1.0, 0.0], [nan, nan], [1.0, 1.0], [0.0, 0.0], [nan, nan], [0.0, 0.0]])
    participants = [Participant(name, 1000.0, 0, 64) for name in "abc"]
    gram = gram_of([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    judgement = judge(DetectorState.empty(), PenaltyConfig(), participants, gram, frozenset("abc"), 1.0, directions)
    assert judgement.accepted == ("a", "b", "c")
    assert [measure.cosine for measure in judgement.measures] == pytest.approx([2**-0.5, nan, 2**-0.5], nan_ok=True)


def test_directions_must_fit() -> None:
    participants = [Participant(name, 1.0, 0, 64) for name in "ab"]
    gram = gram_of([[1.0], [1.0]])
    with pytest.raises(LocalProtocolError, match="matrix of directions of 2"):
        judge(DetectorState.empty(), PenaltyConfig(), participants, gram, frozenset(), 1.0, gram)


FLOATS = st.floats(-100.0, 100.0)


Way = tuple[Vector, Vector, float]
"""(theta_base - theta_j, theta_base - theta_v, tokens) of a push."""


def cosine_with_the_others(ways: Mapping[str, Way], accepted: Sequence[str], name: str) -> float:
    """cos(p_j, s_j + token-weighted mean of the other accepted p_i); NaN when one of them is no direction."""
    own, moved = np.array(ways[name][0], float), np.array(ways[name][1], float)
    others = [other for other in accepted if other != name]
    tokens = sum(ways[other][2] for other in others)
    way = moved + sum(
        (ways[other][2] / tokens * np.array(ways[other][0], float) for other in others), np.zeros(len(own))
    )
    size = float(np.linalg.norm(own) * np.linalg.norm(way))
    return float(own @ way) / size if np.isfinite(size) and size > 0.0 else math.nan


@settings(max_examples=100)
@given(
    pushes=st.dictionaries(
        st.sampled_from("abcd"),
        st.builds(
            Push,
            vector=st.lists(FLOATS, min_size=3, max_size=3),
            tokens=st.floats(1.0, 1e6),
            since_base=st.lists(FLOATS, min_size=3, max_size=3),
        ),
        min_size=1,
    )
)
def test_it_is_what_vectors_say(pushes: dict[str, Push]) -> None:
    """Against numpy on the vectors themselves, without a Gram matrix."""
    judgement = Master(PenaltyConfig(detector="off")).judge(pushes)
    ways = {name: (pushes[name].way, pushes[name].moved, pushes[name].tokens) for name in pushes}
    for measure in judgement.measures:
        expected = cosine_with_the_others(ways, judgement.accepted, measure.cluster)
        if math.isnan(expected) or math.isnan(measure.cosine):
            continue  # where the others' ways cancel out, rounding decides whether anything is left
        assert measure.cosine == pytest.approx(expected, abs=1e-4)


def test_the_usual_cosine_is_the_median_of_the_last_seven() -> None:
    master = Master(live=frozenset("ab"))
    angles = [0.0, 1.0, 0.2, 0.4, 0.9, 0.3, 1.4, 0.1, 0.7, 0.5]
    assert math.isnan(master.state.of("a").usual_cosine)
    for i, angle in enumerate(angles):
        master.round({"a": Push([1.0, 0.0]), "b": Push([math.cos(angle), math.sin(angle)])})
        known = master.state.of("a")
        assert known.cosine_rounds == i + 1
        assert known.usual_cosine == pytest.approx(
            statistics.median(math.cos(x) for x in angles[max(0, i - 6) : i + 1])
        )


def test_records_that_held_an_average_begin_anew() -> None:
    old = {"accepted": 3, "mean": 1.5, "cosine_mean": -0.4, "cosine_rounds": 9, "cosine_alarmed": True}
    assert ClusterStatistics.from_json(old) == ClusterStatistics(accepted=3, mean=1.5)


def test_the_last_judged_push_is_remembered_whatever_became_of_it() -> None:
    master = Master().warmed_up()
    master.round({"a": Push(along(1.0)), "b": Push(along(-30.0)), "c": Push(along(math.nan), nonfinite_elems=1)})
    a, b, c = (master.state.of(name) for name in "abc")
    assert (a.last_norm, b.last_norm) == pytest.approx((1.0, 30.0))
    assert c.last_norm is None
    assert (b.last_cosine, c.last_cosine) == (-1.0, None)
    assert b.last_score is not None
    assert b.last_score > 100


@pytest.mark.parametrize(("seed", "kind"), [(0, "flip"), (1, "noise"), (2, "flip")])
def test_a_cluster_that_goes_elsewhere_raises_the_alarm_within_five_pushes(seed: int, kind: str) -> None:
    """All take part in every round, as with dynamic local steps. Its norm is like any other's, so it is merged."""
    course = Course(seed)
    for _ in range(10):
        course.round("abcd")
    for _ in range(5):
        course.round("abcd", {"d": kind})
    assert course.alarmed() == ["d"]
    assert len(course.alarms) == 1
    assert course.alarms[0].startswith(
        "cluster d pushes in another direction than the others: the usual cosine of its pushes"
    )
    for _ in range(10):
        course.round("abcd")
    assert course.alarmed() == []
    assert len(course.alarms) == 1


@pytest.mark.parametrize(("seed", "kind"), [(0, "flip"), (1, "noise"), (2, "flip")])
def test_a_cluster_that_always_pushes_alone_is_seen_too(seed: int, kind: str) -> None:
    """Rounds of one: compared with the way that the model went since its base. (The norms here hardly differ, so that
    scores would tell a flip too: only cosines are to tell it.)"""
    course = Course(seed, config=PenaltyConfig(detector="off"))
    for _ in range(12):
        for name in "abcd":
            course.round(name, stale=0.5)
    assert course.alarms == []
    for _ in range(6):
        for name in "abcd":
            course.round(name, {"d": kind}, stale=0.5)
    assert "d" in course.alarmed()
    assert any(alarm.startswith("cluster d pushes in another direction") for alarm in course.alarms)


@pytest.mark.parametrize(("seed", "preset"), list(enumerate(["safe", "dynamic", "paper", "edit"])))
def test_clean_clusters_never_raise_it(seed: int, preset: str) -> None:
    course = Course(seed, config=PenaltyConfig.of(preset))
    for i in range(80):
        course.round("abcd" if i % 3 == 0 else "abcd"[i % 4], stale=0.5 if i % 2 else 0.0)
    assert course.alarms == []
    assert course.master.state.of("a").cosine_rounds > 20


def test_the_knobs_set_the_limit() -> None:
    config = PenaltyConfig(cosine_share=0.9, cosine_warm_up_pushes=2, cosine_window_pushes=1)
    course = Course(3, config=config)
    course.round("abcd")
    course.round("abcd", {"a": "noise"})
    assert "a" in course.alarmed()


@pytest.mark.parametrize(
    ("usual", "others", "alarmed"),
    [
        (0.00, (0.46, 0.46, 0.40), True),  # noise
        (-0.40, (0.42, 0.24, 0.43), True),  # a flip
        (0.07, (0.34, 0.10, 0.36), False),  # a model that swings about its way: good clusters turn it back
        (-0.15, (0.19, -0.05, 0.30), False),  # the same, early
        (-0.25, (0.19, -0.05, 0.30), True),
        (0.00, (0.46,), False),  # who of two is wrong?
        (-0.25, (), True),
    ],
)
def test_what_was_seen_in_training_is_told_apart(usual: float, others: tuple[float, ...], alarmed: bool) -> None:
    values = {"a": usual, **dict(zip("bcd", others, strict=False))}
    state = DetectorState().with_clusters(
        {name: ClusterStatistics(cosines=(value,) * 7, cosine_rounds=9) for name, value in values.items()}
    )
    changed, sentences = alarms(PenaltyConfig(), state, ["a"], values)
    assert [name for name, known in changed.items() if known.cosine_alarmed] == (["a"] if alarmed else [])
    assert len(sentences) == alarmed


@pytest.mark.parametrize("kind", ["flip", "noise"])
@pytest.mark.parametrize("names", ["abc", "abcd"])
@pytest.mark.parametrize("how", ["together", "in turn"])
def test_the_others_of_a_bad_cluster_are_never_named(kind: str, names: str, how: str) -> None:
    """Its pushes weigh more than all others', so that the way with which the others are compared is nearly its own."""
    course = Course(4, names)
    for i in range(52):
        bad = {names[-1]: kind} if i >= 12 else {}
        course.weight = 4000.0 if bad else 1000.0
        for who in names if how == "in turn" and i % 2 else (names,):
            course.round(who, bad, stale=1.0 if how == "in turn" else 0.0)
    named = {alarm.split()[1] for alarm in course.alarms if "another direction" in alarm}
    assert named <= {names[-1]}
    assert named or (kind, how) == ("noise", "together")  # three quarters of the model's way are its own
    for _ in range(20):
        course.round(names[:-1])
    assert {alarm.split()[1] for alarm in course.alarms if "another direction" in alarm} == named


@pytest.mark.parametrize("how", ["together", "in turn"])
def test_of_two_that_disagree_both_are_named(how: str) -> None:
    course = Course(0, "ab")
    for i in range(40):
        for who in "ab" if how == "in turn" else ("ab",):
            course.round(who, {"b": "flip"} if i >= 12 else {}, stale=0.5)
    assert course.alarmed() == ["a", "b"]
    for _ in range(20):
        course.round("ab")
    assert course.alarmed() == []


def test_while_one_is_named_another_bad_one_is_found_among_the_rest() -> None:
    course = Course(0, "abcde")
    for _ in range(10):
        course.round("abcde")
    for _ in range(30):
        course.round("abcde", {"d": "flip", "e": "noise"})
    assert course.alarmed() == ["d", "e"]
    for _ in range(20):
        course.round("abcde", {"d": "flip"})
    assert course.alarmed() == ["d"]


def test_none_is_named_while_the_last_push_of_another_that_is_here_agreed_less() -> None:
    """Its pushes are excluded now, but were merged, and the others were compared with them."""
    usual = {"a": 0.0, "b": 0.5, "c": 0.5, "d": 0.5}
    state = DetectorState().with_clusters(
        {
            name: ClusterStatistics(cosines=(value,) * 7, cosine_rounds=9, last_cosine=-0.5 if name == "d" else value)
            for name, value in usual.items()
        }
    )
    assert alarms(PenaltyConfig(), state, ["a", "b"], "abcd") == ({}, ())
    changed, _ = alarms(PenaltyConfig(), state, ["a", "b"], "abc")
    assert changed["a"].cosine_alarmed
