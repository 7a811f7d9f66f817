"""Converts between the frozen values of core/messages.py and the bytes of protos/*.proto, by field name.

Decoding checks types, presence and enums and refuses with MALFORMED; it allocates nothing that the received
bytes do not already bound.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from dips.core import ids, layout, messages, model_description
from dips.core.errors import RefusalCode, Refused
from dips.protos import clusters_pb2, common_pb2, data_pb2, operator_pb2, slaves_pb2

T = TypeVar("T")

_OTHER_NAME = {"PlacementSpec": "Placement", "Parameter": "ParameterSpec"}
_OTHER_FIELD = {("PushId", "cluster"): "cluster_id", ("Parameter", "shape"): "shape_elems"}


def to_message(value: Any) -> Message:
    """The protobuf message of a value of core/messages.py, core/ids.py or core/layout.py."""
    message = _message_class(type(value))()
    _fill(message, value)
    return message


def from_message(message: Message, kind: type[T]) -> T:
    """The value that a protobuf message carries.

    Raises Refused(MALFORMED), or Refused(LAYOUT) for an impossible layout.
    """
    return typing.cast(T, _read(message, kind))


def encode(value: Any) -> bytes:
    return to_message(value).SerializeToString()


def decode(data: bytes, kind: type[T]) -> T:
    """Parse bytes into a value. Raises Refused(MALFORMED)."""
    message = _message_class(kind)()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise Refused(RefusalCode.MALFORMED, f"a {kind.__name__} cannot be parsed: {error}") from error
    return from_message(message, kind)


def _message_class(kind: type[Any]) -> type[Message]:
    found = _MESSAGE_CLASSES.get(kind)
    if found is None:
        found = _MESSAGE_CLASSES[kind] = _find_message_class(kind)
    return found


def _find_message_class(kind: type[Any]) -> type[Message]:
    name = _OTHER_NAME.get(kind.__name__, kind.__name__)
    for module in (common_pb2, clusters_pb2, slaves_pb2, operator_pb2, data_pb2):
        found = getattr(module, name, None)
        if found is not None:
            return typing.cast(type[Message], found)
    raise TypeError(f"no protobuf message mirrors {kind.__name__}")


@dataclasses.dataclass(frozen=True)
class _Field:
    """How one dataclass field maps to the message: `choices` holds the oneof's classes, if it is one."""

    name: str
    wire_name: str
    kind: Any
    optional: bool
    choices: tuple[tuple[type[Any], str], ...] = ()


_MESSAGE_CLASSES: dict[type[Any], type[Message]] = {}
_FIELDS: dict[type[Any], tuple[_Field, ...]] = {}


def _descriptor(kind: type[Any]) -> Descriptor:
    # The stubs name two descriptor classes (Python's and upb's) for the same thing.
    return typing.cast(Descriptor, _message_class(kind).DESCRIPTOR)


def _field_descriptor(message: Message, name: str) -> FieldDescriptor:
    return typing.cast(FieldDescriptor, message.DESCRIPTOR.fields_by_name[name])


def _fields(kind: type[Any]) -> tuple[_Field, ...]:
    found = _FIELDS.get(kind)
    if found is None:
        found = _FIELDS[kind] = _find_fields(kind)
    return found


def _find_fields(kind: type[Any]) -> tuple[_Field, ...]:
    descriptor = _descriptor(kind)
    hints = typing.get_type_hints(kind)
    fields = []
    for field in dataclasses.fields(kind):
        wire_name = _OTHER_FIELD.get((kind.__name__, field.name), field.name)
        hint, optional = _strip_none(hints[field.name])
        choices: tuple[tuple[type[Any], str], ...] = ()
        if wire_name in descriptor.oneofs_by_name:
            choices = _choices(descriptor, wire_name, hint)
        elif wire_name not in descriptor.fields_by_name:
            raise TypeError(f"{descriptor.full_name} has no field {wire_name}")
        fields.append(_Field(field.name, wire_name, hint, optional, choices))
    return tuple(fields)


def _strip_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(rest) < len(typing.get_args(hint)):
            return (functools.reduce(lambda a, b: a | b, rest), True)
    return hint, False


def _choices(descriptor: Descriptor, oneof: str, hint: Any) -> tuple[tuple[type[Any], str], ...]:
    members = descriptor.oneofs_by_name[oneof].fields
    of_message = {typing.cast(Descriptor, field.message_type).full_name: field.name for field in members}
    kinds = typing.get_args(hint) or (hint,)
    return tuple((kind, of_message[_descriptor(kind).full_name]) for kind in kinds)


def _fill(message: Message, value: Any) -> None:
    for field in _fields(type(value)):
        item = getattr(value, field.name)
        if item is None:
            continue
        if field.choices:
            wire_name = next(name for kind, name in field.choices if isinstance(item, kind))
            _fill_one(getattr(message, wire_name), item)
        else:
            _set(message, _field_descriptor(message, field.wire_name), item)


def _fill_one(target: Message, item: Any) -> None:
    target.SetInParent()
    _fill(target, item)


def _set(message: Message, descriptor: FieldDescriptor, item: Any) -> None:
    if _is_map(descriptor):
        getattr(message, descriptor.name).update(dict(item))
    elif descriptor.is_repeated:
        target = getattr(message, descriptor.name)
        if descriptor.message_type is None:
            target.extend(item)
        else:
            for element in item:
                _fill(target.add(), element)
    elif descriptor.message_type is not None:
        _fill_one(getattr(message, descriptor.name), item)
    else:
        setattr(message, descriptor.name, item)


def _is_map(descriptor: FieldDescriptor) -> bool:
    return descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry


def _read(message: Message, kind: type[Any]) -> Any:
    values = {field.name: _read_field(message, kind, field) for field in _fields(kind)}
    return kind(**values)


def _read_field(message: Message, kind: type[Any], field: _Field) -> Any:
    if field.choices:
        present = message.WhichOneof(field.wire_name)
        for choice, wire_name in field.choices:
            if wire_name == present:
                return _read(getattr(message, wire_name), choice)
        if field.optional:
            return None
        raise _malformed(kind, field.name, "none of its alternatives is set")
    descriptor = _field_descriptor(message, field.wire_name)
    item = getattr(message, field.wire_name)
    if _is_map(descriptor):
        return tuple(sorted(item.items()))
    if descriptor.is_repeated:
        element = typing.get_args(field.kind)[0]
        read = _reader(element, kind, field.name)
        return tuple(read(x) for x in item)
    if descriptor.message_type is not None and not message.HasField(field.wire_name):
        if field.optional:
            return None
        raise _malformed(kind, field.name, "it is missing")
    return _reader(field.kind, kind, field.name)(item)


def _reader(element: Any, kind: type[Any], name: str) -> Callable[[Any], Any]:
    if isinstance(element, type) and dataclasses.is_dataclass(element):
        return lambda item: _read(item, element)
    if isinstance(element, type) and issubclass(element, IntEnum):
        return lambda item: _enum(item, element, kind, name)
    return lambda item: item


def _enum(item: int, element: type[IntEnum], kind: type[Any], name: str) -> IntEnum:
    try:
        return element(item)
    except ValueError as error:
        raise _malformed(kind, name, f"{item} is not a known {element.__name__}") from error


def _malformed(kind: type[Any], name: str, why: str) -> Refused:
    return Refused(RefusalCode.MALFORMED, f"{kind.__name__}.{name}: {why}")


MIRRORED: tuple[type[Any], ...] = (
    ids.Incarnation,
    ids.Version,
    ids.RoundId,
    ids.PushId,
    layout.Parameter,
    layout.Layout,
    model_description.TensorDigest,
    *(kind for kind in vars(messages).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)),
)
"""Every class that has a protobuf twin; a test walks it."""
