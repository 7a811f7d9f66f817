"""Compiled functions on guarded memory; each is run in a process of its own, by checked_memory.in_child()."""

from __future__ import annotations

import numpy as np
from support.checked_memory import Guarded, guarded
from support.hostile_headers import changed_headers

from dips.core.chunks import checksum
from dips.core.math import landing_numba
from dips.core.math.outer_numpy import LANES, n_pieces
from dips.core.math.simd_numba import address, compiled, peek8
from dips.core.net import header_numba
from dips.core.wire import DIFFERENCES, encoded_bytes


@compiled
def read_byte(place: int) -> int:
    return int(peek8(place))


def touch(at_end: bool, *offsets: int) -> None:
    """Read these bytes of a guarded buffer of 100 bytes, or beside it."""
    buffer = Guarded(100, at_end=at_end)
    for offset in offsets:
        read_byte(address(buffer.bytes) + offset)


def overwrite() -> None:
    """Write into bytes that may only be read."""
    address_of = address(guarded(b"abc"))
    landing_numba.copy_hashed(address_of, address(np.zeros(3, np.uint8)), 3, np.empty(8, np.uint64))


def parse_headers(seed: int, n: int) -> None:
    value, length = (Guarded(8 * header_numba.N_FIELDS).array(np.int64) for _ in range(2))
    run_id = guarded(b"run-1")
    for number, frame in enumerate(changed_headers(seed, n)):
        data = guarded(frame, at_end=number % 2 == 0)
        if header_numba.parse(address(data), len(data), value, length):
            header_numba.is_ours(value, length, run_id)
            room = Guarded(len(frame) - number % 3)
            header_numba.write_ack(room.bytes, run_id, 3, value, length, True, 7)


SIZES_ELEMS = (1, 2, 15, 16, 17, 59, 60, 61, 255, 256, 257, 300, 1000, 4096, 16383, 16384, 16385, 20000)
"""Around the lengths where the kernels change their way."""


def land_chunks() -> None:
    """Everything that lands, with every buffer between two pages that nobody may touch."""
    acc, lanes = Guarded(64).array(np.uint64), Guarded(8 * LANES).array(np.float64)
    rng = np.random.default_rng(1)
    for n in SIZES_ELEMS:
        for at_end in (True, False):
            values = rng.standard_normal(n).astype(np.float32)
            source = guarded(values.tobytes(), at_end=at_end)
            into, squared = (
                Guarded(4 * n, at_end=at_end).array(np.float32),
                Guarded(8 * n_pieces(n), at_end=at_end).array(np.float64),
            )
            theta = guarded(values.tobytes(), at_end=at_end).view(np.float32)
            assert landing_numba.land(into, address(source), acc)[0] == checksum(source.data)
            assert landing_numba.land_measured(into, address(source), theta, squared, acc, lanes)[1] == 0
            assert into.tobytes() == source.tobytes()
            assert not squared.any()
            for codec in DIFFERENCES:
                n_bytes = encoded_bytes(codec, n)
                coded = guarded(bytes(n_bytes), at_end=at_end)
                found, _ = landing_numba.land_difference(int(codec), into, address(coded), n_bytes, theta, acc)
                assert found == checksum(coded.data)
                landing_numba.land_difference_measured(
                    int(codec), into, address(coded), n_bytes, theta, theta, squared, acc, lanes
                )
    for n_bytes in (0, 1, 63, 64, 65, 1023, 1024, 1025, 4096, 5000):
        source = guarded(rng.bytes(n_bytes))
        target = Guarded(n_bytes)
        found = landing_numba.copy_hashed(address(target.bytes), address(source), n_bytes, acc)
        assert found == checksum(source.data)
        assert target.bytes.tobytes() == source.tobytes()
