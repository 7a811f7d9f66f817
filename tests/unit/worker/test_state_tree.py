"""Nested state as JSON and tensors: what goes in comes out, and what could not is refused."""

from __future__ import annotations

import enum
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.worker.checkpoint_files import StateTreeError, flatten, unflatten


class Tensor:
    """Stands for any framework's."""


def mark_of(value: object) -> str | None:
    return "mine" if isinstance(value, Tensor) else None


def through(state: object) -> Any:
    skeleton, tensors = flatten(state, mark_of)
    text = json.dumps(skeleton, allow_nan=False)

    def tensor(kind: str, name: str) -> Tensor:
        assert kind == "mine"
        return tensors[name]  # type: ignore[no-any-return]

    return unflatten(json.loads(text), tensor)


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.builds(Tensor)
)  # fmt: skip
keys = st.none() | st.booleans() | st.integers() | st.text()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(one: Any, two: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, two)) and all(
            same(a, b) for a, b in zip(one.values(), two.values(), strict=True)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@given(trees)
def test_a_tree_comes_back_with_its_types(tree: Any) -> None:
    assert same(through(tree), tree)


def test_numbers_that_json_does_not_have() -> None:
    nan, above, below, zero = through([math.nan, math.inf, -math.inf, -0.0])
    assert math.isnan(nan)
    assert (above, below, math.copysign(1, zero)) == (math.inf, -math.inf, -1.0)


def test_names_of_tensors_say_where_they_stand_and_never_meet() -> None:
    one, two, three = Tensor(), Tensor(), Tensor()
    state = {"a.b": one, "a": {"b": two}, "list": [three]}
    tensors = flatten(state, mark_of)[1]
    assert tensors == {"a.b": one, "a.b#2": two, "list.0": three}
    assert through(state) == state
    assert flatten(one, mark_of)[1] == {"state": one}


def test_one_tensor_in_two_places_is_kept_twice() -> None:
    shared = Tensor()
    assert len(flatten([shared, shared], mark_of)[1]) == 2


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": [1, object()]}, "a.1"),
        ({"a": {2: {1, 2}}}, "a.2"),
        ({(1, 2): 3}, "top"),
        ([Colour.RED], "0"),
        (print, "top"),
    ],
)
def test_what_cannot_come_back_is_refused_with_its_place(state: object, where: str) -> None:
    with pytest.raises(StateTreeError, match=where):
        flatten(state, mark_of)


def test_a_state_that_holds_itself_is_refused() -> None:
    state: list[object] = []
    state.append(state)
    with pytest.raises(StateTreeError, match="hold itself"):
        flatten(state, mark_of)


@pytest.mark.parametrize("skeleton", [[1], {"z": 1}, {"l": [], "t": []}, {"d": [[{"q": 1}, 1]]}])
def test_something_else_is_no_skeleton(skeleton: object) -> None:
    with pytest.raises(StateTreeError):
        unflatten(skeleton, lambda kind, name: None)
