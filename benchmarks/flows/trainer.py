"""A worker's own code around a push: the snapshot of a torch model, and the transfer on its data thread."""

from __future__ import annotations

import queue
import time

import torch

from dips.core.clock import SystemClock
from dips.core.ids import PushId
from dips.core.layout import Layout
from dips.core.messages import Caller, Settings, Ticket
from dips.worker.data import Transfers
from dips.worker.state.effects import Done, Event, SendPush
from dips.worker.state.waiting import GivenTimes, times_of
from dips.worker.torch_model import TorchParameters
from dips.worker.vectors import F32, Vectors

ANSWER_S = 120.0


class Trainer:
    """A torch model whose parameters are parts of `source`, in layout order, with what a worker keeps for it."""

    def __init__(self, layout: Layout, source: F32, run_id: str, chunk_bytes: int, window_chunks: int) -> None:
        torch.set_num_threads(1)
        model = _model(layout, source)
        self._parameters = TorchParameters(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        assert self._parameters.layout().blocks == layout.blocks, "the model is cut as the slave's shard is"
        self._run_id = run_id
        self._vectors = Vectors(layout.n_elems, self._parameters)
        self._settings = Settings(chunk_bytes=chunk_bytes, window_chunks=window_chunks)
        self._times = times_of(GivenTimes(), self._settings)
        self._ended: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._transfers = Transfers(layout, self._vectors, self._ended.put, SystemClock())
        self._jobs = 0

    def push(self, push: PushId, ticket: Ticket, *, copied: bool) -> float:
        """Seconds from the end of an inner loop until every chunk was acknowledged: a snapshot and its transfer, or,
        unless `copied`, a transfer from the model's own memory. Raises RuntimeError for a transfer that failed.
        """
        caller = Caller(self._run_id, 1, push.cluster, push.incarnation, "bench")
        self._jobs += 1
        began_s = time.perf_counter()
        self._transfers.settle()
        self._vectors.snapshot(self._parameters, may_stay_live=not copied, chunk_bytes=self._settings.chunk_bytes)
        self._transfers.push(self._jobs, SendPush(push, ticket), caller, self._settings, self._times)
        event = self._ended.get(timeout=ANSWER_S)
        elapsed_s = time.perf_counter() - began_s
        self._vectors.forget_push()
        if not isinstance(event, Done):
            raise RuntimeError(f"the push ended with {event}")
        return elapsed_s

    def close(self) -> None:
        self._transfers.close()


def _model(layout: Layout, source: F32) -> torch.nn.Module:
    """One layer for each parameter of the layout."""
    model = torch.nn.Module()
    for span in layout.spans:
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(torch.from_numpy(source[span.start_elem : span.stop_elem]))
        model.add_module(span.parameter.name.removesuffix(".weight"), layer)
    return model
