"""Copies of a state machine, and a fingerprint of one, cheap enough to be made a hundred thousand times.

Frozen dataclasses, enums and plain values are shared, everything else is copied, closures included (a session keeps the
call that it would repeat as a closure). It must never look at what a class means: what may differ between equal states
is named by attribute in the lens of each machine.
"""

from __future__ import annotations

import hashlib
import marshal
from collections import deque
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, NoneType
from typing import Any, TypeVar

T = TypeVar("T")

_PLAIN = (NoneType, bool, int, float, str, bytes)


class _Kind(Enum):
    PLAIN = 1
    ATOM = 2
    LIST = 3
    DICT = 4
    SET = 5
    DEQUE = 6
    TUPLE = 7
    METHOD = 8
    FUNCTION = 9
    OBJECT = 10


_kinds: dict[type, _Kind] = {}
_EXACT = {
    list: _Kind.LIST,
    dict: _Kind.DICT,
    set: _Kind.SET,
    deque: _Kind.DEQUE,
    tuple: _Kind.TUPLE,
    MethodType: _Kind.METHOD,
    FunctionType: _Kind.FUNCTION,
    BuiltinFunctionType: _Kind.ATOM,
    frozenset: _Kind.ATOM,
}


def _kind_of(cls: type) -> _Kind:
    kind = _kinds.get(cls)
    if kind is None:
        kind = _kinds[cls] = _classify(cls)
    return kind


def _classify(cls: type) -> _Kind:
    if cls in _PLAIN:
        return _Kind.PLAIN
    if cls in _EXACT:
        return _EXACT[cls]
    frozen = is_dataclass(cls) and getattr(cls, "__dataclass_params__").frozen  # noqa: B009
    if frozen or issubclass(cls, Enum | type | int | str | float):
        return _Kind.ATOM
    return _Kind.OBJECT


def clone(thing: T) -> T:
    """A copy that shares with the original only what nobody can change."""
    copied: T = _clone(thing, {})
    return copied


def _clone(item: Any, memo: dict[int, Any]) -> Any:
    cls = item.__class__
    kind = _kinds.get(cls) or _kind_of(cls)
    if kind is _Kind.PLAIN or kind is _Kind.ATOM:
        return item
    found = memo.get(id(item))
    if found is not None:
        return found
    return _COPY[kind](item, memo)


def _clone_list(item: list[Any], memo: dict[int, Any]) -> list[Any]:
    new: list[Any] = []
    memo[id(item)] = new
    new.extend(_clone(part, memo) for part in item)
    return new


def _clone_dict(item: dict[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    new: dict[Any, Any] = {}
    memo[id(item)] = new
    for key, part in item.items():
        new[key] = _clone(part, memo)
    return new


def _clone_set(item: set[Any], memo: dict[int, Any]) -> set[Any]:
    new = memo[id(item)] = set(item)  # what can be hashed cannot change
    return new


def _clone_deque(item: deque[Any], memo: dict[int, Any]) -> deque[Any]:
    new: deque[Any] = deque(maxlen=item.maxlen)
    memo[id(item)] = new
    new.extend(_clone(part, memo) for part in item)
    return new


def _clone_tuple(item: tuple[Any, ...], memo: dict[int, Any]) -> tuple[Any, ...]:
    return tuple([_clone(part, memo) for part in item])


def _clone_method(item: MethodType, memo: dict[int, Any]) -> MethodType:
    return MethodType(item.__func__, _clone(item.__self__, memo))


def _clone_function(item: FunctionType, memo: dict[int, Any]) -> FunctionType:
    if not item.__closure__:
        return item
    cells = tuple(CellType(_clone(cell.cell_contents, memo)) for cell in item.__closure__)
    new = FunctionType(item.__code__, item.__globals__, item.__name__, item.__defaults__, cells)
    new.__kwdefaults__ = item.__kwdefaults__
    return new


def _clone_object(item: Any, memo: dict[int, Any]) -> Any:
    new = item.__class__.__new__(item.__class__)
    memo[id(item)] = new
    fields = new.__dict__
    for name, part in item.__dict__.items():
        kind = _kinds.get(part.__class__) or _kind_of(part.__class__)
        fields[name] = part if kind is _Kind.PLAIN or kind is _Kind.ATOM else _clone(part, memo)
    return new


_COPY: dict[_Kind, Callable[[Any, dict[int, Any]], Any]] = {
    _Kind.LIST: _clone_list,
    _Kind.DICT: _clone_dict,
    _Kind.SET: _clone_set,
    _Kind.DEQUE: _clone_deque,
    _Kind.TUPLE: _clone_tuple,
    _Kind.METHOD: _clone_method,
    _Kind.FUNCTION: _clone_function,
    _Kind.OBJECT: _clone_object,
}


class Fingerprints:
    """Digests of things: equal for things that differ only in the attributes named `blind` (see Lens).

    Frozen values are numbered as they are met, so digests compare within one object of this class only.
    """

    def __init__(self, blind: frozenset[str]) -> None:
        self._blind = blind
        self._atoms: dict[Any, int] = {}

    def digest(self, thing: Any) -> bytes:
        """128 bits: among a million states two differing ones collide with a chance of 1e-27."""
        # marshal's version 2 writes no references, so equal structures give equal bytes.
        return hashlib.blake2b(marshal.dumps(self._plain(thing, {}), 2), digest_size=16).digest()

    def _atom(self, item: Any) -> tuple[str, int]:
        return ("@", self._atoms.setdefault((item.__class__, item), len(self._atoms)))

    def _plain(self, item: Any, seen: dict[int, int]) -> Any:
        cls = item.__class__
        kind = _kinds.get(cls) or _kind_of(cls)
        if kind is _Kind.PLAIN:
            return item
        if kind is _Kind.ATOM:
            return self._atom(item)
        if kind is _Kind.OBJECT:
            return self._object(item, seen)
        if kind is _Kind.DICT:
            return ("d", sorted([(self._key(key), self._plain(part, seen)) for key, part in item.items()], key=_first))
        if kind is _Kind.SET:
            return ("s", sorted(self._key(part) for part in item))
        if kind is _Kind.METHOD:
            return ("m", item.__func__.__qualname__)
        if kind is _Kind.FUNCTION:
            cells = [cell.cell_contents for cell in item.__closure__ or ()]
            return ("f", item.__qualname__, [self._plain(part, seen) for part in cells])
        return [self._plain(part, seen) for part in item]

    def _key(self, key: Any) -> str:
        return repr(key if key.__class__ in _PLAIN else self._atom(key))

    def _object(self, item: Any, seen: dict[int, int]) -> Any:
        number = seen.get(id(item))
        if number is not None:
            return ("#", number)
        seen[id(item)] = len(seen)
        blind = self._blind
        fields = [(name, self._plain(part, seen)) for name, part in item.__dict__.items() if name not in blind]
        return (item.__class__.__name__, fields)


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]
