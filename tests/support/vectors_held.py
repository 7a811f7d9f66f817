"""How much memory a cluster's vectors take."""

from __future__ import annotations

from dips.worker.vectors import Vectors


def vectors_held(vectors: Vectors) -> int:
    """Vectors in memory, the residual's included."""
    held = (vectors._base, vectors._push, vectors._pull, vectors._residual, vectors.installed)
    return len(vectors._free) + sum(vector is not None for vector in held)
