"""Computes the held-out loss of a model from a file, of a running master, or of every version as it is published.

All three cut the same windows from the same text, so that they agree on a version up to rounding; they differ when
--data, the held-out settings or --sequence-tokens do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dips.core.clock import SystemClock
from dips.core.ids import Version
from dips.core.net.keys import security_of
from dips.core.net.security import Security
from dips.core.observe.metrics_server import serve_metrics, served
from dips.core.observe.telemetry import Tape, configure_logging
from dips.trainer.config import TrainConfig, corpus_of
from dips.trainer.export import Exported, Fetched, read_export
from dips.trainer.follower import Follower
from dips.trainer.heldout import heldout_loss, model_from_flat, windows_of
from dips.trainer.model import ByteModel
from dips.trainer.run_watch import RunWatch
from dips.trainer.signals import StopSignals
from dips.worker.config import ClientConfig, given
from dips.worker.metrics_collector import Evaluated, heldout_families
from dips.worker.reader import CALL_DEADLINE_S, FetchedModel, fetch_version

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
