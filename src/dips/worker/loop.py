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
import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dips.core.config import load
from dips.core.errors import TERMINATED, ConfigError, DipsError, options_are_keywords
from dips.core.files import share_with
from dips.core.ids import Version
from dips.core.layout import Layout
from dips.core.messages import DataMode, DataPlan, Verdict
from dips.core.model_description import Untrained
from dips.core.net.security import VARIABLES
from dips.core.observe.failpoints import install
from dips.core.observe.logs import (
    end_with_one_sentence,
    say_instead_of_trace,
    show_where_logging_is_not_configured,
)
from dips.core.wire import WIRE_DTYPES
from dips.worker.config import SECTION, ClientConfig, check
from dips.worker.parallel.held import Held, Parallel, held_here, refuse_ranks_outside
from dips.worker.parallel.rank_loop import RankLoop, loop_of_ranks
from dips.worker.parallel.rank_state import TorchState
from dips.worker.parallel.ranks import Ranks, ranks_here
from dips.worker.shell import ClusterShell, OtherRanks, is_orderly, reason_of
from dips.worker.state.work import Work
from dips.worker.step_checks import FirstBatches, Losses, StepWatch, TokenCheck, not_compiled
from dips.worker.torch_model import (
    TorchParameters,
    called_module,
    description_of,
    former_names,
    has_shards,
    innermost,
    is_parents_step,
    makes_state_only,
    plain_model,
    plain_optimizer,
    refuse_hidden_moments,
    refuse_shards,
    running_statistics,
    skipped_by_scaler,
    untrained_of,
    with_contained,
)
from dips.worker.torch_state import HasState

# ---- sigterm ---------------------------------------------------------------------------------------------------------
#
# Handles SIGTERM in a user's training loop: the cluster leaves the run in order before the process ends.
#
# A library must not take signals from its user: the handler is installed only in the main thread and only in place of
# the default handler, which is put back afterwards. A second SIGTERM changes nothing, since launchers send one to a
# whole group and then to each process. A program's own handler is called as ever; but while a loop that has ended waits
# for the run, for hours perhaps, this program can do nothing else, so that the signal ends the wait, too.


_handlers: WeakSet[Sigterm] = WeakSet()
"""Those that are installed: also while a loop joins its run, or leaves it."""


class Sigterm:
    """The handler. `received` is called inside it, once, and must be safe there."""

    def __init__(self, received: Callable[[], None]) -> None:
        self._received = received
        self._installed = False
        self._theirs: Callable[[int, FrameType | None], Any] | None = None
        self.caught = False

    def install(self) -> None:
        """Install the handler; does nothing outside the main thread, or where the program handles SIGTERM."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self._installed = True
            _handlers.add(self)

    def accompany(self) -> None:
        """Call `received` before the program's own handler, if it has one; `caught` stays as it is."""
        theirs = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread() and callable(theirs) and not self._installed:
            self._theirs = theirs
            signal.signal(signal.SIGTERM, self._handle)
            self._installed = True
            _handlers.add(self)

    def give_back(self) -> None:
        """Put the handler back that was there, unless another one has replaced this one. May be called twice."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._theirs or signal.SIG_DFL)
        self._installed, self._theirs = False, None
        _handlers.discard(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._theirs is not None:
            self._received()  # first: theirs may wait for other processes, or raise
            self._theirs(number, frame)
        elif not self.caught:
            self.caught = True
            self._received()


# ---- loop ------------------------------------------------------------------------------------------------------------


_logger = logging.getLogger("dips")

_WITH = "with dips.DiLoCo(model, optimizer, tokens_per_step=...) as sync:"

_guards: WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = WeakKeyDictionary()
"""Refuses the steps of an optimizer whose newest DiLoCo was not entered."""


_entered: WeakSet[DiLoCo] = WeakSet()
"""The loops of this process."""

_of_parent: list[object] = []
"""What a forked process inherited and must not use, not even to close it: it belongs to the parent's threads."""


class _Use(Enum):
    MADE = "made"
    ENTERED = "entered"
    ENDED = "ended"


class DiLoCo:
    """Makes a training loop one cluster of a run (DiLoCo: many inner steps, then one outer step on the difference).

    It works from the beginning of its `with` block to its end. Steps before it, and `done` and count(), raise
    ConfigError; steps after it are not shared. At the end of the block the last steps are pushed and their verdict is
    awaited, for at most leave_wait_s, or, before the run's first merge, cut_off_limit_h; after an error, only the
    verdict of the open push is awaited. Steps that could not be pushed are logged as a warning. SIGTERM, where the
    program does not handle it, does the same at the next step or `done`, and then ends the process with exit code 143.

    Several processes of torch.distributed are one cluster, of any parallelism of torch (docs/integrations.md): all of
    them enter and step together, and each pushes and pulls its own part of the model. Ranks that hold the same elements
    with other values are refused, at the start and before each push.

    Args:
        model: The loop's own module, also as Accelerate or DistributedDataParallel prepared it; of a rank what it
            holds; a list for a pipeline's interleaved stages. A model that is not the run's: Refused (LAYOUT), with the
            first parameter that differs.
        optimizer: The inner optimizer, also as Accelerate prepared it. Where several step different parameters of the
            model, as torch.optim.Muon and AdamW do, a list of all of them, in the same order after a restart: a step is
            complete when each has made one; one that only some of them make, as after an overflow with GradScaler, is
            not counted. The same one twice, or one outside of the list that steps the model: ConfigError.
        tokens_per_step: Tokens (or samples, if every cluster counts them alike) behind one step of this process;
            count() overrides it. Missing, no whole number or below 1: ConfigError; more than the model's inputs can
            hold: a warning, and above a hundred times as many ConfigError at the first step; far above what is usual in
            the run: Refused (TOKENS).
        steps: `done` becomes true after so many steps, with or without a master. Negative: ConfigError.
        sync_every: Inner steps between two pushes that you expect; the master sets them. Another value there:
            ConfigError at the start.
        outer_lr: Outer learning rate that you expect, as for sync_every.
        outer_momentum: Outer momentum that you expect, as for sync_every.
        master: HOST:PORT of the master, or several with commas between them, tried in turn. Without one the loop is
            ordinary training. Not an address: ConfigError; no answer for connect_wait_s (120 s): RetryLater.
        cluster_id: This cluster's name, the same after a restart. Missing: ConfigError; in use by a live process:
            Refused (NAME_TAKEN).
        run_id: The run's name. Another run at this address: Refused (RUN_ID).
        keys: The directory of this cluster's identity (docs/security.md). Files missing, or expired by this machine's
            clock: ConfigError; revoked or of another name: Refused (IDENTITY).
        insecure: Use no keys, with a master on this machine only. Neither keys nor insecure, or both: ConfigError; a
            master that has keys: Refused (IDENTITY).
        wire_dtype: The format of pushes: "float32", or differences to the pulled version in fewer bits: "bfloat16",
            "int8" or "int4"; the rounding error is added to the next push. Anything else: ConfigError.
        tape: A file for this cluster's event record; left out, one in checkpoint_dir, if there is one; "none": none.
            Not writable: ConfigError.
        checkpoint_dir: A folder for this cluster's checkpoints alone (docs/storage.md). Of another cluster or run:
            ConfigError.
        checkpoint_every_s: Seconds between two checkpoints.
        checkpoints_kept: Checkpoints to keep; for a damaged one the one before is used.
        resume: Continue from the newest checkpoint, if there is one; `steps` counts on. Without checkpoint_dir:
            ConfigError.
        state: Further state to be kept, such as a scheduler or a data loader's position: an object with state_dict()
            and load_state_dict(), or several by name.
        buffers: "own" leaves the model's buffers (running statistics of batch norm, say) to this cluster, and no
            version holds them; with "average" the run averages those that a state_dict holds, and an exported model has
            them. All clusters of a run give the same; else Refused (LAYOUT). Anything else: ConfigError.
        parallel: What the ranks of torch.distributed hold, where it does not follow from the model: dips.Parallel.
        earlier: Keywords of earlier releases; each is refused with what to give in its place: ConfigError.

    Raises ConfigError for settings that cannot work; entering raises Refused when the run does not take this cluster
    (another model, say) and RetryLater when no master answers.
    """

    _keeps_own_checkpoints = True
    """Whether checkpoints are taken at intervals; a trainer's callback takes one with each of the trainer's."""

    _resume_label: str | None = None

    _left_open = False
    """Whether a trainer ended without a word, so that this is no loop's own end, and perhaps the middle of a step."""

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        tokens_per_step: int | None = None,
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
        buffers: str = "own",
        parallel: Parallel | None = None,
        **earlier: Any,
    ) -> None:
        end_with_one_sentence()  # again: init_process_group() puts a hook around ours that would swallow the sentence
        _refuse_earlier(earlier)
        self._tokens_per_step = _whole_tokens(tokens_per_step)
        _check_arguments(steps, wire_dtype, buffers)
        self._models = [model] if isinstance(model, torch.nn.Module) else list(model)
        self._optimizers = _optimizers_in(optimizer)
        self._stepped: list[torch.optim.Optimizer] = []
        self._order: list[torch.optim.Optimizer] = []  # of the first complete step
        self._parallel = parallel or Parallel()
        self._steps_wanted = steps
        self._buffers = buffers
        self._use = _Use.MADE
        self._was_used = False
        self._next_tokens: int | None = None
        self._losses = Losses()
        self._watch: StepWatch | None = None
        self._steps_before = 0
        self._token_check: TokenCheck | None = None
        self._first_batches: FirstBatches | None = None
        self._hooks: list[RemovableHandle] = []
        self._sigterm = Sigterm(self._received_sigterm)
        self._in_step = self._asked = False
        self._after_end = Work()
        self._shell: ClusterShell | None = None
        self._config: ClientConfig | None = None
        self._together: RankLoop | None = None
        self._steps = 0
        self._own_tokens = 0
        self._state = state
        self._asks_done = False
        if master or os.environ.get(VARIABLES["master"]):
            if os.name != "posix":
                raise ConfigError("a cluster of a run needs Linux: leave out DIPS_MASTER here, and train alone")
            with options_are_keywords():
                self._config = check(
                    load(
                        ClientConfig,
                        SECTION,
                        given_to="dips.DiLoCo",
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
                            "tape": Path(tape) if tape not in (None, "none") else tape,
                            "checkpoint_dir": None if checkpoint_dir is None else Path(checkpoint_dir),
                            "checkpoint_every_s": checkpoint_every_s,
                            "checkpoints_kept": checkpoints_kept,
                            "resume": resume,
                        },
                    ).value
                )
        self._refuse_second_loop()
        for each in self._optimizers:
            _refuse_steps_before_entering(each)

    def __enter__(self) -> DiLoCo:
        self._refuse_second_loop()
        for optimizer in self._optimizers:
            _may_step(optimizer)
        self._sigterm.install()
        if self._config is not None:
            show_where_logging_is_not_configured()
        try:
            with options_are_keywords():
                self._join()
            self._begin()
        except BaseException as error:
            self._end_hooks()
            if self._cluster is not None:
                self._cluster.close(reason_of(type(error), error))
            self._sigterm.give_back()
            self._say_of_ctrl_c(error, "before it had joined the run")
            raise
        return self

    def _begin(self) -> None:
        """Hear of steps from now on."""
        if not self.active:
            self._sigterm.give_back()
            _logger.info("DIPS_MASTER is not set: training alone, nothing is shared")
        elif self._config is not None and self._config.check_tokens:
            self._token_check = TokenCheck()
            for model in self._models:
                self._token_check.begin(called_module(model))
        if self.active:
            self._first_batches = FirstBatches(self._models[0], self._began_with)
        for optimizer in self._optimizers:
            if not hasattr(type(optimizer).step, "hooked"):  # its class does not begin as torch's do: timm's Lookahead
                optimizer._patch_step_function()
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        self._use, self._was_used, self._after_end = _Use.ENTERED, False, Work()
        if self.active:
            self._watch = StepWatch(self._models, self._known, self._trained)
            self._hooks.append(register_optimizer_step_pre_hook(_of_all(self._any_begins)))
            self._hooks.append(register_optimizer_step_post_hook(_of_all(self._watch.any_stepped)))
        self._steps_before = self._steps
        _entered.add(self)

    def _began_with(self, first_batches: bytes) -> None:
        """Tell the other ranks' leader, and the master, the digest of the first batches."""
        if self._together is not None:
            self._together.first_batches = first_batches
        if self._shell is not None:
            self._shell.first_batches = first_batches

    def _refuse_second_loop(self) -> None:
        """Note who trains what. Raises ConfigError in the block of another loop, or callback, that counts the same
        steps.
        """
        masters = (self._parallel.master_parameters or {}).values()
        trained = [p for model in self._models for p in model.parameters() if p.requires_grad]
        self._trained = frozenset(map(id, (*trained, *masters)))
        self._known = frozenset(with_contained(self._optimizers))
        for other in _entered:
            if self._trained & other._trained or self._known & other._known:
                raise ConfigError(
                    "the steps of this model, or of its optimizer, are counted by another dips.DiLoCo already: leave "
                    "out one of the two; after an error in a trainer, call the close() of its callback first"
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_hooks()
        own_end = kind is None and not self._left_open
        if own_end and self._watch is not None and self._steps == self._steps_before:
            try:
                self._watch.refuse_uncounted()
            except ConfigError as uncounted:
                self.__exit__(type(uncounted), uncounted, uncounted.__traceback__)
                raise
        if self._after_end.steps:
            _logger.warning(
                "%s after the run's end are not counted, and are in the model here: `dips export` writes the run's",
                self._after_end,
            )
        why = "its trainer left it open" if self._left_open and kind is None else reason_of(kind, error)
        reason = "SIGTERM" if self._sigterm.caught else why
        # A SIGTERM to the whole group also ends a loader's workers, which is then an error of the loop.
        by_sigterm = self._sigterm.caught and isinstance(error, Exception) and not isinstance(error, DipsError)
        by_sigterm = by_sigterm and self._together is None and not self._in_step
        # Inside of a step parameters are incomplete, and a loop that has come to its end is in none.
        whole = own_end or ((self._left_open or is_orderly(kind) or by_sigterm) and not self._in_step)
        if isinstance(error, KeyboardInterrupt) and self.active:
            if not self.run_ended:
                _logger.warning("ctrl-C: this cluster leaves the run; a second one ends the process at once")
            self._say_of_ctrl_c(error, "and has left the run; started again, it goes on from the newest version")
        try:
            if kind is None and self.active:
                self._sigterm.accompany()
            if self._together is not None:
                # Without all ranks, as after an error, their parameters cannot be shared.
                self._together.close(reason, push_pending=kind is None and whole, patient=own_end)
            elif self._shell is not None:
                self._shell.close(reason, push_pending=whole, patient=own_end and not self._sigterm.caught)
        except KeyboardInterrupt as again:
            self._say_of_ctrl_c(again, "while it left the run: its last steps may be lost")
            raise
        finally:
            self._sigterm.give_back()
        if by_sigterm and not self.released:
            _logger.warning("after SIGTERM the loop ended with %s: %s", type(error).__name__, error)
            raise self._end_of_process() from error
        if kind is None and (self._sigterm.caught or self._ends) and not self.released:
            raise self._end_of_process()

    def _leave_to_parent(self) -> None:
        """In a forked process, such as a data loader's: the loop has ended here."""
        _of_parent.extend((self._shell, self._together))
        self._shell = self._together = self._watch = None
        self._end_hooks()

    def _end_hooks(self) -> None:
        self._use = _Use.ENDED
        _entered.discard(self)
        if self._token_check is not None:
            self._token_check.end()
        if self._first_batches is not None:
            self._first_batches.end()
        while self._hooks:
            self._hooks.pop().remove()

    def _say_of_ctrl_c(self, error: BaseException, what: str) -> None:
        if isinstance(error, KeyboardInterrupt) and self._config is not None:
            say_instead_of_trace(error, f"cluster {self._config.cluster_id} was ended by ctrl-C {what}")

    @property
    def _ends(self) -> bool:
        """Whether the ranks leave together for a SIGTERM that came to any of them."""
        return self._together is not None and self._together.news.ends

    def _received_sigterm(self) -> None:
        """Called in the signal handler. A wait ends at once; the other ranks learn it when they meet."""
        if self._shell is not None:
            self._shell.request_stop("SIGTERM")

    def _end_of_process(self) -> SystemExit:
        _logger.warning("SIGTERM: this cluster has left the run, and this process ends with exit code %d", TERMINATED)
        return SystemExit(TERMINATED)

    @property
    def released(self) -> bool:
        """Whether the run itself let this cluster go."""
        return self._cluster is not None and self._cluster.released

    def _join(self) -> None:
        """Join the run, alone or with the other ranks. Does nothing where no rank has a master."""
        cut = self._parallel.cuts or len(self._models) > 1 or any(map(has_shards, self._models))
        ranks, config = ranks_here(self._parallel.group, cut=cut), self._config
        if config is not None:
            share_with(config.files_group)
        if ranks is not None:
            try:
                self._join_with(ranks, config)
            except BaseException:
                ranks.close()
                raise
        elif config is not None:
            install("worker", enabled=config.failpoints)
            self._shell = self._shell_of_one(config)
            if self._sigterm.caught:  # while it was made, when no one could be told
                self._received_sigterm()
            self._shell.__enter__()

    def _shell_of_one(self, config: ClientConfig) -> ClusterShell:
        """The shell of a cluster of one process."""
        model, optimizers = self._only_one(), self._optimizers
        for optimizer in optimizers:
            refuse_shards(model, optimizer)
        if self._parallel.group is not None:
            refuse_ranks_outside(self._models, [dist.get_rank()])
        parameters = TorchParameters(model, optimizers, buffers=self._buffers)
        untrained = untrained_of(model, parameters.ids)
        parameters.describe(description_of(model, parameters.ids, untrained))
        self._say_what_is_own(running_statistics(model, parameters.ids))
        inner = TorchState(model, optimizers, {"steps": _Steps(self), **_named(self._state)}, buffers=self._buffers)
        return ClusterShell(
            config, parameters, parameters.layout(), DataPlan(DataMode.OWN),
            inner=inner, resume_label=self._resume_label, untrained=untrained, former=former_names(model),
        )  # fmt: skip

    def _only_one(self) -> torch.nn.Module:
        """Raises ConfigError for what only several ranks can have."""
        if len(self._models) > 1 or self._parallel.cuts:
            raise ConfigError(
                "several modules, and data_mesh, shards, order and master_parameters of dips.Parallel, are for the "
                "ranks of torch.distributed, and this process is alone: call torch.distributed.init_process_group() "
                "before the loop is entered, or give one module"
            )
        return plain_model(self._models[0])

    def _join_with(self, ranks: Ranks, config: ClientConfig | None) -> None:
        settings = {} if config is None else {"steps": self._steps_wanted}
        state = {"steps": _Steps(self), **_named(self._state)}
        together = loop_of_ranks(
            ranks, config, lambda config: self._held(config, ranks), self._optimizers, state, self._shell_of_ranks,
            settings=settings, wants_to_leave=lambda: self._sigterm.caught,
            loss=lambda is_due: self._losses.take(time.monotonic(), is_due),
            keeps_only_state=not self._keeps_own_checkpoints, order=self._parallel.order,
            replicas=self._parallel.replicas,
        )  # fmt: skip
        if together is None:
            ranks.close()
            return
        self._together, self._shell = together, together.shell
        try:
            together.start()
        except BaseException:
            self._together = self._shell = None
            raise

    def _held(self, config: ClientConfig, ranks: Ranks) -> Held:
        """What this rank holds. Raises ConfigError for what it cannot share."""
        given = self._parallel
        return held_here(
            self._models, innermost(self._optimizers), buffers=self._buffers, shards=given.shards,
            master_parameters=given.master_parameters, data_mesh=given.data_mesh, of_world=ranks.of_world,
        )  # fmt: skip

    def _shell_of_ranks(
        self, others: OtherRanks, layout: Layout, untrained: Untrained, trained: frozenset[int]
    ) -> ClusterShell:
        """The leader's shell."""
        assert self._config is not None, "the ranks have a master"
        for model in self._models:
            self._say_what_is_own(running_statistics(plain_model(model), trained))
        return ClusterShell(
            self._config, others, layout, DataPlan(DataMode.OWN), resume_label=self._resume_label, untrained=untrained
        )

    def _say_what_is_own(self, own: Sequence[str]) -> None:
        if own:
            _logger.warning(
                "the model keeps running statistics (%r and %d more), which are not part of the run: an exported model "
                'lacks them, unless all clusters enter the loop with buffers="average"',
                own[0], len(own) - 1,
            )  # fmt: skip

    def count(self, tokens: int, loss: float | torch.Tensor = math.nan) -> None:
        """Set the tokens of the next optimizer.step(), in place of tokens_per_step; loss as in report().

        Raises ConfigError for no whole number, for fewer than one token, and outside of the `with` block.
        """
        self._must_be_entered("count()")
        try:
            tokens = operator.index(tokens)
        except TypeError:
            raise ConfigError(f"count({tokens!r}): give a whole number of tokens") from None
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
        """Whether the loop should end: the run has ended (the model is then its last version, else a warning says
        that it could not be pulled), `steps` are made, SIGTERM came, or the `with` block has ended. Raises ConfigError
        where no `with` block surrounds the loop.

        A checkpoint may be taken here: reading `done` shows that a step is complete.
        """
        if self._use is not _Use.ENTERED:
            if self._use is _Use.MADE or not self._was_used:
                self._must_be_entered("done")
            return True
        self._asks_done = self._was_used = True
        if self._watch is not None:
            self._watch.asked()
        if self._stepped:
            self._forget_half_a_step()
        self._checkpoint_if_due()
        if self._sigterm.caught and self._together is None:
            return True
        return self.run_ended or (self._steps_wanted is not None and self._steps >= self._steps_wanted)

    def _must_be_entered(self, what: str) -> None:
        if self._use is _Use.MADE:
            raise ConfigError(f"{what} before the `with` block: no step is shared; write `{_WITH}` around the loop")
        if self._use is _Use.ENDED:
            raise ConfigError(f"{what} after the `with` block: no step is shared; indent the loop under `{_WITH}`")

    @property
    def run_ended(self) -> bool:
        """Whether the run has ended for this cluster: steps from now on are not shared."""
        self._asked = True
        return self._has_ended

    @property
    def _has_ended(self) -> bool:
        return self._cluster is not None and self._cluster.done

    def _checkpoint_if_due(self) -> None:
        if self._keeps_own_checkpoints and self._cluster is not None:
            self._cluster.checkpoint_if_due()

    @property
    def steps(self) -> int:
        """Inner steps of this loop; one that resumed counts on from its checkpoint. On each of several ranks also those
        without gradients, which the run does not count.
        """
        return self._steps

    @property
    def active(self) -> bool:
        """Whether this loop takes part in a run."""
        return self._cluster is not None

    @property
    def _cluster(self) -> ClusterShell | RankLoop | None:
        """What takes part in the run: this process, or with other ranks; None when training alone."""
        return self._together or self._shell

    @property
    def version(self) -> Version | None:
        """The last pulled version; None when training alone."""
        return None if self._cluster is None else self._cluster.version

    @property
    def progress(self) -> int:
        """Tokens that the whole run has trained on, as far as known here (by several ranks, when they met last);
        without a run, those of this loop's steps.
        """
        return self._own_tokens if self._cluster is None else self._cluster.progress

    @property
    def last_verdict(self) -> Verdict | None:
        """What became of the last push that was decided; None before the first."""
        return self._shell.last_verdict if self._shell else None

    @property
    def shell(self) -> ClusterShell | None:
        """The shell, for everything else; None when training alone, and on a rank that is not the first."""
        return self._shell

    def _forget_half_a_step(self) -> None:
        """In the last iteration only some of the optimizers stepped, as when GradScaler found an overflow in the
        gradients of one: kept for the next iteration, they would end each later step in the middle of one.
        """
        self._stepped.clear()
        self._in_step = False

    @not_compiled
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        order = self._order
        # An earlier optimizer after a later one: the next iteration of a loop that does not read `done`.
        if self._stepped and order and order.index(optimizer) < order.index(self._stepped[-1]):
            self._forget_half_a_step()
        self._in_step = True

    def _any_begins(self, optimizer: torch.optim.Optimizer, kwargs: Mapping[str, Any]) -> None:
        if self._watch is not None and self._watch.any_begins(optimizer):
            self._in_step = True  # also of one inside of a given one, that steps during backward()

    @not_compiled
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if is_parents_step(optimizer):
            return
        if makes_state_only(optimizer, kwargs):
            self._in_step = bool(self._stepped)
            return
        if self._was_skipped(optimizer):
            self._in_step, self._next_tokens = bool(self._stepped), None
            return
        if optimizer not in self._stepped:
            self._stepped.append(optimizer)
        if len(self._stepped) < len(self._optimizers):
            return
        tokens = self._next_tokens or self._tokens_per_step
        self._next_tokens, self._was_used = None, True
        is_empty = self._watch is not None and not self._watch.trains(self._optimizers)
        if is_empty and self._together is None and self._watch is not None:
            self._watch.tell_empty(tokens)
            self._forget_half_a_step()
            return
        if not self._order:
            self._order = list(self._stepped)
            if self.active:
                refuse_hidden_moments(self._optimizers)
        self._stepped.clear()
        if self._token_check is not None:
            self._token_check.stepped(tokens)
        if self._watch is not None:
            self._watch.counted()
        if self._has_ended:
            if not self._after_end.steps:
                _logger.warning(
                    "the run has ended for this cluster: this step and later ones are not counted; end the loop when "
                    "`sync.done` is true, or leave the `with` block"
                )
            self._after_end += Work((), tokens, 1)
        self._steps += 1
        self._own_tokens += tokens
        if self._together is not None:
            self._together.step(tokens, is_empty=is_empty)
        elif self._shell is not None:
            loss = self._losses.take(time.monotonic(), self._shell.push_is_near)
            self._shell.step(tokens, loss=loss)
        if not self._asks_done:
            self._checkpoint_if_due()  # for a loop that never reads `done`
        self._in_step = False
        asked, self._asked = self._asked, False
        if self._has_ended or not self.active:
            self._losses = Losses()  # no one reads them
        alone = self._together is None or self._together.news.done  # no one else must hear of a SIGTERM any longer
        if (self._ends or (self._sigterm.caught and alone and self.active)) and not asked:
            raise self._end_of_process()  # a loop that does not read `done` would go on

    def _was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer was called for a batch that is not trained on."""
        return skipped_by_scaler(optimizer)


_forks = threading.local()
"""The signals that a thread which forks had blocked before."""


def _before_fork() -> None:
    """A SIGTERM that came to the child before its handler is gone would be lost: it waits until then."""
    _forks.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if _handlers else None


def _after_fork() -> None:
    if (blocked := _forks.__dict__.pop("blocked", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _in_forked_process() -> None:
    """A rank's child gets a process group of its own: torchrun and Slurm send SIGTERM to the whole group of a rank, and
    the ranks need batches from their loaders' workers until they have met and left together."""
    for handler in list(_handlers):
        handler.give_back()
    loops = list(_entered)
    if any(loop._together is not None for loop in loops):
        os.setpgid(0, 0)
    for loop in loops:
        loop._leave_to_parent()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_forked_process)


def _refuse_steps_before_entering(optimizer: torch.optim.Optimizer) -> None:
    """Refuse steps until the loop is entered, even where the DiLoCo is dropped at once: a loop without `with` would
    train alone for ever."""

    @not_compiled
    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        raise ConfigError(
            f"dips.DiLoCo(...) was made and not entered: no step is shared; write `{_WITH}` around the loop"
        )

    _may_step(optimizer)  # the newest one counts, as when a notebook's cell runs again
    _guards[optimizer] = optimizer.register_step_pre_hook(refuse)


def _of_all(method: Callable[[torch.optim.Optimizer, Mapping[str, Any]], None]) -> Callable[..., None]:
    """A method as a hook of all optimizers of this process, which does not keep its loop alive."""
    here = WeakMethod(method)

    @not_compiled
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (method := here()) is not None:
            method(optimizer, kwargs)

    return hook


def _may_step(optimizer: torch.optim.Optimizer) -> None:
    guard = _guards.pop(optimizer, None)
    if guard is not None:
        guard.remove()


def _optimizers_in(given: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of which each makes its part of a step. Raises ConfigError for what is none, and for a list that
    has one twice, or none: no step would ever be complete.
    """
    listed = given if isinstance(given, Iterable) and not isinstance(given, torch.optim.Optimizer) else [given]
    optimizers = list(listed)
    strange = [each for each in optimizers if not isinstance(each, torch.optim.Optimizer)]
    if strange:
        raise ConfigError(
            f"optimizer is a {type(strange[0]).__name__}: give a torch.optim.Optimizer, or a list of those that step "
            "the model"
        )
    optimizers = [plain_optimizer(each) for each in optimizers]
    if not optimizers or len(set(map(id, optimizers))) < len(optimizers):
        raise ConfigError(
            "optimizer is an empty list, or has the same optimizer twice, so that no step is ever complete: give each "
            "optimizer that steps the model once"
        )
    innermost(optimizers)
    return optimizers


class _Steps:
    """The counters of a DiLoCo, as a part of its checkpoint."""

    def __init__(self, loop: DiLoCo) -> None:
        self._loop = loop

    def state_dict(self) -> dict[str, int]:
        return {"steps": self._loop._steps, "tokens": self._loop._own_tokens}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self._loop._steps, self._loop._own_tokens = state_dict["steps"], state_dict["tokens"]


def _named(state: HasState | Mapping[str, HasState] | None) -> dict[str, HasState]:
    """The user's own objects by name. Raises ConfigError for one without the two methods."""
    parts = {} if state is None else dict(state) if isinstance(state, Mapping) else {"state": state}
    for name, part in parts.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise ConfigError(
                f"state {name!r} is a {type(part).__name__}: give an object with state_dict() and load_state_dict()"
            )
    return {f"user.{name}": part for name, part in parts.items()}


def _whole_tokens(tokens_per_step: int | None) -> int:
    """Raises ConfigError where it is missing, no whole number, or below 1."""
    remedy = "give the tokens of one optimizer.step(), a whole number of at least 1"
    if tokens_per_step is None:
        raise ConfigError(f"tokens_per_step is missing: {remedy}")
    try:
        whole = operator.index(tokens_per_step)
    except TypeError:
        raise ConfigError(f"tokens_per_step is {tokens_per_step!r}: {remedy}") from None
    if whole < 1:
        raise ConfigError(f"tokens_per_step is {whole}: {remedy}")
    return whole


def _refuse_earlier(arguments: Mapping[str, object]) -> None:
    """Raises ConfigError for a keyword that moved to dips.Parallel, and TypeError, as Python does, for any other."""
    for name in arguments:
        if name in {field.name for field in fields(Parallel)}:
            raise ConfigError(f"{name}= is a part of parallel=: give parallel=dips.Parallel({name}=...)")
        raise TypeError(f"dips.DiLoCo got an unexpected keyword argument {name!r}")


def _check_arguments(steps: int | None, wire_dtype: str | None, buffers: str) -> None:
    if buffers not in ("own", "average"):
        raise ConfigError(f'buffers is {buffers!r}: give "own", or "average" to have the run average them')
    if steps is not None and steps < 0:
        raise ConfigError(f"steps is {steps}: give the number of steps to make, or leave it out")
    if wire_dtype is not None and wire_dtype not in WIRE_DTYPES:
        raise ConfigError(f"wire_dtype is {wire_dtype!r}: give one of {', '.join(WIRE_DTYPES)}")
