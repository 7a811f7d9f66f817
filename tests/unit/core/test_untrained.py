"""The list of what a run does not train: compared by name, kept compactly, refused when it is malformed."""

from __future__ import annotations

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wire_values import values_of

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import TensorDigest
from dips.core.model_description import MAX_TENSORS, Untrained, difference

NAMES = st.text("abc.é", min_size=1, max_size=20)
LISTS = st.lists(st.builds(TensorDigest, NAMES, st.integers(0, 2**64 - 1)), unique_by=lambda item: item.name)


@given(LISTS.map(tuple), LISTS.map(tuple))
def test_the_durable_text_says_the_same(frozen: tuple[TensorDigest, ...], buffers: tuple[TensorDigest, ...]) -> None:
    untrained = Untrained(frozen, buffers)
    assert Untrained.from_text(untrained.to_text()) == untrained


def test_the_text_of_a_large_model_is_short() -> None:
    rows = [TensorDigest(f"model.layers.{n // 9}.mlp.experts.{n % 9}.weight", n * 2**40 + n) for n in range(20_000)]
    assert len(Untrained(tuple(rows)).to_text()) < 30 * len(rows)


def packed(text: str) -> str:
    return base64.b85encode(zlib.compress(text.encode())).decode()


@pytest.mark.parametrize(
    "text",
    [
        *("", "~", "no base 85 \x00", packed(""), packed("[]"), packed("[[],[],[]]"), packed("{}"), packed("[[],3]")),
        *(packed('[[["a","00"]],[]]'), packed('[[["a",7]],[]]'), packed('[[["a","000000000000000g"]],[]]')),
        *(packed('[[["","0000000000000000"]],[]]'), packed("[" * 100_000), packed("[[],[]]")[:-5]),
        base64.b85encode(zlib.compress(bytes(300 << 20))).decode(),
    ],
)
def test_another_text_is_refused_without_being_unpacked_whole(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        Untrained.from_text(text)


@pytest.mark.parametrize(
    ("untrained", "sentence"),
    [
        (Untrained((TensorDigest("", 1),)), "empty or longer"),
        (Untrained((), (TensorDigest("b" * 600, 1),)), "empty or longer"),
        (Untrained((TensorDigest("a", 1), TensorDigest("a", 2))), "'a' is listed twice"),
        (Untrained(tuple(TensorDigest(str(n), n) for n in range(MAX_TENSORS + 1))), f"at most {MAX_TENSORS}"),
        (Untrained(tuple(TensorDigest(f"{n:0500}", n) for n in range(40_000))), "take 20000000 bytes"),
    ],
)
def test_a_malformed_list_is_refused(untrained: Untrained, sentence: str) -> None:
    with pytest.raises(Refused, match=sentence) as refused:
        untrained.check()
    assert refused.value.code is RefusalCode.MALFORMED


@given(values_of(TensorDigest), values_of(TensorDigest))
def test_the_difference_is_empty_exactly_for_equal_lists(one: TensorDigest, other: TensorDigest) -> None:
    assert (difference("tensors", (one,), (other,)) == "") == (one == other)


def test_the_difference_names_a_few_of_each_kind() -> None:
    ours = tuple(TensorDigest(name, 1) for name in ("same", "w0", "w1", "w2", "w3", "gone"))
    theirs = tuple(TensorDigest(name, n) for n, name in enumerate(("w9", "same", "w0x", "w3", "w2", "w1", "w0")))
    assert difference("weights", ours, theirs) == (
        "weights 'w0', 'w1', 'w2' and 1 more differ; it lacks weights 'gone'; "
        "weights 'w9', 'w0x' are in no other cluster's model"
    )
