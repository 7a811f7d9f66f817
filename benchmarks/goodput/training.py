"""A cluster's training, the same in every system: inner steps of a set length, and a record of each.

A step lasts --step-s from the end of the one before: the inner optimizer's arithmetic on all parameters is real, and
the rest is waited, as if a device computed, so that few cores can stand for many clusters. Only then the system has its
turn: hooks run in the order in which they were registered, and the ones here are the first.

Records are JSON lines, each with the time (CLOCK_MONOTONIC): "step", when its compute has ended, and "counted", when
steps of this process are known to be in the model. They are written straight to the system, so that a SIGKILL loses
none. As a program it trains alone: the floor.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from turns import Model

GRADIENT, NOISE = 3e-3, 1e-3
"""Standard deviations of a gradient's elements: what all clusters have in common, and what each has of its own."""


def arguments(description: str | None, *more: str) -> argparse.Namespace:
    """The options of every system's clusters, and the named ones, all text."""
    parser = argparse.ArgumentParser(description=description)
    for name, kind in {"cluster": int, "clusters": int, "params": int, "step-s": float, "inner-steps": int}.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--records", type=Path, required=True)
    for name in more:
        parser.add_argument(name, default="")
    return parser.parse_args()


class Training:
    """The model, its gradient (always the same one) and the inner loop. again: whether this cluster was killed before.

    position: steps since the inner loop began, for systems without a hook of their own.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # whatever libraries print
        torch.set_num_threads(1)
        self.again = options.records.exists()
        self._records = os.open(options.records, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.model = Model(options.params)
        self._gradients = [_gradient(tensor, i, options.cluster) for i, tensor in enumerate(self.model.tensors)]
        self._step_s = options.step_s
        self.steps = self.position = 0
        self._began_s = self._cpu_s = 0.0
        self.model.inner.register_step_pre_hook(self._arithmetic_begins)
        self.model.inner.register_step_post_hook(self._compute)

    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Say that this cluster has joined, wait for the order to begin, and train until this process is killed."""
        print(json.dumps({"ready": True, "model_bytes": 0, "sample": []}), file=self._answers)
        order = json.loads(sys.stdin.readline())
        time.sleep(max(0.0, order["at_s"] - time.monotonic()))
        while True:
            self._began_s = time.monotonic()
            for tensor, gradient in zip(self.model.tensors, self._gradients, strict=True):
                tensor.grad = gradient
            self.model.inner.step()
            after_step()

    def counted(self, first: int, last: int, *, part: int = 0, parts: int = 1, **more: object) -> None:
        """These steps of this process are in a part of the model."""
        if first <= last:
            self.record("counted", first=first, last=last, part=part, parts=parts, **more)

    def record(self, kind: str, **fields: object) -> None:
        line = {"kind": kind, "monotonic_s": time.monotonic(), "life": os.getpid(), **fields}
        os.write(self._records, json.dumps(line).encode() + b"\n")

    def _arithmetic_begins(self, *hook: Any) -> None:
        self._cpu_s = time.thread_time()

    def _compute(self, *hook: Any) -> None:
        cpu_s = time.thread_time() - self._cpu_s
        time.sleep(max(0.0, self._began_s + self._step_s - time.monotonic()))
        self.steps += 1
        self.position += 1
        self.record("step", n=self.steps, cpu_s=cpu_s)


def _gradient(tensor: torch.Tensor, number: int, cluster: int) -> torch.Tensor:
    common, own = (torch.Generator().manual_seed(1000 * seed + number) for seed in (1, 2 + cluster))
    gradient = torch.empty_like(tensor.detach()).normal_(0, GRADIENT, generator=common)
    return gradient.add_(torch.empty_like(gradient).normal_(0, NOISE, generator=own))


if __name__ == "__main__":
    Training(arguments(__doc__)).run()
