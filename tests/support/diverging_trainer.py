"""`dips train` as a cluster that goes astray: python -m support.diverging_trainer, with the options of `dips train`.

It does what stands in the file that WAYWARD names: `up` climbs the loss instead of descending it, for as long as the
file is there (pushes of the usual norm that point the wrong way); `far` doubles all parameters every few steps (pushes
that the penalty excludes).
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import torch

from dips.cli import main
from dips.trainer.train import InnerTrainer

VARIABLE = "WAYWARD"
FAR, FAR_EVERY_STEPS = 2.0, 8
FARTHEST = 100.0
"""Norm of the parameters beyond which they are left alone: a loss that is not finite would end the process. They begin
with a norm of 28."""

_straight = InnerTrainer.step
_steps = itertools.count()


def _norm(model: torch.nn.Module) -> float:
    return float(torch.nn.utils.parameters_to_vector(model.parameters()).norm())


def _step(self: InnerTrainer, batch: object, lr: float) -> float:
    file = Path(os.environ[VARIABLE])
    way = file.read_text() if file.exists() else ""
    loss = _straight(self, batch, -lr if way == "up" else lr)  # type: ignore[arg-type]
    if way == "far" and next(_steps) % FAR_EVERY_STEPS == 0 and _norm(self.model) < FARTHEST:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(FAR)
    return loss


if __name__ == "__main__":
    InnerTrainer.step = _step  # type: ignore[method-assign]
    sys.exit(main.run(["train", *sys.argv[1:]]))
