"""What the driver needs of a model: its layout, a copy of its parameters, and a way to replace them.

The driver knows no framework; TorchParameters (worker/torch_parameters.py) and the tests' numpy model are two
implementations. Every method is called on the training thread, at a step boundary, and never elsewhere.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dips.core.layout import Layout


class ParameterStore(Protocol):
    """The cluster's live parameters. Flat vectors are float32 of layout().n_elems elements, in layout order."""

    def layout(self) -> Layout: ...

    def snapshot(self, into: NDArray[np.float32]) -> None:
        """Copy the live parameters into a flat vector."""
        ...

    def install(self, flat: NDArray[np.float32]) -> None:
        """Overwrite the live parameters; the inner optimizer's state stays."""
        ...

    def reset_inner_optimizer(self) -> None:
        """Forget the inner optimizer's state (moments), as after non-finite parameters."""
        ...
