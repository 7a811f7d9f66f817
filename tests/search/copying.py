"""Copies and fingerprints state machines, cheaply enough for a hundred thousand times.

Frozen dataclasses, enums and plain values are shared, everything else is copied, closures included (a session keeps the
call that it would repeat as a closure). It must never depend on what a class means: the attributes that
may differ between equal states are named for each machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import is_dataclass
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, NoneType
from typing import Any, Generic, TypeVar

from search.state import SearchViolation, key_of

T = TypeVar("T")
Memo = dict[int, Any]

PLAIN: frozenset[type] = frozenset((NoneType, bool, int, float, str, bytes))
"""Classes that marshal writes directly."""

_shared: set[type] = {*PLAIN, frozenset, BuiltinFunctionType}
"""Classes whose values are never changed; extended when new classes occur."""


def share(cls: type) -> None:
    """Declare that values of this mutable class are never changed; it must compare by identity."""
    _shared.add(cls)


def is_frozen(cls: type) -> bool:
    """Whether values of this class are shared between copies, and numbered by fingerprints."""
    if cls in _shared:
        return True
    frozen = is_dataclass(cls) and getattr(cls, "__dataclass_params__").frozen  # noqa: B009
    if frozen or issubclass(cls, Enum | type | int | str | float):
        _shared.add(cls)
        return True
    return False


def clone(thing: T) -> T:
    """A copy that shares only immutable values with the original."""
    copied: T = _clone(thing, {})
    return copied


def _clone(item: Any, memo: Memo) -> Any:
    cls = item.__class__
    if cls in _shared:
        return item
    found = memo.get(id(item))
    if found is not None:
        return found
    return _COPIERS[cls](item, memo)


def _clone_list(item: list[Any], memo: Memo) -> list[Any]:
    new: list[Any] = []
    memo[id(item)] = new
    new.extend([_clone(part, memo) for part in item])
    return new


def _clone_dict(item: dict[Any, Any], memo: Memo) -> dict[Any, Any]:
    new: dict[Any, Any] = item.copy()
    memo[id(item)] = new
    for key, part in item.items():
        if part.__class__ not in _shared:
            new[key] = _clone(part, memo)
    return new


def _clone_set(item: set[Any], memo: Memo) -> set[Any]:
    new = memo[id(item)] = set(item)  # a hashable value cannot change
    return new


def _clone_deque(item: deque[Any], memo: Memo) -> deque[Any]:
    new: deque[Any] = deque(maxlen=item.maxlen)
    memo[id(item)] = new
    new.extend([_clone(part, memo) for part in item])
    return new


def _clone_tuple(item: tuple[Any, ...], memo: Memo) -> tuple[Any, ...]:
    return tuple([_clone(part, memo) for part in item])


def _clone_columns(item: Any, memo: Memo) -> Any:
    return item.__class__(*[_clone(part, memo) for part in item])


def _clone_method(item: MethodType, memo: Memo) -> MethodType:
    return MethodType(item.__func__, _clone(item.__self__, memo))


def _clone_function(item: FunctionType, memo: Memo) -> FunctionType:
    if not item.__closure__:
        return item
    cells = tuple(CellType(_clone(cell.cell_contents, memo)) for cell in item.__closure__)
    new = FunctionType(item.__code__, item.__globals__, item.__name__, item.__defaults__, cells)
    new.__kwdefaults__ = item.__kwdefaults__
    return new


def _clone_object(item: Any, memo: Memo) -> Any:
    new = item.__class__.__new__(item.__class__)
    memo[id(item)] = new
    fields = new.__dict__
    fields.update(item.__dict__)
    shared = _shared
    for name, part in item.__dict__.items():
        if part.__class__ not in shared:
            fields[name] = _clone(part, memo)
    return new


class _Copiers(dict[type, Callable[[Any, Memo], Any]]):
    """The copy function of each class; a new class is copied as an ordinary object, unless it is frozen."""

    def __missing__(self, cls: type) -> Callable[[Any, Memo], Any]:
        mutable = _clone_columns if issubclass(cls, tuple) else _clone_object  # a tuple with names: columns of a table
        self[cls] = (lambda item, memo: item) if is_frozen(cls) else mutable
        return self[cls]


_COPIERS = _Copiers(
    {
        list: _clone_list,
        dict: _clone_dict,
        set: _clone_set,
        deque: _clone_deque,
        tuple: _clone_tuple,
        MethodType: _clone_method,
        FunctionType: _clone_function,
    }
)


class Fingerprints:
    """Digests of objects: equal for objects that differ only in the attributes named `blind`.

    Frozen values are numbered in order of occurrence, so digests compare only within one object of this class.
    """

    def __init__(self, blind: frozenset[str]) -> None:
        self._blind = blind
        self._atoms: dict[Any, int] = {}
        self._met: dict[int, tuple[Any, Any]] = {}
        self._orders: dict[type, list[tuple[list[str], list[str]]]] = {}

        self._readers = _Readers(self)

    def digest(self, thing: Any) -> bytes:
        """128 bits: among a million states two differing ones collide with a chance of 1e-27."""
        return key_of(self._plain(thing, {}))

    def _atom(self, item: Any) -> Any:
        """The number of a frozen value. Copies share them, so most are known; the value is kept so that its id stays
        unique."""
        met = self._met.get(id(item))
        if met is None:
            number = self._atoms.setdefault((item.__class__, item), len(self._atoms))
            met = self._met[id(item)] = (item, ("@", number))
        return met[1]

    def _plain(self, item: Any, seen: dict[int, int]) -> Any:
        cls = item.__class__
        if cls in PLAIN:
            return item
        return self._readers[cls](item, seen)

    def _of_atom(self, item: Any, seen: dict[int, int]) -> Any:
        return self._atom(item)

    def _of_dict(self, item: Any, seen: dict[int, int]) -> Any:
        return ("d", sorted([(self._key(key), self._plain(part, seen)) for key, part in item.items()], key=_first))

    def _of_sequence(self, item: Any, seen: dict[int, int]) -> Any:
        return [self._plain(part, seen) for part in item]

    def _of_set(self, item: Any, seen: dict[int, int]) -> Any:
        return ("s", sorted(self._key(part) for part in item))

    def _of_method(self, item: Any, seen: dict[int, int]) -> Any:
        return ("m", item.__func__.__qualname__)

    def _of_function(self, item: Any, seen: dict[int, int]) -> Any:
        return ("f", item.__qualname__, [self._plain(cell.cell_contents, seen) for cell in item.__closure__ or ()])

    def _key(self, key: Any) -> str:
        return repr(key if key.__class__ in PLAIN else self._atom(key))

    def _of_object(self, item: Any, seen: dict[int, int]) -> Any:
        number = seen.get(id(item))
        if number is not None:
            return ("#", number)
        seen[id(item)] = len(seen)
        fields = item.__dict__
        order, looked_at = self._fields_of(item.__class__, fields)
        plain = self._plain
        values = [part if (part := fields[name]).__class__ in PLAIN else plain(part, seen) for name in looked_at]
        return (item.__class__.__name__, order, values)

    def _fields_of(self, cls: type, fields: dict[str, Any]) -> tuple[int, list[str]]:
        """The set of an object's attributes, as a number, and those of them that count."""
        known = self._orders.get(cls)
        if known is None:
            known = self._orders[cls] = []
        names = list(fields)
        for number, (order, looked_at) in enumerate(known):
            if order == names:
                return number, looked_at
        known.append((names, [name for name in names if name not in self._blind]))
        return len(known) - 1, known[-1][1]


class _Readers(dict[type, Callable[[Any, dict[int, int]], Any]]):
    """The read function of each class; a new class is read as an ordinary object, unless it is frozen."""

    def __init__(self, prints: Fingerprints) -> None:
        super().__init__(
            {
                dict: prints._of_dict,
                list: prints._of_sequence,
                tuple: prints._of_sequence,
                deque: prints._of_sequence,
                set: prints._of_set,
                MethodType: prints._of_method,
                FunctionType: prints._of_function,
            }
        )
        self._prints = prints

    def __missing__(self, cls: type) -> Callable[[Any, dict[int, int]], Any]:
        mutable = self._prints._of_sequence if issubclass(cls, tuple) else self._prints._of_object
        self[cls] = self._prints._of_atom if is_frozen(cls) else mutable
        return self[cls]


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


# ---- arena -----------------------------------------------------------------------------------------------------------
#
# Numbers the local states of machines: each distinct one is kept once, and each step from it is made once.
#
# A global state is then a short tuple of numbers, and most of a search is looking things up. It must never hand out the
# kept machine itself to be changed: a step works on a copy.


M = TypeVar("M")

Out = tuple[Any, ...]
"""An output of a step: its kind and values."""

BLIND = frozenset(
    {"story", "_story", "config", "_config", "recent", "_calls", "_table", "_label", "since_s", "now_s", "last_wall_s"}
    | {"layout", "_layout", "data_plan", "_plan", "welcome", "_changes", "note", "rounds_aborted", "aborted_of"}
    | {"schedule", "link_rates", "counted", "why_undecided"}
)
"""Attributes that no decision reads, or that never differ within one search. schedule: which slave a transfer goes to
first, which no other decision reads. link_rates, counted, why_undecided: for people only."""


class Arena(Generic[M]):
    """All local states of one kind of machine. canonical: makes states equal that differ only in spent numbers.

    twice: make each step twice, and demand the same of both (I14).
    """

    def __init__(self, canonical: Callable[[M], None], twice: bool = False) -> None:
        self._canonical = canonical
        self._twice = twice
        self._prints = Fingerprints(BLIND)
        self._ids: dict[bytes, int] = {}
        self._memo: dict[tuple[int, Hashable], tuple[int, tuple[Out, ...]]] = {}
        self.things: list[M] = []

    def __getitem__(self, number: int) -> M:
        """The state with this number, to be read and never changed."""
        return self.things[number]

    def enter(self, thing: M) -> int:
        """The number of this state; `thing` belongs to the arena from now on."""
        self._canonical(thing)
        digest = self._prints.digest(thing)
        number = self._ids.get(digest)
        if number is None:
            number = self._ids[digest] = len(self.things)
            self.things.append(thing)
        return number

    def step(self, number: int, key: Hashable, act: Callable[[M], list[Out]]) -> tuple[int, tuple[Out, ...]]:
        """The state after `act` and what it did; `key` must say everything that act depends on."""
        found = self._memo.get((number, key))
        if found is None:
            thing = clone(self.things[number])
            outs = tuple(act(thing))
            found = self._memo[number, key] = (self.enter(thing), outs)
            if self._twice:
                self._demand_the_same(found, clone(self.things[number]), key, act)
        return found

    def _demand_the_same(
        self, found: tuple[int, tuple[Out, ...]], thing: M, key: Hashable, act: Callable[[M], list[Out]]
    ) -> None:
        outs = tuple(act(thing))
        if (self.enter(thing), outs) != found:
            raise SearchViolation("I14", f"the same step, {key}, of the same state has two outcomes")
