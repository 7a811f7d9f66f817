"""Compiled functions on addresses touch nothing outside their buffers, and the harness notices when one does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.checked_memory import Memory, Twins, in_child
from support.guarded_kernels import land_chunks, overwrite, parse_headers, touch
from support.hostile_headers import changed_headers

from dips.core.chunks import checksum
from dips.core.math import landing_numba, xxh3_numba
from dips.core.math.outer_numpy import LANES, n_pieces
from dips.core.math.simd_numba import address
from dips.core.net import header_numba
from dips.core.wire import DIFFERENCES, Codec, encoded_bytes


@pytest.mark.parametrize(
    ("act", "arguments"),
    [(touch, (True, 100)), (touch, (False, -1)), (overwrite, ())],
    ids=["behind", "before", "write"],
)
def test_a_guard_page_ends_a_process(act: Callable[..., None], arguments: tuple[object, ...]) -> None:
    assert "SIGSEGV" in in_child(act, *arguments)


def test_a_guard_page_lets_right_reads_pass() -> None:
    assert in_child(touch, True, 0, 99) == ""
    assert in_child(touch, False, 0, 99) == ""


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
    parse = Twins(memory, instead={xxh3_numba.xxh3: checksum_of(memory)}).of(header_numba.parse)
    value, length = np.zeros(header_numba.N_FIELDS, np.int64), np.zeros(header_numba.N_FIELDS, np.int64)
    accepted = 0
    for frame in changed_headers(5, 3500):
        data = np.frombuffer(frame, np.uint8)
        place = memory.add(data, writable=False)
        found = parse(place, len(data), value, length)
        fields = value.copy(), length.copy()
        assert found == header_numba.parse(address(data), len(data), value, length)
        assert not found or ((fields[0] == value).all() and (fields[1] == length).all())
        accepted += found
        memory.remove(int(place))
    assert accepted > 500


def checksum_of(memory: Memory) -> Callable[[int, int], np.uint64]:
    """A quick twin of xxh3: the same access, the same result."""
    return lambda place, n_bytes: np.uint64(checksum(memory.read(place, n_bytes)))


def test_the_compiled_parser_and_writer_stay_within_guard_pages() -> None:
    assert in_child(parse_headers, 6, 3000) == ""


@pytest.mark.parametrize("n", [1, 15, 16, 17, 60, 61, 255, 256, 257, 600, 1000, 16385])
def test_what_lands_touches_its_payload_and_its_place_and_nothing_else(n: int) -> None:
    """With the result of the compiled function. The place begins anywhere in its row, as a chunk does."""
    memory, rng = Memory(), np.random.default_rng(n)
    twins = Twins(memory, instead={xxh3_numba.xxh3: checksum_of(memory)})
    acc, lanes = np.empty(8, np.uint64), np.empty(LANES, np.float64)
    theta = rng.standard_normal(n).astype(np.float32)
    for first in (0, 1, 16):
        row = np.zeros(n + 40, np.float32)
        payload = rng.standard_normal(n).astype(np.float32)
        place = memory.add(payload, writable=False)
        into, squared = row[first : first + n], np.zeros(n_pieces(n))
        assert twins.of(landing_numba.land)(into, place, acc)[0] == checksum(payload.data)
        assert (into == payload).all()
        into[:] = 0
        found, bad = twins.of(landing_numba.land_measured)(into, place, theta, squared, acc, lanes)
        assert (found, bad) == (checksum(payload.data), 0)
        assert (into == payload).all()
        again = np.zeros_like(squared)
        landing_numba.land_measured(into, address(payload), theta, again, acc, lanes)
        assert (squared == again).all()
        assert not row[:first].any()
        assert not row[first + n :].any()
        memory.remove(int(place))


@pytest.mark.parametrize("codec", sorted(DIFFERENCES))
@pytest.mark.parametrize("n", [1, 16, 61, 300])
def test_what_lands_of_a_difference_touches_nothing_else(codec: Codec, n: int) -> None:
    memory, rng = Memory(), np.random.default_rng(n)
    twins = Twins(memory, instead={xxh3_numba.xxh3: checksum_of(memory)})
    acc, lanes, n_bytes = np.empty(8, np.uint64), np.empty(LANES, np.float64), encoded_bytes(codec, n)
    base, into, payload = (
        rng.standard_normal(n).astype(np.float32),
        np.zeros(n, np.float32),
        np.zeros(n_bytes, np.uint8),
    )
    place = memory.add(payload, writable=False)
    squared = np.zeros(n_pieces(n))
    land = twins.of(landing_numba.land_difference_measured)
    assert land(int(codec), into, place, n_bytes, base, base, squared, acc, lanes) == (checksum(payload.data), 0)
    assert (into == base).all()


def test_compiled_landing_stays_within_guard_pages() -> None:
    assert in_child(land_chunks) == ""
