"""Arrays for the tests of the numerics, and equality to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 1e-45, -1e-40, 1.1754942e-38, 3.4e38, -3.4e38)
"""Not finite, a negative zero, denormals, and values whose differences overflow."""


@dataclass
class Shard:
    theta: F32
    momentum: F32
    staging: F32

    @classmethod
    def random(cls, seed: int, n_elems: int, slots: int, special: bool = False) -> Shard:
        rng = np.random.default_rng(seed)
        shard = cls(
            rng.standard_normal(n_elems, np.float32),
            rng.standard_normal(n_elems, np.float32) * np.float32(0.01),
            rng.standard_normal((slots, n_elems), np.float32),
        )
        if special:
            for array in (shard.theta, shard.momentum, shard.staging):
                flat = array.reshape(-1)
                places = rng.integers(0, flat.size, size=max(1, flat.size // 50))
                flat[places] = rng.choice(np.array(SPECIAL, np.float32), size=places.size)
        return shard

    def outputs(self) -> tuple[F32, F32]:
        return np.full_like(self.theta, 77.0), np.full_like(self.momentum, 77.0)


def random_slots(seed: int, k: int, slots: int) -> tuple[I64, F32]:
    """k distinct rows in ascending order, and weights that add up to about 1."""
    rng = np.random.default_rng(seed)
    weights = rng.random(k) + 0.1
    return np.sort(rng.permutation(slots)[:k]).astype(np.int64), (weights / weights.sum()).astype(np.float32)


def assert_same_bits(actual: NDArray[Any], expected: NDArray[Any]) -> None:
    """Equal to the bit, zeros' signs included; any NaN equals any NaN (their payloads carry nothing)."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    integers = np.dtype(f"i{actual.dtype.itemsize}")
    same = (actual.view(integers) == expected.view(integers)) | (np.isnan(actual) & np.isnan(expected))
    different = np.flatnonzero(~same)
    assert different.size == 0, (
        f"{different.size} of {same.size} elements differ, first at {different[0]}: "
        f"{actual.reshape(-1)[different[0]]!r} and {expected.reshape(-1)[different[0]]!r}"
    )
