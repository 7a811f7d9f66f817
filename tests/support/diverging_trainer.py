"""`dips train` as a cluster that goes astray: python -m support.diverging_trainer, with the options of `dips train`.

It does what stands in the file that WAYWARD names, for as long as the file is there. `back`: it goes as far from what
was installed last as training would, and the opposite way (pushes of the usual norm with the wrong direction). `far`:
it doubles all parameters in every step or, where they are large, shrinks them (pushes that the penalty excludes).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from dips.cli import main
from dips.trainer.data import Batch
from dips.trainer.train import InnerTrainer

VARIABLE = "WAYWARD"
GROW, SHRINK = 2.0, 1.0 / 3.0
"""However many of both there are between two pushes, their product is not 1: every push is far from its base."""
FARTHEST = 100.0
"""Norm of the parameters from which they shrink: a loss that is not finite would end the process. They begin with a
norm of 28."""

_step = InnerTrainer.step


class Wayward:
    def __init__(self) -> None:
        self._installed, self._trained, self._left = torch.empty(0), torch.empty(0), torch.empty(0)

    def step(self, trainer: InnerTrainer, batch: Batch, lr: float) -> float:
        file = Path(os.environ[VARIABLE])
        way = file.read_text() if file.exists() else ""
        if way == "back":
            return self._back(trainer, batch, lr)
        loss = _step(trainer, batch, lr)
        if way == "far":
            now = _vector(trainer)
            _set(trainer, now * (GROW if now.norm() < FARTHEST else SHRINK))
        return loss

    def _back(self, trainer: InnerTrainer, batch: Batch, lr: float) -> float:
        """A step from where training would be, and its mirror image at what was installed."""
        now = _vector(trainer)
        if not torch.equal(now, self._left):  # a version was installed
            self._installed = self._trained = now
        _set(trainer, self._trained)
        loss = _step(trainer, batch, lr)
        self._trained = _vector(trainer)
        self._left = 2 * self._installed - self._trained
        _set(trainer, self._left)
        return loss


def _vector(trainer: InnerTrainer) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def _set(trainer: InnerTrainer, vector: torch.Tensor) -> None:
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(vector.clone(), trainer.model.parameters())


if __name__ == "__main__":
    wayward = Wayward()
    InnerTrainer.step = lambda self, batch, lr: wayward.step(self, batch, lr)  # type: ignore[method-assign]
    sys.exit(main.run(["train", *sys.argv[1:]]))
