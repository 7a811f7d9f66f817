"""The work that every system does in a round: the same model, the same inner moves, the same outer step.

An inner loop stands as a small move of every tensor, so that nothing but the exchange takes time, and so that what the
outer step must give is known in closed form: a few elements of each tensor prove that all systems did the same.
"""

from __future__ import annotations

from collections.abc import Sequence

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.8
"""SGD with Nesterov momentum on the mean pseudo-gradient, in every system."""

WIDTH, FEED_FORWARD = 768, 2048
SAMPLED = 2
"""Elements of each tensor that are compared."""

TOLERANCE = 2e-6
"""Float32 rounding of values below 0.1 over some tens of rounds; a move is 1e-5 and more."""


def shapes(n_params: int) -> list[tuple[int, ...]]:
    """Tensors of a LLaMA-like model with exactly n_params elements: layers of attention, gated feed-forward and norms,
    and an embedding that takes the rest.
    """
    layer: list[tuple[int, ...]] = [
        *[(WIDTH, WIDTH)] * 4, (FEED_FORWARD, WIDTH), (FEED_FORWARD, WIDTH), (WIDTH, FEED_FORWARD), (WIDTH,), (WIDTH,),
    ]  # fmt: skip
    n_layer = sum(_size(shape) for shape in layer)
    n_layers = max(0, (n_params - n_params // 5) // n_layer)
    rest = n_params - n_layers * n_layer
    embedding = [(rest // WIDTH, WIDTH)] if rest >= WIDTH else []
    tail = [(rest % WIDTH,)] if rest % WIDTH else []
    return [*embedding, *layer * n_layers, *tail]


def move(cluster: int, turn: int, tensor: int) -> float:
    """What this cluster's inner loop adds to every element of a tensor; the norm of 100M such moves is below 1."""
    return ((7 * cluster + 13 * turn + 5 * tensor) % 11 - 5) * 1e-5


def expected(first: Sequence[float], tensor_of: Sequence[int], clusters: int, turns: int) -> list[float]:
    """The sampled elements after so many rounds, in double precision."""
    values, momenta = list(first), [0.0] * len(first)
    for turn in range(turns):
        for i, tensor in enumerate(tensor_of):
            gradient = -sum(move(cluster, turn, tensor) for cluster in range(clusters)) / clusters
            momenta[i] = OUTER_MOMENTUM * momenta[i] + gradient
            values[i] -= OUTER_LR * (gradient + OUTER_MOMENTUM * momenta[i])
    return values


def _size(shape: Sequence[int]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size
