"""DiLoCo in forty lines of plain torch, written from its paper (arXiv 2311.08105, algorithm 1), not from this project.

The model and the text are the trainer's; the two optimizers, the learning rate, the merge and its clip are done here.
It must import nothing that merges, weighs, clips or schedules.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from dips.core.messages import DataRange
from dips.trainer.config import TrainConfig
from dips.trainer.data import ChunkedText
from dips.trainer.model import ByteModel

Step = Sequence[DataRange]
"""The rows of one batch, all equally long."""


def plain_diloco(
    model: ByteModel, text: ChunkedText, train: TrainConfig, total_tokens: int,
    rounds: Sequence[Sequence[Sequence[Step]]], outer_lr: float, mu: float, clip_norm: float,
    kappas: Sequence[float] | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """The versions, the first one included, as flat vectors. rounds[round][cluster][step]; kappas None: its own."""
    theta, momentum, tokens = parameters_to_vector(model.parameters()).detach(), torch.tensor(0.0), 0
    replicas = [copy.deepcopy(model) for _ in rounds[0]]
    optimizers = [_adamw(replica, train) for replica in replicas]
    versions = [theta]
    for n_round, clusters in enumerate(rounds):
        pushed = []
        for replica, adamw, steps in zip(replicas, optimizers, clusters, strict=True):
            vector_to_parameters(theta.clone(), replica.parameters())
            own = 0
            for rows in steps:
                for group in adamw.param_groups:
                    group["lr"] = _rate(train, total_tokens, tokens + own)
                data = torch.stack([torch.from_numpy(text.tokens_of(row).copy()).long() for row in rows])
                adamw.zero_grad()
                replica.loss(data[:, :-1], data[:, 1:]).backward()
                clip_grad_norm_(replica.parameters(), train.grad_clip)
                adamw.step()
                own += sum(row.tokens for row in rows)
            pushed.append((own, parameters_to_vector(replica.parameters()).detach()))
        all_tokens = sum(own for own, _ in pushed)
        merged = torch.zeros_like(theta)
        for own, parameters in pushed:
            merged = merged + (own / all_tokens) * (theta - parameters)
        kappa = min(1.0, clip_norm / merged.double().norm().item()) if kappas is None else kappas[n_round]
        gradient = kappa * merged
        momentum = mu * momentum + gradient
        theta = theta - outer_lr * (gradient + mu * momentum)
        tokens += all_tokens
        versions.append(theta)
    return versions


def _adamw(model: ByteModel, train: TrainConfig) -> torch.optim.AdamW:
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # The fused kernel rounds otherwise than the plain one.
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def _rate(train: TrainConfig, total_tokens: int, tokens: int) -> float:
    if tokens < train.warmup_tokens:
        return train.lr * (tokens + 1) / (train.warmup_tokens + 1)
    angle = math.pi * min(1.0, (tokens - train.warmup_tokens) / (total_tokens - train.warmup_tokens))
    return train.lr * (train.min_lr_fraction + (1 - train.min_lr_fraction) * (0.5 * (1 + math.cos(angle))))
