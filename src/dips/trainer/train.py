"""Runs `dips train`: the training loop of one cluster, or of one of its ranks, and the same loop without a master.

The loop makes steps, and the driver (worker/shell.py) acts between two steps. Never computes on a token that was not
leased to it, and never goes on after its driver is done. Of several ranks, the leader talks to the master and leases
text; all hold the same leased ranges, so that each knows the batch of every step and takes its own rows, without a
message between two meetings.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from dips.core.errors import ConfigError, FatalError
from dips.core.files import share_with
from dips.core.layout import Layout
from dips.core.messages import DataPlan, DataRange
from dips.core.model_description import Untrained
from dips.core.observe.failpoints import install
from dips.core.observe.logs import configure_logging
from dips.core.observe.tape import Tape
from dips.trainer.config import ALONE, TrainConfig, check_settings, corpus_of, settings_of_rank
from dips.trainer.corpus import all_ranges
from dips.trainer.cut_model import CutModel, another_rank_may_be_gone
from dips.trainer.data import Batch, ChunkedText, LeasedBatches, make_batch
from dips.trainer.evaluate import heldout_loss, model_from_flat, windows_of
from dips.trainer.model import ByteModel
from dips.trainer.parallelism import Place, place_here
from dips.trainer.progress import Slowdown, StepReports, StopSignals
from dips.trainer.sizes import SIZES
from dips.worker.config import ClientConfig
from dips.worker.parallel.rank_loop import RankLoop, loop_of_ranks
from dips.worker.parallel.rank_state import TorchState
from dips.worker.parallel.ranks import ranks_here
from dips.worker.shell import ClusterShell, OtherRanks
from dips.worker.step_checks import Losses
from dips.worker.torch_model import TorchParameters
from dips.worker.torch_state import HasState

# ---- schedule --------------------------------------------------------------------------------------------------------
#
# The inner learning rate as a function of the run's tokens.
#
# The argument is the run's own progress, not this cluster's steps: clusters of different speed, and one that joins
# late, are then at the same place of the same curve.


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up to `peak`, then a cosine down to `peak * min_fraction` at `total_tokens`.

    total_tokens 0: the run's length is unknown, the rate stays at its peak after the warm-up.
    """

    peak: float
    warmup_tokens: int
    min_fraction: float
    total_tokens: int

    def at(self, tokens: int) -> float:
        """The learning rate after `tokens` tokens of the run; beyond the end it stays at its last value."""
        if tokens < self.warmup_tokens:
            return self.peak * (tokens + 1) / (self.warmup_tokens + 1)
        if self.total_tokens <= 0:
            return self.peak
        span = max(1, self.total_tokens - self.warmup_tokens)
        share = min(1.0, (tokens - self.warmup_tokens) / span)
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        return self.peak * (self.min_fraction + (1 - self.min_fraction) * cosine)


# ---- inner -----------------------------------------------------------------------------------------------------------
#
# Makes inner steps with a cluster's model, optimizer and text.
#
# Knows nothing of a master: the loop with a master (train.py), the loop without, and the calibration share it.


BETAS = (0.9, 0.95)
MUON_MOMENTUM = 0.95


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
    """A model, its inner optimizers and the text, ready for steps; sets torch's thread count for the process.

    Of several ranks, each has one, and all make the same steps together.
    """

    def __init__(self, config: TrainConfig) -> None:
        """Raises ConfigError for a device that is not available, or text that cannot be used or that differs between
        ranks. With config.parallel, in the process group of all ranks.
        """
        self.config = config
        self.device = device_of(config)
        torch.set_num_threads(config.threads)
        corpus = corpus_of(config)
        self.heldout = corpus.heldout
        self.text = ChunkedText(corpus.training, config.data_seed, config.chunk_tokens)
        model = ByteModel(SIZES[config.model_size], config.seed).to(self.device)
        self.cut: CutModel | None = None
        if config.parallel:
            with another_rank_may_be_gone():
                self.cut = CutModel(model, config.parallelism, config.batch_size, config.sequence_tokens)
            if not self.cut.all_have(self.text.plan.corpus_digest):
                raise ConfigError(
                    "the ranks of this cluster have read different texts: give all of them the same files, or, where "
                    "they train on the source of Python's standard library, the same Python"
                )
        self.model = model
        """Of several ranks, what the cut has left of it."""
        self.optimizers = make_optimizers(model if self.cut is None else self.cut.module, config)

    def step(self, batch: Batch, lr: float) -> float:
        """One forward, backward and optimizer step at learning rate lr; the mean loss in nats per byte.

        A loss or gradient that is not finite changes nothing and raises FatalError: parameters that it would ruin must
        not be pushed, and its tokens are not trained.
        """
        if self.cut is None:
            value = inner_step(self.model, self.optimizers, batch, lr, self.config.grad_clip)
        else:
            set_rate(self.optimizers, lr)
            value = self.cut.step(self.optimizers, batch, self.config.grad_clip)
        if not math.isfinite(value):
            raise FatalError(
                f"the loss is {value} or its gradient is not finite at learning rate {lr:g}: lower --lr or --grad-clip"
            )
        return value

    def whole_model(self) -> ByteModel:
        """The whole model, on the processor; of several ranks, call it on all together."""
        return self.model.cpu() if self.cut is None else self.cut.whole(self.optimizers)

    def close(self) -> None:
        """End what the ranks share."""
        if self.cut is not None:
            self.cut.close()

    def any_rank(self, flag: bool) -> bool:
        """Whether it is so here, or on some other rank of several, which all call this."""
        return flag if self.cut is None else self.cut.any(flag)


def inner_step(
    model: ByteModel, optimizers: Sequence[torch.optim.Optimizer], batch: Batch, lr: float, grad_clip: float
) -> float:
    """One forward, backward and optimizer step at learning rate lr; the mean loss in nats per byte.

    A loss that is not finite changes nothing and is returned; for a gradient that is not, NaN is.
    """
    set_rate(optimizers, lr)
    device = model.embedding.weight.device
    loss = model.loss(batch.inputs.to(device), batch.targets.to(device))
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    # Together: the device is waited for once.
    read: list[float] = torch.stack([loss.detach().float(), norm.float()]).tolist()
    value, size = read
    if math.isfinite(value):
        if not math.isfinite(size):
            return math.nan
        for optimizer in optimizers:
            optimizer.step()
    return value


def set_rate(optimizers: Sequence[torch.optim.Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters; or Muon for the hidden layers' matrices, and AdamW for the embedding and the norms.

    Muon's update is scaled to the size of AdamW's, so that one learning rate and weight decay fit both
    (arXiv:2502.16982, section 2.2).
    """
    hidden = _hidden_matrices(model) if config.inner_optimizer == "muon" else []
    # AdamW with weight decay for matrices and none for norms. What is cut over other ranks is a group of its own.
    parameters = _without(model.parameters(), hidden)
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in sorted(parameters, key=lambda parameter: parameter.ndim < 2):
        cut = getattr(parameter, "device_mesh", None)
        groups.setdefault((parameter.ndim >= 2, cut), []).append(parameter)
    decay = {True: config.weight_decay, False: 0.0}
    adamw = torch.optim.AdamW(
        [{"params": group, "weight_decay": decay[is_matrix]} for (is_matrix, _), group in groups.items()],
        lr=config.lr,
        betas=BETAS,
        fused=True,
    )
    if not hidden:
        return [adamw]
    muon = torch.optim.Muon(
        hidden, lr=config.lr, weight_decay=config.weight_decay, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, adamw]


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Two-dimensional weights, without those of embeddings; the byte model's output layer is its embedding."""
    embeddings = [p for part in model.modules() if isinstance(part, nn.Embedding) for p in part.parameters()]
    return [parameter for parameter in _without(model.parameters(), embeddings) if parameter.ndim == 2]


def _without(parameters: Iterable[nn.Parameter], left_out: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    ids = {id(parameter) for parameter in left_out}
    return [parameter for parameter in parameters if id(parameter) not in ids]


# ---- train -----------------------------------------------------------------------------------------------------------


_logger = logging.getLogger("dips.trainer")

MIXED_CHUNKS_PER_ROW = 2
"""A lease has at least so many chunks for each row of a batch, so that a batch is never a single document."""


def run(train: TrainConfig, client: ClientConfig) -> int:
    """Train until the run ends, or for train.steps steps when client.master is empty. Returns the exit code.

    0 when the run has ended or has drained this cluster; else 143 after SIGTERM and 130 after ctrl-C, so that a
    supervisor which did not send the signal starts it again. In all cases this cluster has left. Raises the errors of
    core/errors.py: ConfigError for settings, Refused when the master has no place for this cluster.
    """
    place = place_here(train.parallelism)
    client = settings_of_rank(client, place)
    configure_logging("worker", client.cluster_id or ALONE, client.log_level, client.log_format)
    install("worker", enabled=client.failpoints)
    share_with(client.files_group)
    check_settings(train, client)
    with StopSignals() as signals, _trainer_here(train, place, signals) as inner:
        if client.master:
            return _ClusterLoop(inner, client, place, signals).run()
        return _run_alone(inner, client, place, signals)


@contextlib.contextmanager
def _trainer_here(train: TrainConfig, place: Place, signals: StopSignals) -> Iterator[InnerTrainer]:
    """This process's trainer; of several ranks, in the process group of all. A signal ends one of them at once while it
    waits for the others.
    """
    if not train.parallel:
        yield InnerTrainer(train)
        return
    try:
        with signals.ending_the_process():
            _meet_all_ranks(train, place)
            inner = InnerTrainer(train)
        yield inner
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet_all_ranks(train: TrainConfig, place: Place) -> None:
    """Make the process group. Raises ConfigError for settings with which it cannot be made, and FatalError where
    another rank is not there, or is gone already.
    """
    backend = "gloo"
    if device_of(train).type == "cuda":
        n_devices = torch.cuda.device_count()
        if place.local_rank >= n_devices:
            raise ConfigError(
                f"this machine has {n_devices} CUDA devices, and rank {place.rank} is its process number "
                f"{place.local_rank + 1}: start one process for each device, or give --device cpu"
            )
        torch.cuda.set_device(place.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend)
    except ValueError as error:
        raise ConfigError(
            f"rank {place.rank} is not told where the other processes of its cluster are ({error}): start all of them "
            "with torchrun, with one rendezvous"
        ) from error
    except RuntimeError as error:
        raise FatalError(
            f"rank {place.rank} cannot reach the other processes of its cluster, or they have ended ({error}): start "
            "all of them with torchrun, with one rendezvous"
        ) from error


class _ClusterLoop:
    """The loop of a cluster in a run, or of one of its ranks."""

    def __init__(self, inner: InnerTrainer, client: ClientConfig, place: Place, signals: StopSignals) -> None:
        train = self._train = inner.config
        self._signals = signals
        self._inner = inner
        self._batches = LeasedBatches(self._inner.text, train.batch_size, train.sequence_tokens)
        self._reports = StepReports(train.log_every_steps)
        self._losses = Losses()
        self._shell = self._session(client)
        self._reports.tape = self._shell.tape
        self._slowdown = _slowdown_of(train, place)
        self._forgotten = 0

    def _session(self, client: ClientConfig) -> ClusterShell | RankLoop:
        """Of several ranks, all agree on what they hold. Raises ConfigError, on all of them, where they differ."""
        inner, plan, signals = self._inner, self._inner.text.plan, self._signals
        kept: dict[str, HasState] = {"data": self._batches, "reports": self._reports}
        if (cut := inner.cut) is None:
            parameters = TorchParameters(inner.model, inner.optimizers)
            state = TorchState(inner.model, inner.optimizers, kept)
            return ClusterShell(client, parameters, parameters.layout(), plan, inner=state)

        ranks = ranks_here()
        assert ranks is not None, "the process group has several"

        def shell_of(others: OtherRanks, layout: Layout, untrained: Untrained, trained: frozenset[int]) -> ClusterShell:
            return ClusterShell(client, others, layout, plan, untrained=untrained)

        try:
            loop = loop_of_ranks(
                ranks, client, lambda _: cut.held(inner.optimizers), inner.optimizers, kept, shell_of,
                settings=self._train.model_dump(mode="json"), order=cut.names,
                wants_to_leave=lambda: signals.caught is not None,
                loss=lambda _: self._losses.take(time.monotonic(), True),
            )  # fmt: skip
        except BaseException:
            ranks.close()
            raise
        assert loop is not None, "all ranks have a master"
        return loop

    def run(self) -> int:
        reason, whole = "finished", True
        try:
            self._signals.when_received(self._shell.request_stop)
            self._shell.start()
            if self._shell.resumed:
                self._batches.resume(self._shell.take_unused())
            mixed = MIXED_CHUNKS_PER_ROW * self._train.batch_size * self._train.chunk_tokens
            while not self._shell.done:
                self._shell.checkpoint_if_due()
                self._forget_what_was_taken_back()
                if self._batches.held_tokens < self._train.step_tokens:
                    # Enough for the steps up to the next push, and for a mix of chunks.
                    leased = self._shell.lease(max(self._shell.local_steps * self._train.step_tokens, mixed))
                    # First: of several ranks, held_ranges may be those of just before the lease.
                    self._forget_what_was_taken_back()
                    self._batches.add(leased)
                else:
                    self._step()
        except BaseException as error:
            reason, whole = f"{type(error).__name__}: {error}", False
            raise
        finally:
            self._shell.close(reason, push_pending=whole)
            self._inner.close()
        if isinstance(self._shell, RankLoop) and self._shell.news.ends:
            self._signals.another_rank_was_told()
        return 0 if self._shell.released else self._signals.exit_code

    def _forget_what_was_taken_back(self) -> None:
        """The master leased ranges to other clusters at a new Join, which may precede each lease."""
        if self._shell.times_forgotten != self._forgotten:
            self._forgotten = self._shell.times_forgotten
            self._batches.keep_only(self._shell.held_ranges)

    def _step(self) -> None:
        begin_s = time.monotonic()
        schedule = schedule_of(self._train, self._shell.total_tokens)  # the operator may move the run's limit
        batch, lr = self._batches.next(), schedule.at(self._shell.progress)
        base = str(self._shell.version or "")
        loss = self._inner.step(batch, lr)
        # Before the step is reported: the driver measures this cluster's speed, and the wait is part of that.
        self._signals.wait(self._slowdown.wait_s(time.monotonic() - begin_s))
        # Written before the shell knows of the step, in which this cluster may leave the run: a tape ends with that.
        self._reports.step(loss, batch.tokens, lr, self._shell.progress + batch.tokens, base, self._shell.cause)
        if isinstance(self._shell, ClusterShell):
            self._shell.step(batch.tokens, batch.ranges, loss)
        else:  # a range for each row; all ranks have the same loss and ranges, and rows of their own
            assert self._inner.cut is not None, "several ranks train a cut model"
            self._losses.add(loss)
            self._shell.step(sum(part.tokens for part in batch.ranges[self._inner.cut.rows]), batch.ranges)


def schedule_of(train: TrainConfig, total_tokens: int) -> LearningRateSchedule:
    """The learning rate of a run of total_tokens tokens (0: unknown)."""
    return LearningRateSchedule(train.lr, train.warmup_tokens, train.min_lr_fraction, total_tokens)


def _run_alone(inner: InnerTrainer, client: ClientConfig, place: Place, signals: StopSignals) -> int:
    """Plain training of the same model on the same text: a baseline, and a first try without any server."""
    train = inner.config
    windows = windows_of(inner.heldout, train.sequence_tokens)
    with Tape(client.tape_given, "worker", client.cluster_id or ALONE, may_lose=True) as tape:
        tokens = _steps_alone(inner, place, signals, StepReports(train.log_every_steps, tape))
        model = inner.whole_model()
        if place.leads:
            loss = heldout_loss(model, windows)
            tape.write("heldout", ALONE, version=None, tokens=tokens, loss=loss)
            _logger.info("held-out loss %.4f nats per byte after %d tokens, without a master", loss, tokens)
        inner.close()
        return signals.exit_code


def _steps_alone(inner: InnerTrainer, place: Place, signals: StopSignals, reports: StepReports) -> int:
    train = inner.config
    assert train.steps is not None, "run() has asked for it"
    schedule, slowdown = schedule_of(train, train.steps * train.step_tokens), _slowdown_of(train, place)
    batches = LeasedBatches(inner.text, train.batch_size, train.sequence_tokens)
    source, tokens = all_ranges(inner.text.plan), 0
    for _ in range(train.steps):
        if inner.any_rank(signals.caught is not None):
            signals.another_rank_was_told()
            break
        begin_s = time.monotonic()
        if batches.held_tokens < train.step_tokens:
            batches.add(next(source) for _ in range(MIXED_CHUNKS_PER_ROW * train.batch_size))
        batch, lr = batches.next(), schedule.at(tokens)
        loss = inner.step(batch, lr)
        tokens += batch.tokens
        reports.step(loss, batch.tokens, lr, tokens, "", ALONE)
        signals.wait(slowdown.wait_s(time.monotonic() - begin_s))
    return tokens


def _slowdown_of(train: TrainConfig, place: Place) -> Slowdown:
    """Of several ranks the leader waits, and the others for it."""
    return Slowdown(train.emulate_gap if place.leads else 0.0)


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
    """One cluster of a comparison: its model, inner optimizer and text, on config.device; sets torch's thread count for
    the process.

    Driven from outside (lab/compare/record.py): the caller gives the tokens of each step and the progress of the run.
    Many are in one process, so they share the text, and threads or device. Flat vectors are float32 of
    layout().n_elems elements. Two of one configuration begin with equal parameters.
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
