"""Runs a file of examples/recipes as it is, and notes what its cluster trained: `recipe.py FOLDER RECIPE ARGUMENT...`

What only a machine without an accelerator needs is put in place here, before the recipe imports its trainer. Tokens are
counted where they enter the model's first embedding, apart from what Di-PS counts; a step is one of the optimizer.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.three_facts import note, trained_parameters

from dips.worker.loop import DiLoCo
from dips.worker.torch_model import has_shards, innermost, plain_optimizer


class Watch:
    """What goes into the model of one loop, from its beginning to its end."""

    def __init__(self, loop: DiLoCo, folder: Path) -> None:
        (self._model,), self._folder = loop._models, folder
        self._ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._since_step, self._of_steps = 0, list[int]()
        embedding = next(module for module in self._model.modules() if isinstance(module, torch.nn.Embedding))
        embedding.register_forward_pre_hook(self._entered)
        optimizer = innermost(plain_optimizer(each) for each in loop._optimizers)[0]
        optimizer.register_step_post_hook(self._stepped)

    def _entered(self, embedding: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if embedding.training and torch.is_grad_enabled():
            self._since_step += given[0].numel() * self._ranks

    def _stepped(self, *given: Any) -> None:
        self._of_steps.append(self._since_step)
        self._since_step = 0

    def end(self) -> None:
        if has_shards(self._model):
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            whole = {n: t for n, t in get_model_state_dict(self._model, options=options).items() if torch.is_tensor(t)}
        else:
            whole = trained_parameters(self._model)
        if os.environ.get("RANK", "0") == "0":
            note(self._folder, whole, self._of_steps)


def watch_loops(folder: Path) -> None:
    """Also those inside of the callbacks."""
    entered, left, watches = DiLoCo.__enter__, DiLoCo.__exit__, dict[int, Watch]()

    def enter(loop: DiLoCo) -> DiLoCo:
        given = entered(loop)
        watches[id(loop)] = Watch(loop, folder)
        return given

    def leave(loop: DiLoCo, *error: Any) -> None:
        left(loop, *error)
        if error == (None, None, None):
            watches[id(loop)].end()

    DiLoCo.__enter__, DiLoCo.__exit__ = enter, leave  # type: ignore[method-assign]


def without_accelerator(recipe: str) -> None:
    """What its trainer lacks on a machine with processors alone."""
    if recipe == "accelerate_fsdp2":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        if "RANK" in os.environ:
            from support.trainer_ranks import accelerate_cuts_on_a_cpu

            accelerate_cuts_on_a_cpu()
    elif recipe in ("hugging_face", "trl_lora"):
        from transformers import TrainingArguments

        checked = TrainingArguments.__post_init__

        def on_cpu(arguments: TrainingArguments) -> None:
            arguments.use_cpu = True
            checked(arguments)  # type: ignore[no-untyped-call]

        TrainingArguments.__post_init__ = on_cpu  # type: ignore[method-assign]
    elif recipe == "torchtitan_train":
        from support.titan_files import model_arguments
        from support.titan_on_cpu import llama3

        llama3.llama3_args["small"] = model_arguments(llama3.TransformerModelArgs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, of_cluster, *sys.argv = sys.argv  # now: torchtitan reads them when it is imported
    sys.path[0] = str(Path(sys.argv[0]).parent)
    without_accelerator(Path(sys.argv[0]).stem)
    watch_loops(Path(of_cluster))
    runpy.run_path(sys.argv[0], run_name="__main__")
