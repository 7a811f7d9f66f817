"""Describes a model of Hugging Face transformers for exports, if that is what is trained (core/model_description.py).

Never imports transformers: a program that trains one of its models has done so.
"""

from __future__ import annotations

import json
import sys

import torch

from dips.core.model_description import ModelDescription


def description_of(model: torch.nn.Module) -> str:
    """JSON for the layout; empty when no transformers model holds all that is trained.

    The model may stand inside of another module (a LightningModule, say), which gives its names a prefix.
    """
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "PreTrainedModel", None)
    if kind is None:
        return ""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    for name, module in model.named_modules():
        if isinstance(module, kind) and trained <= {id(p) for p in module.parameters()}:
            return _described(module, f"{name}." if name else "", trained).to_json()
    return ""


def _described(module: torch.nn.Module, prefix: str, trained: set[int]) -> ModelDescription:
    config = json.loads(module.config.to_json_string())  # type: ignore[union-attr, operator]
    config["architectures"] = [type(module).__name__]
    # Tied parameters are one object under several names; buffers that are saved are each cluster's own.
    absent = [name for name, tensor in module.state_dict(keep_vars=True).items() if id(tensor) not in trained]
    return ModelDescription(config, prefix, tuple(absent), len(absent))
