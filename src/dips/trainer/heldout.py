"""Computes the held-out loss: the same number for the same parameters, on every machine and at every time.

Windows, their order and the composition of every batch are fixed, the sum is in double precision, and it runs on
the processor in float32 even if training does not: then thread counts change the result only by rounding
(below 1e-6), and an exported model gives the loss that the run reported for its version.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from dips.core.errors import ConfigError
from dips.core.layout import Layout
from dips.trainer.model import ByteModel
from dips.trainer.sizes import ModelConfig

EVAL_BATCH = 32
"""Windows in a batch. Constant, because the shape of a product can change its rounding."""


def windows_of(text: bytes, sequence_tokens: int) -> NDArray[np.int64]:
    """Cut held-out text into (N, T + 1) windows, adjacent ones sharing one byte; the rest at the end is left out.

    Raises ConfigError when there is no complete window.
    """
    n_windows = (len(text) - 1) // sequence_tokens
    if n_windows < 1:
        raise ConfigError(
            f"the held-out text has {len(text)} bytes, a window of {sequence_tokens} tokens needs "
            f"{sequence_tokens + 1}: give more text, raise heldout_fraction or heldout_max_bytes, or lower "
            "sequence_tokens"
        )
    starts = np.arange(n_windows) * sequence_tokens
    tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    windows: NDArray[np.int64] = tokens[starts[:, None] + np.arange(sequence_tokens + 1)]
    return windows


@torch.inference_mode()
def heldout_loss(model: ByteModel, windows: NDArray[np.int64]) -> float:
    """Mean cross entropy in nats per byte over all targets of (N, T + 1) windows. The model must be on the CPU."""
    sums: list[float] = []
    for start in range(0, len(windows), EVAL_BATCH):
        tokens = torch.from_numpy(windows[start : start + EVAL_BATCH])
        losses = model.loss(tokens[:, :-1], tokens[:, 1:], reduction="none")
        sums.append(losses.double().sum().item())
    n_targets = int(windows.shape[0]) * (int(windows.shape[1]) - 1)
    return math.fsum(sums) / n_targets


def model_from_flat(layout: Layout, flat: NDArray[np.float32]) -> ByteModel:
    """The byte model with the parameters of a flat vector of layout.n_elems elements.

    Raises ConfigError when the layout is not a byte model's, or the vector has another length.
    """
    model = ByteModel(ModelConfig.from_layout(layout))
    if flat.shape != (layout.n_elems,):
        raise ConfigError(f"the vector has shape {list(flat.shape)}, the layout has {layout.n_elems} elements")
    with torch.no_grad():
        for span in layout.spans:
            values = torch.from_numpy(flat[span.start_elem : span.stop_elem].copy())
            model.get_parameter(span.parameter.name).copy_(values.view(span.parameter.shape))
    return model
