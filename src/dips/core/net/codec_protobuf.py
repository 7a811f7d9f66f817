"""Converts between the frozen values of core/messages.py and protobuf's messages and bytes.

`make protos` writes the conversion of each class (messages_pb2.py). Decoding allocates nothing that the received bytes
do not already bound.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from dips.core.errors import RefusalCode, Refused
from dips.core.net.messages_pb2 import CODECS

T = TypeVar("T")


def to_message(value: Any) -> Message:
    """The protobuf message of a value of core/messages.py."""
    message_class, write, _ = CODECS[type(value)]
    message = message_class()
    write(value, message)
    return message


def from_message(message: Message, kind: type[T]) -> T:
    """The value that a protobuf message carries.

    Raises Refused(MALFORMED), or Refused(LAYOUT) for an impossible layout.
    """
    return cast(T, CODECS[kind][2](message))


def encode(value: Any) -> bytes:
    return to_message(value).SerializeToString()


def decode(data: bytes, kind: type[T]) -> T:
    """Parse bytes into a value. Raises Refused(MALFORMED)."""
    try:
        message = CODECS[kind][0].FromString(data)
    except DecodeError as error:
        raise Refused(RefusalCode.MALFORMED, f"a {kind.__name__} cannot be parsed: {error}") from error
    return from_message(message, kind)
