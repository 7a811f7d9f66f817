"""Checksum and header parser, their source in the interpreter: what the compiled ones find, and no access outside."""

from __future__ import annotations

import numpy as np
from support.checked_memory import Memory, Twins
from support.hostile_headers import changed_headers

from dips.core.layout import checksum
from dips.core.math import xxh3_numba
from dips.core.math.simd_numba import address
from dips.core.net import header_numba


def test_the_checksum_reads_its_bytes_and_no_others() -> None:
    memory = Memory()
    twin = Twins(memory).of(xxh3_numba.xxh3)
    for n_bytes in [*range(0, 300), 512, 1023, 1024, 1025, 1100, 2048, 2049]:
        data = np.random.default_rng(n_bytes).integers(0, 256, n_bytes).astype(np.uint8)
        place = memory.add(data, writable=False)
        assert twin(place, n_bytes) == checksum(data.data)
        memory.remove(int(place))


def test_the_parser_reads_the_header_and_writes_its_fields_and_nothing_else() -> None:
    """And finds what the compiled one finds."""
    memory = Memory()
    # A quick twin of xxh3: the same access, the same result.
    quick = {xxh3_numba.xxh3: lambda place, n_bytes: np.uint64(checksum(memory.read(place, n_bytes)))}
    parse = Twins(memory, instead=quick).of(header_numba.parse)
    value, length = np.zeros(header_numba.N_FIELDS, np.int64), np.zeros(header_numba.N_FIELDS, np.int64)
    accepted = 0
    for frame in changed_headers(5, 800):
        data = np.frombuffer(frame, np.uint8)
        place = memory.add(data, writable=False)
        found = parse(place, len(data), value, length)
        fields = value.copy(), length.copy()
        assert found == header_numba.parse(address(data), len(data), value, length)
        assert not found or ((fields[0] == value).all() and (fields[1] == length).all())
        accepted += found
        memory.remove(int(place))
    assert accepted > 100
