"""Nested state as JSON and tensors: what goes in comes out, and what could not is refused."""

from __future__ import annotations

import enum
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dips.worker.checkpoint_files import RawTensor
from dips.worker.torch_state import StateTreeError, flatten, unflatten


def through(state: object) -> Any:
    skeleton, tensors = flatten(state)
    text = json.dumps(skeleton, allow_nan=False)
    raw = {
        name: RawTensor("F32", tuple(tensor.shape), torch.as_tensor(tensor).reshape(-1).numpy().view(np.uint8))
        for name, tensor in tensors.items()
    }
    return unflatten(json.loads(text), raw)


numbers = st.lists(st.floats(width=32, allow_nan=False), max_size=3)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | numbers.map(torch.tensor) | numbers.map(lambda row: np.array(row, np.float32))
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
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, two)) and all(
            same(a, b) for a, b in zip(one.values(), two.values(), strict=True)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, torch.Tensor | np.ndarray):
        return one.shape == two.shape and bool((one == two).all())
    return bool(one == two)


@given(trees)
def test_a_tree_comes_back_with_its_types(tree: Any) -> None:
    assert same(through(tree), tree)


def test_numbers_that_json_does_not_have() -> None:
    nan, above, below, zero = through([math.nan, math.inf, -math.inf, -0.0])
    assert math.isnan(nan)
    assert (above, below, math.copysign(1, zero)) == (math.inf, -math.inf, -1.0)


def test_names_of_tensors_say_where_they_stand_and_never_meet() -> None:
    one, two, three = torch.zeros(1), torch.zeros(2), np.zeros(3, np.float32)
    state = {"a.b": one, "a": {"b": two}, "list": [three]}
    tensors = flatten(state)[1]
    assert [(name, id(tensor)) for name, tensor in tensors.items()] == [
        ("a.b", id(one)), ("a.b#2", id(two)), ("list.0", id(three)),
    ]  # fmt: skip
    assert same(through(state), state)
    assert list(flatten(one)[1]) == ["state"]


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(("state", "where"), [
    ({"a": [1, object()]}, "a.1"), ({"a": {2: {1, 2}}}, "a.2"), ({(1, 2): 3}, "top"), ([Colour.RED], "0"),
    (print, "top"),
])  # fmt: skip
def test_what_cannot_come_back_is_refused_with_its_place(state: object, where: str) -> None:
    with pytest.raises(StateTreeError, match=where):
        flatten(state)


def test_a_state_that_holds_itself_is_refused() -> None:
    state: list[object] = []
    state.append(state)
    with pytest.raises(StateTreeError, match="hold itself"):
        flatten(state)


@pytest.mark.parametrize("skeleton", [[1], {"z": 1}, {"l": [], "t": []}, {"d": [[{"q": 1}, 1]]}, {"x": ["torch", "x"]}])
def test_something_else_is_no_skeleton(skeleton: object) -> None:
    with pytest.raises(StateTreeError):
        unflatten(skeleton, {})
