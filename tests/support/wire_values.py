"""Hypothesis strategies for every value that has a protobuf message, within what the wire's integers can hold."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

from dips.core.layout import AVERAGED_LAYER, DTYPES, Layout, Parameter
from dips.core.net.messages_pb2 import CODECS

_INTEGERS = {
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
}
_SCALARS: dict[type[Any], st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    float: st.floats(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
}

names = st.text("abcdef.0123456789_", min_size=1, max_size=12)
parameters = st.builds(
    Parameter,
    name=names,
    shape=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    dtype=st.sampled_from(sorted(DTYPES)),
    layer=names,
)


def _with_buffers(rows: list[Parameter], n_averaged: int) -> tuple[Parameter, ...]:
    """The last ones are averaged, but not the first."""
    first = max(1, len(rows) - n_averaged)
    averaged = (dataclasses.replace(row, layer=AVERAGED_LAYER, averaged=True) for row in rows[first:])
    return (*rows[:first], *averaged)


layouts = st.builds(
    Layout,
    parameters=st.builds(
        _with_buffers,
        st.lists(parameters, min_size=1, max_size=4, unique_by=lambda p: p.name),
        st.sampled_from((0, 0, 1, 2)),
    ),
    block_elems=st.integers(1, 64),
)

_MADE: dict[type[Any], st.SearchStrategy[Any]] = {Parameter: parameters, Layout: layouts}


def values_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    found = _MADE.get(kind)
    if found is None:
        found = _MADE[kind] = st.builds(kind, **_fields_of(kind))
    return found


def _fields_of(kind: type[Any]) -> dict[str, st.SearchStrategy[Any]]:
    hints = typing.get_type_hints(kind)
    wire_fields = typing.cast(Descriptor, CODECS[kind][0].DESCRIPTOR).fields_by_name
    strategies: dict[str, st.SearchStrategy[Any]] = {}
    for field in dataclasses.fields(kind):
        strategies[field.name] = _of_hint(hints[field.name], wire_fields.get(field.name))
    return strategies


def _of_hint(hint: Any, wire: FieldDescriptor | None) -> st.SearchStrategy[Any]:
    if isinstance(hint, typing.NewType):
        return _of_hint(hint.__supertype__, wire)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return st.one_of(*(_of_hint(option, wire) for option in typing.get_args(hint)))
    if hint is type(None):
        return st.none()
    if typing.get_origin(hint) is tuple:
        return _of_tuple(typing.get_args(hint), wire)
    if dataclasses.is_dataclass(hint):
        return st.deferred(_later(typing.cast(type[Any], hint)))
    if issubclass(hint, IntEnum):
        return st.sampled_from(list(hint))
    if hint is int:
        assert wire is not None
        return _INTEGERS[wire.type]
    return _SCALARS[hint]


def _later(kind: type[Any]) -> Callable[[], st.SearchStrategy[Any]]:
    return lambda: values_of(kind)


def _of_tuple(args: tuple[Any, ...], wire: FieldDescriptor | None) -> st.SearchStrategy[Any]:
    if typing.get_origin(args[0]) is not tuple:
        return st.lists(_of_hint(args[0], wire), max_size=3).map(tuple)
    # A map of the wire: sorted pairs with unique keys.
    key, value = (_SCALARS[kind] for kind in typing.get_args(args[0]))
    return st.dictionaries(key, value, max_size=3).map(lambda pairs: tuple(sorted(pairs.items())))
