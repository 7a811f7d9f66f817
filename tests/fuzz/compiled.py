"""Compiled code that reads what comes over a socket: it must find what Python finds, and touch nothing else.

Inputs lie at the end of memory whose next page must not be touched, so an access behind them ends this process.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from support.checked_memory import Guarded

from dips.core.errors import Refused
from dips.core.math.simd_numba import address
from dips.core.net import header_numba
from dips.core.net.data_header import DataHeader
from fuzz.mutate import mutated
from fuzz.target import Broken, Target
from fuzz.wire import headers, nearly_headers, sealed

ROOM_BYTES = 1 << 20
"""Inputs are no longer."""


def compiled_header() -> Target:
    """The compiled parser takes no header that decode() would not take, or that encode() would write in another way."""
    room, value, length = Guarded(ROOM_BYTES), Guarded(8 * header_numba.N_FIELDS), Guarded(8 * header_numba.N_FIELDS)
    inputs = st.one_of(st.binary(max_size=300), mutated(headers), nearly_headers())

    def feed(data: bytes) -> str:
        frame = room.bytes[ROOM_BYTES - len(data) :]
        frame[:] = np.frombuffer(data, np.uint8)
        fields = value.array(np.int64)
        plain = header_numba.parse(address(frame), len(data), fields, length.array(np.int64))
        try:
            header = DataHeader.decode(data)
        except Refused:
            if plain:
                raise Broken("the compiled parser takes a header that is refused") from None
            return "left to Python, which refuses it"
        if not plain:
            return "left to Python"
        if header.encode() != data:
            raise Broken("the compiled parser takes a header that no correct peer writes")
        if (fields[header_numba.REQUEST], fields[header_numba.BLOCK]) != (header.request, header.block):
            raise Broken("the compiled parser reads other numbers")
        return "plain"

    return Target("compiled header", inputs, feed, finish=lambda data: sealed(data[:-10]))


TARGETS: tuple[Callable[[], Target], ...] = (compiled_header,)
