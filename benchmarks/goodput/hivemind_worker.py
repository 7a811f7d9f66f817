"""One peer of a DiLoCo on hivemind: its averager exchanges pseudo-gradients, and every peer takes the outer step.

The group is looked for before the inner loop ends, as hivemind's own optimizer does it. With --delayed the exchange
goes on while the next inner loop runs, and the steps made meanwhile are kept on top of what comes of it. A round whose
averaging fails stays in the parameters, and is a part of the next. A peer that starts again loads the outer state of
another one, and its place in the inner loop. The first peer writes its address to the file --peers, for the others.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind.averaging.averager import DecentralizedAverager
from hivemind.utils import get_dht_time
from training import Training, arguments
from work import OUTER_LR, OUTER_MOMENTUM

MATCHMAKING_S, REQUEST_S, AVERAGING_S, CHUNK_S = 5.0, 3.0, 60.0, 10.0
"""hivemind's own defaults, but for the last, which has none there: a dead peer would stop all others for good."""

PATIENCE_S = 90.0


class Averager(DecentralizedAverager):  # type: ignore[misc]  # no types of theirs are to be had
    """Shares the outer state with peers that start again."""

    peer: Peer

    def get_current_state(self) -> tuple[Any, list[torch.Tensor], None]:
        return {"position": self.peer.position}, [tensor.detach().clone() for tensor in self.peer.outer_state()], None


class Peer:
    def __init__(self, training: Training, options: argparse.Namespace, dht: hivemind.DHT) -> None:
        self._training, self._options = training, options
        self._delayed = options.delayed == "yes"
        self._tensors = list(training.model.tensors)
        self._base = [torch.nn.Parameter(tensor.detach().clone()) for tensor in self._tensors]
        self._sent = [tensor.detach().clone() for tensor in self._tensors]
        self._outer = torch.optim.SGD(self._base, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        self._averager = Averager(
            [torch.zeros_like(tensor) for tensor in self._sent], dht, start=False, prefix="bench",
            target_group_size=options.clusters, min_group_size=2, min_matchmaking_time=MATCHMAKING_S,
            request_timeout=REQUEST_S, allreduce_timeout=AVERAGING_S, next_chunk_timeout=CHUNK_S,
            bandwidth=float(options.bandwidth),
        )  # fmt: skip
        self._averager.peer = self
        self._averager.run_in_background(await_ready=True)
        lead_steps = min(options.inner_steps - 1, math.ceil(MATCHMAKING_S / options.step_s))
        self._lead_at = options.inner_steps - lead_steps
        self._wait_s = lead_steps * options.step_s + float(options.slack_s)
        self._step: Any = None
        self._open = False
        self._counted_to = self._pushed_to = 0
        if training.again:
            self._load()

    @property
    def position(self) -> int:
        return int(self._training.position)

    def outer_state(self) -> list[torch.Tensor]:
        """The parameters of the last outer step, and the momentum."""
        momenta = [self._outer.state[tensor].get("momentum_buffer") for tensor in self._base]
        pairs = zip(self._base, momenta, strict=True)
        return [*self._base, *(torch.zeros_like(base) if momentum is None else momentum for base, momentum in pairs)]

    def after_step(self) -> None:
        training = self._training
        if self._open and (self._step.done() or training.position >= self._options.inner_steps):
            self._finish()
        if self._step is None and training.position >= self._lead_at:
            at = get_dht_time() + max(MATCHMAKING_S, self._wait_s)
            self._step = self._averager.step(
                wait=False, require_trigger=True, scheduled_time=at, timeout=self._wait_s + PATIENCE_S
            )
        if training.position >= self._options.inner_steps:
            training.position = 0
            self._begin()
            if not self._delayed:
                self._finish()

    @torch.no_grad()
    def _begin(self) -> None:
        with self._averager.get_tensors() as differences:
            for difference, sent, base, now in zip(differences, self._sent, self._base, self._tensors, strict=True):
                sent.copy_(now)
                torch.sub(base, now, out=difference)
        self._pushed_to, self._open = self._training.steps, True
        self._step.allow_allreduce()

    @torch.no_grad()
    def _finish(self) -> None:
        self._open = False
        try:
            group, self._step = self._step.result(timeout=PATIENCE_S), None
        except Exception as error:
            self._step = None
            self._training.record("failed", why=repr(error)[:200])
            return
        with self._averager.get_tensors() as differences:
            for difference, base in zip(differences, self._base, strict=True):
                base.grad = difference
            self._outer.step()
        for sent, base, now in zip(self._sent, self._base, self._tensors, strict=True):
            base.grad = None
            now.add_(base - sent)
        self._training.counted(self._counted_to + 1, self._pushed_to, group=len(group))
        self._counted_to = self._pushed_to

    @torch.no_grad()
    def _load(self) -> None:
        found = self._averager.load_state_from_peers(timeout=PATIENCE_S)
        if found is None:
            raise RuntimeError("no peer gave its state")
        metadata, tensors = found
        self._training.position = metadata["position"]
        for i, (base, now) in enumerate(zip(self._base, self._tensors, strict=True)):
            now.copy_(tensors[i])
            base.copy_(tensors[i])
            self._outer.state[base]["momentum_buffer"] = tensors[len(self._base) + i]


def _others(options: argparse.Namespace) -> list[str]:
    path, end_s = Path(options.peers), time.monotonic() + PATIENCE_S
    if options.cluster == 0:
        return []
    while not path.exists():
        if time.monotonic() > end_s:
            raise RuntimeError("the first peer wrote no address")
        time.sleep(0.05)
    return path.read_text().split()


def main() -> None:
    options = arguments(__doc__, "--host", "--peers", "--delayed", "--bandwidth", "--slack-s")
    training = Training(options)
    dht = hivemind.DHT(host_maddrs=[f"/ip4/{options.host}/tcp/0"], initial_peers=_others(options), start=True)
    if options.cluster == 0:
        told = Path(options.peers)
        told.with_suffix(".new").write_text("\n".join(map(str, dht.get_visible_maddrs())))
        told.with_suffix(".new").rename(told)
    training.run(Peer(training, options, dht).after_step)


if __name__ == "__main__":
    main()
