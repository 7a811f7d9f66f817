"""Writes a push's chunks for the wire: the parameters unchanged, or differences to the base in fewer bits.

Shapes: every vector is float32 of n_elems: the whole model's (the layout's), or a share's of it (core/layout.py). A
chunk's bytes are a function of theta, base and residual alone, so that one that is sent again is the same to the bit.
numba is imported only where differences are sent, and for large models. Raises ConfigError from kernels() when it is
not installed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dips.core.errors import ConfigError
from dips.core.ids import Version
from dips.core.layout import FLOAT32_BYTES, Buffer, Chunk, Layout, Share
from dips.core.release import how_to_install
from dips.core.wire import Codec, encoded_bytes

_logger = logging.getLogger("dips.data")

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]


class Kernels(Protocol):
    """The part of dips.core.math.wire_numba that a worker needs; dips.core.math.wire_numpy says what each computes."""

    def encode(self, codec: Codec, now: F32, base: F32, residual: F32 | None, payload: U8) -> None: ...

    def decode(self, codec: Codec, base: F32, payload: U8, out: F32) -> None: ...

    def keep_residual(self, codec: Codec, now: F32, base: F32, residual: F32) -> None: ...

    def warm_up(self) -> None: ...


def kernels() -> Kernels:
    """The compiled conversions. Raises ConfigError without numba."""
    try:
        from dips.core.math import wire_numba
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        raise ConfigError(
            f"differences in fewer bits need numba, which is not installed: {how_to_install('worker')}, or leave "
            "wire_dtype out"
        ) from error
    return wire_numba


def warm_up(tell: Callable[..., None]) -> None:
    """Compile the conversions, or load them. tell: called with (kernel, its number, number of kernels, kept=where code
    is kept). Raises ConfigError without numba.
    """
    kernels()
    from dips.core.math import wire_numba
    from dips.core.math.compiling import watched, where_kept

    with watched(partial(tell, kept=where_kept()), wire_numba):
        wire_numba.warm_up()


WORTH_COMPILING_BYTES = 32 << 20
"""Compiled code copies and carries models from this size on: below it, importing numba costs more than it saves."""

HashingCopy = Callable[[Buffer, Buffer], int]
"""Copies the second buffer into the first, which is as long; returns its checksum (core/layout.py)."""


def hashing_copy(n_bytes: int) -> HashingCopy | None:
    """A copy that takes the checksum in the same pass, for models of so many bytes; None: hash what was copied."""
    return _hashing_copy() if n_bytes >= WORTH_COMPILING_BYTES else None


@lru_cache(maxsize=1)
def _hashing_copy() -> HashingCopy | None:
    """Compiled, or loaded: once for each process, and said where it takes long. None without numba."""
    try:
        from dips.core.math import landing_numba
        from dips.core.math.compiling import watched, where_kept
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "llvmlite"):
            raise
        return None

    def tell(kernel: str, number: int, n_kernels: int) -> None:
        if number == 1:
            _logger.info("compiling the copy of a model; %s", where_kept())

    with watched(tell, landing_numba):
        landing_numba.copy_chunk(bytearray(1), bytes(1))
    return landing_numba.copy_chunk


def bytes_of(flat: F32) -> U8:
    """The vector's memory, without a copy."""
    return flat.view(np.uint8)


@dataclass(frozen=True)
class Difference:
    """The base of the differences;"""

    base: F32
    residual: F32 | None = None  # the rounding error of earlier pushes, None: zero


@dataclass(frozen=True)
class PulledDifferences:
    """The payloads of a pull that fetches differences: what readers of each version after `base` hold, less what those
    of the version before do."""

    codec: Codec
    base: Version  # the version that theta is
    theta: F32  # as long as what the pull fills, and not changed meanwhile
    n: int  # versions from base to the one that is fetched: so many differences of a chunk follow each other

    def payload_bytes(self, length_bytes: int) -> int:
        """Length of the payload of a chunk of so many bytes of parameters."""
        return self.n * encoded_bytes(self.codec, length_bytes // FLOAT32_BYTES)

    def land(self, here: slice, payload: memoryview, into: F32) -> None:
        """Compute these elements of `into`. Raises ValueError for a payload of another length."""
        before, each = self.theta[here], len(payload) // self.n
        for start in range(0, each * self.n, each):
            part = np.frombuffer(payload[start : start + each], np.uint8)
            kernels().decode(self.codec, before, part, into[here])
            before = into[here]


class Places:
    """The places of chunks in a flat vector: the whole one, or a share's, which has its own chunks only."""

    def __init__(self, layout: Layout, share: Share | None = None) -> None:
        """share: None: the whole model. A chunk that it does not own has no place: ValueError."""
        self._start_elem = [block.start_elem for block in layout.blocks]
        self._share = share

    def first_bytes(self, blocks: I64, offsets_bytes: I64) -> I64:
        """Where chunks at these offsets of these blocks begin, in bytes."""
        first_elems = np.array(self._start_elem, np.int64)[blocks] + offsets_bytes // FLOAT32_BYTES
        return FLOAT32_BYTES * (first_elems if self._share is None else self._share.places_of(first_elems))

    def bytes_at(self, chunk: Chunk) -> slice:
        """The chunk's bytes."""
        begin = FLOAT32_BYTES * self._first_elem(chunk)
        return slice(begin, begin + chunk.length_bytes)

    def elems_at(self, chunk: Chunk) -> slice:
        """The chunk's elements."""
        begin = self._first_elem(chunk)
        return slice(begin, begin + chunk.length_bytes // FLOAT32_BYTES)

    def _first_elem(self, chunk: Chunk) -> int:
        first = self._start_elem[chunk.block_id] + chunk.offset_bytes // FLOAT32_BYTES
        return first if self._share is None else self._share.place_of(first)


class BlockPlaces:
    """The places of a block's chunks in a vector that holds this block alone."""

    def first_bytes(self, blocks: I64, offsets_bytes: I64) -> I64:
        """As Places.first_bytes()."""
        return offsets_bytes

    def bytes_at(self, chunk: Chunk) -> slice:
        """The chunk's bytes."""
        return slice(chunk.offset_bytes, chunk.offset_bytes + chunk.length_bytes)


class SharedLock:
    """A lock whose holder may keep it for long: it looks at `wanted`, and whoever wants it comes before it again."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self.wanted = np.zeros(1, np.int64)
        """Not 0 while now() waits. Compiled code reads it."""

    def __enter__(self) -> None:
        with self._turn:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextmanager
    def now(self) -> Iterator[None]:
        """As `with` the lock itself, and its holder is told."""
        with self._turn:
            self.wanted[0] = 1
            try:
                self._lock.acquire()
            finally:
                self.wanted[0] = 0
        try:
            yield
        finally:
            self._lock.release()


@dataclass(frozen=True)
class Memory:
    """Where the payloads of a push come from, for a loop that reads them without this module.

    parts: their bytes, one after the other, are the flat vector; they stay valid while the payloads' lock is held.
    """

    parts: tuple[U8, ...]
    difference: Difference | None = None  # of parts, which then are one vector


class Payloads(Protocol):
    """The payload of each chunk of a push."""

    codec: Codec
    lasting: bool  # its memory is not written again for another chunk
    gated: bool  # wait() must be called before a chunk is read
    lock: AbstractContextManager[object]  # held from of() until the checksum is taken, or while memory() is used

    def of(self, chunk: Chunk) -> memoryview: ...

    def wait(self, chunk: Chunk) -> None:
        """Return once the chunk may be read; of() does so too."""
        ...

    def memory(self) -> Memory:
        """The same object as before, unless the payloads have moved. The caller holds the lock."""
        ...


class ParameterSource(Protocol):
    """A source of parameters as bytes (worker/vectors.py)."""

    lock: SharedLock

    def bytes_at(self, here: slice) -> memoryview: ...

    def memory(self) -> Memory: ...


class Parameters:
    """Payloads of theta itself, without a copy."""

    codec = Codec.F32
    lasting = True
    gated = False

    def __init__(self, theta: F32 | ParameterSource, places: Places) -> None:
        self.lock: AbstractContextManager[object] = nullcontext()
        self._read: Callable[[slice], memoryview]
        self._memory: Callable[[], Memory]
        if isinstance(theta, np.ndarray):
            whole = Memory((bytes_of(theta),))
            self._read, self._memory = bytes_of(theta).data.__getitem__, lambda: whole
        else:
            self._read, self._memory, self.lock = theta.bytes_at, theta.memory, theta.lock
        self._places = places

    def of(self, chunk: Chunk) -> memoryview:
        """The chunk's memory in theta."""
        return self._read(self._places.bytes_at(chunk))

    def wait(self, chunk: Chunk) -> None:
        """Theta is there."""

    def memory(self) -> Memory:
        return self._memory()


class Differences:
    """Payloads of theta - base + residual in fewer bits; each is valid until the next one is made."""

    lasting = False
    gated = False

    def __init__(self, codec: Codec, theta: F32, difference: Difference, places: Places, chunk_bytes: int) -> None:
        """Raises ConfigError without numba."""
        self.codec = codec
        self.lock: AbstractContextManager[object] = nullcontext()
        self._theta = theta
        self._difference = difference
        self._places = places
        self._kernels = kernels()
        self._room = np.empty(encoded_bytes(codec, chunk_bytes // FLOAT32_BYTES), np.uint8)
        self._memory = Memory((bytes_of(theta),), difference)

    def of(self, chunk: Chunk) -> memoryview:
        """The chunk's payload, encoded again at each call."""
        here, difference = self._places.elems_at(chunk), self._difference
        payload = self._room[: encoded_bytes(self.codec, chunk.length_bytes // FLOAT32_BYTES)]
        residual = None if difference.residual is None else difference.residual[here]
        self._kernels.encode(self.codec, self._theta[here], difference.base[here], residual, payload)
        return payload.data

    def wait(self, chunk: Chunk) -> None:
        """Theta is there."""

    def memory(self) -> Memory:
        return self._memory


class SnapshotReady(Protocol):
    """The progress of a snapshot. May be used on any thread."""

    def wait(self, start_elem: int, stop_elem: int) -> None:
        """Return once elements [start_elem, stop_elem) are in the vector."""
        ...


class Gated:
    """Payloads of a push vector that is still being written: each waits for its part of the snapshot."""

    gated = True

    def __init__(self, payloads: Payloads, ready: SnapshotReady, places: Places) -> None:
        self.codec, self.lasting, self.lock = payloads.codec, payloads.lasting, payloads.lock
        self._payloads = payloads
        self._ready = ready
        self._places = places

    def of(self, chunk: Chunk) -> memoryview:
        """The chunk's payload, once its part of the snapshot is complete."""
        self.wait(chunk)
        return self._payloads.of(chunk)

    def wait(self, chunk: Chunk) -> None:
        here = self._places.elems_at(chunk)
        self._ready.wait(here.start, here.stop)

    def memory(self) -> Memory:
        return self._payloads.memory()
