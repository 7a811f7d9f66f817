"""Compiled functions on guarded memory; each is run in a process of its own, by checked_memory.in_child()."""

from __future__ import annotations

import numpy as np
from support.checked_memory import Guarded, guarded

from dips.core.math import landing_numba
from dips.core.math.simd_numba import address, compiled, peek8


@compiled
def read_byte(place: int) -> int:
    return int(peek8(place))


def touch(at_end: bool, *offsets: int) -> None:
    buffer = Guarded(100, at_end=at_end)
    for offset in offsets:
        read_byte(address(buffer.bytes) + offset)


def overwrite() -> None:
    address_of = address(guarded(b"abc"))
    landing_numba.copy_hashed(address_of, address(np.zeros(3, np.uint8)), 3, np.empty(8, np.uint64))
