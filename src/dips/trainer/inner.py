"""Makes inner steps with a cluster's model, optimizer and text.

Knows nothing of a master: the loop with a master (train.py), the loop without, and the calibration share it.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from dips.core.errors import ConfigError, FatalError
from dips.trainer.config import TrainConfig, corpus_of
from dips.trainer.data import Batch, ChunkedText
from dips.trainer.model import ByteModel
from dips.trainer.sizes import SIZES

BETAS = (0.9, 0.95)


def device_of(config: TrainConfig) -> torch.device:
    """The device to train on. Raises ConfigError when CUDA is asked for and not available."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError(
            "device is cuda, but this PyTorch finds no CUDA device: give --device cpu, or install a PyTorch with CUDA "
            "and its driver"
        )
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


class InnerTrainer:
    """A model, its AdamW and the text, ready for steps; sets torch's thread count for the process."""

    def __init__(self, config: TrainConfig) -> None:
        """Raises ConfigError for a device that is not available or text that cannot be used."""
        self.config = config
        self.device = device_of(config)
        torch.set_num_threads(config.threads)
        corpus = corpus_of(config)
        self.heldout = corpus.heldout
        self.text = ChunkedText(corpus.training, config.data_seed, config.chunk_tokens)
        self.model = ByteModel(SIZES[config.model_size], config.seed).to(self.device)
        self.optimizer = make_optimizer(self.model, config)

    def step(self, batch: Batch, lr: float) -> float:
        """One forward, backward and optimizer step at learning rate lr; the mean loss in nats per byte.

        A non-finite loss changes nothing and raises FatalError: parameters that it would ruin must not be pushed.
        """
        value = inner_step(self.model, self.optimizer, batch, lr, self.config.grad_clip)
        if not math.isfinite(value):
            raise FatalError(f"the loss is {value} at learning rate {lr:g}: lower --lr or --grad-clip")
        return value


def inner_step(model: ByteModel, optimizer: torch.optim.Optimizer, batch: Batch, lr: float, grad_clip: float) -> float:
    """One forward, backward and optimizer step at learning rate lr; the mean loss in nats per byte.

    A loss that is not finite changes nothing and is returned.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    device = model.embedding.weight.device
    loss = model.loss(batch.inputs.to(device), batch.targets.to(device))
    value = loss.item()
    if math.isfinite(value):
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
    return value


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices and none for norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=BETAS, fused=True)
