"""The lines of a master's tape that its state writes, one class for each kind."""

from __future__ import annotations

from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.machine import Record


class EpochBegun(Record, kind="epoch"):
    """The master begins an epoch, with the newest version that its journal knows."""

    epoch: int
    version: Version | None
    tokens: int
    durability: str


class CallRefused(Record, kind="refused"):
    """A call of a known sender was refused."""

    peer: str
    call: str
    code: str
    sentence: str
    count: int = 0  # of all refusals of this method and code that this line stands for; 0: one


class RequestRefused(Record, kind="refused"):
    """A request was refused before it reached the state."""

    method: str
    code: str
    sentence: str
    count: int = 0  # of all refusals of this method and code that this line stands for; 0: one


class CertificateRevoked(Record, kind="revoked"):
    """The holder of a certificate that was revoked."""

    holder: str
    reason: str


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


class MasterStoodStill(Record, kind="stood_still"):
    """The master's own process had a pause."""

    gap_s: float


class RunStopped(Record, kind="stopped"):
    """The run has ended, and no cluster is left."""

    reason: str
    tokens: int


class ClusterJoined(Record, kind="join"):
    """A cluster has a new incarnation."""

    cluster: str
    incarnation: Incarnation
    process: bytes


class DataLeased(Record, kind="lease"):
    """A cluster got a lease of data."""

    cluster: str
    tokens: int


class ClusterLeft(Record, kind="leave"):
    """A cluster left in order."""

    cluster: str
    reason: str


class ClusterEvicted(Record, kind="evict"):
    """A cluster was removed from the run."""

    cluster: str
    reason: str


class PullGranted(Record, kind="pull"):
    """A cluster or reader may pull a version."""

    by: str
    version: Version


class TicketIssued(Record, kind="ticket"):
    """A cluster may send a push."""

    push: PushId
    base: Version | None
    fence: int
    tokens: int
    attempt: int
    donates: str | None
    wire: str


class PushAdmitted(Record, kind="admitted"):
    """A push is on every slave, and in the window."""

    push: PushId
    attempt: int
    tokens: int


class PushDecided(Record, kind="verdict"):
    """A push has its verdict."""

    push: PushId
    verdict: str
    version: Version | None
    round: RoundId | None
    code: str
    reason: str


class HistoryAdopted(Record, kind="adopted"):
    """The slaves' history was taken over."""

    version: Version
    before: Version | None
    tokens: int


class RecoveryMoved(Record, kind="recovery"):
    """The recovery has another phase."""

    phase: str
    input: str
    why: str


class Resharded(Record, kind="resharded"):
    """The blocks are on other slaves."""

    version: Version
    blocks: int


class ReshardMoved(Record, kind="reshard"):
    """The RESHARD has another phase."""

    phase: str
    input: str
    why: str


class RoundTooSmall(Record, kind="few_pushes"):
    """A round has fewer pushes than min_clusters_per_round: it waits for those of these clusters, or no longer."""

    round: RoundId | None
    pushes: int
    minimum: int
    clusters: list[str]
    left_s: float  # until it goes on; 0: it does now
    sentence: str


class RoundJudged(Record, kind="judged"):
    """A round was judged; by cluster."""

    round: RoundId | None
    accepted: list[str]
    rejected: dict[str, str]
    norms: dict[str, float]
    scores: dict[str, float | None]
    cosines: dict[str, float]
    kappa: float
    rho: float
    merged_norm: float


class RoundCommitted(Record, kind="commit"):
    """A round's decision is in the journal."""

    round: RoundId | None
    version: Version
    s_max: int


class VersionPublished(Record, kind="publish"):
    """A version is on every slave, and may be pulled."""

    version: Version
    tokens: int


class RoundMoved(Record, kind="round"):
    """The round has another phase."""

    round: RoundId | None
    phase: str
    input: str
    why: str


class RolledBack(Record, kind="rolled_back"):
    """The run goes on from an older version, on a new timeline."""

    version: Version | None
    origin: Version
    donor: str | None
    lost_tokens: int


class AlarmRaised(Record, kind="alarm"):
    """Something that a person should check."""

    code: str
    clusters: list[str]
    sentence: str


class SlaveLost(Record, kind="slave_lost"):
    """A slave's stream ended."""

    slave: str
    reason: str


class SlaveDismissed(Record, kind="slave_dismissed"):
    """The run no longer needs this slave."""

    slave: str
    reason: str


class SlaveAttached(Record, kind="slave_attached"):
    """A slave has a new incarnation."""

    slave: str
    incarnation: Incarnation | None
    directory: bytes


class ConnectionsRefused(Record, kind="refused_connections"):
    """A slave's data port refused connections."""

    slave: str
    count: int
    last_reason: str


class SlaveReady(Record, kind="slave_ready"):
    """A slave holds the version that it was to load."""

    slave: str
    version: Version | None
