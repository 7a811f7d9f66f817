"""Describes a model for exports: its tensors that the run does not train, and a transformers model's configuration
(core/model_description.py).

Never imports transformers: a program that trains one of its models has done so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Set

import torch

from dips.core.model_description import MAX_TOLD, Lacking, ModelDescription
from dips.core.untrained import Untrained
from dips.worker.untrained import moving_buffers


def description_of(model: torch.nn.Module, held: Set[int] | None = None, untrained: Untrained | None = None) -> str:
    """JSON for the layout; empty for a model that is trained completely and is not of transformers.

    held: ids of the tensors that versions hold; None: those that require gradients. untrained: digests of the others.
    A transformers model may be inside of another module (a LightningModule, say), which gives its names a prefix.
    """
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    held = trained if held is None else held
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "PreTrainedModel", None)
    for name, module in model.named_modules():
        if kind is not None and isinstance(module, kind) and trained <= {id(p) for p in module.parameters()}:
            config = json.loads(module.config.to_json_string())
            config["architectures"] = [type(module).__name__]
            prefix = f"{name}." if name else ""
            return _described(module, held, untrained or Untrained(), prefix, config).to_json()
    described = _described(model, held, untrained or Untrained(), "", {})
    return described.to_json() if described.n_absent else ""


def _described(
    module: torch.nn.Module, held: Set[int], untrained: Untrained, prefix: str, config: dict[str, object]
) -> ModelDescription:
    """The tensors to describe. Tied tensors are one object under several names, of which the first counts. A batch
    norm's counter is left out where it has no effect: no file needs it.
    """
    idle = {
        id(norm.num_batches_tracked)
        for norm in module.modules()
        if isinstance(norm, torch.nn.modules.batchnorm._NormBase) and norm.momentum is not None
    }
    moving = moving_buffers(module)
    digests = {item.name: item.digest for item in (*untrained.frozen, *untrained.buffers)}
    seen, lacks = set(held) | idle, []
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in seen or not isinstance(tensor, torch.Tensor):
            continue
        seen.add(id(tensor))
        digest = None if id(tensor) in moving else digests.get(prefix + name)
        lacks.append(Lacking(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), digest))
    return ModelDescription(config, prefix, tuple(one.name for one in lacks[:MAX_TOLD]), len(lacks), tuple(lacks))
