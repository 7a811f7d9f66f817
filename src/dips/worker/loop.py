"""The user's interface: a context manager around an ordinary PyTorch training loop.

    with dips.DiLoCo(model, optimizer, tokens_per_step=batch * sequence) as sync:
        while not sync.done:
            loss = ...
            loss.backward()
            sync.report(loss)
            optimizer.step()

Without a master (DIPS_MASTER unset) it changes nothing: the same file is ordinary training. It hooks the
optimizer's step and nothing else; parameters change only inside optimizer.step(), after the inner update.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from dips.core.config import load
from dips.core.errors import TERMINATED, ConfigError
from dips.core.ids import Version
from dips.core.messages import DataMode, DataPlan, Verdict
from dips.core.net.security import VARIABLES
from dips.core.observe.failpoints import install
from dips.core.wire import WIRE_DTYPES
from dips.worker.config import SECTION, ClientConfig, check
from dips.worker.parallel.ranks import Ranks, StepNews, ranks_here
from dips.worker.shell import ClusterShell, is_orderly, reason_of
from dips.worker.step_checks import Losses, TokenCheck
from dips.worker.torch_model import (
    TorchParameters,
    description_of,
    is_replica_on_all_ranks,
    plain_model,
    plain_optimizer,
    refuse_shards,
    running_statistics,
    untrained_of,
)
from dips.worker.torch_state import HasState, TorchState

# ---- sigterm ---------------------------------------------------------------------------------------------------------
#
# Handles SIGTERM in a user's training loop: the cluster leaves the run in order before the process ends.
#
# A library must not take signals from its user: the handler is installed only in the main thread and only in place of
# the default handler, which is put back afterwards. A second SIGTERM changes nothing, since launchers send one to a
# whole group and then to each process.


class Sigterm:
    """The handler. `received` is called inside it, once, and must be safe there."""

    def __init__(self, received: Callable[[], None]) -> None:
        self._received = received
        self._installed = False
        self.caught = False

    def install(self) -> None:
        """Install the handler; does nothing outside the main thread, or where the program handles SIGTERM."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    def give_back(self) -> None:
        """Put the default handler back, unless another handler has replaced this one. May be called twice."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.caught:
            self.caught = True
            self._received()


# ---- loop ------------------------------------------------------------------------------------------------------------


_logger = logging.getLogger("dips")

_WITH = "with dips.DiLoCo(model, optimizer, tokens_per_step=...) as sync:"

_guards: WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = WeakKeyDictionary()
"""Refuses the steps of an optimizer whose newest DiLoCo was not entered."""


class _Use(Enum):
    MADE = "made"
    ENTERED = "entered"
    ENDED = "ended"


class DiLoCo:
    """Makes a training loop one cluster of a run (DiLoCo: many inner steps, then one outer step on the difference).

    It works from the beginning of its `with` block to its end. Steps before it, and `done` and count(), raise
    ConfigError; steps after it are not shared. At the end of the block the last steps are pushed and their verdict is
    awaited, for at most leave_wait_s; after an error, only the verdict of the open push is awaited. Steps that could
    not be pushed are logged as a warning. SIGTERM, where the program does not handle it, does the same at the next step
    or `done`, and then ends the process with exit code 143.

    model, optimizer: the loop's own, also as Accelerate prepared them; the optimizer is the inner one. tokens_per_step:
    tokens (or samples, if every cluster counts them alike) behind one optimizer.step() of this process; count()
    overrides it. steps: `done` becomes true after so many steps, with or without a master. sync_every, outer_lr,
    outer_momentum: the values that the user expects; the master sets them, and a different value there is refused at
    the start. master, cluster_id, run_id: else DIPS_MASTER, DIPS_CLUSTER, DIPS_RUN. tape: a file for this cluster's
    event record.

    keys: the directory of this cluster's identity (docs/security.md), else DIPS_KEYS. insecure: use no keys, with a
    master on this machine only; else DIPS_INSECURE=1. One of the two must be given.

    wire_dtype: the format of pushes, "float32" (else DIPS_WORKER_WIRE_DTYPE) or differences to the pulled version in
    fewer bits: "bfloat16", "int8" or "int4". The rounding error is added to the next push.

    checkpoint_dir: a folder for this cluster's checkpoints (docs/checkpoints.md), one every checkpoint_every_s seconds.
    resume: continue from the newest of them, if there is one; `steps` counts on. state: further state to be kept, such
    as a scheduler or a data loader's position: an object with state_dict() and load_state_dict(), or several by name.

    buffers: "own" leaves the model's buffers (running statistics of batch norm, say) to this cluster, and no version
    holds them; with "average" the run averages those that a state_dict holds, and an exported model has them. All
    clusters of a run give the same.

    Several processes of torch.distributed are one cluster if each holds all of the model (DistributedDataParallel): all
    of them enter and step together, rank 0 talks to the master, and their tokens are added up. Their checkpoints are
    the trainer's (docs/integrations.md). Ranks whose parameters differ are refused, at the start and before each push;
    replicas: they hold the whole model each, and get rank 0's values where theirs are others at the start.

    Raises ConfigError for settings that cannot work; entering raises Refused when the run does not take this cluster
    (another model, say) and RetryLater when no master answers.
    """

    _keeps_own_checkpoints = True
    """Whether checkpoints are taken at intervals; a trainer's callback takes one with each of the trainer's."""

    _resume_label: str | None = None

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        tokens_per_step: int,
        steps: int | None = None,
        sync_every: int | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        master: str | None = None,
        cluster_id: str | None = None,
        run_id: str | None = None,
        keys: Path | str | None = None,
        insecure: bool | None = None,
        wire_dtype: str | None = None,
        tape: Path | str | None = None,
        checkpoint_dir: Path | str | None = None,
        checkpoint_every_s: float | None = None,
        checkpoints_kept: int | None = None,
        resume: bool | None = None,
        state: HasState | Mapping[str, HasState] | None = None,
        replicas: bool = False,
        buffers: str = "own",
    ) -> None:
        _check_arguments(tokens_per_step, steps, wire_dtype, buffers)
        self._model = plain_model(model)
        self._replicas = replicas or is_replica_on_all_ranks(model)
        self._optimizer = plain_optimizer(optimizer)
        self._tokens_per_step = tokens_per_step
        self._steps_wanted = steps
        self._buffers = buffers
        self._use = _Use.MADE
        self._was_used = False
        self._next_tokens: int | None = None
        self._losses = Losses()
        self._token_check: TokenCheck | None = None
        self._hooks: list[RemovableHandle] = []
        self._sigterm = Sigterm(self._received_sigterm)
        self._ends = False
        self._in_step = self._asked = self._warned_of_end = False
        self._shell: ClusterShell | None = None
        self._config: ClientConfig | None = None
        self._parameters: TorchParameters | None = None
        self._ranks: Ranks | None = None
        self._news = StepNews()
        self.steps = self._steps_compared = 0
        self._own_tokens = 0
        self._state = state
        self._asks_done = False
        if master or os.environ.get(VARIABLES["master"]):
            self._config = check(
                load(
                    ClientConfig,
                    SECTION,
                    variables=VARIABLES,
                    overrides={
                        "master": master or None,
                        "cluster_id": cluster_id or None,
                        "run_id": run_id or None,
                        "keys": keys or None,
                        "insecure": insecure,
                        "sync_every": sync_every,
                        "outer_lr": outer_lr,
                        "outer_momentum": outer_momentum,
                        "wire_dtype": wire_dtype,
                        "tape": None if tape is None else Path(tape),
                        "checkpoint_dir": None if checkpoint_dir is None else Path(checkpoint_dir),
                        "checkpoint_every_s": checkpoint_every_s,
                        "checkpoints_kept": checkpoints_kept,
                        "resume": resume,
                    },
                ).value
            )
        _refuse_steps_before_entering(self._optimizer)

    def __enter__(self) -> DiLoCo:
        _may_step(self._optimizer)
        if self._config is None:
            _logger.info("DIPS_MASTER is not set: training alone, nothing is shared")
        else:
            self._sigterm.install()
            try:
                self._ranks = ranks_here()
                self._parameters = self._checked_parameters(self._ranks)
                self._join(self._config, self._parameters)
            except BaseException:
                self._close_ranks()
                self._sigterm.give_back()
                raise
            if self._config.check_tokens:
                self._token_check = TokenCheck()
                self._token_check.begin(self._model)
        self._hooks.append(self._optimizer.register_step_pre_hook(self._before_step))
        self._hooks.append(self._optimizer.register_step_post_hook(self._after_step))
        self._use, self._was_used = _Use.ENTERED, False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._use = _Use.ENDED
        if self._token_check is not None:
            self._token_check.end()
        while self._hooks:
            self._hooks.pop().remove()
        # Inside of a step parameters are incomplete; ranks that do not leave together cannot compare theirs.
        whole = is_orderly(kind) and not self._in_step and (kind is None or self._ranks is None)
        try:
            if kind is None and self._ranks is not None and self._parameters is not None:
                # Rank 0 may push as it leaves: the ranks' parameters are compared, as before any push.
                self._ranks.meet(0, False, leaves=True)
                if not self.run_ended and self.steps > self._steps_compared:
                    self._ranks.compare(self._parameters)
        except BaseException as raised:
            kind, error, whole = type(raised), raised, False
            raise
        finally:
            self._leave(reason_of(kind, error), whole, together=kind is None)
        released = self._shell is not None and self._shell.released
        if kind is None and (self._sigterm.caught or self._ends) and not released:
            raise self._end_of_process()

    def _leave(self, reason: str, push_pending: bool, together: bool) -> None:
        """Leave the run. together: all ranks leave, and keep one model."""
        try:
            if self._shell is not None:
                self._shell.close("SIGTERM" if self._sigterm.caught else reason, push_pending=push_pending)
            if together and self._ranks is not None:
                self._follow_the_first(self._ranks)
        finally:
            self._close_ranks()
            self._sigterm.give_back()

    def _received_sigterm(self) -> None:
        """Called in the signal handler. A wait ends at once; several ranks all learn it at the next step."""
        if self._shell is not None and self._ranks is None:
            self._shell.request_stop("SIGTERM")

    def _end_of_process(self) -> SystemExit:
        _logger.warning("SIGTERM: this cluster has left the run, and this process ends with exit code %d", TERMINATED)
        return SystemExit(TERMINATED)

    def _close_ranks(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def _checked_parameters(self, ranks: Ranks | None) -> TorchParameters:
        """The model's parameters; all ranks enter with the same ones, or none does."""
        parameters: TorchParameters | Exception
        try:
            refuse_shards(self._model, self._optimizer)
            parameters = TorchParameters(self._model, self._optimizer, buffers=self._buffers)
        except Exception as error:
            parameters = error
        if ranks is not None:
            ranks.agree(parameters, replicas=self._replicas)
        if isinstance(parameters, Exception):
            raise parameters
        return parameters

    def _join(self, config: ClientConfig, parameters: TorchParameters) -> None:
        """Rank 0 joins, seeds or pulls; then all ranks have its parameters."""
        install("worker", enabled=config.failpoints)
        ranks = self._ranks
        if ranks is not None and self._keeps_own_checkpoints and config.checkpoint_dir is not None:
            raise ConfigError(
                "a loop of several ranks keeps no checkpoints of its own: leave out checkpoint_dir, or use the "
                "callback for your trainer, whose checkpoints hold every rank"
            )
        if ranks is None or ranks.is_first:
            try:
                self._shell = self._driver_for(config, parameters)
                self._shell.__enter__()
            except BaseException:
                if ranks is not None:
                    ranks.tell(StepNews(failed=True))
                raise
        if ranks is not None:
            self._follow_the_first(ranks, enters=True)

    def _driver_for(self, config: ClientConfig, parameters: TorchParameters) -> ClusterShell:
        inner = TorchState(self._model, self._optimizer, {"steps": _Steps(self), **_named(self._state)})
        plan = DataPlan(DataMode.OWN)
        untrained = untrained_of(self._model, parameters.ids)
        parameters.describe(description_of(self._model, parameters.ids, untrained))
        if own := running_statistics(self._model, parameters.ids):
            _logger.warning(
                "the model keeps running statistics (%r and %d more), which are not part of the run: an exported model "
                'lacks them, unless all clusters enter the loop with buffers="average"',
                own[0], len(own) - 1,
            )  # fmt: skip
        return ClusterShell(
            config, parameters, parameters.layout(), plan,
            inner=inner, resume_label=self._resume_label, untrained=untrained,
        )  # fmt: skip

    def count(self, tokens: int, loss: float | torch.Tensor = math.nan) -> None:
        """Set the tokens of the next optimizer.step(), in place of tokens_per_step; loss as in report().

        Raises ConfigError for fewer than one token, and outside of the `with` block.
        """
        self._must_be_entered("count()")
        if tokens < 1:
            raise ConfigError(f"count({tokens}): a step is trained on at least 1 token")
        self._next_tokens = tokens
        if isinstance(loss, torch.Tensor) or not math.isnan(loss):
            self._losses.add(loss)

    def report(self, loss: float | torch.Tensor) -> None:
        """Report the training loss of the next optimizer.step(), in nats per token, for `dips status` and the status
        page. Several, of accumulated batches, are averaged. A tensor on a device is not waited for at each step.

        Raises ConfigError for what is not one number, and outside of the `with` block.
        """
        self._must_be_entered("report()")
        self._losses.add(loss)

    @property
    def done(self) -> bool:
        """Whether the loop should end: the run has ended (the model is then its last version), `steps` are made,
        SIGTERM came, or the `with` block has ended. Raises ConfigError where no `with` block surrounds the loop.

        A checkpoint may be taken here: reading `done` shows that a step is complete.
        """
        if self._use is not _Use.ENTERED:
            if self._use is _Use.MADE or not self._was_used:
                self._must_be_entered("done")
            return True
        self._asks_done = self._was_used = True
        if self._shell is not None:
            self._shell.checkpoint_if_due()
        if self._sigterm.caught and self._ranks is None:
            return True
        return self.run_ended or (self._steps_wanted is not None and self.steps >= self._steps_wanted)

    def _must_be_entered(self, what: str) -> None:
        if self._use is _Use.MADE:
            raise ConfigError(f"{what} before the `with` block: no step is shared; write `{_WITH}` around the loop")
        if self._use is _Use.ENDED:
            raise ConfigError(f"{what} after the `with` block: no step is shared; indent the loop under `{_WITH}`")

    @property
    def run_ended(self) -> bool:
        """Whether the run has ended for this cluster: steps from now on are not shared."""
        self._asked = True
        if self._ranks is not None:
            return self._news.done  # the same on every rank
        return self._shell is not None and self._shell.done

    @property
    def active(self) -> bool:
        """Whether this loop takes part in a run."""
        return self._shell is not None or self._ranks is not None

    @property
    def version(self) -> Version | None:
        """The last pulled version; None when training alone."""
        if self._shell is not None:
            return self._shell.version
        return Version(self._news.timeline, self._news.version) if self._news.timeline else None

    @property
    def progress(self) -> int:
        """Tokens that the whole run has trained on, as far as known here; without a run, those of this loop's steps."""
        if self._shell is not None:
            return self._shell.progress
        return self._news.progress if self._ranks is not None else self._own_tokens

    @property
    def last_verdict(self) -> Verdict | None:
        return self._shell.last_verdict if self._shell else None

    @property
    def shell(self) -> ClusterShell | None:
        """The shell, for everything else; None when training alone."""
        return self._shell

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._in_step = True

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        tokens = self._next_tokens or self._tokens_per_step
        self._next_tokens, self._was_used, loss = None, True, math.nan
        near = self._shell is not None and self._shell.push_is_near
        if self._shell is not None:
            loss = self._losses.take(time.monotonic(), near)
        if self._token_check is not None:
            self._token_check.stepped(tokens)
        self.steps += 1
        if self._ranks is not None:
            tokens, near, self._ends = self._ranks.meet(tokens, near, wants_to_leave=self._sigterm.caught)
        self._own_tokens += tokens
        if self._ranks is not None:
            self._step_together(self._ranks, tokens, loss, near or self._ends)
        elif self._shell is not None:
            self._shell.step(tokens, loss=loss)
        if self._shell is not None and self._keeps_own_checkpoints and not self._asks_done:
            self._shell.checkpoint_if_due()  # for a loop that never reads `done`
        self._in_step = False
        asked, ended = self._asked, self.run_ended
        self._asked = False
        if (self._ends or (self._sigterm.caught and self._ranks is None)) and not asked:
            raise self._end_of_process()  # a loop that does not read `done` would go on
        if ended and not asked and not self._warned_of_end:
            self._warned_of_end = True
            _logger.warning("the run has ended for this cluster: ask `sync.done`; steps from now on are not shared")

    def _step_together(self, ranks: Ranks, tokens: int, loss: float, may_push: bool) -> None:
        """Rank 0 steps in the run; the others get the result, and take its parameters if they were replaced.

        may_push: the same on all ranks; a push begins at no other step, as the ranks are compared before it.
        """
        assert self._parameters is not None, "set with the ranks"
        if may_push:
            ranks.compare(self._parameters)
            self._steps_compared = self.steps
        try:
            if self._shell is not None:
                if self._ends:
                    self._shell.request_stop("SIGTERM")
                self._shell.step(tokens, loss=loss, may_push=may_push)
        except BaseException:
            ranks.tell(StepNews(failed=True))
            raise
        self._follow_the_first(ranks)

    def _follow_the_first(self, ranks: Ranks, *, enters: bool = False) -> None:
        """All ranks take rank 0's news, its parameters where those were replaced (enters: in any case), and its resets
        of the optimizer: replicas stay equal only if their optimizers do.
        """
        assert self._parameters is not None, "set with the ranks"
        before, self._news = StepNews() if enters else self._news, ranks.tell(self._facts())
        if enters or self._news.installs != before.installs:
            ranks.spread(self._parameters.tensors)
        if self._news.resets != before.resets and self._shell is None:
            self._parameters.reset_inner_optimizer()

    def _facts(self) -> StepNews | None:
        """The news that rank 0 sends to the others; None on those."""
        shell, parameters = self._shell, self._parameters
        if shell is None or parameters is None:
            return None
        base = shell.version
        at = (base.timeline, base.v) if base is not None else (0, 0)
        return StepNews(parameters.installs, parameters.resets, shell.done, *at, shell.progress)


def _refuse_steps_before_entering(optimizer: torch.optim.Optimizer) -> None:
    """Refuse steps until the loop is entered, even where the DiLoCo is dropped at once: a loop without `with` would
    train alone for ever."""

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        raise ConfigError(
            f"dips.DiLoCo(...) was made and not entered: no step is shared; write `{_WITH}` around the loop"
        )

    _may_step(optimizer)  # the newest one counts, as when a notebook's cell runs again
    _guards[optimizer] = optimizer.register_step_pre_hook(refuse)


def _may_step(optimizer: torch.optim.Optimizer) -> None:
    guard = _guards.pop(optimizer, None)
    if guard is not None:
        guard.remove()


class _Steps:
    """The counters of a DiLoCo, as a part of its checkpoint."""

    def __init__(self, loop: DiLoCo) -> None:
        self._loop = loop

    def state_dict(self) -> dict[str, int]:
        return {"steps": self._loop.steps, "tokens": self._loop._own_tokens}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self._loop.steps, self._loop._own_tokens = state_dict["steps"], state_dict["tokens"]


def _named(state: HasState | Mapping[str, HasState] | None) -> dict[str, HasState]:
    """The user's own objects by name. Raises ConfigError for one without the two methods."""
    parts = {} if state is None else dict(state) if isinstance(state, Mapping) else {"state": state}
    for name, part in parts.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise ConfigError(
                f"state {name!r} is a {type(part).__name__}: give an object with state_dict() and load_state_dict()"
            )
    return {f"user.{name}": part for name, part in parts.items()}


def _check_arguments(tokens_per_step: int, steps: int | None, wire_dtype: str | None, buffers: str) -> None:
    if buffers not in ("own", "average"):
        raise ConfigError(f'buffers is {buffers!r}: give "own", or "average" to have the run average them')
    if tokens_per_step < 1:
        raise ConfigError(f"tokens_per_step is {tokens_per_step}: give the tokens of one optimizer.step(), at least 1")
    if steps is not None and steps < 0:
        raise ConfigError(f"steps is {steps}: give the number of steps to make, or leave it out")
    if wire_dtype is not None and wire_dtype not in WIRE_DTYPES:
        raise ConfigError(f"wire_dtype is {wire_dtype!r}: give one of {', '.join(WIRE_DTYPES)}")
