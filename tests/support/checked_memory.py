"""Compiled functions run where no access outside their buffers goes unnoticed, in two ways.

Twins: the same source, run by the interpreter. Each function that works on addresses (core/math/simd_numba.py, libzmq's
calls) is replaced by one that raises Outside unless every byte lies in a buffer that the kernel was given. Indices of
arrays are checked by numpy. Slow, but it names the line, and sees reads that a machine allows.

Guarded memory: the compiled code itself, on buffers that end at a page that must not be touched, and begin behind one.
The processor checks, and ends the process: run it by in_child().
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
import types as python_types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic
from numba.core.types import ExternalFunction
from numpy.typing import NDArray

from dips.core.math import simd_numba
from dips.core.net import zmq_numba


class Outside(AssertionError):
    """An access outside the buffers, or to one in a way that is not allowed."""


@dataclass
class Span:
    """Bytes [start, stop) that may be read, and written if writable."""

    start: int
    stop: int
    writable: bool
    keep: object = None
    """What must live as long."""
    live: bool = True
    """False after remove(): addresses of it may still be around."""


class Address(int):
    """An address within a buffer: what is computed from it by + and - must lie in the same buffer, not in another."""

    span: Span

    @classmethod
    def into(cls, span: Span, place: int) -> Address:
        made = cls(place)
        made.span = span
        return made

    def __add__(self, other: int) -> Address:
        return Address.into(self.span, int(self) + int(other))

    __radd__ = __add__

    def __sub__(self, other: int) -> int:
        difference = int(self) - int(other)
        return difference if isinstance(other, Address) else Address.into(self.span, difference)


class Memory:
    def __init__(self) -> None:
        self._spans: dict[int, Span] = {}
        self._seen: dict[tuple[int, int], Span] = {}
        self._trusts = False

    def add(self, array: NDArray[Any], *, writable: bool = True) -> Address:
        """A buffer of its own, until remove()."""
        start = simd_numba.address(array)
        span = self._spans[start] = Span(start, start + array.nbytes, writable, array)
        return Address.into(span, start)

    def remove(self, start: int) -> None:
        self._spans.pop(start).live = False

    def of_array(self, array: NDArray[Any] | ArrayAt) -> int:
        """The address of an array that the kernel has: its own bytes, no more of the array that it is a part of."""
        if isinstance(array, ArrayAt):
            return array.at()
        assert array.size == 0 or array.flags.c_contiguous, "the address of an array with gaps"
        start = simd_numba.address(array)
        span = Span(start, start + array.nbytes, array.flags.writeable, array)
        return Address.into(self._seen.setdefault((span.start, span.stop), span), start)

    def forget(self) -> None:
        self._seen.clear()

    def check(self, place: int, n_bytes: int, *, write: bool = False) -> None:
        """Raises Outside unless these bytes lie in one buffer."""
        place, n_bytes = place if isinstance(place, Address) else int(place), int(n_bytes)
        if n_bytes == 0 or self._trusts:
            return
        spans = [place.span] if isinstance(place, Address) else [*self._spans.values(), *self._seen.values()]
        for span in spans:
            if span.live and span.start <= place and 0 <= n_bytes <= span.stop - place:
                if write and not span.writable:
                    raise Outside(f"{n_bytes} bytes would be written into a buffer that may only be read")
                return
        near = min(spans, key=lambda span: min(abs(place - span.start), abs(place - span.stop)), default=None)
        where = "none" if near is None else f"{near.stop - near.start} bytes, the access begins at {place - near.start}"
        raise Outside(f"{'write' if write else 'read'} of {n_bytes} bytes outside every buffer; the nearest: {where}")

    @contextmanager
    def trusting(self) -> Iterator[None]:
        """For calls of Python, whose memory is not known here."""
        self._trusts = True
        try:
            yield
        finally:
            self._trusts = False

    def may_write(self, place: int, n_bytes: int) -> bool:
        try:
            self.check(place, n_bytes, write=True)
        except Outside:
            return False
        return True

    def read(self, place: int, n_bytes: int) -> bytes:
        self.check(place, n_bytes)
        return ctypes.string_at(int(place), int(n_bytes))

    def write(self, place: int, data: bytes) -> None:
        self.check(place, len(data), write=True)
        ctypes.memmove(int(place), data, len(data))


class ArrayAt:
    """What array_at returns: an array that checks what is taken out of it, by an index or a slice, when it is taken."""

    def __init__(self, memory: Memory, place: int, n_elems: int, dtype: np.dtype[Any]) -> None:
        assert n_elems >= 0, "an array of a negative size"
        self._memory, self._place, self._n, self.dtype = memory, place, n_elems, dtype
        self.itemsize = dtype.itemsize

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int | slice) -> Any:
        return self._part(index)[0] if not isinstance(index, slice) else self._part(index)

    def __setitem__(self, index: int | slice, value: Any) -> None:
        self._part(index)[:] = value

    def at(self) -> int:
        return self._place

    def _part(self, index: int | slice) -> NDArray[Any]:
        """The elements, in place; read-only where the buffer is."""
        if not isinstance(index, slice):
            if not -self._n <= index < self._n:
                raise Outside(f"element {index} of {self._n}")
            index = slice(index % self._n, index % self._n + 1)
        start, stop, step = index.indices(self._n)
        assert step == 1, "a slice with steps"
        n_bytes = max(0, stop - start) * self.itemsize
        if n_bytes == 0:
            return np.zeros(0, self.dtype)
        place = self._place + start * self.itemsize
        self._memory.check(place, n_bytes)
        data: Any = (ctypes.c_uint8 * n_bytes).from_address(int(place))
        part: NDArray[Any] = np.frombuffer(data, self.dtype)
        part.flags.writeable = self._memory.may_write(place, n_bytes)
        return part


class Twins:
    """Twins of compiled functions over one memory.

    libzmq: what its functions do, by their C names. instead: replaces these functions, which have tests of their own.
    """

    def __init__(
        self,
        memory: Memory,
        libzmq: Mapping[str, Callable[..., Any]] | None = None,
        instead: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        self.memory = memory
        self._libzmq = libzmq or {}
        self._known: dict[int, Any] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        self._kept: list[Any] = []
        for original, twin in {**_intrinsics(memory), **(instead or {})}.items():
            self._know(original, twin)

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        twin = self._of(function)

        def run(*arguments: Any) -> Any:
            try:
                with np.errstate(all="ignore"):
                    return twin(*arguments)
            finally:
                self.memory.forget()

        return run

    def _know(self, original: Any, twin: Any) -> Any:
        self._known[id(original)] = twin
        self._kept.append(original)  # so that no other object gets its id
        return twin

    def _of(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, Dispatcher):
            return self._know(value, self._twin(value.py_func))
        if isinstance(value, _Intrinsic):
            return self._know(value, _no_twin_of(f"the intrinsic {value._name}"))
        if isinstance(value, ExternalFunction):
            name = str(value.symbol).removeprefix("dips_")
            return self._know(value, self._libzmq.get(name) or _no_twin_of(name))
        if isinstance(value, python_types.FunctionType) and value.__module__.startswith("dips."):
            return self._know(value, self._twin(value))
        return value

    def _twin(self, function: python_types.FunctionType) -> Callable[..., Any]:
        twin = python_types.FunctionType(
            function.__code__,
            self._globals_of(function),
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        twin.__kwdefaults__ = function.__kwdefaults__
        return twin

    def _globals_of(self, function: python_types.FunctionType) -> dict[str, Any]:
        module = function.__globals__
        names = self._globals.get(id(module))
        if names is None:
            names = self._globals[id(module)] = dict(module)  # known before it is filled: modules name each other
            for name, value in module.items():
                names[name] = self._of(value)
        return names


class Interpreted:
    """A module of kernels whose functions are twins, for tests that compare the module with its reference."""

    def __init__(self, module: python_types.ModuleType) -> None:
        memory = Memory()
        self._module, self._twins = module, Twins(memory, instead={simd_numba.address: memory.of_array})
        self.address = memory.add

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self._twins.of(value) if isinstance(value, Dispatcher | python_types.FunctionType) else value


def _no_twin_of(name: str) -> Callable[..., Any]:
    def complain(*arguments: Any) -> Any:
        raise NotImplementedError(f"checked_memory has no twin of {name}")

    return complain


def _intrinsics(memory: Memory) -> dict[Any, Callable[..., Any]]:
    """Twins of simd_numba's intrinsics. A vector is an array of its elements, so numpy's operators are those of it."""

    def vector(array: NDArray[Any], index: int) -> slice:
        lanes = simd_numba.VECTOR_BYTES // array.itemsize
        n_elems = array.size if isinstance(array, np.ndarray) else len(array)
        if not 0 <= index <= n_elems - lanes:
            raise Outside(f"a vector of {lanes} elements at {index} of {n_elems}")
        return slice(index, index + lanes)

    def flat(array: Any) -> Any:
        return array.reshape(-1) if isinstance(array, np.ndarray) else array

    def load(array: NDArray[Any], index: int) -> Any:
        return flat(array)[vector(array, index)].copy()

    def store(array: NDArray[Any], index: int, value: NDArray[Any]) -> None:
        flat(array)[vector(array, index)] = value

    def stream(array: NDArray[Any], index: int, value: NDArray[Any]) -> None:
        assert (memory.of_array(array) + index * array.itemsize) % simd_numba.VECTOR_BYTES == 0, "not aligned"
        store(array, index, value)

    def array_at(place: int, n_elems: int, dtype: type) -> ArrayAt:
        return ArrayAt(memory, place, int(n_elems), np.dtype(dtype))

    def peek(n_bytes: int) -> Callable[[int], np.uint64]:
        return lambda place: np.uint64(int.from_bytes(memory.read(place, n_bytes), sys.byteorder))

    def atomic_add(place: int, value: int) -> np.int64:
        assert int(place) % 8 == 0, "not aligned"
        before = int.from_bytes(memory.read(place, 8), sys.byteorder, signed=True)
        memory.write(place, (before + int(value)).to_bytes(8, sys.byteorder, signed=True))
        return np.int64(before)

    def atomic_get(place: int) -> np.int64:
        return np.int64(np.frombuffer(memory.read(place, 8), np.int64)[0])

    def load_words(place: int) -> NDArray[np.uint64]:
        return np.frombuffer(memory.read(place, simd_numba.VECTOR_BYTES), np.uint64)

    def stream_words(place: int, value: NDArray[np.uint64]) -> None:
        assert int(place) % simd_numba.VECTOR_BYTES == 0, "not aligned"
        memory.write(place, value.tobytes())

    def step_words(acc: NDArray[np.uint64], data: NDArray[np.uint64], secret: NDArray[np.uint64]) -> NDArray[np.uint64]:
        key = data ^ secret
        return acc + data[[1, 0, 3, 2, 5, 4, 7, 6]] + (key & np.uint64(0xFFFFFFFF)) * (key >> np.uint64(32))

    def mulhi_fold(a: np.uint64, b: np.uint64) -> np.uint64:
        product = int(a) * int(b)
        return np.uint64((product >> 64) ^ (product & (2**64 - 1)))

    def no_effect(*arguments: Any) -> None:
        """Of a prefetch, which may be of anything, and of a fence."""

    return {
        simd_numba.load: load,
        simd_numba.store: store,
        simd_numba.stream: stream,
        simd_numba.prefetch: no_effect,
        simd_numba.fence: no_effect,
        simd_numba.splat: lambda value: np.full(simd_numba.VECTOR_BYTES // value.itemsize, value),
        simd_numba.widen: lambda value: tuple(np.split(value.astype(np.float64), 2)),
        simd_numba.multiply_add: lambda a, b, c: a * b + c,
        simd_numba.array_at: array_at,
        simd_numba.address_of: memory.of_array,
        simd_numba.peek8: peek(1),
        simd_numba.peek32: peek(4),
        simd_numba.peek64: peek(8),
        simd_numba.atomic_add: atomic_add,
        simd_numba.atomic_get: atomic_get,
        simd_numba.mulhi_fold: mulhi_fold,
        simd_numba.load_words: load_words,
        simd_numba.store_words: lambda place, value: memory.write(place, value.tobytes()),
        simd_numba.stream_words: stream_words,
        simd_numba.as_words: lambda value: value.view(np.uint64),
        simd_numba.step_words: step_words,
        simd_numba.scramble_words: lambda acc, secret: (acc ^ (acc >> np.uint64(47)) ^ secret) * np.uint64(0x9E3779B1),
        zmq_numba.monotonic_ns: time.monotonic_ns,
    }


class Guarded:
    """A buffer of n_bytes between two forbidden pages: ends at the second, or begins behind the first."""

    def __init__(self, n_bytes: int, *, at_end: bool = True) -> None:
        page = mmap.PAGESIZE
        n_pages = max(1, -(-n_bytes // page))
        self._mapping = mmap.mmap(-1, (n_pages + 2) * page)
        whole = np.frombuffer(self._mapping, np.uint8)
        first = page + (n_pages * page - n_bytes if at_end else 0)
        self.bytes = whole[first : first + n_bytes]
        start = simd_numba.address(whole)
        _forbid(start, page)
        _forbid(start + (n_pages + 1) * page, page)

    def array(self, dtype: type) -> NDArray[Any]:
        return self.bytes.view(dtype)


def in_guards(array: NDArray[Any]) -> NDArray[Any]:
    copy: NDArray[Any] = Guarded(array.nbytes).bytes.view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _forbid(start: int, n_bytes: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


_libc = ctypes.CDLL(None, use_errno=True)


def in_child(function: Callable[..., None], *arguments: object, timeout_s: float = 300.0) -> str:
    """Run a module's function in a process of its own. Returns why it did not end well, and its last words; "": it did.

    arguments: what repr() writes and Python reads.
    """
    call = f"from {function.__module__} import {function.__name__} as run; run(*{arguments!r})"
    command = [sys.executable, "-X", "faulthandler", "-c", call]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    if ended.returncode == 0:
        return ""
    died = f"signal {signal.Signals(-ended.returncode).name}" if ended.returncode < 0 else f"code {ended.returncode}"
    return f"{function.__name__} ended with {died}: {ended.stderr[-3000:]}"
