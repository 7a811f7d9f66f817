"""A callback for Lightning's Trainer: its training becomes one cluster of a run.

    trainer = lightning.Trainer(callbacks=[dips.LightningCallback()])
    trainer.fit(module, loader)

Without DIPS_MASTER it does nothing. It changes parameters only inside of the optimizer's step(), and never touches
validation, schedules or data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dips.core.errors import TERMINATED, ConfigError
from dips.core.observe.logs import end_with_one_sentence
from dips.core.release import how_to_install

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.exceptions import SIGTERMException
except ModuleNotFoundError as error:
    raise ConfigError(f"the callback for Lightning needs {error.name}: {how_to_install('lightning')}") from error

from dips.worker.integrations.trainer_loop import CallbackOptions, Joined, TokensOf, TrainerLoop, step_label, tokens_in

_FOLDER, _LABEL = "dips", "dips_label"


class LightningCallback(Callback):
    """The callback; give it to a Trainer: `callbacks=[LightningCallback()]`.

    Of several processes each gives it to its Trainer: under `ddp`, or under ModelParallelStrategy, whose module cuts
    itself with fully_shard or parallelize_module.

    Args:
        tokens_per_step: Tokens (or samples) behind one optimizer.step() of this process; left out, they are counted.
            Below 1: ConfigError.
        tokens_of: Counts the tokens of a batch; left out, the `input_ids` of batches that have them, accumulated
            batches together. A batch that it cannot count: ConfigError.
        checkpoint_dir: A folder for this cluster alone; left out, `dips` in the Trainer's default_root_dir, if the
            Trainer saves.
        loop: Further arguments of dips.DiLoCo, such as master, cluster_id, keys, wire_dtype or buffers. steps, state,
            resume and checkpoint_every_s are the Trainer's: ConfigError.

    The Trainer stops when the run has ended, with the run's last version as its model. Raises ConfigError, Refused and
    RetryLater from trainer.fit(), as dips.DiLoCo does.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int | None = None,
        tokens_of: TokensOf | None = None,
        checkpoint_dir: Path | str | None = None,
        **loop: Any,
    ) -> None:
        folder = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._options = CallbackOptions(tokens_per_step, folder, loop)
        self._tokens_of = tokens_of or tokens_in
        self._joined = Joined()
        self._label: str | None = None
        self._steps_seen = 0
        self._batch_tokens = 0  # of a batch that is not known to have gradients
        self._sees_backward = self._has_gradients = False

    @property
    def sync(self) -> TrainerLoop | None:
        """The loop while it trains: version, progress, last_verdict; None before and after."""
        return self._joined.loop

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._options.has_master:
            end_with_one_sentence()  # again: init_process_group() puts a hook around ours that would swallow it
            _refuse(trainer)
            model = trainer.strategy.model or pl_module  # with DDP's wrapper, if there is one
            optimizer, folder, label = trainer.optimizers[0], self._folder(trainer), self._label
            self._joined.begin(lambda: TrainerLoop(model, optimizer, self._options, folder, label))
            self._sees_backward = pl_module.automatic_optimization

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.sync is None:
            return
        self.sync.saw_batch(batch)
        if self._options.tokens_per_step is None:
            self._batch_tokens = self._tokens_of(batch)
            if not self._sees_backward:  # a loop of the module's own, which may call loss.backward() itself
                self._add_tokens()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._sees_backward = self._has_gradients = True
        self._add_tokens()

    def _add_tokens(self) -> None:
        tokens, self._batch_tokens = self._batch_tokens, 0
        if self.sync is not None:
            self.sync.add_tokens(tokens)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self.sync is None:
            return
        if pl_module.automatic_optimization and not self._has_gradients:
            self.sync.skip_step()  # training_step() returned None: Lightning calls the optimizer without gradients
        else:
            self.sync.before_step()
        self._has_gradients = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.sync is None:
            return
        # Lightning has divided it by the number of batches in a step. It goes with the next step.
        self.sync.saw_loss(outputs.get("loss") if isinstance(outputs, Mapping) else outputs, is_share=True)
        if self.sync.steps != self._steps_seen:
            self._steps_seen = self.sync.steps
            self.sync.report_seen()
        if self.sync.run_ended:
            trainer.should_stop = True

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.sync is not None:
            checkpoint[_LABEL] = step_label(trainer.global_step)
            self.sync.checkpoint(checkpoint[_LABEL])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        label = checkpoint.get(_LABEL)
        self._label = label if isinstance(label, str) and trainer.state.fn == TrainerFn.FITTING else None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sync, self._label = self.sync, None
        self._joined.end()
        if sync is not None and trainer.received_sigterm:  # it no longer looks for it
            sync.refuse_loss_by_sigterm()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        sync = self.sync
        self._joined.end(type(exception), exception, exception.__traceback__)
        released = sync is None or sync.released
        if isinstance(exception, SIGTERMException) and not released:
            exception.code = TERMINATED  # Lightning's own is 0, which means that the work is done

    def close(self) -> None:
        """Leave the run, as HuggingFaceCallback.close() does. May be called twice."""
        self._label = None
        self._joined.leave_open()

    def _folder(self, trainer: Trainer) -> Path | None:
        if not trainer.checkpoint_callbacks:
            return None
        return self._options.checkpoint_dir or Path(trainer.default_root_dir) / _FOLDER


def _refuse(trainer: Trainer) -> None:
    """Raises ConfigError for a trainer without one model and one inner optimizer in all processes, or without end."""
    if len(trainer.optimizers) != 1:
        raise ConfigError(
            f"the module has {len(trainer.optimizers)} optimizers: a cluster trains with one, whose steps are counted"
        )
    if not isinstance(trainer.strategy, (DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy)):
        raise ConfigError(
            f"the strategy {type(trainer.strategy).__name__} may cut the model or its optimizer state into shards in a "
            "form of its own: use ModelParallelStrategy with fully_shard or parallelize_module in configure_model(), "
            "strategy='ddp', or one device"
        )
    if trainer.min_epochs or trainer.min_steps:
        raise ConfigError(
            "min_epochs and min_steps would train on after the run has ended, and share nothing: leave them out"
        )
