"""What the parts of a session share: its phases, what a refusal asks for, the master's terms, and SharedState.

Only parts of this package write to the state, and only within one ClusterMachine.handle() call.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from dips.core.errors import ConfigError, RefusalCode, Refused, RemoteProtocolError
from dips.core.ids import ClusterId, Incarnation, Version
from dips.core.layout import Layout, layer_of
from dips.core.machine import MachineHistory, Phase, TransitionTable
from dips.core.messages import (
    AwaitVerdictRequest,
    Caller,
    ClusterRequest,
    DataPlan,
    DataRange,
    HeartbeatReply,
    JoinReply,
    LeaveRequest,
    PullGrant,
    ReturnDataRequest,
    Settings,
)
from dips.core.model_description import Untrained
from dips.core.protocol import RANKS, agree
from dips.core.wire import Codec
from dips.worker.state.effects import ClearResidual, Command, Effect, KeepResidual, Log, Record, Run
from dips.worker.state.waiting import RULES, ExchangeStage, GivenTimes, RepeatedCall, WaitPolicy, times_of
from dips.worker.state.work import WorkBook

# ---- phases ----------------------------------------------------------------------------------------------------------
#
# The phases of a cluster's session and the transitions between them; docs/protocol.md is generated from this.


class SessionPhase(Enum):
    """The phases. JOINING again, after a fence, goes on in the background: the training loop runs in every phase but
    LEFT, unless ClusterMachine.must_wait is true.
    """

    JOINING = "JOINING"
    TRAINING = "TRAINING"
    BEGINNING_PUSH = "BEGINNING_PUSH"
    TRANSFERRING = "TRANSFERRING"
    FINISHING_PUSH = "FINISHING_PUSH"
    AWAITING = "AWAITING"
    PULLING = "PULLING"
    LEAVING = "LEAVING"
    LEFT = "LEFT"


_P = SessionPhase
_PRESENT = (_P.TRAINING, _P.BEGINNING_PUSH, _P.TRANSFERRING, _P.FINISHING_PUSH, _P.AWAITING, _P.PULLING)
_DONATING = (_P.BEGINNING_PUSH, _P.FINISHING_PUSH, _P.AWAITING)
# APPLIED, EXCLUDED and ROLLED_BACK ask for a pull; ABORTED for none; an ABORTED seed is pushed again.
_DECIDED = [_P.PULLING, _P.TRAINING, _P.BEGINNING_PUSH]

SESSION_TABLE: TransitionTable[SessionPhase] = TransitionTable(
    "session",
    _P.JOINING,
    {
        (_P.JOINING, "joined"): [_P.BEGINNING_PUSH, _P.AWAITING, _P.PULLING, _P.TRAINING],
        (_P.TRAINING, "push due"): [_P.BEGINNING_PUSH],
        (_P.TRAINING, "donate"): [_P.BEGINNING_PUSH],
        (_P.AWAITING, "donate"): [_P.BEGINNING_PUSH],
        (_P.PULLING, "donate"): [_P.BEGINNING_PUSH],
        # Back to the phase before: a donation that is not taken changes nothing.
        **{(phase, "not donated"): [_P.TRAINING, _P.AWAITING, _P.PULLING] for phase in _DONATING},
        (_P.TRAINING, "run stops"): [_P.PULLING],
        (_P.BEGINNING_PUSH, "ticket"): [_P.TRANSFERRING],
        (_P.BEGINNING_PUSH, "stale"): [_P.PULLING],
        (_P.BEGINNING_PUSH, "undecided"): [_P.AWAITING],
        (_P.BEGINNING_PUSH, "verdict"): _DECIDED,
        (_P.BEGINNING_PUSH, "push refused"): [_P.PULLING, _P.TRAINING],
        (_P.BEGINNING_PUSH, "run stops"): [_P.PULLING],
        (_P.TRANSFERRING, "sent"): [_P.FINISHING_PUSH],
        (_P.TRANSFERRING, "transfer failed"): [_P.BEGINNING_PUSH],
        (_P.TRANSFERRING, "run stops"): [_P.PULLING],
        (_P.FINISHING_PUSH, "admitted"): [_P.AWAITING],
        (_P.FINISHING_PUSH, "incomplete"): [_P.TRANSFERRING],
        (_P.FINISHING_PUSH, "verdict"): _DECIDED,
        (_P.FINISHING_PUSH, "push again"): [_P.BEGINNING_PUSH],
        (_P.FINISHING_PUSH, "push refused"): [_P.PULLING, _P.TRAINING],
        (_P.AWAITING, "verdict"): _DECIDED,
        (_P.PULLING, "installed"): [_P.TRAINING],
        (_P.LEAVING, "left"): [_P.LEFT],
        (_P.JOINING, "leave"): [_P.LEAVING, _P.LEFT],
        **{(phase, "fenced"): [_P.JOINING] for phase in _PRESENT},
        **{(phase, "leave"): [_P.LEAVING] for phase in _PRESENT},
    },
)


# ---- refusals --------------------------------------------------------------------------------------------------------
#
# Maps each refusal by the master to the cluster's remedy: one table instead of a test at every call.


class Remedy(Enum):
    JOIN_AGAIN = "join again as a new incarnation"
    WAIT = "the same call again, later"
    PULL = "another cluster seeded the run: pull its version"
    DROP = "the push cannot be counted: pull, and drop its steps"
    NEW_ATTEMPT = "begin the same push again"
    NEW_PUSH = "the same work under a new number"
    GIVE_UP = "a person must act"


_OF_CODE: Mapping[RefusalCode, Remedy] = {
    RefusalCode.FENCED: Remedy.JOIN_AGAIN,
    RefusalCode.STALE_EPOCH: Remedy.JOIN_AGAIN,
    RefusalCode.UNKNOWN_NAME: Remedy.JOIN_AGAIN,
    RefusalCode.BUSY: Remedy.WAIT,
    # A heartbeat reports when the last version is published; until then the cluster waits.
    RefusalCode.STOPPING: Remedy.WAIT,
    RefusalCode.VERSION_GONE: Remedy.WAIT,
    RefusalCode.SEED_EXISTS: Remedy.PULL,
    RefusalCode.RANGES: Remedy.DROP,
    RefusalCode.DIGEST: Remedy.NEW_ATTEMPT,
    RefusalCode.UNKNOWN_PUSH: Remedy.NEW_ATTEMPT,
    RefusalCode.SEQ: Remedy.NEW_PUSH,
}

_OF_A_PUSH = frozenset({Remedy.PULL, Remedy.DROP, Remedy.NEW_ATTEMPT, Remedy.NEW_PUSH})


def remedy_for(refused: Refused, *, joining: bool, pushing: bool) -> Remedy:
    """The remedy in this phase. Remedies for a push do not apply outside of one.

    FENCED as the answer to Join without a time to retry means that a newer process took over this cluster's name.
    """
    if refused.retry_after_s > 0:
        return Remedy.WAIT
    remedy = _OF_CODE.get(refused.code, Remedy.GIVE_UP)
    if joining and (remedy is Remedy.JOIN_AGAIN or refused.code is RefusalCode.STOPPING):
        return Remedy.GIVE_UP
    if remedy in _OF_A_PUSH and not pushing:
        return Remedy.GIVE_UP
    return remedy


# ---- terms -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SessionConfig(GivenTimes):
    """The session's part of ClientConfig, the model and the data; `expect_*` None: any value is accepted.

    Times that are None follow from the master's settings (waiting.py).
    """

    cluster_id: ClusterId
    layout: Layout
    data_plan: DataPlan
    run_id: str = ""
    declared_tokens_per_s: float = 0.0
    connect_wait_s: float = 120.0
    cut_off_limit_s: float = 86_400.0
    """How long steps are made that no one takes, before training waits."""
    durable_pushes: bool = False
    """A push's number is used only once its record is on disk (PushRecord)."""
    expect_sync_every: int | None = None
    expect_outer_lr: float | None = None
    expect_outer_momentum: float | None = None
    wire: Codec = Codec.F32
    """The codec that this cluster asks for in its pushes; each ticket says whether it may use it."""
    takes_differences: bool = True
    """Whether it can fetch versions as differences to its base."""
    curve_key: bytes = b""
    """This process's public key of the data flow; empty without keys."""
    rank_keys: tuple[bytes, ...] = ()
    """The keys of the cluster's other ranks; empty without keys."""
    pushers: int = 1
    """The cluster's ranks: each sends and fetches its share of every transfer."""
    untrained: Untrained = field(default_factory=Untrained)
    """The model's tensors that the run does not train, as they were at the start."""
    process_id: bytes = b""
    """Drawn for this process: it lets the master distinguish a repeated Join from a second process of this name."""
    host: str = ""
    """The host of this process, for people."""
    master: str = ""
    """The master's address, for people."""
    answers_in_steps: bool = False
    """Whether the driver also takes events during a step, where ClusterMachine.may_take_in_step() says that it may."""
    former: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors whose names had parts of wrappers in earlier releases -> those names."""

    def with_former_names(self) -> SessionConfig:
        """For a run, or a checkpoint, of an earlier release: the same tensors in the same order, under former names."""
        rows = tuple(
            replace(row, name=was, layer=row.layer if row.averaged else layer_of(was))
            if (was := self.former.get(row.name))
            else row
            for row in self.layout.parameters
        )
        frozen, buffers = (
            tuple(replace(each, name=self.former.get(each.name, each.name)) for each in listed)
            for listed in (self.untrained.frozen, self.untrained.buffers)
        )
        return replace(
            self, layout=replace(self.layout, parameters=rows), untrained=Untrained(frozen, buffers), former={}
        )


class Terms:
    """The master's terms, as far as they are known."""

    def __init__(self, config: SessionConfig) -> None:
        self._config = config
        self.run_id = config.run_id
        self.epoch = 0
        self.incarnation: Incarnation | None = None
        self.previous: Incarnation | None = None
        """The incarnation that a resumed process continues, until its first Join is answered."""
        self.leases_timeline: int | None = None
        """The timeline on which the master last listed this cluster's ranges."""
        self.settings = Settings()
        self.times = times_of(config, self.settings)
        self.local_steps = self.settings.sync_every_steps
        self.tokens = 0
        self.published: Version | None = None
        self.stop = False
        self.takes_pushes = True
        """Whether the master accepts a push, also after `stop`: from a drained cluster yes, at the run's end no. Tokens
        and limit do not say so: the operator may move the limit at any time, and an end may be taken back."""

    def caller(self, cause: str) -> Caller:
        return Caller(self.run_id, self.epoch, self._config.cluster_id, self.incarnation, cause)

    def joined(self, reply: JoinReply) -> None:
        """Take the terms of a Join's answer. Raises ConfigError where this cluster expects another setting, Refused for
        the protocol's version, RemoteProtocolError for a setting that does not exist.
        """
        self.run_id, self.epoch, self.incarnation = reply.run_id, reply.epoch, reply.incarnation
        hello = agree(reply.hello.protocol_min, reply.hello.protocol_max, reply.hello.capabilities, "the master")
        if self._config.pushers > 1 and RANKS not in hello.capabilities:
            raise ConfigError(
                f"this cluster has {self._config.pushers} ranks, and the master runs a release that does not know such "
                "clusters: install the same release of dips on the master, on all slaves and on all clusters"
            )
        if reply.settings.overlap not in RULES:
            raise RemoteProtocolError(
                f"the master's overlap is {reply.settings.overlap!r}, and this release knows {', '.join(RULES)}: "
                "install the same release of dips on the master and on all clusters"
            )
        if not 0 <= reply.settings.overlap_share <= 1:
            raise RemoteProtocolError(
                f"the master's overlap_share is {reply.settings.overlap_share!r}, and a share is 0 to 1: install the "
                "same release of dips on the master and on all clusters"
            )
        config = self._config
        pairs: tuple[tuple[str, float | None, float], ...] = (
            ("sync_every", config.expect_sync_every, reply.settings.sync_every_steps),
            ("outer_lr", config.expect_outer_lr, reply.settings.outer_lr),
            ("outer_momentum", config.expect_outer_momentum, reply.settings.outer_momentum),
        )
        for name, wanted, given in pairs:
            if wanted is not None and wanted != given:
                raise ConfigError(
                    f"this cluster is given {name} = {wanted:g}, the run's is {given:g}: all clusters share the "
                    f"master's setting, so leave {name} out here, or start the master with {wanted:g}"
                )
        self.times = times_of(self._config, reply.settings)
        self.settings, self.tokens, self.published = reply.settings, reply.tokens, reply.published
        self.takes_pushes = True  # members may join a run that ends: its heartbeats, or a refusal, say so
        self.take_steps(reply.local_steps)

    def beat(self, reply: HeartbeatReply) -> None:
        self._progressed(reply.tokens, reply.published)
        self.take_steps(reply.local_steps)
        self.stop = self.stop or reply.stop
        self.takes_pushes = not reply.no_more_pushes
        if reply.limit is not None:
            self.settings = replace(self.settings, tk_max_tokens=reply.limit.tokens)

    def granted(self, grant: PullGrant) -> None:
        self._progressed(grant.tokens, grant.version)
        self.take_steps(grant.local_steps)

    def take_steps(self, local_steps: int) -> None:
        self.local_steps = local_steps or self.settings.sync_every_steps

    def _progressed(self, tokens: int, published: Version | None) -> None:
        """Take tokens and version. A beat and a grant may overtake each other: only a new timeline lowers them."""
        if published is None:
            return
        if self.published is not None and self.published.timeline != published.timeline:
            self.tokens, self.published = tokens, published
        else:
            self.tokens, self.published = max(self.tokens, tokens), max(self.published or published, published)


# ---- shared state ----------------------------------------------------------------------------------------------------


SIDE_LIMIT = 64
"""Most small calls waiting for the master; the oldest is dropped first (pins expire, a Join frees ranges)."""


class SharedState:
    """Shared state of one session."""

    def __init__(self, config: SessionConfig) -> None:
        self.config = config
        self.terms = Terms(config)
        self.work = WorkBook()
        self.story = MachineHistory()
        self.phase = Phase(SESSION_TABLE, self.story, f"session {config.cluster_id}")
        self.now_s = 0.0
        self.cause = f"{config.cluster_id}/join"
        self.exchange, self.data, self.side = (RepeatedCall(lambda: self.terms.times) for _ in range(3))
        self.base: Version | None = None
        self.base_fence = 0
        self.steps = 0
        """Inner steps of this process, over all its incarnations."""
        self.steps_since_snapshot = 0
        """Steps that theta_now is ahead of theta_at_push."""
        self.steps_towards_push = 0
        self.patience = WaitPolicy(answers_in_steps=config.answers_in_steps)
        self.push_s = 0.0
        self.pull_s = 0.0
        self.window_closes_s = -math.inf
        """When the window of the last push's round closes, as the master said when it admitted the push."""
        self.leave_deadline_s = 0.0
        """Deadline of the call Leave."""
        self.note = ""
        self.unrecorded_since_s: float | None = None
        """Since when the open push cannot be recorded on this cluster's disk."""
        self.cut_off_since_s: float | None = None
        """Since when the master or a slave does not take this cluster's work."""
        self.donate: Version | None = None
        """The version that the master asks this cluster to donate."""
        self.donate_after_s = -math.inf
        self.residual = False
        """Whether the rounding residual of earlier pushes is kept, for the next push to carry."""
        self._side_queue: deque[Callable[[], ClusterRequest]] = deque(maxlen=SIDE_LIMIT)
        self._last_job = 0
        self._out: list[Effect] = []

    # ---- effects ----

    def emit(self, effect: Effect) -> None:
        self._out.append(effect)

    def take(self) -> list[Effect]:
        out, self._out = self._out, []
        return out

    def applied_as(self, wire: Codec | None) -> None:
        """The push was applied in this codec (None: no longer known): the residual advances.

        A push in float32 loses nothing, and carries no residual.
        """
        if wire is not None and wire.is_difference:
            self.residual = True
            self.emit(KeepResidual(wire))
        elif wire is None:
            self.clear_residual()

    def clear_residual(self) -> None:
        """Set the residual to zero: the steps that it comes from do not count."""
        if self.residual:
            self.residual = False
            self.emit(ClearResidual())

    def record(self, record: Record) -> None:
        self.emit(record)

    def log(self, key: str, sentence: str, level: int = logging.INFO) -> None:
        self.emit(Log(level, key, sentence, self.cause))

    def move(self, input_name: str, to: SessionPhase, why: str = "") -> None:
        self.phase.move(input_name, to, self.now_s, self.cause, why)

    def run(self, command: Command, deadline_s: float = math.inf) -> int:
        """Begin a job. Returns its number, which its end will have."""
        self._last_job += 1
        self.emit(Run(self._last_job, command, self.cause, deadline_s))
        return self._last_job

    # ---- calls ----

    def ask(self, build: Callable[[], ClusterRequest], after_s: float = 0.0) -> None:
        """Send the exchange's next call, in place of the one before."""
        self.exchange.ask(build, self.now_s + after_s)

    def aside(self, build: Callable[[], ClusterRequest]) -> None:
        """Queue a small call that nothing waits for."""
        self._side_queue.append(build)

    def aside_ranges(self, ranges: tuple[DataRange, ...]) -> None:
        """Give ranges back to the master, FREE."""
        if ranges:
            cause = self.cause
            self.aside(lambda: ReturnDataRequest(self.terms.caller(cause), ranges))

    def asides_done(self) -> bool:
        return self.side.idle and not self._side_queue

    def forget_asides(self) -> None:
        self._side_queue.clear()
        self.side.cancel()

    def send_due(self) -> None:
        """Emit the calls whose time has come."""
        if self.side.idle and self._side_queue:
            self.side.ask(self._side_queue.popleft(), self.now_s)
        for lane in (self.exchange, self.data, self.side):
            request = lane.take(self._last_job + 1, self.now_s)
            if request is not None:
                if isinstance(request, LeaveRequest):
                    deadline_s = self.leave_deadline_s
                else:
                    held_s = request.wait_s if isinstance(request, AwaitVerdictRequest) else 0.0
                    deadline_s = self.terms.times.call_deadline_s + held_s
                self.run(request, deadline_s)

    def lane_of(self, job: int) -> RepeatedCall | None:
        """The lane that waits for this call; None: its answer came too late to matter."""
        return next((lane for lane in (self.exchange, self.data, self.side) if lane.job == job), None)

    def wake_s(self) -> float:
        return min(lane.due_s for lane in (self.exchange, self.data, self.side))

    # ---- waiting ----

    def hold(self, stage: ExchangeStage) -> None:
        """The exchange reaches this stage: the training loop waits as long as the master's settings say."""
        self.patience.enter(stage, self.terms.settings, self.now_s)

    def got_through(self) -> None:
        """A whole exchange, or a part of one, was made: the run takes this cluster's work."""
        self.cut_off_since_s = None
        self.log("cut off", "")

    def not_taken(self) -> None:
        """The run does not take this cluster's work now."""
        if self.cut_off_since_s is None:
            self.cut_off_since_s = self.now_s
        self.patience.unusual()

    def train_on(self) -> None:
        """A peer cannot be reached: training goes on meanwhile."""
        self.not_taken()
        self.patience.train_on(self.now_s)
