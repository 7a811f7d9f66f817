"""The driver's interface to a model: its layout, a copy of its parameters, and a way to replace them.

The driver knows no framework; TorchParameters (worker/torch_model.py) and the tests' numpy model are two
implementations. Every method is called only on the training thread, at a step boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dips.core.layout import Layout
from dips.core.net.payloads import SnapshotReady


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


@runtime_checkable
class StreamingStore(ParameterStore, Protocol):
    """A store that chooses the memory of flat vectors, and copies to it while its caller does other things."""

    def empty(self, n_elems: int) -> NDArray[np.float32]:
        """A vector of any content, in the memory that is fastest for snapshots and installs."""
        ...

    def begin_snapshot(self, into: NDArray[np.float32]) -> SnapshotReady | None:
        """Copy the present live parameters; None: already complete. They may change while the copy goes on."""
        ...

    def live(self) -> Sequence[NDArray[np.float32]] | None:
        """The memory of the live parameters, one flat array after the other in layout order; None: it is not float32
        on the host, or in too many pieces.
        """
        ...


@runtime_checkable
class RoundingStore(ParameterStore, Protocol):
    """A store with parameters in fewer bits than float32, which hold the installed values only rounded."""

    @property
    def rounds(self) -> bool:
        """Whether it has any such parameter."""
        ...

    def add_rounded_off(
        self, flat: NDArray[np.float32], installed: NDArray[np.float32], start_elem: int, stop_elem: int
    ) -> None:
        """flat = installed + (flat - installed as rounded by install()), elements [start_elem, stop_elem) of such
        parameters: the change by steps since, without the rounding. Other elements stay. May be called on any thread.
        """
        ...
