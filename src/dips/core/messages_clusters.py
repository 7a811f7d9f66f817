"""Messages between clusters and master; import them from dips.core.messages."""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.layout import Layout
from dips.core.messages_shared import (
    NAN,
    Busy,
    Caller,
    DataPlan,
    DataRange,
    Hello,
    PlacementSpec,
    Settings,
    StaleKind,
    Verdict,
)
from dips.core.model_description import TensorDigest
from dips.core.wire import Codec


@dataclass(frozen=True)
class JoinRequest:
    caller: Caller
    hello: Hello
    layout: Layout
    layout_hash: bytes
    data_plan: DataPlan
    declared_tokens_per_s: float = 0.0
    held_ranges: tuple[DataRange, ...] = ()
    curve_key: bytes = b""
    frozen: tuple[TensorDigest, ...] = ()
    buffers: tuple[TensorDigest, ...] = ()
    process_id: bytes = b""
    host: str = ""


@dataclass(frozen=True)
class JoinReply:
    epoch: int
    incarnation: Incarnation
    hello: Hello
    settings: Settings
    seed: bool
    fence: int
    last_push: Verdict | PushId | None
    published: Version | None
    tokens: int
    local_steps: int
    run_id: str
    kept_ranges: tuple[DataRange, ...] = ()


@dataclass(frozen=True)
class HeartbeatRequest:
    caller: Caller
    phase: str = ""
    steps: int = 0
    tokens_per_s: float = 0.0
    steps_per_s: float = 0.0
    loss: float = NAN
    push_s: float = 0.0
    pull_s: float = 0.0
    base: Version | None = None
    note: str = ""


@dataclass(frozen=True)
class HeartbeatReply:
    epoch: int
    published: Version | None
    tokens: int
    local_steps: int
    stop: bool
    phase: str
    donate: Version | None = None


@dataclass(frozen=True)
class BeginPushRequest:
    caller: Caller
    seq: int
    base: Version | None
    fence: int
    ranges: tuple[DataRange, ...]
    tokens: int
    steps: int
    mean_loss: float = NAN
    donates: Version | None = None
    wire: Codec = Codec.F32


@dataclass(frozen=True)
class Ticket:
    attempt: int
    placement: PlacementSpec
    block_order: tuple[int, ...]
    wire: Codec = Codec.F32


@dataclass(frozen=True)
class Stale:
    kind: StaleKind
    sentence: str


@dataclass(frozen=True)
class BeginPushReply:
    answer: Ticket | Stale | Busy | PushId | Verdict


@dataclass(frozen=True)
class FinishPushRequest:
    caller: Caller
    seq: int
    attempt: int
    digest_of_slave: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class Admitted:
    round: RoundId
    window_closes_in_s: float


@dataclass(frozen=True)
class FinishPushReply:
    answer: Admitted | Busy | Verdict


@dataclass(frozen=True)
class AwaitVerdictRequest:
    caller: Caller
    push: PushId
    wait_s: float


@dataclass(frozen=True)
class AwaitVerdictReply:
    answer: Verdict | Busy


@dataclass(frozen=True)
class BeginPullRequest:
    caller: Caller
    reader: bool = False
    at_least: Version | None = None
    exact: bool = False
    curve_key: bytes = b""


@dataclass(frozen=True)
class PullGrant:
    version: Version
    fence: int
    pin_id: int
    placement: PlacementSpec
    block_order: tuple[int, ...]
    digest_of_slave: tuple[tuple[str, bytes], ...]
    tokens: int
    local_steps: int
    layout: Layout | None
    chunk_bytes: int
    epoch: int
    run_id: str


@dataclass(frozen=True)
class BeginPullReply:
    answer: PullGrant | Busy


@dataclass(frozen=True)
class FinishPullRequest:
    caller: Caller
    pin_id: int
    reader: bool = False


@dataclass(frozen=True)
class FinishPullReply:
    local_steps: int


@dataclass(frozen=True)
class LeaseDataRequest:
    caller: Caller
    want_tokens: int
    request: int = 0


@dataclass(frozen=True)
class LeaseDataReply:
    ranges: tuple[DataRange, ...]


@dataclass(frozen=True)
class ReturnDataRequest:
    caller: Caller
    ranges: tuple[DataRange, ...]


@dataclass(frozen=True)
class ReturnDataReply:
    pass


@dataclass(frozen=True)
class LeaveRequest:
    caller: Caller
    reason: str


@dataclass(frozen=True)
class LeaveReply:
    pass


ClusterRequest = (
    JoinRequest
    | BeginPushRequest
    | FinishPushRequest
    | AwaitVerdictRequest
    | BeginPullRequest
    | FinishPullRequest
    | LeaseDataRequest
    | ReturnDataRequest
    | LeaveRequest
    | HeartbeatRequest
)

ClusterReply = (
    JoinReply
    | BeginPushReply
    | FinishPushReply
    | AwaitVerdictReply
    | BeginPullReply
    | FinishPullReply
    | LeaseDataReply
    | ReturnDataReply
    | LeaveReply
    | HeartbeatReply
)
