"""The byte model on the ranks of a cluster: cut as a Parallelism says, and its inner step.

Every kind computes what one process does with the same batch, up to rounding: the same first values, the rows of the
batch dealt to the ranks that have data of their own, and the norm of the gradient of the whole model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dips.core.errors import FatalError
from dips.trainer.data import Batch
from dips.trainer.model import IGNORED_TARGET, ByteModel, Layer, cross_entropy
from dips.trainer.parallelism import NAMES, Parallelism
from dips.worker.parallel.held import Held, held_here
from dips.worker.torch_model import local

MICROBATCHES_OF_A_STAGE = 2
"""A batch goes through a pipeline in at most so many parts for each stage."""

NORM_FLOOR = 1e-6
"""As in torch's clip_grad_norm_()."""


class Stage(nn.Module):
    """Consecutive layers of a byte model. Names are those of the full model; the first and the last stage have the
    embedding, which is tied.
    """

    def __init__(self, full: ByteModel, number: int, n_stages: int) -> None:
        super().__init__()
        n_layers = len(full.layers)
        begin, end = (-(-n_layers * edge // n_stages) for edge in (number, number + 1))
        self.is_first, self.is_last = number == 0, number == n_stages - 1
        self.embedding = full.embedding if self.is_first or self.is_last else None
        self.layers = nn.ModuleDict({str(index): full.layers[index] for index in range(begin, end)})
        self.norm = full.norm if self.is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """(B, T) bytes on the first stage, else (B, T, C) -> (B, T, C), or (B, T, V) logits on the last one."""
        if self.is_first:
            assert self.embedding is not None
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.is_last:
            assert self.embedding is not None
            assert self.norm is not None
            x = F.linear(self.norm(x), self.embedding.weight)
        return x


class CutModel:
    """This rank's part of the model. Every method is called on all ranks together."""

    def __init__(self, model: ByteModel, parallelism: Parallelism, batch_size: int, sequence_tokens: int) -> None:
        """model: the whole one, on its device, equal on all ranks; it is cut in place."""
        self._config = model.config
        self._parallelism = parallelism
        self._device = model.embedding.weight.device
        self._all: dist.ProcessGroup | None = dist.new_group()
        sizes = tuple(getattr(parallelism, name) for name in NAMES)
        self._mesh = init_device_mesh(self._device.type, sizes, mesh_dim_names=tuple(NAMES))
        at = {name: self._mesh.get_local_rank(name) for name in NAMES}
        n_rows = batch_size // parallelism.n_data
        begin = n_rows * (at["data"] * parallelism.fsdp + at["fsdp"])
        self.rows = slice(begin, begin + n_rows)
        """Those of the cluster's batch that this rank trains on."""
        self._tells_loss = at["tensor"] == 0
        stage = Stage(model, at["pipeline"], parallelism.pipeline) if parallelism.pipeline > 1 else None
        self.module: nn.Module = stage or model
        if parallelism.tensor > 1:
            # Tensor parallelism: every rank has some heads and some hidden units of each layer; all else is whole.
            for layer in _layers(self.module):
                parallelize_module(
                    layer,
                    self._mesh["tensor"],
                    {
                        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
                        **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
                        "attention.wo": RowwiseParallel(),
                        "feed_forward.down": RowwiseParallel(),
                    },
                )
        if parallelism.fsdp > 1:
            # FSDP2: every rank has a shard of each parameter, and gathers a layer while it computes with it.
            for part in (*_layers(self.module), self.module):
                fully_shard(part, mesh=self._mesh["fsdp"])
        self._pipeline = _Pipeline(stage, self._mesh, n_rows, sequence_tokens) if stage is not None else None
        # How many ranks hold an element of each parameter.
        here = {name: local(parameter).numel() for name, parameter in self.module.named_parameters()}
        shapes = self._config.parameter_shapes
        counts = self._sum([float(here.get(name, 0)) for name in shapes])
        self._n_holders = {
            name: count / math.prod(shape) for (name, shape), count in zip(shapes.items(), counts, strict=True)
        }

    @property
    def names(self) -> list[str]:
        """Of the whole model's parameters, in its order."""
        return list(self._config.parameter_shapes)

    def held(self, optimizers: Sequence[torch.optim.Optimizer]) -> Held:
        """What this rank holds of the model."""
        return held_here([self.module], optimizers, data_mesh=self._mesh["data", "fsdp"])

    def step(self, optimizers: Sequence[torch.optim.Optimizer], batch: Batch, grad_clip: float) -> float:
        """One inner step on the cluster's batch; the mean loss in nats per byte, the same on all ranks.

        A loss that is not finite changes nothing and is returned; for a gradient that is not, NaN is. Raises FatalError
        where another rank is gone.
        """
        with another_rank_may_be_gone():
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            # FSDP2 averages over its ranks; all else adds up.
            loss = self._backward(batch, self._parallelism.fsdp / batch.tokens) / self._parallelism.fsdp
            gradients = self._gradients()
            self._add_up(list(gradients.values()))
            squares = sum(
                (
                    float(gradient.double().square().sum()) / self._n_holders[name]
                    for name, gradient in gradients.items()
                ),
                start=0.0,
            )
            value, square = self._sum([loss if self._tells_loss else 0.0, squares])
            if math.isfinite(value):
                if not math.isfinite(square):
                    return math.nan
                scale = min(1.0, grad_clip / (math.sqrt(square) + NORM_FLOOR))
                torch._foreach_mul_(list(gradients.values()), scale)
                for optimizer in optimizers:
                    optimizer.step()
            return value

    def any(self, flag: bool) -> bool:
        """Whether it is so on some rank. Raises FatalError where another rank is gone."""
        with another_rank_may_be_gone():
            return self._sum([float(flag)])[0] > 0

    def all_have(self, digest: bytes) -> bool:
        """Whether all ranks give the same bytes, as many on each. Raises FatalError where another rank is gone."""
        with another_rank_may_be_gone():
            mine = [float(byte) for byte in digest]
            is_mean = self._sum(mine) == [byte * dist.get_world_size() for byte in mine]
            return not self.any(not is_mean)

    def whole(self, optimizers: Sequence[torch.optim.Optimizer]) -> ByteModel:
        """The whole model, in the processor's memory of each rank. Raises FatalError where another rank is gone."""
        held = self.held(optimizers)
        here = {row.parameter.name: (row.box, tensor) for row, tensor in zip(held.rows, held.tensors(), strict=True)}
        model = ByteModel(self._config)
        with torch.no_grad(), another_rank_may_be_gone():
            for name, parameter in model.named_parameters():
                # Less than any value: the largest over all ranks is what those have that hold the element.
                whole = torch.full_like(parameter, -math.inf, device=self._device)
                if name in here:
                    (starts, sizes), part = here[name]
                    whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))] = part
                dist.all_reduce(whole, dist.ReduceOp.MAX, group=self._all)
                parameter.copy_(whole)
        return model

    def close(self) -> None:
        """End the threads of the last messages, before the interpreter ends: torch aborts a process in which one of
        them is about to free a tensor then. (torch keeps FSDP2's own groups for ever.)
        """
        group, self._all = self._all, None
        if group is not None:
            dist.destroy_process_group(group)

    def _backward(self, batch: Batch, weight: float) -> float:
        """Gradients of the summed losses of this rank's rows, times weight; returns that, 0 where it is not known."""
        inputs, targets = (whole[self.rows].to(self._device) for whole in (batch.inputs, batch.targets))
        if self._pipeline is not None:
            return self._pipeline.backward(inputs, targets, weight)
        loss = cross_entropy(self.module(inputs), targets, "sum") * weight
        torch.autograd.backward(loss)
        return loss.item()

    def _add_up(self, gradients: list[Tensor]) -> None:
        """Add the gradients of ranks with other data, which hold the same parts of the model."""
        if self._parallelism.data > 1:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=self._mesh["data"].get_group())
            for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def _gradients(self) -> dict[str, Tensor]:
        """What this rank holds of each parameter's gradient."""
        return {name: local(p.grad) for name, p in self.module.named_parameters() if p.grad is not None}

    def _sum(self, numbers: list[float]) -> list[float]:
        """Each of the numbers, added over all ranks."""
        total = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(total, group=self._all)
        sums: list[float] = total.tolist()
        return sums


# ---- cuts ------------------------------------------------------------------------------------------------------------


def _layers(module: nn.Module) -> list[Layer]:
    return [part for part in module.modules() if isinstance(part, Layer)]


# ---- pipeline --------------------------------------------------------------------------------------------------------


class _Pipeline:
    """Runs batches through the stages, in parts that follow one another, and adds up the tied embedding's gradients."""

    def __init__(self, stage: Stage, mesh: DeviceMesh, n_rows: int, sequence_tokens: int) -> None:
        line = mesh["pipeline"]
        number, n_stages = line.get_local_rank(), line.size()
        most = MICROBATCHES_OF_A_STAGE * n_stages
        self._n_parts = max(n_parts for n_parts in range(1, most + 1) if n_rows % n_parts == 0)
        self._stage = stage
        self._sequence_tokens = sequence_tokens
        self._weight = 0.0
        device = stage.parameters().__next__().device
        self._schedule = ScheduleGPipe(
            PipelineStage(stage, number, n_stages, device, group=line.get_group()), self._n_parts, loss_fn=self._loss
        )
        self._tied: dist.ProcessGroup | None = None
        ends = mesh.mesh[[0, -1]].reshape(2, -1).T.tolist()
        for ranks in ends:  # all ranks make all groups
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                self._tied = group

    def backward(self, inputs: Tensor, targets: Tensor, weight: float) -> float:
        """As CutModel._backward(); the last stage has the loss."""
        # The schedule divides gradients by the number of parts.
        self._weight, losses = weight * self._n_parts, list[Tensor]()
        if self._stage.is_first:
            self._schedule.step(self._padded(inputs, 0))
        elif self._stage.is_last:
            self._schedule.step(target=self._padded(targets, IGNORED_TARGET), losses=losses)
        else:
            self._schedule.step()
        if self._stage.embedding is not None:
            gradient = self._stage.embedding.weight.grad
            assert gradient is not None, "both ends of the pipeline use it"
            dist.all_reduce(local(gradient), group=self._tied)
        return sum(loss.item() for loss in losses) / self._n_parts

    def _padded(self, tokens: Tensor, value: int) -> Tensor:
        """Rows of full length: the stages' messages have one size."""
        return F.pad(tokens, (0, self._sequence_tokens - tokens.shape[1]), value=value)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets, "sum") * self._weight


# ---- errors ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def another_rank_may_be_gone() -> Iterator[None]:
    """Raises FatalError in place of torch's error of a rank that another one has left."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo/" in str(error):
            raise FatalError(
                f"rank {dist.get_rank()} of this cluster has lost another rank, which ended: its own error says why"
            ) from error
        raise
