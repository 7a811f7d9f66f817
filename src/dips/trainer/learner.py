"""Trains one cluster of a comparison: the byte model, its inner optimizers and the text.

Driven from outside (lab/compare/record.py). Knows no session, no clock and no simulator: the caller gives the tokens of
each step and the progress of the run. Many are in one process, so they share the text, and threads or device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dips.core.messages import DataPlan, DataRange
from dips.trainer.config import TrainConfig, corpus_of
from dips.trainer.data import ChunkedText, make_batch
from dips.trainer.evaluate import heldout_loss, model_from_flat, windows_of
from dips.trainer.model import ByteModel
from dips.trainer.sizes import SIZES
from dips.trainer.train import device_of, inner_step, make_optimizers, schedule_of
from dips.worker.torch_model import TorchParameters

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class SharedText:
    """The text of a run, read once for all clusters of a process."""

    training: ChunkedText
    heldout: bytes  # text that is never trained on


def read_text(config: TrainConfig) -> SharedText:
    """Read the text. Raises ConfigError for text that cannot be used."""
    corpus = corpus_of(config)
    return SharedText(ChunkedText(corpus.training, config.data_seed, config.chunk_tokens), corpus.heldout)


class ByteLearner(TorchParameters):
    """One cluster's model, inner optimizer and text, on config.device; sets torch's thread count for the process.

    Flat vectors are float32 of layout().n_elems elements. Two of one configuration begin with equal parameters.
    """

    def __init__(self, config: TrainConfig, text: SharedText, total_tokens: int) -> None:
        """total_tokens: of the whole run, the end of the learning rate's schedule (0: unknown). Raises ConfigError for
        a device that is not available."""
        torch.set_num_threads(config.threads)
        self._config = config
        self._text = text.training
        self._net = ByteModel(SIZES[config.model_size], config.seed).to(device_of(config))
        super().__init__(self._net, make_optimizers(self._net, config))
        self._schedule = schedule_of(config, total_tokens)

    def data_plan(self) -> DataPlan:
        """The data plan for the master's leases; equal on all clusters of one text."""
        return self._text.plan

    def step(self, ranges: Sequence[DataRange], progress_tokens: int) -> float:
        """One inner step on exactly these tokens, each range a row of the batch; the mean loss in nats per byte.

        progress_tokens: the run's progress in the learning rate's schedule. A loss that is not finite changes
        nothing and is returned; for a gradient that is not, NaN is. Raises RemoteProtocolError for a range that the
        text does not have.
        """
        batch = make_batch(self._text, ranges)
        rate = self._schedule.at(progress_tokens)
        return inner_step(self._net, self._optimizers, batch, rate, self._config.grad_clip)


def evaluator(config: TrainConfig, text: SharedText) -> Callable[[F32], float]:
    """The held-out loss, in nats per byte, of a model given as a flat vector, on the processor whatever the device (see
    trainer/evaluate.py); sets torch's thread count.

    Raises ConfigError when the held-out text is shorter than one window, and on a vector of another length.
    """
    torch.set_num_threads(config.threads)
    windows = windows_of(text.heldout, config.sequence_tokens)
    model = ByteModel(SIZES[config.model_size])
    layout = TorchParameters(model, make_optimizers(model, config)).layout()
    return lambda flat: heldout_loss(model_from_flat(layout, flat), windows)
