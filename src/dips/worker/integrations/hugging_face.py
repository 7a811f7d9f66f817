"""A callback for the Trainer of Hugging Face transformers: its training becomes one cluster of a run.

    trainer = Trainer(model, arguments, train_dataset=..., callbacks=[dips.HuggingFaceCallback()])
    trainer.train()

Without DIPS_MASTER it does nothing. It changes parameters only inside of the Trainer's optimizer.step(), and never
touches evaluation, schedules or data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from dips.core.errors import ConfigError
from dips.core.observe.logs import end_with_one_sentence
from dips.core.release import how_to_install

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    raise ConfigError(
        f"the callback for Hugging Face's Trainer needs {error.name}: {how_to_install('huggingface')}"
    ) from error

from dips.worker.integrations.trainer_loop import CallbackOptions, Joined, TrainerLoop, step_label, tokens_in
from dips.worker.step_checks import HookHere

_FOLDER = "dips"


class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """The callback; give it to a Trainer: `callbacks=[HuggingFaceCallback()]`.

    Of several processes each gives it to its Trainer: under DistributedDataParallel, FSDP2 or tensor parallelism.

    Args:
        tokens_per_step: Tokens behind one optimizer.step() of this process; left out, the `input_ids` that the model is
            trained on are counted, accumulated batches together. Below 1: ConfigError.
        checkpoint_dir: A folder for this cluster alone; left out, `dips` in the Trainer's output_dir, if the Trainer
            saves.
        loop: Further arguments of dips.DiLoCo, such as master, cluster_id, keys, wire_dtype or buffers. steps, state,
            resume and checkpoint_every_s are the Trainer's: ConfigError.

    The Trainer stops when the run has ended, with the run's last version as its model. Raises ConfigError, Refused
    and RetryLater from trainer.train(), as dips.DiLoCo does.
    """

    def __init__(
        self, *, tokens_per_step: int | None = None, checkpoint_dir: Path | str | None = None, **loop: Any
    ) -> None:
        folder = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._options = CallbackOptions(tokens_per_step, folder, loop)
        self._joined = Joined()
        self._hooks: list[RemovableHandle] = []
        self._loss_scale = 1
        self._sees_losses = False

    @property
    def sync(self) -> TrainerLoop | None:
        """The loop while it trains: version, progress, last_verdict; None before and after."""
        return self._joined.loop

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if not self._options.has_master:
            return
        end_with_one_sentence()  # again: init_process_group() puts a hook around ours that would swallow the sentence
        model, optimizer = given["model"], given["optimizer"]
        _refuse(args, model, self._options)
        label = step_label(state.global_step) if state.global_step > 0 else None
        self._joined.begin(lambda: TrainerLoop(model, optimizer, self._options, self._folder(args), label))
        self._remove_hooks()
        if self._options.tokens_per_step is None:
            self._hooks.append(model.register_forward_pre_hook(HookHere(self._count), with_kwargs=True))
        self._sees_losses = False
        n_batches = args.world_size // (getattr(model, "tp_size", None) or 1)  # tensor-parallel ranks see the same one
        self._loss_scale = n_batches if args.average_tokens_across_devices else 1
        if (
            not args.torch_compile
        ):  # a hook sees nothing inside of a compiled model: then the Trainer's log gives the loss
            self._hooks.append(model.register_forward_hook(HookHere(self._see_loss), with_kwargs=True))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if self.sync is not None:
            self.sync.report_seen()
            self.sync.before_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self.sync is None:
            return
        if self.sync.run_ended:
            control.should_training_stop = True
        if control.should_save:
            self.sync.checkpoint(step_label(state.global_step))

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self.sync is not None and control.should_save:
            self.sync.checkpoint(step_label(state.global_step))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        # save_strategy="best" decides after an evaluation, so that this one comes second.
        if self.sync is not None:
            self.sync.checkpoint(step_label(state.global_step))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **given: Any,
    ) -> None:
        loss = (logs or {}).get("loss")
        if self.sync is not None and isinstance(loss, float) and not self._sees_losses:
            self.sync.report(loss)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self._remove_hooks()
        self._joined.end()

    def close(self) -> None:
        """Leave the run, for example in a `finally`: complete steps are pushed, and none that may be half made; of
        several ranks none while an exception is on its way. May be repeated.
        """
        self._remove_hooks()
        self._joined.leave_open()

    def _count(self, model: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        if model.training and torch.is_grad_enabled() and self.sync is not None:
            self.sync.add_tokens(tokens_in(given) or tokens_in({"input_ids": args[0] if args else None}))

    def _see_loss(self, model: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
        """Note the loss that the model computes; that of a user's compute_loss is noted when it is logged."""
        if not (model.training and torch.is_grad_enabled()) or self.sync is None:
            return
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            return
        self._sees_losses = True
        # With the number of items of all batches and ranks, the model divides each batch's sum by it.
        is_share = given.get("num_items_in_batch") is not None
        self.sync.saw_loss(loss.detach() * self._loss_scale if is_share else loss, is_share=is_share)

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _folder(self, args: TrainingArguments) -> Path | None:
        if args.save_strategy == "no" or args.save_only_model:
            return None
        return self._options.checkpoint_dir or Path(args.output_dir or ".") / _FOLDER


def _refuse(args: TrainingArguments, model: torch.nn.Module, options: CallbackOptions) -> None:
    """Raises ConfigError for settings without one model and one inner optimizer in all processes together."""
    if getattr(args, "deepspeed", None):
        raise ConfigError(
            "DeepSpeed cuts the model or its optimizer state into shards in a form of its own: leave out deepspeed, "
            "and train with FSDP2 or DistributedDataParallel (docs/integrations.md)"
        )
    if getattr(args, "fsdp", None) and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ConfigError(
            "fsdp is set, and FSDP2 has not cut the model: Accelerate cuts on accelerators only, and version 1 makes "
            "shards in a form of its own; set fsdp_config={'version': 2}, or without an accelerator leave out fsdp and "
            "load the model with distributed_config=DistributedConfig(fsdp_size=...)"
        )
    if args.load_best_model_at_end:
        raise ConfigError(
            "load_best_model_at_end would put an old checkpoint in place of the run's last version: leave it out, and "
            "take the version that you want with `dips export`"
        )
    if args.torch_compile and options.tokens_per_step is None:
        raise ConfigError(
            "tokens are not counted inside of a compiled model: give tokens_per_step= to the callback, the tokens "
            "behind one optimizer.step() of this process"
        )
