"""Layouts: the cut into layers and blocks, its hash, and what is refused before it can do harm."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from support.wire_values import layouts

from dips.core.errors import RefusalCode, Refused
from dips.core.layout import (
    AVERAGED_LAYER,
    FLOAT32_BYTES,
    MAX_NAME_CHARS,
    Block,
    Layout,
    Parameter,
    first_difference,
    layer_of,
    layout_from_json,
)


def parameter(name: str, *shape: int, layer: str = "", dtype: str = "float32") -> Parameter:
    return Parameter(name, shape, dtype, layer or layer_of(name))


SMALL = Layout(
    (
        parameter("embedding.weight", 4, 3), parameter("layers.0.up", 5), parameter("layers.1.up", 2, 2),
        parameter("layers.0.down", 6), parameter("scale"),
    ),
    block_elems=8,
)  # fmt: skip


def test_parameters_of_one_layer_stand_together() -> None:
    assert [(span.parameter.name, span.start_elem, span.stop_elem) for span in SMALL.spans] == [
        ("embedding.weight", 0, 12), ("layers.0.up", 12, 17), ("layers.0.down", 17, 23), ("layers.1.up", 23, 27),
        ("scale", 27, 28),
    ]  # fmt: skip


def test_blocks_cut_layers_and_never_span_two() -> None:
    assert SMALL.blocks == (
        Block(0, "embedding", 0, 8), Block(1, "embedding", 8, 4), Block(2, "layers.0", 12, 8),
        Block(3, "layers.0", 20, 3), Block(4, "layers.1", 23, 4), Block(5, "scale", 27, 1),
    )  # fmt: skip


@given(layout=layouts)
def test_spans_and_blocks_tile_the_flat_vector(layout: Layout) -> None:
    for pieces in (
        [(s.start_elem, s.stop_elem) for s in layout.spans],
        [(b.start_elem, b.stop_elem) for b in layout.blocks],
    ):
        ends = [0, *(stop for _, stop in pieces)]
        assert [start for start, _ in pieces] == ends[:-1]
        assert ends[-1] == layout.n_elems
    assert [block.block_id for block in layout.blocks] == list(range(len(layout.blocks)))
    assert all(0 < block.n_elems <= layout.block_elems for block in layout.blocks)
    assert layout.n_bytes == sum(block.n_bytes for block in layout.blocks) == layout.n_elems * FLOAT32_BYTES


@given(layout=layouts)
def test_a_layout_can_be_read_back(layout: Layout) -> None:
    again = layout_from_json(layout.canonical_json())
    assert again == layout
    assert again.layout_hash == layout.layout_hash


def test_the_hash_is_the_same_on_every_machine_and_release() -> None:
    # Clusters of different machines compare it: a change of this value is a change of the protocol.
    assert SMALL.layout_hash.hex() == "d3fccdf1c486700fe8d5427ee52f4b6d12adc100b0fb7a1dd07090c1a398a2b1"


MEAN = Parameter("norm.mean", (9,), "float32", AVERAGED_LAYER, averaged=True)
BUFFERED = Layout((*SMALL.parameters, MEAN), SMALL.block_elems)
FIRST, UP, *REST = SMALL.parameters


@pytest.mark.parametrize(("other", "named"), [
    (Layout((FIRST, parameter("layers.0.up", 5, dtype="bfloat16"), *REST), 8), "bfloat16"),
    (Layout((FIRST, parameter("layers.0.up", 5, layer="x"), *REST), 8), "layer 'x'"),
    (Layout((FIRST, parameter("layers.0.up", 6), *REST), 8), "[6]"),
    (Layout((FIRST, parameter("layers.0.gate", 5), *REST), 8), "lacks parameter 'layers.0.up' of shape [5]"),
    (Layout((*SMALL.parameters, parameter("extra", 2)), 8), "'extra'"),
    (Layout(SMALL.parameters[::-1], 8), "another order"), (Layout(SMALL.parameters, 7), "7 elements"),
    (BUFFERED, "without buffers="), (Layout((*SMALL.parameters, parameter("norm.mean", 9)), 8), "'norm.mean'"),
])  # fmt: skip
def test_any_difference_changes_the_hash_and_is_named(other: Layout, named: str) -> None:
    assert other.layout_hash not in (SMALL.layout_hash, BUFFERED.layout_hash if other is not BUFFERED else b"")
    assert named in first_difference(SMALL, other)
    assert 'with buffers="average"' in first_difference(BUFFERED, SMALL)


ONE = parameter("a", 1)


@pytest.mark.parametrize(
    ("parameters", "block_elems"),
    [
        ((), 8), ((ONE,), 0), ((ONE,), 2**32 + 1), ((ONE, parameter("a", 2)), 8), ((parameter("a", 0),), 8),
        ((parameter("a", -3),), 8), ((parameter("a", *[1] * 17),), 8), ((parameter("a", 2, dtype="float64"),), 8),
        ((parameter("a", 2, dtype=""),), 8), ((parameter("", 2, layer="x"),), 8),
        ((parameter("n" * (MAX_NAME_CHARS + 1), 2),), 8), ((parameter("a", 2**40), parameter("b", 2**44)), 2**32),
        ((parameter("a", 2**40),), 1), ((MEAN,), 8), ((MEAN, ONE), 8), ((ONE, MEAN, parameter("late", 3)), 8),
        ((ONE, dataclasses.replace(MEAN, layer="a")), 8),
    ],
)  # fmt: skip
def test_an_impossible_layout_is_refused(parameters: tuple[Parameter, ...], block_elems: int) -> None:
    with pytest.raises(Refused) as caught:
        Layout(parameters, block_elems)
    assert caught.value.code is RefusalCode.LAYOUT


def test_a_huge_model_is_cut_without_being_walked_element_by_element() -> None:
    huge = Layout((parameter("a", 2**40),), 2**32)
    assert len(huge.blocks) == 256


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "null", "[" * 100_000),
        *('{"parameters": [[1]], "block_elems": 3}', '{"parameters": [], "block_elems": 3}'),
        '{"parameters": [["a", ["x"], "float32", "a"]], "block_elems": 3}',
    ],
)
def test_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(Refused) as caught:
        layout_from_json(text)
    assert caught.value.code is RefusalCode.LAYOUT


@pytest.mark.parametrize(("name", "layer"), [
    ("embedding.weight", "embedding"), ("model.layers.3.mlp.up.weight", "model.layers.3"), ("layers.12", "layers.12"),
    ("h.0.attn.1.bias", "h.0"), ("weight", "weight"), ("block3.weight", "block3"), ("0.weight", "0"),
])  # fmt: skip
def test_the_layer_is_named_up_to_the_first_number(name: str, layer: str) -> None:
    assert layer_of(name) == layer


@given(layout=layouts)
def test_what_is_averaged_stands_behind_all_that_is_trained_in_blocks_of_its_own(layout: Layout) -> None:
    assert layout.n_trained == sum(p.n_elems for p in layout.parameters if not p.averaged)
    pieces = [(block.start_elem, block.stop_elem, block.averaged) for block in layout.blocks]
    pieces += [(span.start_elem, span.stop_elem, span.parameter.averaged) for span in layout.spans]
    for start, stop, averaged in pieces:
        assert (stop <= layout.n_trained) is not averaged
        assert (start >= layout.n_trained) is averaged


@pytest.mark.parametrize("kind", ["trained", 1, None, ["averaged"]])
def test_an_unknown_kind_of_parameter_is_refused(kind: object) -> None:
    text = BUFFERED.canonical_json().replace('"averaged"]', f"{json.dumps(kind)}]")
    with pytest.raises(Refused, match="cannot be read"):
        layout_from_json(text)
