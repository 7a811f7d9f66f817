"""One peer of a DiLoCo on hivemind: its averager exchanges pseudo-gradients, and every peer takes the outer step.

The group is found before the inner loop ends, as hivemind's own optimizer does it, so that the time of a round is the
exchange alone. The first peer writes its address to the file --address, for the others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind.averaging.averager import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from turns import Exchange, Model, arguments, serve
from work import OUTER_LR, OUTER_MOMENTUM

OPTIONS = arguments(__doc__, "--address", "--part-bytes")
MATCHMAKING_S, PATIENCE_S = 2.0, 60.0


class Averaging:
    """theta_base, the averager over the differences to it, and the group of the round to come."""

    def __init__(self, model: Model, dht: hivemind.DHT) -> None:
        self._tensors = list(model.tensors)
        self._base = [tensor.detach().clone() for tensor in self._tensors]
        self._outer = torch.optim.SGD(self._tensors, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        part = {"part_size_bytes": int(OPTIONS.part_bytes)} if OPTIONS.part_bytes else {}
        self.averager = DecentralizedAverager(
            [torch.zeros_like(tensor) for tensor in self._base], dht, start=True, prefix="bench",
            target_group_size=OPTIONS.clusters, min_group_size=OPTIONS.clusters,
            min_matchmaking_time=MATCHMAKING_S, request_timeout=1.0, **part,
        )  # fmt: skip
        self._step: Any = None

    def prepare(self) -> None:
        """Find the group; returns when it stands and waits to be let go."""
        self._step = self.averager.step(wait=False, require_trigger=True, timeout=PATIENCE_S)
        _wait_until(lambda: self._step.stage is AveragingStage.AWAITING_TRIGGER)

    @torch.no_grad()
    def sync(self) -> None:
        with self.averager.get_tensors() as differences:
            for difference, before, now in zip(differences, self._base, self._tensors, strict=True):
                torch.sub(before, now, out=difference)
        self._step.allow_allreduce()
        if len(self._step.result(timeout=PATIENCE_S)) != OPTIONS.clusters:
            raise RuntimeError("hivemind averaged without all peers")
        with self.averager.get_tensors() as differences:
            for difference, before, now in zip(differences, self._base, self._tensors, strict=True):
                now.copy_(before)
                now.grad = difference
            self._outer.step()
        for before, now in zip(self._base, self._tensors, strict=True):
            before.copy_(now)
            now.grad = None


def _wait_until(happened: Any) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not happened():
        if time.monotonic() > end_s:
            raise RuntimeError(f"hivemind found no group within {PATIENCE_S:g} s")
        time.sleep(0.01)


def _others() -> list[str]:
    if OPTIONS.cluster == 0:
        return []
    _wait_until(Path(OPTIONS.address).exists)
    return Path(OPTIONS.address).read_text().split()


@contextlib.contextmanager
def connect(model: Model) -> Iterator[Exchange]:
    dht = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=_others(), start=True)
    if OPTIONS.cluster == 0:
        told = Path(OPTIONS.address)
        told.with_suffix(".new").write_text("\n".join(map(str, dht.get_visible_maddrs())))
        told.with_suffix(".new").rename(told)
    averaging = Averaging(model, dht)
    try:
        yield Exchange(averaging.sync, averaging.prepare)
    finally:
        averaging.averager.shutdown()
        dht.shutdown()


if __name__ == "__main__":
    serve(OPTIONS, connect)
