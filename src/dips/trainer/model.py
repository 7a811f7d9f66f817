"""A LLaMA-style language model over bytes: small enough for a demo, with the structure of common language models.

The module must never keep state besides its parameters (no buffers): the flat vector is the complete model, and its
configuration (trainer/sizes.py) can be read back from the layout.

Shapes: B sequences, T tokens, C dim, H heads of HEAD_DIM, V = 256 byte values, F hidden of the feed-forward.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dips.trainer.sizes import HEAD_DIM, NORM_EPS, ROPE_THETA, VOCABULARY, ModelConfig

INIT_STD = 0.02
IGNORED_TARGET = -100
"""A target that adds nothing to the loss: for positions that only pad a batch."""


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, NORM_EPS)


@lru_cache(maxsize=8)
def _rotation(n_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency: two (T, HEAD_DIM / 2) float32 tensors, computed in float64."""
    # Cached for later calls: an evaluation that fills the cache must not leave tensors that training cannot use.
    with torch.inference_mode(False):
        exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM
        angles = torch.outer(torch.arange(n_tokens, dtype=torch.float64), ROPE_THETA**-exponents)
        return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: turn the pair (x_i, x_{i+HEAD_DIM/2}) of (B, H, T, HEAD_DIM) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions, no biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = _rotation(x.shape[1], x.device)
        q, k = (rotate(self._heads(projection(x)), cos, sin) for projection in (self.wq, self.wk))
        mixed = F.scaled_dot_product_attention(q, k, self._heads(self.wv(x)), is_causal=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, H * HEAD_DIM) -> (B, H, T, HEAD_DIM); under tensor parallelism H is this rank's part of the heads."""
        heads: Tensor = x.unflatten(2, (-1, HEAD_DIM))
        return heads.transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class ByteModel(nn.Module):
    """The language model. The output projection is the embedding (tied), so it appears once in the layout."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        """Weights depend only on `seed` and `config`, never on torch's global generator."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim)
        generator = torch.Generator().manual_seed(seed)
        # Both projections that write to the residual stream are smaller, so that its size does not grow with depth.
        residual_std = INIT_STD / math.sqrt(2 * config.n_layers)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 2:
                    writes = name.endswith(("attention.wo.weight", "feed_forward.down.weight"))
                    parameter.normal_(0.0, residual_std if writes else INIT_STD, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) int64 byte values -> (B, T, V) logits of the byte that follows each."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Cross entropy in nats per byte over the targets that are not IGNORED_TARGET; both (B, T)."""
        return cross_entropy(self(tokens), targets, reduction)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """In nats per byte of (B, T, V) logits over the (B, T) targets that are not IGNORED_TARGET."""
    flat = logits.view(-1, VOCABULARY).float()
    return F.cross_entropy(flat, targets.reshape(-1), ignore_index=IGNORED_TARGET, reduction=reduction)
