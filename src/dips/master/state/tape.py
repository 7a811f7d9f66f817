"""The lines of a master's tape that its state writes, one class for each kind."""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.machine import Record


@dataclass(frozen=True, kw_only=True)
class EpochBegun(Record):
    """The master begins an epoch, with the newest version that its journal knows."""

    KIND = "epoch"
    epoch: int
    version: Version | None
    tokens: int
    durability: str


@dataclass(frozen=True, kw_only=True)
class CallRefused(Record):
    """A call of a known sender was refused."""

    KIND = "refused"
    peer: str
    call: str
    code: str
    sentence: str
    count: int = 0  # of all refusals of this method and code that this line stands for; 0: one


@dataclass(frozen=True, kw_only=True)
class RequestRefused(Record):
    """A request was refused before it reached the state."""

    KIND = "refused"
    method: str
    code: str
    sentence: str
    count: int = 0  # of all refusals of this method and code that this line stands for; 0: one


@dataclass(frozen=True, kw_only=True)
class CertificateRevoked(Record):
    """The holder of a certificate that was revoked."""

    KIND = "revoked"
    holder: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class OperatorAsked(Record):
    """An operator's request was carried out; its name is the kind."""

    request: str
    sentence: str

    @property
    def kind(self) -> str:
        return self.request

    @property
    def fields(self) -> dict[str, object]:
        return {"sentence": self.sentence}


@dataclass(frozen=True, kw_only=True)
class MasterStoodStill(Record):
    """The master's own process had a pause."""

    KIND = "stood_still"
    gap_s: float


@dataclass(frozen=True, kw_only=True)
class RunStopped(Record):
    """The run has ended, and no cluster is left."""

    KIND = "stopped"
    reason: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class ClusterJoined(Record):
    """A cluster has a new incarnation."""

    KIND = "join"
    cluster: str
    incarnation: Incarnation
    process: bytes


@dataclass(frozen=True, kw_only=True)
class DataLeased(Record):
    """A cluster got a lease of data."""

    KIND = "lease"
    cluster: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class ClusterLeft(Record):
    """A cluster left in order."""

    KIND = "leave"
    cluster: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class ClusterEvicted(Record):
    """A cluster was removed from the run."""

    KIND = "evict"
    cluster: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PullGranted(Record):
    """A cluster or reader may pull a version."""

    KIND = "pull"
    by: str
    version: Version


@dataclass(frozen=True, kw_only=True)
class TicketIssued(Record):
    """A cluster may send a push."""

    KIND = "ticket"
    push: PushId
    base: Version | None
    fence: int
    tokens: int
    attempt: int
    donates: str | None
    wire: str


@dataclass(frozen=True, kw_only=True)
class PushAdmitted(Record):
    """A push is on every slave, and in the window."""

    KIND = "admitted"
    push: PushId
    attempt: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class PushDecided(Record):
    """A push has its verdict."""

    KIND = "verdict"
    push: PushId
    verdict: str
    version: Version | None
    round: RoundId | None
    code: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class HistoryAdopted(Record):
    """The slaves' history was taken over."""

    KIND = "adopted"
    version: Version
    before: Version | None
    tokens: int


@dataclass(frozen=True, kw_only=True)
class RecoveryMoved(Record):
    """The recovery has another phase."""

    KIND = "recovery"
    phase: str
    input: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Resharded(Record):
    """The blocks are on other slaves."""

    KIND = "resharded"
    version: Version
    blocks: int


@dataclass(frozen=True, kw_only=True)
class ReshardMoved(Record):
    """The RESHARD has another phase."""

    KIND = "reshard"
    phase: str
    input: str
    why: str


@dataclass(frozen=True, kw_only=True)
class RoundTooSmall(Record):
    """A round has fewer pushes than min_clusters_per_round: it waits for those of these clusters, or no longer."""

    KIND = "few_pushes"
    round: RoundId | None
    pushes: int
    minimum: int
    clusters: list[str]
    left_s: float  # until it goes on; 0: it does now
    sentence: str


@dataclass(frozen=True, kw_only=True)
class RoundJudged(Record):
    """A round was judged; by cluster."""

    KIND = "judged"
    round: RoundId | None
    accepted: list[str]
    rejected: dict[str, str]
    norms: dict[str, float]
    scores: dict[str, float | None]
    cosines: dict[str, float]
    kappa: float
    rho: float
    merged_norm: float


@dataclass(frozen=True, kw_only=True)
class RoundCommitted(Record):
    """A round's decision is in the journal."""

    KIND = "commit"
    round: RoundId | None
    version: Version
    s_max: int


@dataclass(frozen=True, kw_only=True)
class VersionPublished(Record):
    """A version is on every slave, and may be pulled."""

    KIND = "publish"
    version: Version
    tokens: int


@dataclass(frozen=True, kw_only=True)
class RoundMoved(Record):
    """The round has another phase."""

    KIND = "round"
    round: RoundId | None
    phase: str
    input: str
    why: str


@dataclass(frozen=True, kw_only=True)
class RolledBack(Record):
    """The run goes on from an older version, on a new timeline."""

    KIND = "rolled_back"
    version: Version | None
    origin: Version
    donor: str | None
    lost_tokens: int


@dataclass(frozen=True, kw_only=True)
class AlarmRaised(Record):
    """Something that a person should check."""

    KIND = "alarm"
    code: str
    clusters: list[str]
    sentence: str


@dataclass(frozen=True, kw_only=True)
class SlaveLost(Record):
    """A slave's stream ended."""

    KIND = "slave_lost"
    slave: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SlaveDismissed(Record):
    """The run no longer needs this slave."""

    KIND = "slave_dismissed"
    slave: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SlaveAttached(Record):
    """A slave has a new incarnation."""

    KIND = "slave_attached"
    slave: str
    incarnation: Incarnation | None
    directory: bytes


@dataclass(frozen=True, kw_only=True)
class ConnectionsRefused(Record):
    """A slave's data port refused connections."""

    KIND = "refused_connections"
    slave: str
    count: int
    last_reason: str


@dataclass(frozen=True, kw_only=True)
class SlaveReady(Record):
    """A slave holds the version that it was to load."""

    KIND = "slave_ready"
    slave: str
    version: Version | None
