"""The stability tables of docs/algorithm.md, from the reference kernel itself and the master's own coefficients.

Model: K clusters that make no inner progress arrive one a round; each pushes the version that its own push
before made, so the pseudo-gradient of round t is theta_t - theta_(t-K+1). The state is the last K thetas and
the momentum. The map is linear and works element by element, so one call on K + 1 elements, element i in
basis state i, gives its matrix; that of delayed Nesterov is the product over one cycle. It always has the
eigenvalue 1 (a constant theta); stable means that all others lie within the unit circle.
"""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from dips.core.ids import Version
from dips.core.math import outer_numpy
from dips.master.state.penalty_types import PenaltyConfig
from dips.master.state.records import OuterStep, outer_step_of

CLUSTERS = (2, 3, 4, 6, 9)
SLOW = PenaltyConfig.of("safe", outer_optimizer="delayed-nesterov", outer_momentum=0.8, delay_rounds=4)
TABLE = {  # its coefficients, the gain of a round of lr 1, and for each K the largest stable lr, as printed
    "0.8": (PenaltyConfig(outer_momentum=0.8), 1, ("0.692", "0.612", "0.494", "0.309", "0.171")),
    "0.6": (PenaltyConfig(outer_momentum=0.6), 1, ("0.727", "0.661", "0.564", "0.411", "0.290")),
    "0.5": (PenaltyConfig(outer_momentum=0.5), 1, ("0.75", "0.69", "0.61", "0.48", "0.38")),
    "0.0": (PenaltyConfig(outer_momentum=0.0), 1, ("1.00", "1.00", "1.00", "1.00", "1.00")),
    "heavy ball": (PenaltyConfig(outer_optimizer="heavy-ball"), 1, ("1.80", "1.00", "0.556", "0.255", "0.129")),
    "delayed by four": (SLOW, 4, ("1.000", "0.874", "1.000", "0.651", "0.447")),
}  # fmt: skip


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


@pytest.mark.parametrize("clusters", CLUSTERS)
@pytest.mark.parametrize(("config", "gain", "printed"), TABLE.values(), ids=TABLE)
def test_largest_stable_lr_is_that_of_the_document(
    config: PenaltyConfig, gain: int, printed: tuple[str, ...], clusters: int
) -> None:
    expected = printed[CLUSTERS.index(clusters)]
    half_digit = 0.5 * 10.0 ** -len(expected.partition(".")[2])
    assert largest_stable_lr(clusters, config) / gain == pytest.approx(float(expected), abs=half_digit + 1e-5)


@pytest.mark.parametrize("momentum", [0.5, 0.8])
@pytest.mark.parametrize("clusters", CLUSTERS)
def test_momentum_that_waits_for_every_cluster_costs_no_stability(clusters: int, momentum: float) -> None:
    """Delayed Nesterov with N = K: a cycle has each cluster once, and lr / N may be what it is without momentum."""
    config = replace(SLOW, outer_momentum=momentum, delay_rounds=clusters)
    assert largest_stable_lr(clusters, config) / clusters == pytest.approx(1.0, abs=1e-5)
