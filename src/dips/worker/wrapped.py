"""Unwraps the model and the optimizer from the wrappers of trainers.

Names of parameters must be the same on every cluster, whether it runs one process or eight, compiles its model or not;
and a step must be noticed where it is made. So wrappers are removed, and those that cut a model or its optimizer state
into shards are refused. Imports no wrapper: a program does not use one that it has not imported.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dips.core.errors import ConfigError

_TRAINERS = frozenset({"accelerate", "lightning", "pytorch_lightning"})
_SHARDED_MODELS = frozenset({"FullyShardedDataParallel", "DeepSpeedEngine", "PipelineEngine"})
_SHARDED_OPTIMIZERS = frozenset({"ZeroRedundancyOptimizer", "DeepSpeedOptimizerWrapper"})


def plain_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model without DistributedDataParallel, DataParallel and torch.compile around it."""
    return list(_with_wrappers(model))[-1]


def is_replica_on_all_ranks(model: torch.nn.Module) -> bool:
    """Whether DistributedDataParallel wraps the model and gave all processes the same parameters.

    One over a part of the processes, together with shards of tensor or pipeline parallelism, did not.
    """
    return any(
        isinstance(each, DistributedDataParallel) and each.process_group.size() == dist.get_world_size()
        for each in _with_wrappers(model)
    )


def _with_wrappers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The given model, the model inside its wrapper, and so on; the plain model is the last."""
    while True:
        yield model
        inner = model.module if isinstance(model, (DataParallel, DistributedDataParallel)) else None
        inner = inner if inner is not None else getattr(model, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return
        model = inner


def plain_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose step() changes parameters, without the wrappers of Accelerate and Lightning.

    Other wrappers stay: they may change parameters after the inner optimizer has.
    """
    while type(optimizer).__module__.split(".")[0] in _TRAINERS:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer) or inner is optimizer:
            break
        optimizer = inner
    return optimizer


def refuse_shards(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError for a model or an optimizer state that no single process holds completely."""
    kinds = {type(module).__name__ for module in model.modules()} & _SHARDED_MODELS
    kinds |= {type(optimizer).__name__} & _SHARDED_OPTIMIZERS
    if type(optimizer).__module__.split(".")[0] == "deepspeed":
        kinds.add("DeepSpeed")
    if kinds:
        raise ConfigError(
            f"{sorted(kinds)[0]} cuts the model or its optimizer state into shards, which this release does not "
            "gather: train on one device, or on several with DistributedDataParallel, where each holds all of it"
        )
