"""One replica of torchft's DiLoCo, over gloo, as its train_diloco.py has it. TORCHFT_LIGHTHOUSE says where that is.

A sync that fails puts its fragment's parameters back: these steps are lost, and a replica that heals loses its own.
What happens to a round is read off torchft's step, which only a sync that is committed moves.
"""

from __future__ import annotations

import argparse
import socket
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is not in their __all__
from training import Training, arguments
from work import OUTER_LR, OUTER_MOMENTUM


class Replica:
    """fragments: parts of the model that are synchronised in turn; delay: inner steps between sending one and using
    what came of it.
    """

    def __init__(self, training: Training, options: argparse.Namespace) -> None:
        socket.gethostname = lambda: options.host  # sites have addresses, no names
        import torchft
        from torchft.checkpointing.http_transport import HTTPTransport
        from torchft.local_sgd import DiLoCo

        self._training = training
        self._parts, self._delay = int(options.fragments), int(options.delay)
        self._every = options.inner_steps // self._parts
        self._done_to = [0] * self._parts
        model, timeout = training.model, timedelta(seconds=float(options.timeout_s))
        fragments = self._fragments()
        outer = [  # one each: an optimizer of all would step the other fragments by their inner gradients
            torch.optim.SGD(fragment.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
            for fragment in fragments
        ]
        store = TCPStore(options.host, 0, is_master=True, wait_for_workers=False)
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timeout), use_async_quorum=False, min_replica_size=1,
            load_state_dict=self._load, state_dict=self._state, replica_id=f"c{options.cluster}",
            timeout=max(timedelta(seconds=30), timeout), quorum_timeout=max(timedelta(seconds=60), 2 * timeout),
            rank=0, world_size=1, store_addr=options.host, store_port=store.port, hostname=options.host,
            checkpoint_transport=HTTPTransport(timeout=timeout, num_chunks=0),
        )  # fmt: skip
        self.diloco = DiLoCo(
            self.manager, fragments, model.inner, outer, sync_every=options.inner_steps,
            fragment_sync_delay=self._delay, fragment_update_alpha=float(options.alpha), use_bucketization=True,
        )  # fmt: skip
        self._step, self._healed = 0, False

    def after_step(self) -> None:
        training = self._training
        if training.position < self._every:
            return
        training.position = 0
        part, now = self._step % self._parts, training.steps
        if self._healed:
            # All of its parameters were another replica's, whose progress it sends as its own (local_sgd.py:
            # "batches can be overrepresented"): its steps are lost, and the other's are in the model twice.
            self._done_to = [now] * self._parts
            training.record("healed", at_step=now)
        elif self.manager.current_step() > self._step:
            sent = now - self._delay
            own = self.manager.batches_committed()
            training.counted(self._done_to[part] + 1, sent, part=part, parts=self._parts, own=own)
            self._done_to[part] = sent
        else:
            self._done_to[part] = now
            training.record("discarded", at_step=now)
        self._step, self._healed = self.manager.current_step(), False

    def _fragments(self) -> list[torch.nn.Module]:
        """The tensors dealt out in their order, as a pipeline's stages would hold them, by size."""
        tensors = list(self._training.model.tensors)
        whole, before = sum(map(torch.numel, tensors)), 0
        dealt: list[list[torch.nn.Parameter]] = [[] for _ in range(self._parts)]
        for tensor in tensors:
            dealt[min(self._parts - 1, before * self._parts // whole)].append(tensor)
            before += tensor.numel()
        return [torch.nn.ParameterList(part) for part in dealt]

    def _load(self, state: dict[str, Any]) -> None:
        self._training.model.load_state_dict(state["model"])
        self._training.model.inner.load_state_dict(state["inner_optim"])
        self._healed = True

    def _state(self) -> dict[str, Any]:
        """Without the outer optimizers and what they start from: torchft adds these itself."""
        model = self._training.model
        return {"model": model.state_dict(), "inner_optim": model.inner.state_dict()}


def main() -> None:
    options = arguments(__doc__, "--host", "--fragments", "--delay", "--alpha", "--timeout-s")
    training = Training(options)
    replica = Replica(training, options)
    with replica.diloco:
        training.run(replica.after_step)


if __name__ == "__main__":
    main()
