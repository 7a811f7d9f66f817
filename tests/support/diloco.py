"""One outer step of DiLoCo in plain torch operators, and what clusters of numpy gave to it."""

from __future__ import annotations

import numpy as np
import torch
from support.whole_run import F32, NumpyCluster


def diloco(theta: F32, momentum: F32, pushed: list[F32], kappa: float = 1.0) -> tuple[F32, F32]:
    """theta and momentum after a round of these pushes with equal tokens; kappa given. All (n,) float32."""
    current, buffer = torch.from_numpy(theta), torch.from_numpy(momentum)
    delta = (1 / len(pushed)) * (current - torch.from_numpy(pushed[0]))
    for other in pushed[1:]:
        delta = delta + (1 / len(pushed)) * (current - torch.from_numpy(other))
    gradient = kappa * delta
    buffer = 0.8 * buffer + gradient
    return (current - 0.7 * (gradient + 0.8 * buffer)).numpy(), buffer.numpy()


def trained(cluster: NumpyCluster) -> list[F32]:
    return [pushed for pushed in cluster.model.pushed if not np.array_equal(pushed, cluster.model.installed[0])]
