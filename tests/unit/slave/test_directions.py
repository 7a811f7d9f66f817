"""Which way clusters went, on a sample of the elements: against numpy on whole vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.slave_values import V0, V1, V2

from dips.core.ids import Version
from dips.core.layout import Block
from dips.slave.calculation import KEPT_VERSIONS, SAMPLE_ELEMS, directions
from dips.slave.memory import F32, ShardMemory

RNG = np.random.default_rng(11)


def vectors(n: int, n_elems: int) -> F32:
    return RNG.standard_normal((n, n_elems)).astype(np.float32)


def memory_of(staging: F32) -> ShardMemory:
    slots, n = staging.shape
    memory = ShardMemory([Block(0, "layer", 0, n)], 1 << 16, slots, 1 << 25)
    memory.staging[:] = staging
    return memory


def keep(memory: ShardMemory, version: Version, theta: F32) -> None:
    assert np.isnan(directions(memory, version, theta, [0], [None])).all()


def matrix(upper: Sequence[float], k: int) -> np.ndarray:
    out = np.zeros((2 * k, 2 * k))
    out[np.triu_indices(2 * k)] = upper
    return out + np.triu(out, 1).T


def test_a_small_shard_is_measured_whole() -> None:
    theta, staging = vectors(3, 500), vectors(4, 500)
    memory = memory_of(staging)
    for version, value in zip((V0, V1), theta, strict=False):
        keep(memory, version, value)
    found = matrix(directions(memory, V2, theta[2], [3, 1, 0], [V2, V0, V1]), 3)
    bases = theta[[2, 0, 1]]
    rows = np.concatenate([bases - staging[[3, 1, 0]], bases - theta[2]]).astype(np.float64)
    np.testing.assert_allclose(found, rows @ rows.T, rtol=1e-5, atol=1e-4)


def test_a_large_shard_is_measured_on_a_sample_of_it_scaled_to_the_whole() -> None:
    n = 4 * SAMPLE_ELEMS + 17
    theta, own = vectors(2, n), vectors(1, n)[0]
    memory = memory_of(np.stack([theta[0] - own, theta[0] - 0.5 * own]).astype(np.float32))
    keep(memory, V0, theta[0])
    found = matrix(directions(memory, V1, theta[1], [0, 1], [V0, V0]), 2)
    assert found[0, 0] == pytest.approx(float(own @ own), rel=0.03)
    assert found[0, 1] / np.sqrt(found[0, 0] * found[1, 1]) == pytest.approx(1.0, abs=1e-6)
    cosine = found[0, 2] / np.sqrt(found[0, 0] * found[2, 2])
    gone = theta[0] - theta[1]
    assert cosine == pytest.approx(float(own @ gone) / np.sqrt(float(own @ own) * float(gone @ gone)), abs=0.02)


def test_elements_that_are_not_finite_spoil_their_own_push_only() -> None:
    theta, staging = vectors(1, 300)[0], vectors(2, 300)
    staging[0, 7], staging[0, 8] = np.nan, np.inf
    found = matrix(directions(memory_of(staging), V0, theta, [0, 1], [V0, V0]), 2)
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[np.ix_([1, 2, 3], [1, 2, 3])]).all()


def test_what_is_kept_is_a_copy_and_the_oldest_leaves() -> None:
    theta = vectors(1, 40)[0]
    first = theta.copy()
    memory = memory_of(np.zeros((1, 40), np.float32))
    keep(memory, V0, theta)
    theta += 1
    for v in range(1, KEPT_VERSIONS):
        keep(memory, Version(1, v), theta)
    known = matrix(directions(memory, V0, theta, [0], [V0]), 1)
    assert known[0, 0] == pytest.approx(float(first @ first), rel=1e-5), "the first copy is still there"
    assert np.isnan(directions(memory, Version(1, KEPT_VERSIONS), theta, [0], [V0])).all()
