"""The stability table of docs/algorithm.md, from the reference kernel itself.

Model: K clusters that make no inner progress arrive one a round; each pushes the version that its own push
before made, so the pseudo-gradient of round t is theta_t - theta_(t-K+1). The state is the last K thetas and
the momentum. The map is linear and works element by element, so one call on K + 1 elements, element i in
basis state i, gives its matrix. It always has the eigenvalue 1 (a constant theta); stable means that all
others lie within the unit circle.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from dips.core import outer_numpy

TABLE = {  # momentum: {K: (largest stable lr, half of its last printed digit)}
    0.8: {2: (0.692, 5e-4), 3: (0.612, 5e-4), 4: (0.494, 5e-4), 6: (0.309, 5e-4), 9: (0.171, 5e-4)},
    0.5: {2: (0.75, 5e-3), 3: (0.69, 5e-3), 4: (0.61, 5e-3), 6: (0.48, 5e-3), 9: (0.38, 5e-3)},
    0.0: {2: (1.0, 5e-3), 3: (1.0, 5e-3), 4: (1.0, 5e-3), 6: (1.0, 5e-3), 9: (1.0, 5e-3)},
}


def transition_matrix(clusters: int, outer_lr: float, momentum: float) -> NDArray[np.float64]:
    """(K + 1, K + 1): the next state as a function of (theta_t, .., theta_(t-K+1), buf)."""
    size = clusters + 1
    basis = np.eye(size, dtype=np.float32)  # row: a part of the state; column: the basis state
    out_theta, out_momentum = np.zeros(size, np.float32), np.zeros(size, np.float32)
    outer_numpy.outer_step(
        *(basis[0], basis[clusters], basis[clusters - 1 : clusters], np.zeros(1, np.int64), np.ones(1, np.float32)),
        *(1.0, outer_lr, momentum, momentum, out_theta, out_momentum, 0, size),
    )
    return np.vstack([out_theta, basis[: clusters - 1], out_momentum]).astype(np.float64)


def stable(clusters: int, outer_lr: float, momentum: float) -> bool:
    eigenvalues = np.linalg.eigvals(transition_matrix(clusters, outer_lr, momentum))
    neutral = np.argmin(np.abs(eigenvalues - 1))
    assert abs(eigenvalues[neutral] - 1) < 1e-3
    return bool(np.all(np.abs(np.delete(eigenvalues, neutral)) < 1 - 1e-9))


def largest_stable_lr(clusters: int, momentum: float) -> float:
    low, high = 0.01, 1.5
    assert stable(clusters, low, momentum)
    assert not stable(clusters, high, momentum)
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if stable(clusters, middle, momentum) else (low, middle)
    return low


@pytest.mark.parametrize(
    ("momentum", "clusters"), [(momentum, clusters) for momentum, row in TABLE.items() for clusters in row]
)
def test_largest_stable_lr_is_that_of_the_document(momentum: float, clusters: int) -> None:
    expected, half_digit = TABLE[momentum][clusters]
    assert largest_stable_lr(clusters, momentum) == pytest.approx(expected, abs=half_digit + 1e-5)


def test_more_clusters_need_a_smaller_step_with_the_default_momentum() -> None:
    """Why the default lr of 0.7 is unstable without clip, grace window and participation scaling, already for
    K = 2."""
    found = [largest_stable_lr(clusters, 0.8) for clusters in (2, 3, 4, 6, 9)]
    assert found == sorted(found, reverse=True)
    assert found[0] < 0.7


@pytest.mark.parametrize("clusters", [2, 4, 9])
def test_participation_scaling_makes_the_default_step_stable(clusters: int) -> None:
    """rho = 1/K scales the pseudo-gradient, which is the same as an lr of 0.7 / K in the linear model."""
    assert stable(clusters, 0.7 / clusters, 0.8)
