"""core/math/landing_numba.py: the checksums of the xxhash package, and the sums, counts and copies of the readable
references, at every length and alignment; and nothing beside the target is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.checked_memory import Interpreted

from dips.core.math import landing_numba, outer_numpy, wire_numpy
from dips.core.math.outer_numpy import PIECE_ELEMS, n_pieces
from dips.core.wire import Codec, encoded_bytes

F32 = NDArray[np.float32]

LENGTHS = [
    *(1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 59, 60, 61, 64, 100, 255, 256, 257, 271, 272, 273, 300, 511, 512, 513, 1000),
    *(PIECE_ELEMS - 1, PIECE_ELEMS, PIECE_ELEMS + 1, PIECE_ELEMS + 256, 40_000, 2**18 - 7, 2**18),
]
POISONS = [None, np.nan, np.inf, -np.inf]
MOST = max(LENGTHS)
RNG = np.random.default_rng(11)
THETA = RNG.standard_normal(MOST).astype(np.float32)
VALUES = (THETA + RNG.standard_normal(MOST).astype(np.float32)).astype(np.float32)


class Target:
    def __init__(self, n_elems: int, shift_elems: int) -> None:
        self._memory = np.full(n_elems + 64, 7.0, np.float32)
        lines_begin = -(self._memory.ctypes.data // 4) % 16
        self._part = slice(lines_begin + 16 + shift_elems, lines_begin + 16 + shift_elems + n_elems)
        self.values = self._memory[self._part]

    def rest_is_untouched(self) -> bool:
        around = np.delete(self._memory, self._part)
        return bool(np.all(around == 7.0))


def frame(payload: bytes, shift_bytes: int) -> memoryview:
    memory = np.zeros(len(payload) + 128, np.uint8)
    first = -memory.ctypes.data % 64 + shift_bytes
    memory[first : first + len(payload)] = np.frombuffer(payload, np.uint8)
    return memory[first : first + len(payload)].data.toreadonly()


def same_bits(a: F32, b: F32) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


INTERPRETED = [1, 17, 59, 61, 273, 300, 1000]
"""Lengths at which the kernels' source runs in the interpreter too, where every access is checked."""

lengths = pytest.mark.parametrize(
    ("kernels", "n_elems"),
    [*((landing_numba, n) for n in LENGTHS), *((Interpreted(landing_numba), n) for n in INTERPRETED)],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)


@lengths
@pytest.mark.parametrize(("shift_elems", "shift_bytes"), [(0, 0), (1, 0), (5, 3), (15, 1), (0, 33)])
def test_landing_is_checksum_copy_and_sums(kernels: Any, n_elems: int, shift_elems: int, shift_bytes: int) -> None:
    for number, poison in enumerate(POISONS):
        values = VALUES[:n_elems].copy()
        if poison is not None:
            values[(0, n_elems // 2, n_elems - 1)[number - 1]] = poison
        theta = THETA[MOST - n_elems :]
        payload = frame(values.tobytes(), shift_bytes)
        squared, expected = np.full(n_pieces(n_elems), 9.0), np.empty(n_pieces(n_elems))
        bad = outer_numpy.measure_landed(values, theta, expected)
        right = (xxhash.xxh3_64_intdigest(payload), bad)
        measured, plain = Target(n_elems, shift_elems), Target(n_elems, shift_elems)
        assert kernels.land_chunk(Codec.F32, measured.values, payload, None, theta, squared) == right
        assert kernels.land_chunk(Codec.F32, plain.values, payload) == right
        assert np.array_equal(squared, expected, equal_nan=True)
        for target in (measured, plain):
            assert same_bits(target.values, values)
            assert target.rest_is_untouched()


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec.is_difference])
@pytest.mark.parametrize("n_elems", [1, 63, 64, 65, 1000, PIECE_ELEMS + 1])
@pytest.mark.parametrize("kernels", [landing_numba, Interpreted(landing_numba)], ids=["compiled", "interpreted"])
def test_differences(kernels: Any, codec: Codec, n_elems: int) -> None:
    if n_elems > 1000 and kernels is not landing_numba:
        return  # that takes seconds
    theta, base = THETA[:n_elems], VALUES[:n_elems]
    written = np.empty(encoded_bytes(codec, n_elems), np.uint8)
    wire_numpy.encode(codec, THETA[-n_elems:], base, None, written)
    for poisoned in (False, True):
        if poisoned and codec is Codec.BF16:
            written[:2] = [0x80, 0x7F]  # infinity
        elif poisoned:
            written[:4] = [0, 0, 0xC0, 0x7F]  # the first block's scale is NaN
        payload = frame(written.tobytes(), 3)
        expected, sums = np.empty(n_elems, np.float32), np.empty(n_pieces(n_elems))
        wire_numpy.decode(codec, base, written, expected)
        right = (xxhash.xxh3_64_intdigest(payload), outer_numpy.measure_landed(expected, theta, sums))
        assert (right[1] > 0) == poisoned
        squared = np.full(n_pieces(n_elems), 9.0)
        measured, plain = Target(n_elems, 1), Target(n_elems, 1)
        assert kernels.land_chunk(codec, measured.values, payload, base, theta, squared) == right
        assert kernels.land_chunk(codec, plain.values, payload, base) == right
        assert np.array_equal(squared, sums, equal_nan=True)
        for target in (measured, plain):
            assert np.array_equal(target.values, expected, equal_nan=True)
            assert target.rest_is_untouched()


@given(
    kernels=st.sampled_from([landing_numba, landing_numba, landing_numba, Interpreted(landing_numba)]),
    n_bytes=st.one_of(st.integers(0, 300), st.integers(0, 9000)),
    shift=st.integers(0, 64),
    source_shift=st.integers(0, 64),
)
def test_bytes_are_copied_between_any_addresses(kernels: Any, n_bytes: int, shift: int, source_shift: int) -> None:
    payload = frame(VALUES.view(np.uint8)[:n_bytes].tobytes(), source_shift)
    memory = np.full(n_bytes + 128, 7, np.uint8)
    first = -memory.ctypes.data % 64 + shift
    assert kernels.copy_chunk(memory[first : first + n_bytes].data, payload) == xxhash.xxh3_64_intdigest(payload)
    assert memory[first : first + n_bytes].tobytes() == payload
    assert np.all(memory[:first] == 7)
    assert np.all(memory[first + n_bytes :] == 7)


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    into, theta = np.full(8, 7.0, np.float32), np.zeros(8, np.float32)
    read_only = into[:]
    read_only.flags.writeable = False
    for arguments in (
        (Codec.F32, into, bytes(28)),
        (Codec.F32, into, bytes(33)),
        (Codec.F32, read_only, bytes(32)),
        (Codec.F32, into.astype(np.float64), bytes(32)),
        (Codec.F32, into, bytes(32), None, theta[:7], np.zeros(1)),
        (Codec.F32, into, bytes(32), None, theta, np.zeros(2)),
        (Codec.BF16, into, bytes(16)),
        (Codec.BF16, into, bytes(15), theta),
        (Codec.BF16, into, bytes(16), theta[:7]),
    ):
        with pytest.raises(ValueError, match=r"needed|size must be a divisor|read-only|no base"):
            landing_numba.land_chunk(*arguments)
    with pytest.raises(ValueError, match="32 bytes cannot be copied into 28"):
        landing_numba.copy_chunk(into[:7].data, bytes(32))
    with pytest.raises(ValueError, match="into 32, read-only"):
        landing_numba.copy_chunk(read_only.data, bytes(32))
    assert np.all(into == 7.0)
