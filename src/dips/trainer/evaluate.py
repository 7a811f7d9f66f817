"""Computes the held-out loss of a model from a file, of a running master, or of every version as it is published.

All three cut the same windows from the same text, so that they agree on a version up to rounding; they differ when
--data, the held-out settings or --sequence-tokens do.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dips.core.clock import Clock, SystemClock
from dips.core.errors import ConfigError, RefusalCode, Refused, RetryLater
from dips.core.ids import Version
from dips.core.layout import Layout
from dips.core.messages import StatusReply
from dips.core.net.keys import security_of
from dips.core.net.security import Security
from dips.core.observe.metrics_server import serve_metrics, served
from dips.core.observe.telemetry import ChangeLogger, Tape, configure_logging, new_cause
from dips.trainer.config import TrainConfig, corpus_of
from dips.trainer.export import Exported, Fetched, read_export
from dips.trainer.model import ByteModel
from dips.trainer.progress import RunWatch, StopSignals
from dips.trainer.sizes import ModelConfig
from dips.worker.config import ClientConfig, given
from dips.worker.metrics import Evaluated, heldout_families
from dips.worker.reader import CALL_DEADLINE_S, FetchedModel, fetch_version

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


# ---- follower --------------------------------------------------------------------------------------------------------
#
# Follows a run and evaluates its versions, until the run has stopped.
#
# Evaluates every version as long as it can keep up, else the newest; the last one always. An evaluator must never
# delay a run: it only reads, and skips a version that is gone.


_logger = logging.getLogger("dips.trainer")

POLL_S = 0.5


class HasLoss(Protocol):
    """The result of an evaluation; only the loss, in nats per byte, is used here."""

    @property
    def loss(self) -> float: ...


def next_version(published: Version | None, last: Version | None) -> Version | None:
    """The next version after `last` to ask for; None: nothing new."""
    if published is None or published == last:
        return None
    if last is not None and published.timeline == last.timeline and published.v > last.v:
        return last.next()
    return published


class Follower:
    """Asks, fetches, evaluates and records; `run` ends when the run has stopped and its last version is recorded."""

    def __init__(
        self,
        status: Callable[[], StatusReply],
        fetch: Callable[[Version | None], Fetched],
        evaluate: Callable[[Fetched], HasLoss],
        tape: Tape,
        patience_s: float,
        clock: Clock | None = None,
    ) -> None:
        """fetch(version), None for the newest. patience_s: how long the master may be away."""
        self._status = status
        self._fetch = fetch
        self._evaluate = evaluate
        self._tape = tape
        self._patience_s = patience_s
        self._clock: Clock = clock or SystemClock()
        self._last: Version | None = None
        self._answered_s = self._clock.monotonic_s()
        self._changes = ChangeLogger(_logger)

    def run(self, wait: Callable[[float], bool]) -> None:
        """Run until the end, or until wait(seconds) returns true, which is a request to stop.

        Raises RetryLater when no answer came for patience_s, Refused for any refusal except a version that is gone.
        """
        pause_s = 0.0
        while not wait(pause_s):
            try:
                status = self._status()
                self._answered()
                wanted = next_version(status.published, self._last)
                if wanted is None and status.stopped:
                    return
                pause_s = 0.0 if wanted is not None and self._evaluate_one(wanted) else POLL_S
            except RetryLater as error:
                self._away(error)
                pause_s = max(POLL_S, min(error.retry_after_s, self._patience_s / 4))

    def _evaluate_one(self, wanted: Version) -> bool:
        """Evaluate one version. Returns whether there was a new one."""
        fetched = self._fetched(wanted)
        self._answered()
        if fetched.version == self._last:
            return False
        loss = self._evaluate(fetched).loss
        self._last = fetched.version
        self._tape.write("heldout", new_cause(), version=str(fetched.version), tokens=fetched.tokens, loss=loss)
        _logger.info("version %s: held-out loss %.4f after %d tokens", fetched.version, loss, fetched.tokens)
        return True

    def _fetched(self, wanted: Version) -> Fetched:
        try:
            return self._fetch(wanted)
        except Refused as refused:
            if refused.code is not RefusalCode.VERSION_GONE:
                raise
            return self._fetch(None)

    def _answered(self) -> None:
        self._answered_s = self._clock.monotonic_s()
        self._changes.report("master", "")

    def _away(self, error: RetryLater) -> None:
        away_s = self._clock.monotonic_s() - self._answered_s
        if away_s >= self._patience_s:
            raise RetryLater(f"the run could not be read for {away_s:.0f} s: {error}", error.retry_after_s) from error
        self._changes.report("master", f"waiting for the run: {error}", logging.WARNING)


# ---- evaluate --------------------------------------------------------------------------------------------------------


READER_NAME = "heldout"
"""The evaluator's name, where no other is given."""

FETCH_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Evaluation:
    """One result. loss: held-out, in nats per byte, of a version of a run; tokens: applied by the run until then."""

    run_id: str
    version: Version
    tokens: int
    loss: float


class Evaluator:
    """Evaluates models on the held-out text, cut once; sets torch's thread count for the process."""

    def __init__(self, train: TrainConfig) -> None:
        """Raises ConfigError for text that cannot be used."""
        torch.set_num_threads(train.threads)
        self._windows = windows_of(corpus_of(train).heldout, train.sequence_tokens)

    def __call__(self, fetched: Fetched) -> Evaluation:
        """Evaluate a version. Raises ConfigError when it is not of a byte model."""
        loss = heldout_loss(model_from_flat(fetched.layout, fetched.flat), self._windows)
        return Evaluation(fetched.run_id, fetched.version, fetched.tokens, loss)


def load_exported(path: Path) -> tuple[ByteModel, Exported]:
    """Load the model of a file that `dips export` wrote, and the file's metadata. Raises ConfigError."""
    exported = read_export(path)
    return model_from_flat(exported.layout, exported.flat), exported


def evaluate_file(path: Path, train: TrainConfig) -> Evaluation:
    """The held-out loss of an export. Raises ConfigError for the file, the text, or a layout of another model."""
    exported = read_export(path)
    return Evaluator(train)(exported)


def evaluate_live(
    master: str,
    run_id: str | None,
    train: TrainConfig,
    security: Security,
    version: Version | None = None,
    name: str = READER_NAME,
) -> Evaluation:
    """The held-out loss of a version that the slaves still keep; None: the newest.

    Raises ConfigError as evaluate_file does, Refused when that version is gone, RetryLater when no answer comes.
    """
    evaluator = Evaluator(train)
    return evaluator(fetch_version(master, run_id, name, security, version=version, deadline_s=FETCH_DEADLINE_S))


def follow(train: TrainConfig, client: ClientConfig) -> int:
    """Evaluate the versions of a run as they are published, until it has stopped. Returns the process's exit code.

    Each is a tape record of kind `heldout` {version, tokens, loss}; the last version is always evaluated. 0 at the
    end of the run, else 143 after SIGTERM and 130 after ctrl-C. Raises RetryLater when the master was away for
    client.connect_wait_s, ConfigError and Refused as evaluate_live.
    """
    name = client.cluster_id or READER_NAME
    configure_logging("worker", name, client.log_level, client.log_format)
    security = security_of(client, "the evaluator")
    evaluator, clock = _Shown(Evaluator(train)), SystemClock()
    metrics = serve_metrics(
        client,
        security,
        lambda: heldout_families(evaluator.last, security, clock.monotonic_s()),
        role="evaluator",
        name=name,
        run=client.run_id,
    )
    with (
        served(metrics),
        StopSignals() as signals,
        Tape(client.tape, "worker", name, may_lose=True) as tape,
        RunWatch(client.master, client.run_id, given(client.call_deadline_s) or CALL_DEADLINE_S, security) as watch,
    ):
        fetch = _fetcher(client.master, client.run_id or None, name, security)
        Follower(watch.status, fetch, evaluator, tape, client.connect_wait_s).run(signals.wait)
        return signals.exit_code


class _Shown:
    """An evaluator whose last result can be read by scrapes, on their threads."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self.last: Evaluated | None = None

    def __call__(self, fetched: Fetched) -> Evaluation:
        found = self._evaluator(fetched)
        count = self.last.count + 1 if self.last is not None else 1
        self.last = Evaluated(found.version, found.tokens, found.loss, SystemClock().monotonic_s(), count)
        return found


def _fetcher(
    master: str, run_id: str | None, name: str, security: Security
) -> Callable[[Version | None], FetchedModel]:
    fetch = partial(fetch_version, master, run_id, name, security, deadline_s=FETCH_DEADLINE_S)
    return lambda version: fetch(version=version)
