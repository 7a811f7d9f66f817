"""What the callbacks for all trainers share: one DiLoCo loop whose checkpoints belong to the trainer's own.

A trainer counts steps, walks through its data and keeps checkpoints by itself. With each of those one of ours is taken,
under a label that names it, and durable before the trainer writes its own: so what a trainer resumes from always finds
the session that goes with it, or none, and never another one.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from dips.core.errors import ConfigError
from dips.worker.loop import DiLoCo

_logger = logging.getLogger("dips")

KEPT = 3
"""Checkpoints of ours that stay unless DIPS_WORKER_CHECKPOINTS_KEPT says otherwise: of the trainer's newest, the one
before, and one that the trainer did not live to write."""

_BY_THE_CALLBACK = ("tokens_per_step", "steps", "state", "resume", "checkpoint_every_s")

TokensOf = Callable[[Any], int]
"""Batch -> its tokens."""


@dataclass(frozen=True)
class CallbackOptions:
    """What a user gives a callback. tokens_per_step: of one optimizer.step() of this process; None: they are counted.

    checkpoint_dir: a folder for this cluster alone; None: the callback chooses one beside the trainer's checkpoints.
    loop: for DiLoCo (master, cluster_id, keys, wire_dtype, ...).
    """

    tokens_per_step: int | None
    checkpoint_dir: Path | None
    loop: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Raises ConfigError for what the callback itself decides, or a count below 1."""
        taken = [name for name in _BY_THE_CALLBACK if name in self.loop]
        if taken:
            raise ConfigError(f"{taken[0]} is your trainer's business here: leave it out of the callback's arguments")
        if self.tokens_per_step is not None and self.tokens_per_step < 1:
            raise ConfigError(
                f"tokens_per_step is {self.tokens_per_step}: give at least 1, or None to have them counted"
            )

    @property
    def has_master(self) -> bool:
        """Whether there is a run to take part in; says so when there is none, as then a callback does nothing."""
        named = bool(self.loop.get("master") or os.environ.get("DIPS_MASTER"))
        if not named:
            _logger.info("DIPS_MASTER is not set: training alone, nothing is shared")
        return named


class TrainerLoop(DiLoCo):
    """A DiLoCo loop inside of a trainer."""

    _keeps_own_checkpoints = False

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        options: CallbackOptions,
        checkpoint_dir: Path | None,
        label: str | None,
    ) -> None:
        """label: of the trainer's checkpoint that was resumed from; None: it began anew. checkpoint_dir None: no
        checkpoints. Raises ConfigError as DiLoCo does.
        """
        given = dict(options.loop)
        if checkpoint_dir is not None:
            given.setdefault("checkpoints_kept", KEPT)
        super().__init__(
            model, optimizer, tokens_per_step=options.tokens_per_step or 1, checkpoint_dir=checkpoint_dir,
            resume=label is not None and checkpoint_dir is not None, **given,
        )  # fmt: skip
        self._fixed_tokens = options.tokens_per_step
        # Without a label nothing is resumed, not even where DIPS_WORKER_RESUME_REQUIRED stands: then it is an error.
        self._resume_label = label or step_label(0)
        self._label_taken: str | None = None
        self._counted = 0
        self._seen_losses: list[torch.Tensor] = []
        self._are_shares = False

    def add_tokens(self, tokens: int) -> None:
        """A batch of training was seen; several may make one step."""
        self._counted += tokens

    def saw_loss(self, loss: Any, *, is_share: bool) -> None:
        """The loss of a batch, if that is what this is; several may make one step, of whose loss each is a share, or
        which is their mean. Never waits for a device.
        """
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._seen_losses.append(loss.detach().clone().reshape(()))
            self._are_shares = is_share

    def report_seen(self) -> None:
        """All losses of one step were seen."""
        seen, self._seen_losses = self._seen_losses, []
        if seen:
            total = torch.stack(seen).sum()
            self.report(total if self._are_shares else total / len(seen))

    def before_step(self) -> None:
        """An optimizer.step() follows. Raises ConfigError when nobody knows what it was trained on."""
        tokens = self._fixed_tokens or self._counted
        if tokens < 1:
            raise ConfigError(
                "the tokens of a step could not be counted: no batch has `input_ids`; give tokens_per_step= to the "
                "callback, the tokens (or samples) behind one optimizer.step() of this process"
            )
        self.count(tokens)
        self._counted = 0

    def checkpoint(self, label: str) -> None:
        """The trainer is about to write its checkpoint of this name: ours goes first. Once is enough for a name."""
        if self.shell is None or self._label_taken == label or self.shell.config.checkpoint_dir is None:
            return
        if self.shell.checkpoint_now(label):
            self._label_taken = label
        elif not self.run_ended:
            _logger.warning("no checkpoint of this cluster goes with %s: resumed from it, it pulls anew", label)


class Joined:
    """Holds the loop of a training, from its begin to its end; the callbacks have one each."""

    def __init__(self) -> None:
        self.loop: TrainerLoop | None = None

    def begin(self, loop: TrainerLoop) -> TrainerLoop:
        """Enter a loop; one that an earlier training left open is ended."""
        self.end()
        loop.__enter__()
        self.loop = loop
        atexit.register(self._say_what_is_lost)
        return loop

    def end(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Leave the run. May be called twice."""
        loop, self.loop = self.loop, None
        atexit.unregister(self._say_what_is_lost)
        if loop is not None:
            loop.__exit__(kind, error, trace)

    def _say_what_is_lost(self) -> None:
        """A trainer that tells no callback of an exception: the process ends, and nothing can be pushed any more."""
        shell = self.loop.shell if self.loop is not None else None
        if shell is not None and not shell.done and shell.unshared.steps:
            _logger.warning(
                "the training ended by an exception, without %s: they were not pushed; callback.close() in a `finally` "
                "waits for an open push", shell.unshared,
            )  # fmt: skip


def tokens_in(batch: Any) -> int:
    """Tokens of a batch that has `input_ids`, padding included: asking a device how many are not would wait for it.

    0 for a batch that has none.
    """
    ids = batch.get("input_ids") if hasattr(batch, "get") else getattr(batch, "input_ids", None)
    return ids.numel() if isinstance(ids, torch.Tensor) else 0


def step_label(step: int) -> str:
    """The name of the checkpoint that a trainer takes after so many steps."""
    return f"step {step}"
