"""Runs one cluster's session: carries out the session's effects between steps, on the training thread.

The user's loop (worker/loop.py) and the trainer use this class; it knows no framework. Live parameters are touched only
inside start(), step() and lease(), on the thread that calls them. While a step is made, a thread of the shell moves the
exchange on (calls of the master, the begin of transfers), so that the loop waits for no answer. Never raises because
the master or a slave is away: training goes on, and the exchange is tried again at later steps.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import secrets
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING

from dips.core.clock import Clock, SystemClock
from dips.core.errors import ConfigError, LocalProtocolError
from dips.core.ids import ClusterId, Incarnation, Version
from dips.core.layout import Layout
from dips.core.messages import DataMode, DataPlan, DataRange, HeartbeatRequest, PullGrant, Settings, Verdict
from dips.core.model_description import Untrained
from dips.core.net.addresses import MasterAddresses, check_slaves_reachable
from dips.core.net.keys import security_of
from dips.core.net.payloads import warm_up
from dips.core.net.tls_probe import check_let_in
from dips.core.net.zmq_sockets import CurvePair, pair_for
from dips.core.observe.logs import ChangeLogger
from dips.core.observe.tape import Starting, Tape
from dips.core.wire import WIRE_DTYPES
from dips.worker.checkpoint import Checkpointing, Checkpoints, InnerState
from dips.worker.checkpoint_files import CheckpointStore
from dips.worker.commands import Command, Fetch, KeepPush, Send, ShareOut, Snapshot
from dips.worker.config import ClientConfig, check, given_times
from dips.worker.control import Heartbeat, MasterClient
from dips.worker.metrics import DATA, EXCHANGE, Metrics
from dips.worker.model_part import ModelPart
from dips.worker.pace import StepTimer
from dips.worker.parameters import ParameterStore
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import (
    Cancel,
    ClearResidual,
    CopyBase,
    CopyParameters,
    Effect,
    Event,
    Finished,
    Install,
    InstallMode,
    KeepResidual,
    LeaseWanted,
    Log,
    PushRecord,
    Record,
    Run,
    SendPush,
    Started,
    Stepped,
    StopWanted,
    Tick,
)
from dips.worker.state.shared import SessionConfig
from dips.worker.state.work import Work

if TYPE_CHECKING:  # only the leader of several ranks needs it
    from dips.worker.parallel.rank_part import LeadingPart

_starts = logging.getLogger("dips.worker")

LONGEST_WAIT_S = 0.5
"""Longest sleep of a wait before its reason is checked (and logged, if it changed)."""

WORTH_A_LINE_S = 2.0
"""A shorter wait happens in every round and is not logged."""


@dataclass(frozen=True)
class OtherRanks:
    """The leader's cluster of several ranks. keys: the other ranks' of the data flow; curve: the leader's own.
    checkpoints: of all ranks; None: they keep none. former: as in ClusterShell.
    """

    n_ranks: int
    curve: CurvePair | None
    keys: tuple[bytes, ...]
    part: LeadingPart
    checkpoints: Checkpoints | None = None
    former: Mapping[str, str] = field(default_factory=dict)


class ClusterShell:
    """Runs one cluster in the run. Only request_stop() may be called by several threads.

    The session belongs to whoever holds the lock: the training thread within its calls, "dips-exchange" between them.
    """

    def __init__(
        self,
        config: ClientConfig,
        parameters: ParameterStore | OtherRanks,
        layout: Layout,
        data_plan: DataPlan,
        *,
        inner: InnerState | None = None,
        resume_label: str | None = None,
        untrained: Untrained | None = None,
        former: Mapping[str, str] | None = None,
    ) -> None:
        """Make the shell; opens no connection yet. Raises ConfigError for settings that cannot work.

        parameters: this process's, which hold all of layout; or the ranks that hold it together, of which this one is
        the leader. inner: further state in checkpoints, besides parameters and session. resume_label: resume
        from the checkpoint that checkpoint_now() took under it. untrained: the model's other tensors, for the master to
        compare; None: none. former: names of tensors -> those that earlier releases gave them, where they differ.
        """
        self.config = check(config)
        self.security = security_of(config, f"cluster {config.cluster_id}")
        self._clock: Clock = SystemClock()
        ranks = parameters if isinstance(parameters, OtherRanks) else None
        curve = pair_for(self.security) if ranks is None else ranks.curve
        session = SessionConfig(
            ClusterId(config.cluster_id),
            layout,
            data_plan,
            run_id=config.run_id,
            declared_tokens_per_s=config.declared_tokens_per_s,
            connect_wait_s=config.connect_wait_s,
            cut_off_limit_s=3600 * config.cut_off_limit_h,
            **asdict(given_times(config)),
            durable_pushes=config.checkpoint_dir is not None,
            wire=WIRE_DTYPES[config.wire_dtype],
            takes_differences=find_spec("numba") is not None,
            curve_key=b"" if curve is None else curve.public,
            process_id=secrets.token_bytes(16),
            host=f"process {os.getpid()} on {socket.gethostname()[:64]}",
            master=config.master,
            expect_sync_every=config.sync_every,
            expect_outer_lr=config.outer_lr,
            expect_outer_momentum=config.outer_momentum,
            untrained=untrained or Untrained(),
            former=former or {},
            answers_in_steps=ranks is None,
        )
        if ranks is not None:
            session = replace(session, rank_keys=ranks.keys, pushers=ranks.n_ranks, former=ranks.former)
        self._session = ClusterMachine(session)
        self._lock = threading.RLock()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._for_later: deque[Event] = deque()  # arrived during a step, and wait for its end
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._between: threading.Thread | None = None
        self._in_step = False
        self._failed_in_step: BaseException | None = None
        self._log = ChangeLogger(logging.getLogger("dips.worker"))
        if WIRE_DTYPES[config.wire_dtype].is_difference and layout.n_trained < layout.n_elems:
            raise ConfigError(
                f"wire_dtype is {config.wire_dtype!r}, whose rounding could make a running variance negative: "
                'leave it out where buffers="average"'
            )
        store: CheckpointStore | None = None
        if ranks is None and config.checkpoint_dir is not None:
            store = CheckpointStore(config.checkpoint_dir, config.checkpoints_kept)
        # After the lock of its folder: another process of this name may write there.
        self.tape = Tape(config.tape_used, "worker", config.cluster_id, self._clock, may_lose=True)
        if WIRE_DTYPES[config.wire_dtype].is_difference:
            # Now, and not while the first push is on its way.
            starting = Starting("kernels", _starts, self.tape, self._clock, quiet_s=0.0)
            warm_up(starting.compiles)
            starting.end()
        self._pace = StepTimer()
        self._metrics: Metrics | None = None
        if config.metrics_listen is not None:
            self._metrics = Metrics(self._session, self._pace, self._clock)
        links = self._metrics.links if self._metrics is not None else None
        self._checkpoints: Checkpoints | None = None
        if isinstance(parameters, OtherRanks):
            self._part: ModelPart | LeadingPart = parameters.part
            parameters.part.begin(self._events.put, self.tape, links)
            self._checkpoints = parameters.checkpoints
            if self._checkpoints is not None:
                self._checkpoints.begin(self._events.put, self.tape)
        else:
            part = self._part = ModelPart(parameters, layout, self._arrived, self._clock, self.tape, curve, links)
            self._between = threading.Thread(target=self._go_on_in_steps, name="dips-exchange", daemon=True)
            if store is not None:
                self._checkpoints = Checkpointing(config, store, parameters, part.vectors, inner, self._clock)
                self._checkpoints.begin(self._arrived, self.tape)
        self._masters = MasterAddresses(config.master)
        self._client = MasterClient(self._masters, self.security, self._arrived)
        self._heartbeat = Heartbeat(self._masters, self.security, self._events.put, self._clock, self._client.hang_up)
        self._resume_label = resume_label
        self._chunk_bytes = 0
        self._finished: Finished | None = None
        self._raised = False
        self._closed = False
        self.steps = 0
        self.first_batches = b""
        """Digest of the loop's first batches, once it knows it: equal ones of two clusters are an alarm."""
        self.resumed = False
        """Whether start() resumed from a checkpoint."""

    # ---- the training loop's calls ----

    def start(self) -> None:
        """Resume if configured; join, seed or pull the first version; returns when the cluster may train, or is `done`.

        Raises Refused or ConfigError when this cluster cannot take part (each says what to do), RetryLater when no
        master could be reached within connect_wait_s.
        """
        if self._checkpoints is not None and (self.config.resume or self.config.resume_required):
            self.resumed = self._checkpoints.resume(self._session, self._resume_label)
        if self._metrics is not None:
            self._metrics.serve(self.config, self.security, self._checkpoints, lambda: self._heartbeat.answered_s)
        check_let_in(self._masters.now, self.security)
        self._settle(Started())
        if self._between is not None and not self.done:
            self._between.start()
        self._pace.resume(self._clock.monotonic_s())

    def step(self, tokens: int, ranges: Sequence[DataRange] = (), loss: float = math.nan, *, steps: int = 1) -> None:
        """Report an inner step on `tokens` tokens (leased mode: those of `ranges`); loss in nats per token.

        steps: made since the last report, on all these tokens; more than steps_to_push of them make a push late.
        May block (bounded by the master's verdict_wait_s) and may replace the parameters. Raises ConfigError for a
        count below 1, LocalProtocolError for ranges that are not held, and whatever ends this cluster's part.
        """
        if self.done:
            self._raise_if_failed()
            return
        if tokens < 1:
            raise ConfigError(f"a step counts {tokens} tokens: give the number of tokens it was trained on, at least 1")
        now_s = self._clock.monotonic_s()
        with self._lock:  # the exchange's thread may be reading the pace for a heartbeat
            self.steps += steps
            self._pace.stepped(tokens, loss, now_s, steps)
        self._settle(Stepped(tokens, tuple(ranges), loss, steps=steps))
        self._pace.resume(self._clock.monotonic_s())

    def lease(self, tokens: int) -> list[DataRange]:
        """Lease about `tokens` tokens of the corpus; blocks until the master leases some; [] only when `done`.

        At least so many, unless that is more than one call may have (MAX_LEASED_CHUNKS) or than is free. Call it
        between steps. Raises LocalProtocolError when the data plan is not LEASED.
        """
        if self._session.config.data_plan.mode is not DataMode.LEASED:
            raise LocalProtocolError("lease() is for leased data; with its own data a cluster only counts tokens")
        began_s = self._clock.monotonic_s()
        ranges: list[DataRange] = []
        with self._lock, self._training_goes_on():
            while not ranges and not self.done:
                if not self._session.lease_pending:
                    self._handle(LeaseWanted(tokens))
                # An arrived answer may require a wait: a step on parameters that will be dropped does not count.
                if not self._session.must_wait(self._clock.monotonic_s()):
                    ranges = self._session.take_leased()
                if not ranges and not self.done:
                    self._wait("data")
            if self._metrics is not None:
                self._metrics.goes_on()
        self._pace.pause(self._clock.monotonic_s() - began_s)
        self._raise_if_failed()
        return ranges

    def take_unused(self) -> list[DataRange]:
        """After start(): ranges that an earlier incarnation leased and has not trained on, as far as the master lets
        this one keep them.

        lease() hands the same ranges out when this is not called.
        """
        return self._session.take_leased()

    def checkpoint_if_due(self) -> None:
        """Take a checkpoint if it is time for one. Call it between two steps, when the loop's own state (`inner`) is of
        the same step as the parameters. Does nothing without a checkpoint directory.
        """
        if self._checkpoints is not None and not self.done:
            began_s = self._clock.monotonic_s()
            with self._lock:
                self._checkpoints.take_if_due(self._session, self.cause)
            self._pace.pause(self._clock.monotonic_s() - began_s)

    def checkpoint_now(self, label: str) -> bool:
        """Take a checkpoint under a label, between two steps. Returns when it is durable, and whether there is one.

        For loops that keep checkpoints of their own: the label says which of theirs it belongs to.
        """
        if self._checkpoints is None or self.done:
            return False
        began_s = self._clock.monotonic_s()
        with self._lock:
            taken = self._checkpoints.take_now(self._session, self.cause, label)
        self._pace.pause(self._clock.monotonic_s() - began_s)
        return taken

    def request_stop(self, reason: str = "asked to stop") -> None:
        """Leave at the next step() or lease(), once all work is pushed and decided, or leave_wait_s is over.
        May be called from a signal handler or another thread.
        """
        self._events.put(StopWanted(reason))

    def close(
        self, reason: str = "the training loop has ended", *, push_pending: bool = True, patient: bool = False
    ) -> None:
        """Leave the run, if that has not happened, and end all threads. May be called twice; raises nothing new.

        First the open push is decided, and steps that are not in it are pushed, unless `push_pending` says that the
        parameters may be in the middle of a step: for at most leave_wait_s, or cut_off_limit_h where a loop that ended
        by itself is `patient` and the run has merged nothing yet. Steps that could not be pushed are logged as a
        warning.
        """
        if self._closed:
            return
        self._closed = True
        self._wakes.put(False)
        if self._between is not None and self._between.ident is not None:
            self._between.join()
        try:
            try:
                with self._lock, self._training_goes_on():
                    if not self.done:
                        self._handle(StopWanted(reason, push_pending and not self._part.alone, patient))
                    if not self.done and self._part.alone:
                        # the open push is given up: no one can pull
                        self._handle(StopWanted(reason, push_pending=False))
                    while not self.done and self._clock.monotonic_s() < self._session.gives_up_s:
                        self._wait("wait")
            except KeyboardInterrupt:
                lost = self._session.unshared
                self._log.report("lost", f"interrupted while leaving: {lost} may be lost", logging.WARNING)
                raise
            if not self.done:
                self._finished = Finished(f"{reason} (leaving was not answered)")
        finally:
            self._heartbeat.close()
            self._part.close()
            self._client.close()
            if self._checkpoints is not None:
                self._checkpoints.close()
            if self._metrics is not None:
                self._metrics.stop()
            self.tape.close()

    def __enter__(self) -> ClusterShell:
        try:
            self.start()
        except BaseException:
            self.close("it could not begin")
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(reason_of(kind, error), push_pending=is_orderly(kind), patient=kind is None)

    # ---- state that may be read ----

    @property
    def done(self) -> bool:
        """Whether this cluster has left the run or is leaving: the run ended, or it was asked to stop."""
        return self._finished is not None

    @property
    def exit_reason(self) -> str:
        return self._finished.reason if self._finished else ""

    @property
    def released(self) -> bool:
        """Whether the run itself let this cluster go: it has ended, or it drained this cluster."""
        return self._session.released

    @property
    def settings(self) -> Settings:
        """The run's settings; the defaults before start()."""
        return self._session.shared.terms.settings

    @property
    def push_is_near(self) -> bool:
        """Whether a push is due at the next step()."""
        return not self.done and self._session.push_is_near

    @property
    def steps_to_push(self) -> int:
        """How many steps may be reported together next; 1 where each step may matter."""
        return self._session.steps_to_push

    @property
    def version(self) -> Version | None:
        """The base: the last pulled version."""
        return self._session.shared.base

    @property
    def tokens_global(self) -> int:
        """Tokens applied by the whole run, as far as known here."""
        return self._session.shared.terms.tokens

    @property
    def total_tokens(self) -> int:
        """Tokens after which the run ends; 0: unknown."""
        return self.settings.tk_max_tokens

    @property
    def progress(self) -> int:
        """tokens_global and this cluster's own tokens that are not applied yet; use it for schedules."""
        return self.tokens_global + self._session.shared.work.tokens

    @property
    def held_ranges(self) -> tuple[DataRange, ...]:
        """Ranges leased to this cluster and not trained on yet."""
        return self._session.held

    @property
    def times_forgotten(self) -> int:
        """Goes up whenever the master took held ranges back: then only held_ranges may be trained on."""
        return self._session.shared.work.times_forgotten

    @property
    def local_steps(self) -> int:
        """H_j, the present number of inner steps between two pushes."""
        return self._session.shared.terms.local_steps

    @property
    def incarnation(self) -> Incarnation | None:
        return self._session.shared.terms.incarnation

    @property
    def run_id(self) -> str:
        return self._session.shared.terms.run_id

    @property
    def cluster_id(self) -> str:
        return self.config.cluster_id

    @property
    def last_verdict(self) -> Verdict | None:
        return self._session.pushing.last_verdict

    @property
    def steps_per_s(self) -> float:
        """Measured speed of computing alone."""
        return self._pace.steps_per_s

    @property
    def phase(self) -> str:
        return self._session.phase.value

    @property
    def unshared(self) -> Work:
        """Work that was trained here and would be lost if this process ended now."""
        return self._session.unshared

    @property
    def cause(self) -> str:
        """The cause id for records that the training loop writes to the tape."""
        return self._session.shared.cause

    # ---- parts ----

    def _settle(self, first: Event) -> None:
        """Handle `first` and the arrived events; wait while the session must wait; raise the error that ended it."""
        with self._lock, self._training_goes_on():
            self._part.look()
            self._handle(first)  # and whatever is due
            while (event := self._next()) is not None:
                self._handle(event)
            began_s = self._clock.monotonic_s()
            while self._session.must_wait(now_s := self._clock.monotonic_s()):
                self._wait("wait", quiet=now_s - began_s < WORTH_A_LINE_S)
            self._log.report("wait", "")
            self._update_heartbeat()
            if self._metrics is not None:
                self._metrics.goes_on()
        self._raise_if_failed()

    def _wait(self, key: str, *, quiet: bool = False) -> None:
        """Sleep until something arrives or is due, and handle it; log why, unless `quiet`."""
        if not quiet:
            words = self._session.waiting_for()
            self._log.report(key, words if words.startswith(("waiting", "leaving")) else f"waiting: {words}")
        self._update_heartbeat()
        if self._metrics is not None:
            self._metrics.waits(DATA if key == "data" else EXCHANGE)
        now_s = self._clock.monotonic_s()
        pause_s = min(LONGEST_WAIT_S, max(0.0, self._session.next_deadline_s() - now_s))
        looks_after_s = self._part.look_every_s
        event = self._next(min(pause_s, looks_after_s))
        if event is not None:
            self._handle(event)
        else:
            self._part.look()
            if pause_s <= looks_after_s:
                self._handle(Tick())

    def _arrived(self, event: Event) -> None:
        """From any thread."""
        self._events.put(event)
        if self._between is not None:
            self._wakes.put(True)

    def _next(self, wait_s: float = 0.0) -> Event | None:
        """The next event, or None if none arrives in that time."""
        if self._for_later:
            return self._for_later.popleft()
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=wait_s) if wait_s > 0 else self._events.get_nowait()
        return None

    def _go_on_in_steps(self) -> None:
        """On the thread "dips-exchange": handle what arrives while the training thread makes a step, as far as it may
        come then."""
        while self._wakes.get():
            with self._lock:
                self._in_step = True
                try:
                    # What may not come now is kept for the end of the step; events of different jobs have no order.
                    taken = False
                    while not self.done and not self._events.empty():
                        event = self._events.get()
                        if self._session.may_take_in_step(event):
                            self._handle(event)
                            taken = True
                        else:
                            self._for_later.append(event)
                    if taken:
                        self._update_heartbeat()
                except BaseException as error:
                    self._failed_in_step = error
                    return
                finally:
                    self._in_step = False

    def _raise_if_failed(self) -> None:
        if self._failed_in_step is not None:
            error, self._failed_in_step = self._failed_in_step, None
            raise error
        if self._finished is not None and self._finished.error is not None and not self._raised:
            self._raised = True
            raise self._finished.error

    def _handle(self, event: Event) -> None:
        effects = deque(self._session.handle(event, self._clock.monotonic_s()))
        if self._metrics is not None:
            self._metrics.tell(event, effects)
        try:
            while effects:
                self._carry_out(effects.popleft())
        except BaseException:
            # The session expects an answer to each of its calls: without these, leaving would wait for one in vain.
            for effect in effects:
                if isinstance(effect, Run) and not isinstance(effect.command, PushRecord | SendPush | PullGrant):
                    self._client.start(effect.job, effect.command, effect.deadline_s)
            raise

    def _carry_out(self, effect: Effect) -> None:
        if self._in_step and isinstance(effect, CopyParameters | Install | CopyBase):
            raise LocalProtocolError(f"{type(effect).__name__} in the middle of a step: an event should have waited")
        match effect:
            case Run():
                self._begin(effect)
            case CopyParameters():
                try:
                    # No copy is made where training is likely to wait until its push is sent, in float32.
                    settings, whole = self.settings, not WIRE_DTYPES[self.config.wire_dtype].is_difference
                    waits = settings.overlap == "none" and settings.verdict_wait_s > 0 and whole
                    self._do(Snapshot(may_stay_live=waits, whole=whole))
                except ConfigError:
                    self._session.pushing.abandon()  # parameters that cannot be read are never sent
                    raise
            case Cancel() | Install() | CopyBase() | KeepResidual() | ClearResidual():
                self._do(effect)
            case Record():
                self.tape.write(effect.kind, effect.cause, **effect.fields)
            case Log():
                self._log.report(effect.key, effect.sentence, effect.level, effect.cause)
            case Finished():
                self._finished = effect

    def _begin(self, run: Run) -> None:
        """Begin a job; its end is an event."""
        session = self._session
        match run.command:
            case PushRecord() as record:
                assert self._checkpoints is not None, "asked for only with a directory"
                self._checkpoints.record_push(run.job, record)
            case SendPush() as push:
                opened = session.pushing.open
                if opened is not None and opened.base is not None and self._part.push_is_zero:
                    session.pushing.abandon()
                    raise ConfigError(
                        "every parameter of the copy that this cluster would push is 0, which no training gives, so "
                        "nothing is sent: look at what optimizer.step() leaves in the model (a learning rate times "
                        "weight decay of 1 or more, a step in a captured or compiled graph that was not run)"
                    )
                # A push whose steps changed nothing is excluded, unless another version was published since its base,
                # or the rounding error of earlier pushes is sent with it.
                unchanged = opened is not None and opened.work.tokens > 0 and self._part.push_is_base
                sentence = (
                    "the steps since the last push changed no parameter, so that this cluster adds nothing to the run: "
                    "look at its learning rate and its optimizer"
                )
                self._log.report("no change", sentence if unchanged else "", logging.WARNING)
                check_slaves_reachable(self._masters.now, push.ticket.placement.slaves)
                caller, times = session.shared.terms.caller(run.cause), session.shared.terms.times
                self._do(Send(run.job, push.push, push.ticket, caller, self.settings, times))
            case PullGrant() as grant:
                check_slaves_reachable(self._masters.now, grant.placement.slaves)
                plan = session.pulling.plan
                assert plan is not None, "a pull has a plan"
                live = session.shared.steps_since_snapshot == 0 and not self._in_step
                needed = plan.mode is InstallMode.REBASE_FROM_PUSH
                self._do(Fetch(run.job, grant, run.cause, session.shared.terms.times, live, needed))
            case request:
                self._client.start(run.job, request, run.deadline_s)

    def _do(self, command: Command) -> None:
        """Have all ranks carry out a command."""
        chunk_bytes = self.settings.chunk_bytes
        if chunk_bytes != self._chunk_bytes and not isinstance(command, Cancel):
            self._part.do(ShareOut(chunk_bytes))
            self._chunk_bytes = chunk_bytes
        self._part.do(command)

    @contextlib.contextmanager
    def _training_goes_on(self) -> Iterator[None]:
        """Context of every call of the training loop; afterwards the parameters may change, also after an interrupt."""
        try:
            yield
        finally:
            # If theta_at_push is only in the parameters, and still needed, it is copied now.
            plan = self._session.pulling.plan
            rebases = plan is not None and plan.mode is InstallMode.REBASE_FROM_PUSH
            if self._part.push_is_live:
                self._part.do(KeepPush(needed=self._session.pushing.open is not None or rebases))

    def note_late_ranks(self, ranks: Sequence[int]) -> None:
        """Have heartbeats name ranks that the others wait for between two steps; from any thread."""
        self._heartbeat.late_ranks = tuple(ranks)

    def _update_heartbeat(self) -> None:
        shared = self._session.shared
        if shared.terms.incarnation is None or self.done:
            return
        since_s = shared.unrecorded_since_s
        request = HeartbeatRequest(
            shared.terms.caller(shared.cause),
            phase=self.phase,
            steps=shared.steps,
            tokens_per_s=self._pace.tokens_per_s,
            steps_per_s=self._pace.steps_per_s,
            loss=self._pace.loss,
            push_s=shared.push_s,
            pull_s=shared.pull_s,
            base=shared.base,
            note=shared.note,
            late_ranks=tuple(self._part.late_ranks),
            first_batches=self.first_batches,
            unrecorded_s=0.0 if since_s is None else self._clock.monotonic_s() - since_s,
        )
        self._heartbeat.tell(request, shared.terms.settings)


def reason_of(kind: type[BaseException] | None, error: BaseException | None) -> str:
    """Why a `with` block was left, for Leave."""
    if kind is None:
        return "the training loop has ended"
    return f"{kind.__name__}: {error}" if str(error or "") else kind.__name__


def is_orderly(kind: type[BaseException] | None) -> bool:
    """Whether a `with` block was left between steps, with complete parameters: a person's ctrl-C, sys.exit."""
    return kind is None or issubclass(kind, (KeyboardInterrupt, SystemExit))
