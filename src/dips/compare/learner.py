"""The interface of what a cluster trains: it keeps torch, which the worker needs, out of the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dips.core.layout import Layout
from dips.core.messages import DataPlan, DataRange

F32 = NDArray[np.float32]

Evaluate = Callable[[F32], float]
"""The held-out loss, in nats per byte, of a model given as a flat vector (n_elems of the layout)."""


class Learner(Protocol):
    """One cluster's model, inner optimizer and text. Also a dips.worker.parameters.ParameterStore.

    Flat vectors are float32 of layout().n_elems elements, in layout order.
    """

    def layout(self) -> Layout: ...

    def data_plan(self) -> DataPlan:
        """The data that the master leases; equal on all clusters."""
        ...

    def snapshot(self, into: F32) -> None: ...

    def install(self, flat: F32) -> None: ...

    def reset_inner_optimizer(self) -> None: ...

    def step(self, ranges: Sequence[DataRange], progress_tokens: int) -> float:
        """One inner step on exactly these tokens; the mean loss in nats per byte.

        progress_tokens: the position of the run on the learning rate's schedule. A loss that is not finite changes
        nothing and is returned.
        """
        ...
