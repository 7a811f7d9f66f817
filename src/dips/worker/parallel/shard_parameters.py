"""The live parameters of one rank among several, as the driver of its share sees them (worker/parameters.py).

Shapes: every flat vector is this rank's share of the layout, its runs one after the other. snapshot() and install() are
called on all ranks together: what a rank owns and another one holds moves in an exchange (parallel/exchange.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dips.core.allocator import zeros
from dips.core.layout import Layout, Share
from dips.core.net.payloads import SnapshotReady
from dips.worker.parallel.agreement import Agreed
from dips.worker.parallel.exchange import Exchange
from dips.worker.parameters import ChunkSums
from dips.worker.torch_model import DTYPES, add_rounded_off, narrow_runs

F32 = NDArray[np.float32]


class ShardParameters:
    """The ParameterStore of one rank: a StreamingStore and a RoundingStore for its share."""

    def __init__(
        self,
        agreed: Agreed,
        shares: Sequence[Share],
        group: dist.ProcessGroup,
        reset_inner_optimizers: Callable[[], None],
    ) -> None:
        """shares: of every rank. group: all ranks, over gloo, for exchanges alone."""
        self._agreed = agreed
        self._exchange = Exchange(agreed.layout, agreed.held, shares, group)
        self._narrow = narrow_runs(_dtypes(agreed.layout, shares[agreed.rank]))
        self._reset_inner_optimizers = reset_inner_optimizers
        self._pinned = any(tensor.device.type == "cuda" for tensor in agreed.tensors())

    def layout(self) -> Layout:
        """The layout of the whole model."""
        return self._agreed.layout

    def close(self) -> None:
        """No exchange follows; other ranks notice."""
        self._exchange.close()

    def empty(self, n_elems: int) -> F32:
        """A vector; for parts of a model on a CUDA device in pinned memory, as other memory is copied more slowly."""
        if not self._pinned:
            return zeros(n_elems)
        pinned: F32 = torch.empty(n_elems, dtype=torch.float32, pin_memory=True).numpy()
        return pinned

    def snapshot(self, into: F32) -> None:
        """Copy what this rank owns of the live parameters, from itself and from others."""
        self._exchange.collect(self._agreed.tensors(), into)

    def begin_snapshot(self, into: F32, sums: ChunkSums | None = None) -> SnapshotReady | None:
        """As snapshot(), but what a rank holds on a CUDA device and owns comes while its caller goes on: the next
        kernel that changes a parameter waits for it on the device. Checksums are left to the sender.
        """
        return self._exchange.begin_collect(self._agreed.tensors(), into)

    def install(self, flat: F32) -> None:
        """Overwrite what this rank holds, from its own share and from others'. Parameters with masters get these
        rounded.
        """
        tensors = self._agreed.tensors()
        self._exchange.spread(flat, tensors)
        with torch.no_grad():
            for master, working in zip(tensors, self._agreed.working_copies(), strict=True):
                if working is not None:
                    working.copy_(master)

    def reset_inner_optimizer(self) -> None:
        self._reset_inner_optimizers()

    def live(self) -> Sequence[F32] | None:
        """None: a share is no list of whole parameters."""
        return None

    @property
    def rounds(self) -> bool:
        return bool(self._narrow)

    def add_rounded_off(self, flat: F32, installed: F32, start_elem: int, stop_elem: int) -> None:
        """Elements [start_elem, stop_elem) of the share's vector."""
        add_rounded_off(self._narrow, flat, installed, start_elem, stop_elem)


def _dtypes(layout: Layout, share: Share) -> Iterator[tuple[torch.dtype, int, int]]:
    """(dtype, start, stop) of each trained tensor's parts of the share's vector, in its order."""
    for span in layout.spans:
        if span.parameter.averaged:
            return
        first = int(np.searchsorted(share.stops, span.start_elem, "right"))
        last = int(np.searchsorted(share.starts, span.stop_elem))
        for run in range(first, last):
            offset = int(share.places[run] - share.starts[run])
            start = max(int(share.starts[run]), span.start_elem)
            stop = min(int(share.stops[run]), span.stop_elem)
            yield DTYPES[span.parameter.dtype], start + offset, stop + offset
