"""Values and bytes: nothing is lost on the way. What strangers may send: tests/unit/fuzz."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wire_values import values_of

from dips.core import messages
from dips.core.errors import RefusalCode, Refused
from dips.core.ids import PushId, Version
from dips.core.net.codec_protobuf import decode, encode
from dips.core.net.messages_pb2 import CODECS
from dips.protos import common_pb2

each_class = pytest.mark.parametrize("kind", CODECS, ids=lambda kind: kind.__name__)


@each_class
@settings(max_examples=12)
@given(data=st.data())
def test_a_value_survives_the_wire(kind: type[Any], data: st.DataObject) -> None:
    value = data.draw(values_of(kind))
    # By repr, because NaN is not equal to itself.
    assert repr(decode(encode(value), kind)) == repr(value)


def alternatives() -> list[tuple[type[Any], str, type[Any]]]:
    """Each message that a field of another message may hold where there is a choice."""
    hints = [(kind, name, hint) for kind in CODECS for name, hint in typing.get_type_hints(kind).items()]
    choices = [each for each in hints if typing.get_origin(each[2]) in (types.UnionType, typing.Union)]
    return [(kind, name, one) for kind, name, hint in choices for one in typing.get_args(hint) if one in CODECS]


@pytest.mark.parametrize(("kind", "field", "alternative"), alternatives())
@settings(max_examples=2)
@given(data=st.data())
def test_each_alternative_of_a_field_survives_the_wire(
    kind: type[Any], field: str, alternative: type[Any], data: st.DataObject
) -> None:
    value = dataclasses.replace(data.draw(values_of(kind)), **{field: data.draw(values_of(alternative))})
    assert repr(decode(encode(value), kind)) == repr(value)


def test_what_a_message_lacks_and_what_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(Refused, match=r"BeginPushReply\.answer: none of its alternatives is set") as caught:
        decode(b"", messages.BeginPushReply)
    assert caught.value.code is RefusalCode.MALFORMED
    with pytest.raises(Refused, match=r"PushId\.incarnation: it is missing"):
        decode(common_pb2.PushId(cluster="a", seq=1).SerializeToString(), PushId)
    message = common_pb2.Refusal(sentence="?")
    message.code = typing.cast(Any, 999)
    with pytest.raises(Refused, match=r"Refusal\.code: 999 is not a known RefusalCode"):
        decode(message.SerializeToString(), messages.Refusal)


def test_fields_of_a_newer_peer_are_ignored() -> None:
    known = Version(1, 2)
    unknown_field_15 = bytes([15 << 3 | 0, 7])
    assert decode(encode(known) + unknown_field_15, Version) == known


def test_a_map_comes_back_sorted() -> None:
    caller = messages.Caller("run", 1, "a")
    request = messages.FinishPushRequest(caller, 1, 1, (("s-1", b"b"), ("s-0", b"a")))
    assert decode(encode(request), messages.FinishPushRequest).digest_of_slave == (("s-0", b"a"), ("s-1", b"b"))
