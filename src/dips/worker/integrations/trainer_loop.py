"""The common part of the callbacks for trainers: one DiLoCo loop whose checkpoints belong to the trainer's own.

A trainer counts steps, reads its data and keeps checkpoints by itself. With each of those a checkpoint of the cluster
is taken, under a label that names it, and durable before the trainer writes its own: so a trainer that resumes always
finds the session that belongs to its checkpoint, or none, and never another one.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from dips.core.config import environment_name
from dips.core.errors import ConfigError
from dips.worker.config import SECTION
from dips.worker.loop import DiLoCo

_logger = logging.getLogger("dips")

KEPT = 3
"""The cluster's checkpoints that are kept unless DIPS_WORKER_CHECKPOINTS_KEPT is set: those of the trainer's newest, of
the one before, and of one that the trainer died before writing."""

_BY_THE_CALLBACK = ("tokens_per_step", "steps", "state", "resume", "checkpoint_every_s")

TokensOf = Callable[[Any], int]
"""Batch -> its tokens."""


@dataclass(frozen=True)
class CallbackOptions:
    """A callback's arguments."""

    tokens_per_step: int | None  # of one optimizer.step() of this process; None: they are counted
    # a folder for this cluster alone; None: the callback chooses one next to the trainer's checkpoints
    checkpoint_dir: Path | None
    loop: Mapping[str, Any]  # for DiLoCo (master, cluster_id, keys, wire_dtype, ...)

    def __post_init__(self) -> None:
        """Raises ConfigError for an argument that the callback itself sets, or a count below 1."""
        taken = [name for name in _BY_THE_CALLBACK if name in self.loop]
        if taken:
            raise ConfigError(f"{taken[0]} is set by your trainer here: leave it out of the callback's arguments")
        if self.tokens_per_step is not None and self.tokens_per_step < 1:
            raise ConfigError(
                f"tokens_per_step is {self.tokens_per_step}: give at least 1, or None to have them counted"
            )
        # Now: the program may change its directory before it trains.
        if self.checkpoint_dir is not None:
            object.__setattr__(self, "checkpoint_dir", Path(self.checkpoint_dir).absolute())
        given = {name: self.loop.get(name) for name in ("tape", "keys")}
        paths = {name: Path(path).absolute() for name, path in given.items() if path not in (None, "none")}
        object.__setattr__(self, "loop", {**self.loop, **paths})

    @property
    def has_master(self) -> bool:
        """Whether there is a run to take part in; logs when there is none, as then a callback does nothing."""
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
        """label: of the trainer's checkpoint that was resumed from; None: it began without. checkpoint_dir None: no
        checkpoints. Raises ConfigError as DiLoCo does.
        """
        given = dict(options.loop)
        if checkpoint_dir is not None and not os.environ.get(environment_name(SECTION, "checkpoints_kept")):
            given.setdefault("checkpoints_kept", KEPT)
        super().__init__(
            model, optimizer, tokens_per_step=options.tokens_per_step or 1, checkpoint_dir=checkpoint_dir,
            resume=label is not None and checkpoint_dir is not None, **given,
        )  # fmt: skip
        self._fixed_tokens = options.tokens_per_step
        self._has_directory = self._config is not None and self._config.checkpoint_dir is not None
        # Without a label nothing is resumed, not even where DIPS_WORKER_RESUME_REQUIRED is set: then it is an error.
        self._resume_label = label or step_label(0)
        self._label_taken: str | None = None
        self._counted = 0
        self._skips = False
        self._seen_losses: list[torch.Tensor] = []
        self._are_shares = False

    def add_tokens(self, tokens: int) -> None:
        """Count the tokens of a training batch; several may make one step."""
        self._counted += tokens

    def saw_batch(self, batch: Any) -> None:
        """A batch that is trained on, of a trainer that may not call the model itself."""
        if self._first_batches is not None:
            self._first_batches.add(batch)

    def saw_loss(self, loss: Any, *, is_share: bool) -> None:
        """Note the loss of a batch, if `loss` is one. Of several in one step, each is a share of the step's loss, or
        the step's loss is their mean. Never waits for a device.
        """
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._seen_losses.append(loss.detach().clone().reshape(()))
            self._are_shares = is_share

    def report_seen(self) -> None:
        """Report the loss of a step, once all its batches were noted."""
        seen, self._seen_losses = self._seen_losses, []
        if seen:
            total = torch.stack(seen).sum()
            self.report(total if self._are_shares else total / len(seen))

    def before_step(self) -> None:
        """Count an optimizer.step() that follows. Raises ConfigError when its tokens are not known."""
        tokens = self._fixed_tokens or self._counted
        if tokens < 1:
            raise ConfigError(
                "the tokens of a step could not be counted: no batch has `input_ids`; give tokens_per_step= to the "
                "callback, the tokens (or samples) behind one optimizer.step() of this process"
            )
        self.count(tokens)
        self._counted, self._skips = 0, False

    def skip_step(self) -> None:
        """Do not count an optimizer.step() that follows, if one does: there are no gradients."""
        self._skips = True

    def _was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._skips or super()._was_skipped(optimizer)

    def refuse_loss_by_sigterm(self) -> None:
        """After its end, where the trainer heard a SIGTERM: raises SystemExit for a wait that it cut short."""
        if self.shell is not None and self.shell.unshared.steps and not self.released:
            raise self._end_of_process()

    def checkpoint(self, label: str) -> None:
        """Take the cluster's checkpoint before the trainer writes its own of this name. Once is enough for a name."""
        if self._cluster is None or self._label_taken == label or not self._has_directory:
            return
        taken = self._cluster.checkpoint_now(label)
        if taken or self._together is not None:
            self._label_taken = label  # on all ranks alike, since they take one together
        if taken or self.shell is None:
            return
        if not self.run_ended:
            _logger.warning("no checkpoint of this cluster belongs to %s: resumed from it, it pulls again", label)


class Joined:
    """Keeps the loop of a training from its beginning to its end; each callback has one."""

    def __init__(self) -> None:
        self.loop: TrainerLoop | None = None

    def begin(self, make: Callable[[], TrainerLoop]) -> TrainerLoop:
        """Make and enter a loop, after the end of one that an earlier training left open."""
        self.leave_open()
        loop = make()
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

    def leave_open(self) -> None:
        """Leave the run where no one says that the training has come to its end: its complete steps are pushed, and
        nothing is waited for longer than usual. Of several ranks none are, while an exception is on its way: the others
        may wait for this one. May be called twice.
        """
        if self.loop is not None:
            self.loop._left_open = True
        self.end(*sys.exc_info())

    def _say_what_is_lost(self) -> None:
        """Log what is lost when a trainer reports no exception to callbacks: the process ends without a push."""
        shell = self.loop.shell if self.loop is not None else None
        if shell is not None and not shell.done and shell.unshared.steps:
            _logger.warning(
                "the training ended by an exception, without %s: they were not pushed; callback.close() in a `finally` "
                "pushes those of one process", shell.unshared,
            )  # fmt: skip


def tokens_in(batch: Any) -> int:
    """Tokens of a batch that has `input_ids`, padding included: to count the others would wait for the device.

    0 for a batch that has none.
    """
    ids = batch.get("input_ids") if hasattr(batch, "get") else getattr(batch, "input_ids", None)
    return ids.numel() if isinstance(ids, torch.Tensor) else 0


def step_label(step: int) -> str:
    """The label of the checkpoint that a trainer takes after so many steps."""
    return f"step {step}"
