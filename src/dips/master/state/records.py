"""The master's state in memory: clusters, pushes, slaves, the round and pins. It is lost when the process ends."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from enum import Enum

from dips.core import messages
from dips.core.ids import Incarnation, PushId, RoundId, SlaveId, Version
from dips.core.machine import Phase, TransitionTable
from dips.core.placement import Placement
from dips.core.wire import Codec
from dips.master.state.ledger import CommitInfo
from dips.master.state.penalty_types import JudgeInputs, Judgement, PenaltyConfig
from dips.master.state.reasons import VerdictCode

# ---- tables ----------------------------------------------------------------------------------------------------------
#
# The phases of pushes, slaves and rounds and their transitions; docs/protocol.md draws its diagrams from them.


class PushPhase(Enum):
    TICKETED = "TICKETED"
    STAGED = "STAGED"
    ADMITTED = "ADMITTED"
    SEALED = "SEALED"
    DECIDED = "DECIDED"


PUSH_TABLE: TransitionTable[PushPhase] = TransitionTable(
    "push",
    PushPhase.TICKETED,
    {
        (PushPhase.TICKETED, "new attempt"): [PushPhase.TICKETED],
        (PushPhase.STAGED, "new attempt"): [PushPhase.TICKETED],
        (PushPhase.TICKETED, "all slaves staged it"): [PushPhase.STAGED],
        (PushPhase.STAGED, "finish push"): [PushPhase.ADMITTED],
        (PushPhase.ADMITTED, "window sealed"): [PushPhase.SEALED],
        (PushPhase.SEALED, "round aborted"): [PushPhase.ADMITTED],
        (PushPhase.TICKETED, "aborted"): [PushPhase.DECIDED],
        (PushPhase.STAGED, "aborted"): [PushPhase.DECIDED],
        (PushPhase.ADMITTED, "aborted"): [PushPhase.DECIDED],
        (PushPhase.SEALED, "aborted"): [PushPhase.DECIDED],
        (PushPhase.SEALED, "applied"): [PushPhase.DECIDED],
        (PushPhase.SEALED, "excluded"): [PushPhase.DECIDED],
        (PushPhase.SEALED, "rolled back"): [PushPhase.DECIDED],
    },
)


class SlavePhase(Enum):
    ABSENT = "ABSENT"
    ATTACHED = "ATTACHED"
    PROMISED = "PROMISED"
    CONFIGURING = "CONFIGURING"
    READY = "READY"


SLAVE_TABLE: TransitionTable[SlavePhase] = TransitionTable(
    "slave",
    SlavePhase.ABSENT,
    {
        (SlavePhase.ABSENT, "hello"): [SlavePhase.ATTACHED],
        (SlavePhase.ATTACHED, "promised"): [SlavePhase.PROMISED],
        (SlavePhase.PROMISED, "configure"): [SlavePhase.CONFIGURING],
        (SlavePhase.CONFIGURING, "ready"): [SlavePhase.READY],
        (SlavePhase.READY, "configure"): [SlavePhase.CONFIGURING],
        **{
            (phase, "lost"): [SlavePhase.ABSENT]
            for phase in (
                SlavePhase.ATTACHED,
                SlavePhase.PROMISED,
                SlavePhase.CONFIGURING,
                SlavePhase.READY,
            )
        },
    },
)


class RoundPhase(Enum):
    IDLE = "IDLE"
    WINDOW = "WINDOW"
    SEALED = "SEALED"
    MEASURE = "MEASURE"
    JUDGE = "JUDGE"
    PREPARE = "PREPARE"
    COMMIT = "COMMIT"
    PUBLISH = "PUBLISH"


ROUND_TABLE: TransitionTable[RoundPhase] = TransitionTable(
    "round",
    RoundPhase.IDLE,
    {
        (RoundPhase.IDLE, "push admitted"): [RoundPhase.WINDOW],
        (RoundPhase.WINDOW, "no push is left"): [RoundPhase.IDLE],
        (RoundPhase.WINDOW, "window closed"): [RoundPhase.SEALED],
        (RoundPhase.SEALED, "no push is left"): [RoundPhase.IDLE],
        (RoundPhase.SEALED, "checks passed"): [RoundPhase.MEASURE],
        (RoundPhase.SEALED, "it is the seed"): [RoundPhase.PREPARE],
        (RoundPhase.MEASURE, "all measured"): [RoundPhase.JUDGE],
        (RoundPhase.MEASURE, "abort"): [RoundPhase.IDLE],
        (RoundPhase.JUDGE, "accepted"): [RoundPhase.PREPARE],
        (RoundPhase.JUDGE, "void"): [RoundPhase.IDLE],
        (RoundPhase.PREPARE, "all prepared"): [RoundPhase.COMMIT],
        (RoundPhase.PREPARE, "void"): [RoundPhase.IDLE],
        (RoundPhase.PREPARE, "abort"): [RoundPhase.IDLE],
        (RoundPhase.COMMIT, "all flipped"): [RoundPhase.PUBLISH],
        (RoundPhase.PUBLISH, "verdicts sent"): [RoundPhase.IDLE],
        (RoundPhase.SEALED, "it is a donation"): [RoundPhase.PREPARE],
        (RoundPhase.COMMIT, "recovery"): [RoundPhase.IDLE],
    },
)


class RecoveryPhase(Enum):
    NONE = "NONE"
    GATHERING = "GATHERING"
    ASKING = "ASKING"
    DONATING = "DONATING"


RECOVERY_TABLE: TransitionTable[RecoveryPhase] = TransitionTable(
    "recovery",
    RecoveryPhase.NONE,
    {
        (RecoveryPhase.NONE, "master started"): [RecoveryPhase.GATHERING],
        (RecoveryPhase.NONE, "slave cannot load"): [RecoveryPhase.GATHERING],
        (RecoveryPhase.GATHERING, "record needed"): [RecoveryPhase.ASKING],
        (RecoveryPhase.ASKING, "record came"): [RecoveryPhase.GATHERING],
        (RecoveryPhase.ASKING, "no record"): [RecoveryPhase.GATHERING],
        (RecoveryPhase.GATHERING, "all can load"): [RecoveryPhase.NONE],
        (RecoveryPhase.GATHERING, "adopted"): [RecoveryPhase.NONE],
        (RecoveryPhase.GATHERING, "rolled back"): [RecoveryPhase.NONE],
        (RecoveryPhase.GATHERING, "no common version"): [RecoveryPhase.DONATING],
        (RecoveryPhase.DONATING, "donation committed"): [RecoveryPhase.NONE],
        (RecoveryPhase.DONATING, "snapshot came back"): [RecoveryPhase.GATHERING],
        (RecoveryPhase.DONATING, "no donor is left"): [RecoveryPhase.GATHERING],
    },
)


class ReshardPhase(Enum):
    NONE = "NONE"
    WAITING = "WAITING"
    LISTING = "LISTING"
    MOVING = "MOVING"


RESHARD_TABLE: TransitionTable[ReshardPhase] = TransitionTable(
    "reshard",
    ReshardPhase.NONE,
    {
        (ReshardPhase.NONE, "asked"): [ReshardPhase.WAITING],
        (ReshardPhase.WAITING, "all are here"): [ReshardPhase.LISTING],
        (ReshardPhase.LISTING, "all listed"): [ReshardPhase.MOVING],
        (ReshardPhase.MOVING, "journaled"): [ReshardPhase.NONE],
        (ReshardPhase.LISTING, "given up"): [ReshardPhase.WAITING],
        (ReshardPhase.MOVING, "given up"): [ReshardPhase.WAITING],
        (ReshardPhase.WAITING, "nothing asked"): [ReshardPhase.NONE],
    },
)


# ---- outer optimizer -------------------------------------------------------------------------------------------------
#
# The outer optimizers: the step that slaves make with a round's merge, as coefficients of one linear step.
#
#     g    = scale d
#     buf' = momentum_decay buf + g
#     θ'   = θ - outer_lr (gradient_weight g + momentum_lookahead buf')
#
# A slave knows this step only (core/math/outer_numpy.py). The coefficients, which PREPARE and the COMMIT record carry,
# make it Nesterov's, Polyak's or a delayed step (docs/algorithm.md, further outer optimizers). This module must never
# hold state: all follows from the settings, the judgement and the number of the version that the step starts from.


@dataclass(frozen=True)
class OuterStep:
    """The coefficients of one round's step; the names are those of PREPARE."""

    scale: float
    outer_lr: float
    momentum_decay: float
    momentum_lookahead: float
    gradient_weight: float

    def to_json(self) -> dict[str, str]:
        """The coefficients as repr text, like all floats of a record."""
        return {name: repr(value) for name, value in dataclasses.asdict(self).items()}


def seed_step(outer_lr: float) -> OuterStep:
    """The step of a round that takes one push as it is: slaves make no step and keep no momentum."""
    return OuterStep(1.0, outer_lr, momentum_decay=0.0, momentum_lookahead=0.0, gradient_weight=1.0)


def outer_step_of(config: PenaltyConfig, outer_lr: float, scale: float, rho: float, before: Version) -> OuterStep:
    """The step of the round that starts from version `before`; scale: rho kappa, of its judgement.

    `nesterov`: docs/algorithm.md, PREPARE. `heavy-ball` (Polyak 1964): θ' = θ - lr buf'. `averaging`: no momentum;
    with lr 1 the new model is the clipped and scaled mean of the pushed ones.
    """
    mu = config.outer_momentum
    if config.outer_optimizer == "heavy-ball":
        return OuterStep(scale, outer_lr, mu, momentum_lookahead=1.0, gradient_weight=0.0)
    if config.outer_optimizer == "averaging":
        return OuterStep(scale, outer_lr, momentum_decay=0.0, momentum_lookahead=0.0, gradient_weight=1.0)
    if config.outer_optimizer == "delayed-nesterov":
        # Of Async Local-SGD (arXiv 2401.09135, with c = 0): momentum moves the model every n-th round. Each round makes
        # θ - lr g/n; the last of a cycle of n also m ← β m + (sum of the cycle's g)/n, θ ← θ - lr β m. The buffer
        # collects that sum itself: it decays by β in the first round of a cycle, and by nothing in the others. `before`
        # counts the rounds since the run began, so that neither a restart nor a ROLLBACK loses the place.
        n, place = config.delay_rounds, before.v % config.delay_rounds
        decay, lookahead = mu if place == 0 else 1.0, mu if place == n - 1 else 0.0
        return OuterStep(scale / n, outer_lr, decay, lookahead, gradient_weight=1.0)
    decay, lookahead = momentum_coefficients(config, rho)
    return OuterStep(scale, outer_lr, decay, lookahead, gradient_weight=1.0)


def momentum_coefficients(config: PenaltyConfig, rho: float) -> tuple[float, float]:
    """Nesterov's (decay, lookahead) for a round with the share rho of a full round.

    Normally both are mu_o. With momentum_scaling = "tokens": decay m = mu_o^rho, so that rounds whose rho add
    up to one decay the momentum as much as one full round; lookahead = mu_o (1 - m) / (1 - mu_o), which keeps
    the momentum's part of the step in proportion. Both are mu_o exactly when rho = 1.
    """
    mu = config.outer_momentum
    if config.momentum_scaling == "off" or rho == 1.0:
        return mu, mu
    decay = mu**rho
    return decay, mu * (1.0 - decay) / (1.0 - mu)


# ---- records ---------------------------------------------------------------------------------------------------------


@dataclass
class Push:
    """One undecided push."""

    id: PushId
    request: messages.BeginPushRequest
    attempt: int
    slot: int  # its place in every slave's staging
    phase: Phase[PushPhase]
    began_s: float
    renewed_s: float  # when bytes of it arrived last
    digest_of_slave: dict[str, bytes] = field(default_factory=dict)  # of this attempt, as slaves report them
    landed_bytes: dict[str, int] = field(default_factory=dict)
    finish_token: int | None = None  # a held FinishPush, answered at finish_until_s at the latest
    finish_until_s: float = 0.0
    claimed: dict[str, bytes] = field(default_factory=dict)  # the digests of what the cluster sent
    wire: Codec = Codec.F32
    code: VerdictCode = VerdictCode.OTHER  # why it is decided as it is; set before the verdict is sent

    @property
    def cluster(self) -> str:
        return self.id.cluster

    @property
    def is_seed(self) -> bool:
        """Whether it has no base: the first parameters of a run, or a donation. It is merged without a judgement."""
        return self.request.base is None

    @property
    def is_donation(self) -> bool:
        return self.request.donates is not None

    @property
    def sealed(self) -> bool:
        return self.phase.now is PushPhase.SEALED

    @property
    def needs_base(self) -> bool:
        """Whether slaves still need its base's parameters: after sealing, all its chunks have been decoded."""
        return self.wire.is_difference and not self.sealed

    def forget(self, slave: str) -> None:
        """Forgets what a lost slave had received of it."""
        self.digest_of_slave.pop(slave, None)
        self.landed_bytes.pop(slave, None)


@dataclass
class OperatorChanges:
    """What the operator changed in this process's ledger, and so not in an old copy of it (rollback.py)."""

    paused: bool = False
    end: bool = False  # asked for, or taken back
    token_limit: bool = False
    drains: set[str] = field(default_factory=set)  # clusters whose drain began or ended


@dataclass(frozen=True)
class StepsAhead:
    """The steps that a cluster makes before its next push: at least so many, none of them before since_s."""

    steps: int
    since_s: float


@dataclass
class Member:
    """A cluster that is here: joined, beating, not evicted."""

    cluster: str
    incarnation: Incarnation
    slot: int
    beat_s: float
    held_at_join: tuple[messages.DataRange, ...] = ()
    last_seq: int = 0
    beat: messages.HeartbeatRequest | None = None
    push: Push | None = None
    last_admitted_s: float | None = None
    leave_token: int | None = None
    local_steps: int = 0
    ahead: StepsAhead | None = None  # None: not known, it may push at any time (pacing.py)
    last_lease: tuple[int, tuple[messages.DataRange, ...]] = (0, ())  # its number and the answer, in case that was lost
    base: Version | None = None  # the version that it trains on, if it sends differences
    wanted_wire: Codec = Codec.F32  # the codec that its last push asked for
    process_id: bytes = b""
    host: str = ""
    pushers: int = 1  # ranks that send and fetch parts of each of its transfers
    silent_since_s: float | None = None  # when the stream of its beats broke, if it is broken


@dataclass
class Slave:
    """A slave that this run has seen."""

    id: SlaveId
    memory_bytes: int
    phase: Phase[SlavePhase]
    link: int | None = None
    incarnation: Incarnation | None = None
    incarnations: int = 0
    endpoint: str = ""
    curve_key: bytes = b""
    beat_s: float = 0.0
    beat: messages.SlaveBeat = field(default_factory=messages.SlaveBeat)
    version: Version | None = None
    snapshots: tuple[messages.SnapshotInfo, ...] = ()  # on its disk, as its hello said
    durable: Version | None = None
    trouble: str = ""  # why it is not ready, in a sentence
    capabilities: frozenset[str] = frozenset()
    directory_id: bytes = b""
    held_until_s: float = 0.0  # while it is away, its name is kept for its directory until then

    @property
    def ready(self) -> bool:
        return self.phase.now is SlavePhase.READY


@dataclass
class RoundState:
    """The open round."""

    phase: Phase[RoundPhase]
    id: RoundId | None = None
    window_closes_s: float = 0.0
    window_ends_s: float = 0.0  # also when the window starts again
    grace_s: float = 0.0
    few_until_s: float = math.inf  # when a window with too few pushes goes on; counted while nothing else holds it
    awaited: tuple[str, ...] = ()  # the clusters whose pushes the window stays open for, because it has too few
    few: str = ""  # with how few pushes it went on, in a sentence; empty: with enough
    deadline_s: float | None = None
    participants: list[Push] = field(default_factory=list)  # fixed from SEALED on, in cluster-id order
    measured: dict[str, tuple[messages.BlockGram, ...]] = field(default_factory=dict)
    directions: dict[str, tuple[float, ...]] = field(default_factory=dict)
    all_zero: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    digest_of_slave: dict[str, bytes] = field(default_factory=dict)  # of the prepared shards
    flipped: set[str] = field(default_factory=set)
    judgement: Judgement | None = None
    judged_from: JudgeInputs | None = None
    step: OuterStep | None = None
    not_before_s: float = 0.0  # no window closes earlier: the round before it was aborted
    resend_s: float | None = None  # when COMMIT is sent again to slaves that have not flipped
    timeout_factor: float = 1.0  # doubles with each aborted round
    last_abort: str = ""

    @property
    def cause(self) -> str:
        return "-" if self.id is None else str(self.id)


HeldVersion = tuple[Version, RoundId, bytes]
"""A committed snapshot: version, round, commit_hash."""


@dataclass(frozen=True)
class Donor:
    """A cluster that is asked for its copy of a version."""

    cluster: str
    incarnation: Incarnation
    commit: CommitInfo
    since_s: float
    base: Version  # the name of that version at the cluster


@dataclass
class RecoveryState:
    """The state of a recovery."""

    phase: Phase[RecoveryPhase]
    since_s: float | None = None  # its begin, whatever phases follow
    reason: str = ""  # in a sentence; empty while a restarted master waits for its slaves
    asked: SlaveId | None = None  # the slave whose record of `wanted` is awaited
    wanted: HeldVersion | None = None
    ask_again_s: float = 0.0
    look_until_s: float = 0.0  # until when a rebuild waits for slaves before it takes a version
    records: dict[bytes, bytes] = field(default_factory=dict)  # those received, by commit_hash
    silent: set[tuple[SlaveId, HeldVersion]] = field(default_factory=set)  # those that gave no record
    # What could not be loaded although the slave's hello named it.
    broken: set[tuple[SlaveId, Version, RoundId]] = field(default_factory=set)
    named: set[SlaveId] = field(default_factory=set)  # slaves that a record names and the ledger does not
    donor: Donor | None = None
    tried: set[tuple[str, Incarnation]] = field(default_factory=set)  # whose donation failed
    wrong: set[tuple[str, Incarnation, Version]] = field(default_factory=set)  # whose copy is not what was committed
    words: str = ""  # what it waits for, in addition to the reason

    @property
    def active(self) -> bool:
        return self.phase.now is not RecoveryPhase.NONE

    @property
    def donating(self) -> bool:
        return self.phase.now is RecoveryPhase.DONATING

    def asks(self, member: Member) -> Donor | None:
        """The donor, if it is this cluster in this incarnation."""
        donor = self.donor if self.donating else None
        here = donor is not None and (donor.cluster, donor.incarnation) == (member.cluster, member.incarnation)
        return donor if here else None


@dataclass
class ReshardState:
    """The state of a RESHARD."""

    phase: Phase[ReshardPhase]
    round: RoundId | None = None
    placement: Placement | None = None
    incarnations: dict[SlaveId, Incarnation | None] = field(default_factory=dict)  # of who takes part, at the start
    lists: dict[SlaveId, messages.ShardList] = field(default_factory=dict)
    # Of theta and momentum of each new shard, computed from the lists.
    digests: dict[SlaveId, tuple[bytes, bytes]] = field(default_factory=dict)
    prepared: set[SlaveId] = field(default_factory=set)  # these have their new shard on disk
    not_before_s: float = 0.0
    pause_s: float = 0.0
    trouble: str = ""  # why the last try was given up

    @property
    def moving(self) -> bool:
        """Whether blocks are being listed or moved: no round begins until the end."""
        return self.phase.now in (ReshardPhase.LISTING, ReshardPhase.MOVING)


@dataclass
class Pin:
    """A version that a cluster or reader is pulling."""

    pin_id: int
    owner: str
    version: Version
    until_s: float


@dataclass(frozen=True)
class Kept:
    """A version that slaves still hold, and the tokens applied up to it."""

    commit: CommitInfo
    tokens: int

    @property
    def version(self) -> Version:
        return self.commit.version
