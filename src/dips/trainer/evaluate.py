"""Computes the held-out loss of a model from a file, of a running master, or of every version as it is published.

All three cut the same windows from the same text, so that they agree on a version up to rounding; they differ when
--data, the held-out settings or --sequence-tokens do.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dips.core.clock import SystemClock
from dips.core.errors import ConfigError
from dips.core.files import share_with
from dips.core.ids import Version
from dips.core.layout import Layout, PublishedModel
from dips.core.net.keys import security_of
from dips.core.net.security import Security
from dips.core.observe.logs import configure_logging
from dips.core.observe.metrics_server import serve_metrics, served
from dips.core.observe.tape import Tape, new_cause
from dips.trainer.config import TrainConfig, corpus_of
from dips.trainer.model import ByteModel
from dips.trainer.progress import StopSignals
from dips.trainer.sizes import ModelConfig
from dips.worker.config import ClientConfig, given
from dips.worker.metrics import Evaluated, heldout_families
from dips.worker.reader import CALL_DEADLINE_S, FETCH_DEADLINE_S, fetch_version, follow_run

# ---- heldout ---------------------------------------------------------------------------------------------------------
#
# Computes the held-out loss: the same number for the same parameters, on every machine and at every time.
#
# Windows, their order and the composition of every batch are fixed, the sum is in double precision, and it runs on
# the processor in float32 even if training does not: then thread counts change the result only by rounding
# (below 1e-6), and an exported model gives the loss that the run reported for its version.


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
def heldout_loss(model: ByteModel, windows: NDArray[np.int64], each_batch: Callable[[], None] = lambda: None) -> float:
    """Mean cross entropy in nats per byte over all targets of (N, T + 1) windows. The model must be on the CPU.

    each_batch: called before each batch of windows; what it raises ends the evaluation.
    """
    sums: list[float] = []
    for start in range(0, len(windows), EVAL_BATCH):
        each_batch()
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


# ---- evaluate --------------------------------------------------------------------------------------------------------


READER_NAME = "heldout"
"""The evaluator's name, where no other is given."""

_logger = logging.getLogger("dips.trainer")


@dataclass(frozen=True)
class Evaluation:
    """One result."""

    run_id: str
    version: Version
    tokens: int  # applied by the run until then
    loss: float  # held-out, in nats per byte, of a version of a run


class Evaluator:
    """Evaluates models on the held-out text, cut once; sets torch's thread count for the process."""

    def __init__(self, train: TrainConfig) -> None:
        """Raises ConfigError for text that cannot be used."""
        torch.set_num_threads(train.threads)
        self._windows = windows_of(corpus_of(train).heldout, train.sequence_tokens)

    def __call__(self, fetched: PublishedModel, each_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Evaluate a version. Raises ConfigError when it is not of a byte model, and what each_batch() raises."""
        loss = heldout_loss(model_from_flat(fetched.layout, fetched.flat), self._windows, each_batch)
        return Evaluation(fetched.run_id, fetched.version, fetched.tokens, loss)


def evaluate_live(
    master: str,
    run_id: str | None,
    train: TrainConfig,
    security: Security,
    version: Version | None = None,
) -> Evaluation:
    """The held-out loss of a version that the slaves still keep; None: the newest.

    Raises ConfigError as an Evaluator does, Refused when that version is gone, RetryLater when no answer comes.
    """
    evaluator = Evaluator(train)
    return evaluator(fetch_version(master, run_id, READER_NAME, security, version=version, deadline_s=FETCH_DEADLINE_S))


def follow(train: TrainConfig, client: ClientConfig) -> int:
    """Evaluate the versions of a run as they are published, until it has stopped. Returns the process's exit code.

    Each is a tape record of kind `heldout` {version, tokens, loss}; the last version is always evaluated. 0 at the
    end of the run, else 143 after SIGTERM and 130 after ctrl-C. Raises RetryLater as Follower.run, with
    client.connect_wait_s as patience, ConfigError and Refused as evaluate_live.
    """
    name = client.cluster_id or READER_NAME
    configure_logging("worker", name, client.log_level, client.log_format)
    share_with(client.files_group)
    security = security_of(client, "the evaluator")
    evaluator, clock = Evaluator(train), SystemClock()
    last: list[Evaluated] = []  # the last result, for scrapes, which are made on other threads

    def evaluate(fetched: PublishedModel, each_batch: Callable[[], None]) -> None:
        found = evaluator(fetched, each_batch)
        last[:] = [Evaluated(found.version, found.tokens, found.loss, clock.monotonic_s())]
        tape.write("heldout", new_cause(), version=str(found.version), tokens=found.tokens, loss=found.loss)
        _logger.info("version %s: held-out loss %.4f after %d tokens", found.version, found.loss, found.tokens)

    metrics = serve_metrics(
        client,
        security,
        lambda: heldout_families(last[0] if last else None, security, clock.monotonic_s()),
        role="evaluator",
        name=name,
        run=client.run_id,
    )
    deadline_s = given(client.call_deadline_s) or CALL_DEADLINE_S
    with (
        served(metrics),
        StopSignals() as signals,
        Tape(client.tape_given, "worker", name, may_lose=True) as tape,
    ):
        follow_run(
            client.master, client.run_id, name, security, evaluate, signals.wait, patience_s=client.connect_wait_s,
            call_deadline_s=deadline_s,
        )  # fmt: skip
        return signals.exit_code
