"""One of several ranks of a cluster under a trainer that people have; started by torchrun, which names rank and peers:

    torchrun --standalone --nproc_per_node 2 tests/support/trainer_ranks.py KIND FOLDER STEPS [KILLED_RANK KILLED_AT]

KIND is a trainer of KINDS and how the model is cut, as `lightning-fsdp`. Where a trainer refuses to do so on a CPU, the
check is switched off here, and all else of it is as it is. The run stands in the environment. Goes on from the
trainer's last checkpoint in FOLDER if there is one, and writes what this rank holds at the end to FOLDER/rank-N.json.
KILLED_RANK kills itself after so many steps of a first life.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.trainer_models import LENGTH, Layer, Model, Rows, flat_of, same_cut

import dips
from dips.worker import torch_model
from dips.worker.parallel import agreement

BATCH, ACCUMULATED, SAVED_EVERY = 2, 2, 5
RANK = int(os.environ["RANK"])


@dataclass
class Watch:
    folder: Path
    killed_at: int | None
    version: str = ""
    progress: int = 0
    ended: bool = False

    def step(self, steps: int, sync: dips.DiLoCo | None) -> None:
        if sync is not None:
            self.version, self.progress, self.ended = str(sync.version), sync.progress, sync.run_ended
        if steps == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def tell(self, steps: int, model: torch.nn.Module, talks: bool) -> None:
        digest = hashlib.sha256(flat_of(model).tobytes()).hexdigest()
        is_cut = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        told = {"steps": steps, "model": digest, "version": self.version, "progress": self.progress, "talks": talks}
        (self.folder / f"rank-{RANK}.json").write_text(json.dumps({**told, "ended": self.ended, "is_cut": is_cut}))


def hugging_face(watch: Watch, steps: int, cut: str) -> None:
    """cut: ddp: by the Trainer. loaded-fsdp, loaded-tp: a Llama that transformers cuts when it loads it. fsdp: one that
    Accelerate cuts."""
    from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Look(TrainerCallback):
        talks = False

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.talks = callback.sync is not None and callback.sync.shell is not None
            watch.step(state.global_step, callback.sync)

    given: dict[str, Any] = {}
    llama = watch.folder / "llama"
    if cut == "ddp":
        model: torch.nn.Module = Model(RANK)
    elif cut == "fsdp":
        accelerate_cuts_on_a_cpu()
        model = LlamaForCausalLM.from_pretrained(llama)
        given = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
    else:
        from transformers.distributed.configuration_utils import DistributedConfig

        _accelerate_knows_tensor_parallelism_on_a_cpu()
        dist.init_process_group("gloo")
        sizes: dict[str, Any] = {"fsdp_size": 2} if cut == "loaded-fsdp" else {"tp_size": 2, "tp_plan": "auto"}
        model = LlamaForCausalLM.from_pretrained(llama, distributed_config=DistributedConfig(**sizes))
        given = {"save_strategy": "no"}  # the Trainer keeps no checkpoints of such models
    folder, callback, look = watch.folder / "trainer", dips.HuggingFaceCallback(), Look()
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATED,
        max_steps=steps, save_steps=SAVED_EVERY, learning_rate=0.01, use_cpu=True, report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False, seed=3, ddp_backend="gloo", **given,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Rows(), callbacks=[callback, look])
    trainer.train(resume_from_checkpoint=True if list(folder.glob("checkpoint-*")) else None)
    assert isinstance(trainer.model, torch.nn.Module)
    watch.tell(trainer.state.global_step, trainer.model, look.talks)


def accelerate_cuts_on_a_cpu() -> None:
    """As on an accelerator; on a CPU it would silently take DistributedDataParallel instead."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    made = AcceleratorState.__init__

    def make(state: Any, *given: Any, fsdp_plugin: Any = None, **more: Any) -> None:
        made(state, *given, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # else the next state has its own

    AcceleratorState.__init__ = make


def _accelerate_knows_tensor_parallelism_on_a_cpu() -> None:
    from accelerate.parallelism_config import ParallelismConfig

    ParallelismConfig._validate_accelerator = lambda self, accelerator: None


def lightning(watch: Watch, steps: int, cut: str) -> None:
    """cut: ddp, or fsdp and tp by ModelParallelStrategy."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self._of = (Model(RANK if cut == "ddp" else 0),)
            self.layers = self._of[0].layers

        def configure_model(self) -> None:
            if cut in sizes:
                assert self.device_mesh is not None
                _cut(self._of[0], cut, self.device_mesh["data_parallel" if cut == "fsdp" else "tensor_parallel"])

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self._of[0](**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    class Look(Callback):
        talks = False

        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *given: Any) -> None:
            self.talks = callback.sync is not None and callback.sync.shell is not None
            watch.step(trainer.global_step, callback.sync)

    callback, look, module, last = dips.LightningCallback(), Look(), Module(), watch.folder / "last.ckpt"
    keeper = ModelCheckpoint(
        watch.folder, every_n_train_steps=SAVED_EVERY, save_last=True, enable_version_counter=False
    )
    sizes = {"fsdp": (2, 1), "tp": (1, 2)}
    trainer = Trainer(
        max_steps=steps, accumulate_grad_batches=ACCUMULATED, accelerator="cpu", devices=2,
        strategy=ModelParallelStrategy(*sizes[cut]) if cut in sizes else "ddp",
        default_root_dir=watch.folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback, keeper, look],
    )  # fmt: skip
    trainer.fit(module, DataLoader(Rows(), BATCH), ckpt_path=str(last) if last.exists() else None)
    watch.tell(trainer.global_step, module._of[0], look.talks)


def _cut(model: Model, cut: str, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        assert isinstance(layer, Layer)
        if cut == "fsdp":
            fully_shard(layer, mesh=mesh)
        else:
            layer.w = torch.nn.Parameter(distribute_tensor(layer.w.detach(), mesh, [Shard(0)]))


def accelerate(watch: Watch, steps: int, cut: str) -> None:
    """The loops of docs/integrations.md. cut: ddp and prepared-fsdp: by Accelerate. own-fsdp: by the loop itself."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    model, plugin = Model(RANK if cut == "ddp" else 0), None
    if cut == "prepared-fsdp":
        accelerate_cuts_on_a_cpu()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Layer"],
            cpu_ram_efficient_loading=False,
        )  # fmt: skip
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, fsdp_plugin=plugin)
    if cut == "own-fsdp":
        _cut(model, "fsdp", init_device_mesh("cpu", (2,)))
    prepared, optimizer, loader = model, torch.optim.AdamW(model.parameters(), lr=0.01), DataLoader(Rows(), BATCH)
    if cut == "own-fsdp":
        optimizer, loader = accelerator.prepare(optimizer, loader)
    else:
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with dips.DiLoCo(prepared, optimizer, tokens_per_step=ACCUMULATED * BATCH * LENGTH, steps=steps) as sync:
        for batch in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            watch.step(sync.steps, sync)
            if sync.done:
                break
        talks = sync.shell is not None
    watch.tell(sync.steps, model, talks)


KINDS = {"hugging_face": hugging_face, "lightning": lightning, "accelerate": accelerate}


def main(kind: str, folder: str, steps: str, *killed: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch_model.Layout = agreement.Layout = same_cut  # type: ignore[attr-defined, assignment]
    place = Path(folder)
    first_life = not (place / "lives").exists()
    here = first_life and bool(killed) and int(killed[0]) == RANK
    watch = Watch(place, int(killed[1]) if here else None)
    trainer, _, cut = kind.partition("-")
    KINDS[trainer](watch, int(steps), cut)


if __name__ == "__main__":
    main(*sys.argv[1:])
