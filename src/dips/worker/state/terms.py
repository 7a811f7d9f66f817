"""The terms that the master gave this cluster: run, epoch, incarnation, and the settings that all clusters share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from dips.core.errors import ConfigError, RefusalCode, Refused, RemoteProtocolError
from dips.core.ids import ClusterId, Incarnation, Version
from dips.core.layout import Layout
from dips.core.machine import TransitionTable
from dips.core.messages import Caller, DataPlan, HeartbeatReply, JoinReply, PullGrant, Settings
from dips.core.model_description import Untrained
from dips.core.protocol import agree
from dips.core.wire import Codec
from dips.worker.state.waiting import RULES, times_of

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
class SessionConfig:
    """The session's part of ClientConfig, the model and the data; `expect_*` None: any value is accepted.

    Times that are None follow from the master's settings (waiting.py).
    """

    cluster_id: ClusterId
    layout: Layout
    data_plan: DataPlan
    run_id: str = ""
    declared_tokens_per_s: float = 0.0
    connect_wait_s: float = 120.0
    call_deadline_s: float | None = None
    retry_max_s: float | None = None
    leave_wait_s: float | None = None
    data_silence_s: float | None = None
    data_stall_s: float | None = None
    durable_pushes: bool = False
    """A push's number is used only once its record is on disk (PersistPush)."""
    expect_sync_every: int | None = None
    expect_outer_lr: float | None = None
    expect_outer_momentum: float | None = None
    wire: Codec = Codec.F32
    """The codec that this cluster asks for in its pushes; each ticket says whether it may use it."""
    curve_key: bytes = b""
    """This process's public key of the data flow; empty without keys."""
    untrained: Untrained = field(default_factory=Untrained)
    """The model's tensors that the run does not train, as they were at the start."""
    process_id: bytes = b""
    """Drawn for this process: it lets the master distinguish a repeated Join from a second process of this name."""
    host: str = ""
    """The host of this process, for people."""


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
        self.no_more_pushes = False
        """The master refused a push because the run ends."""

    def caller(self, cause: str) -> Caller:
        return Caller(self.run_id, self.epoch, self._config.cluster_id, self.incarnation, cause)

    def joined(self, reply: JoinReply) -> None:
        """Take the terms of a Join's answer. Raises ConfigError where this cluster expects another setting, Refused for
        the protocol's version, RemoteProtocolError for a setting that does not exist.
        """
        self.run_id, self.epoch, self.incarnation = reply.run_id, reply.epoch, reply.incarnation
        agree(reply.hello.protocol_min, reply.hello.protocol_max, reply.hello.capabilities, "the master")
        if reply.settings.overlap not in RULES:
            raise RemoteProtocolError(
                f"the master's overlap is {reply.settings.overlap!r}, and this release knows {', '.join(RULES)}: "
                "install the same release of dips on the master and on all clusters"
            )
        self._check_expectations(reply.settings)
        self.times = times_of(self._config, reply.settings)
        self.settings, self.tokens, self.published = reply.settings, reply.tokens, reply.published
        self.take_steps(reply.local_steps)

    def beat(self, reply: HeartbeatReply) -> None:
        self._progressed(reply.tokens, reply.published)
        self.take_steps(reply.local_steps)
        self.stop = self.stop or reply.stop

    def granted(self, grant: PullGrant) -> None:
        self._progressed(grant.tokens, grant.version)
        self.take_steps(grant.local_steps)

    @property
    def takes_pushes(self) -> bool:
        """Whether the master accepts a push after `stop`: from a drained cluster yes, at the run's end no."""
        ended = 0 < self.settings.tk_max_tokens <= self.tokens
        return not (self.no_more_pushes or ended)

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

    def _check_expectations(self, settings: Settings) -> None:
        config = self._config
        pairs: tuple[tuple[str, float | None, float], ...] = (
            ("sync_every", config.expect_sync_every, settings.sync_every_steps),
            ("outer_lr", config.expect_outer_lr, settings.outer_lr),
            ("outer_momentum", config.expect_outer_momentum, settings.outer_momentum),
        )
        for name, wanted, given in pairs:
            if wanted is not None and wanted != given:
                raise ConfigError(
                    f"this cluster is given {name} = {wanted:g}, the run's is {given:g}: all clusters share the "
                    f"master's setting, so leave {name} out here, or start the master with {wanted:g}"
                )
