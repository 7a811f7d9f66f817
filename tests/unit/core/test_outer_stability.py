"""The stability tables of docs/algorithm.md, from the reference kernel itself and the master's own coefficients.

Model: K clusters that make no inner progress arrive one a round; each pushes the version that its own push
before made, so the pseudo-gradient of round t is theta_t - theta_(t-K+1). The state is the last K thetas and
the momentum. The map is linear and works element by element, so one call on K + 1 elements, element i in
basis state i, gives its matrix; that of delayed Nesterov is the product over one cycle. It always has the
eigenvalue 1 (a constant theta); stable means that all others lie within the unit circle.
"""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from numpy.typing import NDArray

from dips.core.ids import Version
from dips.core.math import outer_numpy
from dips.master.state.penalty_types import PenaltyConfig
from dips.master.state.records import OuterStep, outer_step_of

CLUSTERS = (2, 3, 4, 6, 9)

TABLE = {  # momentum: {K: (largest stable lr, half of its last printed digit)}
    0.8: {2: (0.692, 5e-4), 3: (0.612, 5e-4), 4: (0.494, 5e-4), 6: (0.309, 5e-4), 9: (0.171, 5e-4)},
    0.6: {2: (0.727, 5e-4), 3: (0.661, 5e-4), 4: (0.564, 5e-4), 6: (0.411, 5e-4), 9: (0.290, 5e-4)},
    0.5: {2: (0.75, 5e-3), 3: (0.69, 5e-3), 4: (0.61, 5e-3), 6: (0.48, 5e-3), 9: (0.38, 5e-3)},
    0.0: {2: (1.0, 5e-3), 3: (1.0, 5e-3), 4: (1.0, 5e-3), 6: (1.0, 5e-3), 9: (1.0, 5e-3)},
}

HEAVY_BALL = dict(zip(CLUSTERS, (1.80, 1.00, 0.556, 0.255, 0.129), strict=True))
DELAYED_BY_FOUR = dict(zip(CLUSTERS, (1.00, 0.874, 1.00, 0.651, 0.447), strict=True))
"""Momentum 0.8: the largest stable lr of heavy ball, and the largest stable lr / N of delayed Nesterov with N = 4."""


def transition_matrix(clusters: int, step: OuterStep) -> NDArray[np.float64]:
    """(K + 1, K + 1): the next state as a function of (theta_t, .., theta_(t-K+1), buf)."""
    size = clusters + 1
    basis = np.eye(size, dtype=np.float32)  # row: a part of the state; column: the basis state
    out_theta, out_momentum = np.zeros(size, np.float32), np.zeros(size, np.float32)
    outer_numpy.outer_step(
        *(basis[0], basis[clusters], basis[clusters - 1 : clusters], np.zeros(1, np.int64), np.ones(1, np.float32)),
        *(*astuple(step), out_theta, out_momentum, 0, size),
    )
    return np.vstack([out_theta, basis[: clusters - 1], out_momentum]).astype(np.float64)


def nesterov(momentum: float) -> PenaltyConfig:
    return PenaltyConfig(outer_momentum=momentum)


def delayed(momentum: float, delay_rounds: int) -> PenaltyConfig:
    return PenaltyConfig.of(
        "safe", outer_optimizer="delayed-nesterov", outer_momentum=momentum, delay_rounds=delay_rounds
    )


def stable(clusters: int, outer_lr: float, config: PenaltyConfig) -> bool:
    matrix = np.eye(clusters + 1)
    for v in range(config.delay_rounds if config.outer_optimizer == "delayed-nesterov" else 1):
        matrix = transition_matrix(clusters, outer_step_of(config, outer_lr, 1.0, 1.0, Version(1, v))) @ matrix
    eigenvalues = np.linalg.eigvals(matrix)
    neutral = np.argmin(np.abs(eigenvalues - 1))
    assert abs(eigenvalues[neutral] - 1) < 1e-3
    return bool(np.all(np.abs(np.delete(eigenvalues, neutral)) < 1 - 1e-9))


def largest_stable_lr(clusters: int, config: PenaltyConfig) -> float:
    low, high = 0.01, 15.0
    assert stable(clusters, low, config)
    assert not stable(clusters, high, config)
    for _ in range(26):
        middle = (low + high) / 2
        low, high = (middle, high) if stable(clusters, middle, config) else (low, middle)
    return low


@pytest.mark.parametrize(
    ("momentum", "clusters"), [(momentum, clusters) for momentum, row in TABLE.items() for clusters in row]
)
def test_largest_stable_lr_is_that_of_the_document(momentum: float, clusters: int) -> None:
    expected, half_digit = TABLE[momentum][clusters]
    assert largest_stable_lr(clusters, nesterov(momentum)) == pytest.approx(expected, abs=half_digit + 1e-5)


@pytest.mark.parametrize("clusters", CLUSTERS)
def test_heavy_ball_bears_more_than_nesterov_with_few_clusters_and_less_with_many(clusters: int) -> None:
    config = PenaltyConfig(outer_optimizer="heavy-ball")
    found = largest_stable_lr(clusters, config)
    assert found == pytest.approx(HEAVY_BALL[clusters], abs=5e-3 if clusters < 4 else 5e-4 + 1e-5)
    assert (found > largest_stable_lr(clusters, nesterov(0.8))) == (clusters < 6)


@pytest.mark.parametrize("momentum", [0.5, 0.8])
@pytest.mark.parametrize("clusters", CLUSTERS)
def test_momentum_that_waits_for_every_cluster_costs_no_stability(clusters: int, momentum: float) -> None:
    """Delayed Nesterov with N = K: a cycle has each cluster once, and lr / N may be what it is without momentum."""
    found = largest_stable_lr(clusters, delayed(momentum, clusters))
    assert found / clusters == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("clusters", CLUSTERS)
def test_a_delay_that_fits_no_cycle_of_the_clusters_helps_less(clusters: int) -> None:
    """N = 4 whatever K: still stabler than Nesterov at the same gain of a round."""
    found = largest_stable_lr(clusters, delayed(0.8, 4)) / 4
    assert found == pytest.approx(DELAYED_BY_FOUR[clusters], abs=5e-4 + 1e-5)
    assert found > largest_stable_lr(clusters, nesterov(0.8))
