"""Injects bad pushes: what a bad cluster pushes instead of what it trained, and when.

The damage is done to the push alone. The cluster itself keeps training undamaged, as with a transfer or
hardware that spoils what it sends; so a push after the bad ones is good.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dips.core.errors import ConfigError

F32 = NDArray[np.float32]

KINDS = ("nan", "x30", "flip", "noise")
"""Kinds: elements that are NaN; the update times thirty; the opposite update; a random direction of the same length."""

HUGE = 30.0
NAN_ELEMS = 8
"""The number of NaN elements: a single one must be enough to be noticed, in any block."""


@dataclass(frozen=True)
class Injection:
    """Which cluster pushes what, and when: the pushes of a cluster are numbered from 1.

    cluster: its index. first_push: the first bad one, later than the norms' warm-up of 8. Then bad_run bad pushes and
    good_run good ones by turns, fewer than the 8 in a row after which a cluster's statistics begin again. The
    defaults spoil 17 of a cluster's first 35 pushes.
    """

    kind: str
    cluster: int = 0
    first_push: int = 10
    bad_run: int = 5
    good_run: int = 3

    def __post_init__(self) -> None:
        """Check the fields. Raises ConfigError for an unknown kind and for numbers that name no push."""
        if self.kind not in KINDS:
            raise ConfigError(f"injection {self.kind!r} is not known: choose one of {', '.join(KINDS)}")
        if self.cluster < 0 or min(self.first_push, self.bad_run, self.good_run) < 1:
            raise ConfigError(
                f"{self} names no push: give a cluster from 0, and first_push, bad_run and good_run from 1"
            )

    def is_bad(self, n_push: int) -> bool:
        """Whether the n-th push of that cluster, counted from 1, is spoilt."""
        place = n_push - self.first_push
        return place >= 0 and place % (self.bad_run + self.good_run) < self.bad_run


class Injector:
    """Spoils the pushes of the injection's cluster; the same seed spoils them alike."""

    def __init__(self, injection: Injection, seed: int) -> None:
        self.injection = injection
        self._seed = seed

    def corrupt(self, n_push: int, push: F32, base: F32) -> bool:
        """Spoil the n-th push in place if it is a bad one; returns whether it is.

        push: the vector to be sent; base: the version that the cluster last pulled; both (n_elems,) float32.
        """
        if not self.injection.is_bad(n_push):
            return False
        rng = np.random.default_rng((self._seed, n_push))
        match self.injection.kind:
            case "nan":
                push[rng.integers(len(push), size=NAN_ELEMS)] = np.nan
            case "x30":
                push[:] = base + np.float32(HUGE) * (push - base)
            case "flip":
                push[:] = base - (push - base)
            case "noise":
                push[:] = base + _random_of_norm(rng, float(np.linalg.norm(push - base)), len(push))
        return True


def _random_of_norm(rng: np.random.Generator, norm: float, n_elems: int) -> F32:
    direction = rng.standard_normal(n_elems, dtype=np.float32)
    scaled: F32 = direction * np.float32(norm / float(np.linalg.norm(direction)))
    return scaled
