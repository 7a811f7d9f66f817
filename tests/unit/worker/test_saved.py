"""A saved session comes back as it was, and nothing else is taken for one."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, Version
from dips.core.messages import DataRange, Verdict, VerdictKind
from dips.worker.state.effects import InstallMode, PushRecord
from dips.worker.state.pulling import PullPlan
from dips.worker.state.saved import SavedSession, SavedStateError
from dips.worker.state.work import Work

counts = st.integers(0, 2**40)
versions = st.builds(Version, counts, counts)
incarnations = st.builds(Incarnation, counts, counts)
push_ids = st.builds(PushId, st.just(ClusterId("a")), incarnations, st.integers(0, 50))
losses = st.floats(allow_nan=False, allow_infinity=False)


def works(chunks: range) -> st.SearchStrategy[Work]:
    def build(spans: list[tuple[int, int, int]], steps: int, loss_sum: float) -> Work:
        ranges = tuple(DataRange(1, 0, chunk, begin, begin + length) for chunk, begin, length in spans)
        return Work(ranges, sum(item.tokens for item in ranges), steps, loss_sum, steps)

    span = st.tuples(st.sampled_from(chunks), st.integers(0, 99), st.integers(1, 99))
    return st.builds(build, st.lists(span, unique_by=lambda s: s[0], max_size=5), st.integers(0, 99), losses)


pushes = st.builds(PushRecord, push_ids, st.none() | versions, counts, works(range(10, 20)), st.none() | versions)
verdicts = st.builds(
    Verdict, push_ids, st.sampled_from(VerdictKind), st.none() | versions, st.text(), st.booleans(),
    st.none() | st.builds(RoundId, counts, counts),
)  # fmt: skip
pulls = st.builds(PullPlan, st.sampled_from(InstallMode), st.none() | versions, st.booleans(), st.booleans())
sessions = st.builds(
    SavedSession, run_id=st.text(), cluster_id=st.just("a"), layout_hash=st.binary(), data_digest=st.binary(),
    incarnation=incarnations, seq=st.integers(50, 2**40), base=versions, base_fence=counts, local_steps=counts,
    tokens=counts, steps_since_snapshot=counts, steps_towards_push=counts, leases_asked=counts,
    held=works(range(0, 10)).map(lambda work: work.ranges), pending=works(range(20, 30)), lost=st.booleans(),
    push=st.none() | pushes, pull=st.none() | pulls, last_verdict=st.none() | verdicts, residual=st.booleans(),
)  # fmt: skip


@settings(max_examples=40)
@given(sessions)
def test_a_session_comes_back_through_json(saved: SavedSession) -> None:
    assert SavedSession.from_json(json.loads(json.dumps(saved.to_json(), allow_nan=False))) == saved


def example() -> dict[str, Any]:
    push_id = PushId(ClusterId("a"), Incarnation(1, 2), 3)
    work = Work((DataRange(1, 0, 5, 0, 10),), 10, 1, 2.5, 1)
    saved = SavedSession(
        "run", "a", b"layout", b"data", Incarnation(1, 2), 3, Version(1, 4), 2,
        held=(DataRange(1, 0, 5, 10, 20),),
        push=PushRecord(push_id, Version(1, 3), 1, work),
        pull=PullPlan(InstallMode.REPLACE, Version(1, 5)),
        last_verdict=Verdict(push_id, VerdictKind.APPLIED, Version(1, 4), "good", round=RoundId(1, 7)),
    )  # fmt: skip
    return json.loads(json.dumps(saved.to_json()))  # type: ignore[no-any-return]


PENDING = {"ranges": [[1, 0, 6, 0, 10]], "tokens": 10, "steps": 1, "loss_sum": 2.5, "n_losses": 1}


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else [])
    return [path] * bool(path) + [found for key, item in inside for found in paths(item, (*path, key))]


@pytest.mark.parametrize("path", paths(example()), ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("wrong", [-1, 1.5, "wrong", {"a": 1}, [[]], True], ids=repr)
def test_a_value_of_another_kind_is_never_taken(path: tuple[Any, ...], wrong: Any) -> None:
    """Whatever stands in one place: it is refused with a sentence, or read as exactly what stands there."""
    row = copy.deepcopy(example())
    inner = row
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = wrong
    try:
        saved = SavedSession.from_json(row)
    except SavedStateError:
        return
    assert saved.to_json() == row


def test_a_missing_field_is_named_unless_an_earlier_release_had_none() -> None:
    for name in example():
        row = example()
        del row[name]
        if name == "residual":
            assert not SavedSession.from_json(row).residual
        else:
            with pytest.raises(SavedStateError, match=f"'{name}'"):
                SavedSession.from_json(row)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"cluster_id": "b"}, "not of this cluster"), ({"seq": 2}, "newer than number 2"),
    ({"held": [[1, 0, 5, 9, 20]]}, "token 9 of chunk 5 is in two ranges"),
    ({"held": [[1, 0, 5, 20, 20]]}, "ends before it begins"),
    ({"base": None}, "base is None, not a row of timeline, v"), ({"layout_hash": "xyz"}, "hex"),
    ({"pending": {**PENDING, "tokens": 11}}, "11 tokens"),
])  # fmt: skip
def test_what_cannot_be_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SavedStateError, match=sentence):
        SavedSession.from_json({**example(), **change})


@pytest.mark.parametrize("raw", [None, [], 3, "text", {}])
def test_something_else_is_no_session(raw: object) -> None:
    with pytest.raises(SavedStateError):
        SavedSession.from_json(raw)
