"""The master's state in memory: clusters, pushes, slaves, the round and pins. It is lost when the process ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from dips.core.ids import Incarnation, PushId, RoundId, SlaveId, Version
from dips.core.machine import Phase
from dips.core.messages import (
    BeginPushRequest,
    BlockGram,
    DataRange,
    HeartbeatRequest,
    ShardList,
    SlaveBeat,
    SnapshotInfo,
)
from dips.core.placement import Placement
from dips.core.wire import DIFFERENCES, Codec
from dips.master.state.ledger import CommitInfo
from dips.master.state.outer_optimizer import OuterStep
from dips.master.state.penalty import JudgeInputs, Judgement
from dips.master.state.tables import PushPhase, RecoveryPhase, ReshardPhase, RoundPhase, SlavePhase


@dataclass
class Push:
    """One undecided push. digest_of_slave: the digests that slaves report for this attempt; wire: its codec."""

    id: PushId
    request: BeginPushRequest
    attempt: int
    slot: int
    phase: Phase[PushPhase]
    began_s: float
    renewed_s: float
    digest_of_slave: dict[str, bytes] = field(default_factory=dict)
    landed_bytes: dict[str, int] = field(default_factory=dict)
    finish_token: int | None = None
    finish_until_s: float = 0.0
    claimed: dict[str, bytes] = field(default_factory=dict)
    wire: Codec = Codec.F32

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
        return self.wire in DIFFERENCES and not self.sealed

    def forget(self, slave: str) -> None:
        """Forgets what a lost slave had received of it."""
        self.digest_of_slave.pop(slave, None)
        self.landed_bytes.pop(slave, None)


@dataclass
class Member:
    """A cluster that is here: joined, beating, not evicted.

    wanted_wire: the codec that its last push asked for; base: the version that it trains on, if it sends differences.
    """

    cluster: str
    incarnation: Incarnation
    slot: int
    beat_s: float
    held_at_join: tuple[DataRange, ...] = ()
    last_seq: int = 0
    beat: HeartbeatRequest | None = None
    push: Push | None = None
    last_admitted_s: float | None = None
    leave_token: int | None = None
    local_steps: int = 0
    last_lease: tuple[int, tuple[DataRange, ...]] = (0, ())
    base: Version | None = None
    wanted_wire: Codec = Codec.F32
    process_id: bytes = b""
    host: str = ""
    silent_since_s: float | None = None
    """When the stream of its beats broke, if it is broken."""


@dataclass
class Slave:
    """A slave that this run has seen. held_until_s: while it is away, its name is kept for its directory until then."""

    id: SlaveId
    memory_bytes: int
    phase: Phase[SlavePhase]
    link: int | None = None
    incarnation: Incarnation | None = None
    incarnations: int = 0
    endpoint: str = ""
    curve_key: bytes = b""
    beat_s: float = 0.0
    beat: SlaveBeat = field(default_factory=SlaveBeat)
    version: Version | None = None
    snapshots: tuple[SnapshotInfo, ...] = ()
    durable: Version | None = None
    trouble: str = ""
    capabilities: frozenset[str] = frozenset()
    directory_id: bytes = b""
    held_until_s: float = 0.0

    @property
    def ready(self) -> bool:
        return self.phase.now is SlavePhase.READY


@dataclass
class RoundState:
    """The open round; participants are fixed from SEALED on, in cluster-id order."""

    phase: Phase[RoundPhase]
    id: RoundId | None = None
    window_closes_s: float = 0.0
    window_ends_s: float = 0.0  # also when the window starts again
    grace_s: float = 0.0
    deadline_s: float | None = None
    participants: list[Push] = field(default_factory=list)
    measured: dict[str, tuple[BlockGram, ...]] = field(default_factory=dict)
    directions: dict[str, tuple[float, ...]] = field(default_factory=dict)
    digest_of_slave: dict[str, bytes] = field(default_factory=dict)
    flipped: set[str] = field(default_factory=set)
    judgement: Judgement | None = None
    judged_from: JudgeInputs | None = None
    step: OuterStep | None = None
    not_before_s: float = 0.0
    resend_s: float | None = None
    timeout_factor: float = 1.0
    last_abort: str = ""

    @property
    def cause(self) -> str:
        return "-" if self.id is None else str(self.id)


HeldVersion = tuple[Version, RoundId, bytes]
"""A committed snapshot: version, round, commit_hash."""


@dataclass(frozen=True)
class Donor:
    """A cluster that is asked for its copy of a version. base: the name of that version at the cluster."""

    cluster: str
    incarnation: Incarnation
    commit: CommitInfo
    since_s: float
    base: Version


@dataclass
class RecoveryState:
    """The state of a recovery.

    reason: why, in a sentence; empty while a restarted master waits for its slaves. asked: the slave whose record of
    `wanted` is awaited. records: those received, by commit_hash. silent: (slave, snapshot) that gave no record.
    broken: (slave, version, round) that could not be loaded although the slave's hello named it. named: slaves that a
    record names and the ledger does not. tried: incarnations whose donation failed; wrong: those whose copy is not what
    was committed.
    """

    phase: Phase[RecoveryPhase]
    reason: str = ""
    asked: SlaveId | None = None
    wanted: HeldVersion | None = None
    ask_again_s: float = 0.0
    records: dict[bytes, bytes] = field(default_factory=dict)
    silent: set[tuple[SlaveId, HeldVersion]] = field(default_factory=set)
    broken: set[tuple[SlaveId, Version, RoundId]] = field(default_factory=set)
    named: set[SlaveId] = field(default_factory=set)
    donor: Donor | None = None
    tried: set[tuple[str, Incarnation]] = field(default_factory=set)
    wrong: set[tuple[str, Incarnation, Version]] = field(default_factory=set)
    words: str = ""

    @property
    def active(self) -> bool:
        return self.phase.now is not RecoveryPhase.NONE

    @property
    def donating(self) -> bool:
        return self.phase.now is RecoveryPhase.DONATING


@dataclass
class ReshardState:
    """The state of a RESHARD.

    incarnations: the slaves that take part, each with its incarnation at the start. digests: of theta and momentum of
    each new shard, computed from the lists. prepared: the slaves that have their new shard on disk. trouble: why the
    last try was given up.
    """

    phase: Phase[ReshardPhase]
    round: RoundId | None = None
    placement: Placement | None = None
    incarnations: dict[SlaveId, Incarnation | None] = field(default_factory=dict)
    lists: dict[SlaveId, ShardList] = field(default_factory=dict)
    digests: dict[SlaveId, tuple[bytes, bytes]] = field(default_factory=dict)
    prepared: set[SlaveId] = field(default_factory=set)
    not_before_s: float = 0.0
    pause_s: float = 0.0
    trouble: str = ""

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
