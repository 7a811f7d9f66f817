"""Computes the held-out loss of a model from a file, of a running master, or of every version as it is published.

All three cut the same windows from the same text, so that they agree on a version up to rounding; they differ when
--data, the held-out settings or --sequence-tokens do.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
import numpy as np
import torch
from numpy.typing import NDArray

from dips.core.clock import Clock, SystemClock
from dips.core.errors import ConfigError, RefusalCode, Refused, RetryLater
from dips.core.files import share_with
from dips.core.ids import Version
from dips.core.layout import Layout, PublishedModel
from dips.core.messages import StatusReply, StatusRequest
from dips.core.net.codec_protobuf import from_message, to_message
from dips.core.net.grpc_calls import refused_from
from dips.core.net.keys import security_of
from dips.core.net.security import Security
from dips.core.observe.failpoints import failpoint
from dips.core.observe.logs import ChangeLogger, configure_logging
from dips.core.observe.metrics_server import serve_metrics, served
from dips.core.observe.tape import Tape, new_cause
from dips.protos import operator_pb2_grpc
from dips.trainer.config import TrainConfig, corpus_of
from dips.trainer.model import ByteModel
from dips.trainer.progress import StopSignals
from dips.trainer.sizes import ModelConfig
from dips.worker.config import ClientConfig, given
from dips.worker.control import channel_to
from dips.worker.metrics import Evaluated, heldout_families
from dips.worker.reader import CALL_DEADLINE_S, fetch_version

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


# ---- follower --------------------------------------------------------------------------------------------------------
#
# Follows a run and evaluates its versions, until the run has stopped.
#
# Evaluates every version as long as it can keep up, else the newest; the last one always. An evaluator must never
# delay a run: it only reads, and skips a version that is gone. The servers of a run that has ended answer for a while
# only, which may be shorter than an evaluation: so it also asks during one, and gives it up for the last version.


_logger = logging.getLogger("dips.trainer")

POLL_S = 0.5


class RunWatch:
    """A channel to the master of one run ("": any run that it serves)."""

    def __init__(self, master: str, run_id: str, deadline_s: float, security: Security) -> None:
        """Raises ConfigError for an address that cannot be used."""
        self._channel = channel_to(master, security)
        self._stub: Any = operator_pb2_grpc.OperatorStub(self._channel)
        self._run_id = run_id
        self._deadline_s = deadline_s

    def status(self) -> StatusReply:
        """The run's status. Raises Refused, or RetryLater when no answer comes in time."""
        try:
            failpoint("worker.status.before_call")
            answer = self._stub.Status(to_message(StatusRequest(self._run_id)), timeout=self._deadline_s)
            if failpoint("worker.status.after_call"):
                raise RetryLater("a failpoint loses the answer to Status")
        except grpc.RpcError as error:
            raise refused_from(error) from error
        except OSError as error:
            raise RetryLater(f"the request for the status failed: {error}") from error
        return from_message(answer, StatusReply)

    def __enter__(self) -> RunWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()


class _Superseded(Exception):
    """The run has ended with a later version than the one that is being evaluated."""


def next_version(status: StatusReply, last: Version | None) -> Version | None:
    """The next version after `last` to ask for; None: nothing new."""
    published = status.published
    if published is None or published == last:
        return None
    if not status.stopped and last is not None and published.timeline == last.timeline and published.v > last.v:
        return last.next()
    return published


class Follower:
    """Asks, fetches, evaluates and records; `run` ends when the run has stopped and its last version is recorded."""

    def __init__(
        self,
        status: Callable[[], StatusReply],
        fetch: Callable[[Version | None], PublishedModel],
        evaluate: Callable[[PublishedModel, Callable[[], None]], float],
        tape: Tape,
        patience_s: float,
        clock: Clock | None = None,
    ) -> None:
        """fetch(version), None for the newest. evaluate(fetched, each_batch): returns the loss, in nats per byte; it
        calls each_batch() often, and passes on what that raises. patience_s: how long the master may be away before its
        first answer, and once its run is stopping: then it may have ended.
        """
        self._status = status
        self._fetch = fetch
        self._evaluate = evaluate
        self._tape = tape
        self._patience_s = patience_s
        self._clock: Clock = clock or SystemClock()
        self._last: Version | None = None
        self._end: StatusReply | None = None
        self._answered_s = self._ask_again_s = self._clock.monotonic_s()
        self._waits_for_ever = False
        self._changes = ChangeLogger(_logger)

    def run(self, wait: Callable[[float], bool]) -> None:
        """Run until the end, or until wait(seconds) returns true, which is a request to stop. A master that goes away
        in the middle of its run is waited for without limit: its operator brings it back.

        Raises RetryLater when no first answer came for patience_s, or none of a run that was stopping; Refused for any
        refusal except a version that is gone.
        """
        pause_s = 0.0
        while not wait(pause_s):
            try:
                status = self._end or self._asked()  # the servers of a run that has ended need not say so again
                wanted = next_version(status, self._last)
                if wanted is None and status.stopped:
                    return
                pause_s = 0.0 if wanted is not None and self._evaluate_one(wanted) else POLL_S
            except RetryLater as error:
                away_s = self._clock.monotonic_s() - self._answered_s
                if away_s >= self._patience_s and not self._waits_for_ever:
                    sentence = f"the run could not be read for {away_s:.0f} s: {error}"
                    raise RetryLater(sentence, error.retry_after_s) from error
                self._changes.report("master", f"waiting for the run: {error}", logging.WARNING)
                pause_s = max(POLL_S, min(error.retry_after_s, self._patience_s / 4))

    def _evaluate_one(self, wanted: Version) -> bool:
        """Evaluate one version. Returns whether there was a new one."""
        try:
            fetched = self._fetch(wanted)
        except Refused as refused:
            if refused.code is not RefusalCode.VERSION_GONE:
                raise
            fetched = self._fetch(None)
        self._answered()
        if fetched.version == self._last:
            return False
        try:
            loss = self._evaluate(fetched, lambda: self._look_past(fetched.version))
        except _Superseded:
            return True
        self._last = fetched.version
        self._tape.write("heldout", new_cause(), version=str(fetched.version), tokens=fetched.tokens, loss=loss)
        _logger.info("version %s: held-out loss %.4f after %d tokens", fetched.version, loss, fetched.tokens)
        return True

    def _look_past(self, version: Version) -> None:
        """Ask now and then while a version is evaluated. Raises _Superseded."""
        if self._clock.monotonic_s() < self._ask_again_s:
            return
        try:
            self._asked()
        except RetryLater:  # run() asks with more patience
            self._ask_again_s = self._clock.monotonic_s() + self._patience_s / 4
        if self._end is not None and next_version(self._end, version) is not None:
            raise _Superseded

    def _asked(self) -> StatusReply:
        status = self._status()
        self._answered()
        self._waits_for_ever = not (status.stopping or status.stopped)
        self._end = status if status.stopped else None
        self._ask_again_s = self._answered_s + POLL_S
        return status

    def _answered(self) -> None:
        self._answered_s = self._clock.monotonic_s()
        self._changes.report("master", "")


# ---- evaluate --------------------------------------------------------------------------------------------------------


READER_NAME = "heldout"
"""The evaluator's name, where no other is given."""

FETCH_DEADLINE_S = 60.0


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

    def evaluate(fetched: PublishedModel, each_batch: Callable[[], None]) -> float:
        found = evaluator(fetched, each_batch)
        last[:] = [Evaluated(found.version, found.tokens, found.loss, clock.monotonic_s())]
        return found.loss

    def fetch(version: Version | None) -> PublishedModel:
        return fetch_version(
            client.master, client.run_id or None, name, security, version=version, deadline_s=FETCH_DEADLINE_S
        )

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
        RunWatch(client.master, client.run_id, deadline_s, security) as watch,
    ):
        Follower(watch.status, fetch, evaluate, tape, client.connect_wait_s).run(signals.wait)
        return signals.exit_code
