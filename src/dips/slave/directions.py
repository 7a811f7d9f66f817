"""Measures the direction in which each cluster moved, on a sample of the elements (docs/algorithm.md, Direction).

The Gram matrix of MEASURE compares pseudo-gradients with the current version: in a stale push they contain the reverse
of the model's movement meanwhile, and late in a run that part is the larger one. The cluster's own movement is
theta_base - theta_j, and its base is seldom still in memory. So a slave keeps every stride-th element of the last
versions: at most SAMPLE_ELEMS x KEPT_VERSIONS float32, 8 MiB whatever the model's size. Only cosines are computed from
it; no version ever depends on it.

Shapes: n elements of the shard, m of them in the sample, k pushes of the round in cluster-id order; theta (n,),
staging (slots, n), samples (m,), all float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dips.core.ids import Version
from dips.core.math import outer_numba as kernels

F32 = NDArray[np.float32]

SAMPLE_ELEMS = 65_536
"""Cosines of so many elements are off by about 1 / sqrt(m) = 0.004; they are compared with values above 0.1."""

KEPT_VERSIONS = 32
"""Bases older than this are not known: about what s_max allows of 8 clusters."""


class Samples:
    """The sampled elements of the versions that were measured last. One caller at a time."""

    def __init__(self, n_elems: int) -> None:
        """n_elems: the trained elements, which come before all others."""
        self._n_elems = n_elems
        # Odd, so that no power of two makes it take the same few columns of every matrix.
        self._stride = max(1, -(-n_elems // SAMPLE_ELEMS)) | 1
        self._of: dict[Version, F32] = {}

    def keep(self, version: Version, theta: F32) -> None:
        """Keep samples of this version; the oldest is dropped when there are too many."""
        if version not in self._of:
            self._of[version] = theta[: self._n_elems : self._stride].copy()
        while len(self._of) > KEPT_VERSIONS:
            del self._of[next(iter(self._of))]

    def products(
        self, theta: F32, staging: F32, rows: Sequence[int], bases: Sequence[Version | None]
    ) -> tuple[float, ...]:
        """The upper triangle by rows of the 2k x 2k Gram matrix of p_1 .. p_k, s_1 .. s_k, estimated for the shard.

        p_j = theta_base - theta_j is the movement of cluster j, s_j = theta_base - theta that of the model meanwhile.
        Where a base is not known both are NaN, and so are their products.
        """
        k = len(rows)
        now = theta[: self._n_elems : self._stride]
        vectors = np.full((2 * k, len(now)), np.nan, np.float32)
        with np.errstate(all="ignore"):
            for j, (row, version) in enumerate(zip(rows, bases, strict=True)):
                base = self._of.get(version) if version is not None else None
                if base is not None:
                    vectors[j] = base - staging[row, : self._n_elems : self._stride]
                    vectors[k + j] = base - now
        gram, _ = kernels.gram(np.zeros_like(now), vectors, np.arange(2 * k, dtype=np.int64), 0, len(now))
        scale = self._n_elems / max(1, len(now))
        return tuple(scale * float(gram[i, j]) for i in range(2 * k) for j in range(i, 2 * k))
