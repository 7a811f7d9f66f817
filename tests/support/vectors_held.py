"""How much memory a cluster's vectors take."""

from __future__ import annotations

from dips.worker.vectors import Copied, Vectors


def vectors_held(vectors: Vectors) -> int:
    """Vectors in memory, the residual's included."""
    held = (vectors._base, vectors._pull, vectors._residual_room, vectors.installed)
    return len(vectors._free) + isinstance(vectors._at_push, Copied) + sum(vector is not None for vector in held)
