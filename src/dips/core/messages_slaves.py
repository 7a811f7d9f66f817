"""Messages between slaves and master; import them from dips.core.messages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.layout import Layout
from dips.core.messages_shared import Caller, DataRange, Hello, PlacementSpec, Refusal, Settings
from dips.core.wire import Codec

# ---- up ----


@dataclass(frozen=True)
class SnapshotInfo:
    version: Version
    round: RoundId
    layout_hash: bytes
    placement_hash: bytes
    digest: bytes
    committed: bool
    commit_hash: bytes = b""


@dataclass(frozen=True)
class SlaveHello:
    hello: Hello
    data_endpoint: str
    memory_bytes: int
    promised_epoch: int
    snapshots: tuple[SnapshotInfo, ...] = ()
    curve_key: bytes = b""
    directory_id: bytes = b""


@dataclass(frozen=True)
class Promised:
    epoch: int


@dataclass(frozen=True)
class Ready:
    version: Version | None
    digest: bytes = b""


@dataclass(frozen=True)
class ConfigureRefused:
    refusal: Refusal


@dataclass(frozen=True)
class StagingProgress:
    push: PushId
    attempt: int
    landed_bytes: int


@dataclass(frozen=True)
class SlaveBeat:
    staging_bytes: int = 0
    served_bytes: int = 0
    refused_chunks: int = 0
    resident_bytes: int = 0
    staging_open: int = 0
    progress: tuple[StagingProgress, ...] = ()
    durable: Version | None = None
    refused_connections: int = 0
    refused_connection: str = ""


@dataclass(frozen=True)
class Staged:
    push: PushId
    attempt: int
    digest: bytes


@dataclass(frozen=True)
class BlockGram:
    block: int
    gram: tuple[float, ...]
    nonfinite_elems: tuple[int, ...]


@dataclass(frozen=True)
class Measured:
    round: RoundId
    blocks: tuple[BlockGram, ...]
    directions: tuple[float, ...] = ()


@dataclass(frozen=True)
class Prepared:
    round: RoundId
    digest: bytes


@dataclass(frozen=True)
class RoundRefused:
    round: RoundId
    command: str
    refusal: Refusal


@dataclass(frozen=True)
class Flipped:
    round: RoundId
    version: Version


@dataclass(frozen=True)
class CommitRecord:
    version: Version
    round: RoundId
    record: bytes = b""
    refusal: Refusal | None = None


@dataclass(frozen=True)
class ShardList:
    round: RoundId
    theta: tuple[int, ...]
    momentum: tuple[int, ...]


SlaveBody = (
    SlaveHello
    | Promised
    | Ready
    | SlaveBeat
    | Staged
    | Measured
    | Prepared
    | RoundRefused
    | Flipped
    | ConfigureRefused
    | CommitRecord
    | ShardList
)


@dataclass(frozen=True)
class SlaveMessage:
    caller: Caller
    body: SlaveBody


# ---- down ----


@dataclass(frozen=True)
class Welcome:
    hello: Hello
    settings: Settings


@dataclass(frozen=True)
class Configure:
    layout: Layout
    layout_hash: bytes
    placement: PlacementSpec
    staging_slots: int
    load: Version | None = None
    load_round: RoundId | None = None
    load_digest: bytes = b""
    commit_hash: bytes = b""
    commit_record: bytes = b""
    pinned_versions: int = 2
    origin: Version | None = None
    origin_round: RoundId | None = None
    empty: bool = False


@dataclass(frozen=True)
class SendCommitRecord:
    version: Version
    round: RoundId


@dataclass(frozen=True)
class OpenStaging:
    push: PushId
    attempt: int
    slot: int
    base: Version | None
    fence: int
    tokens: int
    ranges: tuple[DataRange, ...] = ()
    wire: Codec = Codec.F32


@dataclass(frozen=True)
class CloseStaging:
    push: PushId


@dataclass(frozen=True)
class StagedPush:
    push: PushId
    attempt: int


@dataclass(frozen=True)
class Measure:
    round: RoundId
    version: Version
    participants: tuple[StagedPush, ...]


@dataclass(frozen=True)
class Prepare:
    round: RoundId
    from_version: Version | None
    to_version: Version
    accepted: tuple[StagedPush, ...]
    weights: tuple[float, ...]
    scale: float
    outer_lr: float
    momentum_decay: float
    momentum_lookahead: float
    gradient_weight: float
    averaged_share: float = 1.0


@dataclass(frozen=True)
class AbortRound:
    round: RoundId
    reason: str


@dataclass(frozen=True)
class Commit:
    round: RoundId
    version: Version
    commit_hash: bytes
    commit_record: bytes


@dataclass(frozen=True)
class Retain:
    versions: tuple[Version, ...]


class KeyRole(IntEnum):
    CLUSTER = 1
    READER = 2
    SLAVE = 3


@dataclass(frozen=True, order=True)
class AllowedKey:
    role: KeyRole
    owner: str
    curve_key: bytes


@dataclass(frozen=True)
class Allow:
    keys: tuple[AllowedKey, ...]


@dataclass(frozen=True)
class ListShard:
    round: RoundId
    version: Version


@dataclass(frozen=True)
class MoveBlocks:
    round: RoundId
    from_version: Version
    to_version: Version
    layout: Layout
    layout_hash: bytes
    placement: PlacementSpec
    sources: PlacementSpec
    staging_slots: int
    pinned_versions: int
    theta_digest: bytes
    momentum_digest: bytes


@dataclass(frozen=True)
class StopSlave:
    reason: str


CommandBody = (
    Welcome
    | Configure
    | OpenStaging
    | CloseStaging
    | Measure
    | Prepare
    | AbortRound
    | Commit
    | Retain
    | StopSlave
    | SendCommitRecord
    | Allow
    | ListShard
    | MoveBlocks
)


@dataclass(frozen=True)
class SlaveCommand:
    run_id: str
    epoch: int
    incarnation: Incarnation | None
    cause_id: str
    body: CommandBody
