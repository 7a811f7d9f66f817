"""The flat copies of the model that a cluster keeps beside its live parameters, and the arithmetic between them.

Shapes: every vector is float32 of n_elems (the layout's). Memory: 16 bytes for each parameter of the model, on the
host. The push vector is read by the data thread while a push is sent, the pull vector written by it while a version
is fetched; everything else is the training thread's alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dips.worker.parameters import ParameterStore
from dips.worker.state.effects import InstallMode

F32 = NDArray[np.float32]


class Vectors:
    """theta_at_push, theta_base, the pulled theta, and one vector for arithmetic."""

    def __init__(self, n_elems: int) -> None:
        self.push: F32 = np.zeros(n_elems, np.float32)
        self.pull: F32 = np.zeros(n_elems, np.float32)
        self.base: F32 = np.zeros(n_elems, np.float32)
        self._scratch: F32 = np.zeros(n_elems, np.float32)

    def snapshot(self, parameters: ParameterStore) -> None:
        """theta_at_push = theta_now."""
        parameters.snapshot(self.push)

    def copy_base(self) -> None:
        """theta_at_push = theta_base, to the bit."""
        np.copyto(self.push, self.base)

    def restore(self, base: F32, push: F32 | None) -> None:
        """What a checkpoint held; push None: nothing needs theta_at_push."""
        np.copyto(self.base, base)
        if push is not None:
            np.copyto(self.push, push)

    def install(self, parameters: ParameterStore, mode: InstallMode) -> None:
        """Make the pulled theta live (REPLACE: to the bit) and remember it as theta_base."""
        if mode is InstallMode.REPLACE:
            parameters.install(self.pull)
        else:
            parameters.install(self._rebased(parameters, mode))
        self.base, self.pull = self.pull, self.base

    def _rebased(self, parameters: ParameterStore, mode: InstallMode) -> F32:
        """pulled + (theta_now - theta_then)."""
        then = self.push if mode is InstallMode.REBASE_FROM_PUSH else self.base
        parameters.snapshot(self._scratch)
        np.subtract(self._scratch, then, out=self._scratch)
        np.add(self.pull, self._scratch, out=self._scratch)
        return self._scratch
