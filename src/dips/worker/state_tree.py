"""Converts nested state (an optimizer's state_dict, say) to JSON and a flat table of tensors, and back. No pickle.

Marks distinguish what JSON cannot: a tuple from a list, keys that are numbers, NaN, bytes. Only containers, numbers,
texts, bytes and tensors are accepted: what cannot be read back exactly must not be written. Knows no framework: the
caller says what a tensor is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dips.core.errors import ConfigError

JsonTree = Any

MAX_DEPTH = 100


class StateTreeError(ConfigError):
    """A state has a value that a checkpoint cannot hold; the sentence says where."""


def flatten(state: object, mark_of: Callable[[object], str | None]) -> tuple[JsonTree, dict[str, Any]]:
    """A JSON skeleton and the tensors by name. mark_of: a word for the kind of a tensor; None for other values.

    Raises StateTreeError naming the place of a value that cannot be kept.
    """
    writer = _Writer(mark_of)
    return writer.skeleton(state, (), 0), writer.tensors


def unflatten(skeleton: JsonTree, tensor: Callable[[str, str], Any]) -> Any:
    """The inverse of flatten; tensor(kind, name) returns the tensors. Raises StateTreeError for an invalid skeleton."""
    try:
        return _Reader(tensor).value(skeleton)
    except (ValueError, TypeError, RecursionError) as error:
        raise StateTreeError(f"a state's skeleton cannot be read ({error}): it is not one of this release") from error


class _Writer:
    def __init__(self, mark_of: Callable[[object], str | None]) -> None:
        self._mark_of = mark_of
        self.tensors: dict[str, Any] = {}

    def skeleton(self, value: object, path: tuple[str, ...], depth: int) -> JsonTree:
        if depth > MAX_DEPTH:
            raise StateTreeError(f"the state at {_place(path)} is nested deeper than {MAX_DEPTH}: it may hold itself")
        mark = self._mark_of(value)
        if mark is not None:
            return {"x": [mark, self._named(value, path)]}
        if isinstance(value, Mapping):
            return {"d": [self._pair(key, item, path, depth) for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            items = [self.skeleton(item, (*path, str(i)), depth + 1) for i, item in enumerate(value)]
            return {"l" if isinstance(value, list) else "t": items}
        return _leaf(value, path)

    def _pair(self, key: object, item: object, path: tuple[str, ...], depth: int) -> list[JsonTree]:
        return [_leaf(key, path), self.skeleton(item, (*path, str(key)), depth + 1)]

    def _named(self, tensor: object, path: tuple[str, ...]) -> str:
        """Name a tensor by its path. Paths may coincide ('a.b' as one key, or as two): then a number is appended."""
        plain = name = ".".join(path) or "state"
        n = 1
        while name in self.tensors:
            n += 1
            name = f"{plain}#{n}"
        self.tensors[name] = tensor
        return name


def _leaf(value: object, path: tuple[str, ...]) -> JsonTree:
    if value is None or isinstance(value, bool):
        return value
    # Subclasses (an IntEnum, say) would come back as something else.
    if type(value) in (int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"f": str(float(value))}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    raise StateTreeError(
        f"the state at {_place(path)} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold: let state_dict() return tensors, numbers, texts and containers of these"
    )


class _Reader:
    def __init__(self, tensor: Callable[[str, str], Any]) -> None:
        self._tensor = tensor

    def value(self, skeleton: JsonTree) -> Any:
        if not isinstance(skeleton, dict):
            if isinstance(skeleton, list):
                raise StateTreeError("a state's skeleton holds a bare list: it is not one of this release")
            return skeleton
        if len(skeleton) != 1:
            raise StateTreeError("a state's skeleton has a mark too many: it is not one of this release")
        ((mark, inner),) = skeleton.items()
        return self._marked(mark, inner)

    def _marked(self, mark: str, inner: JsonTree) -> Any:
        match mark:
            case "x":
                kind, name = inner
                return self._tensor(kind, name)
            case "d":
                return {self.value(key): self.value(item) for key, item in inner}
            case "l":
                return self._items(inner)
            case "t":
                return tuple(self._items(inner))
            case "f":
                return float(inner)
            case "b":
                return bytes.fromhex(inner)
        raise StateTreeError(f"a state's skeleton has {mark}: {inner!r}, which is not a mark of this release")

    def _items(self, inner: Sequence[JsonTree]) -> list[Any]:
        return [self.value(item) for item in inner]


def _place(path: tuple[str, ...]) -> str:
    return repr(".".join(path)) if path else "its top"
