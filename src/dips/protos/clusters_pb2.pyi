from dips.protos import common_pb2 as _common_pb2
from dips.protos import data_pb2 as _data_pb2
from dips.protos import options_pb2 as _options_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StaleKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STALE_UNSPECIFIED: _ClassVar[StaleKind]
    STALE_VERSIONS: _ClassVar[StaleKind]
    STALE_FENCE: _ClassVar[StaleKind]
    STALE_TIMELINE: _ClassVar[StaleKind]
STALE_UNSPECIFIED: StaleKind
STALE_VERSIONS: StaleKind
STALE_FENCE: StaleKind
STALE_TIMELINE: StaleKind

class JoinRequest(_message.Message):
    __slots__ = ("caller", "hello", "layout", "layout_hash", "data_plan", "declared_tokens_per_s", "held_ranges", "curve_key", "frozen", "buffers", "process_id", "host", "rank_keys", "pushers")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    DATA_PLAN_FIELD_NUMBER: _ClassVar[int]
    DECLARED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    HELD_RANGES_FIELD_NUMBER: _ClassVar[int]
    CURVE_KEY_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RANK_KEYS_FIELD_NUMBER: _ClassVar[int]
    PUSHERS_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    hello: _common_pb2.Hello
    layout: _common_pb2.Layout
    layout_hash: bytes
    data_plan: _common_pb2.DataPlan
    declared_tokens_per_s: float
    held_ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.DataRange]
    curve_key: bytes
    frozen: _containers.RepeatedCompositeFieldContainer[TensorDigest]
    buffers: _containers.RepeatedCompositeFieldContainer[TensorDigest]
    process_id: bytes
    host: str
    rank_keys: _containers.RepeatedScalarFieldContainer[bytes]
    pushers: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., layout_hash: _Optional[bytes] = ..., data_plan: _Optional[_Union[_common_pb2.DataPlan, _Mapping]] = ..., declared_tokens_per_s: _Optional[float] = ..., held_ranges: _Optional[_Iterable[_Union[_common_pb2.DataRange, _Mapping]]] = ..., curve_key: _Optional[bytes] = ..., frozen: _Optional[_Iterable[_Union[TensorDigest, _Mapping]]] = ..., buffers: _Optional[_Iterable[_Union[TensorDigest, _Mapping]]] = ..., process_id: _Optional[bytes] = ..., host: _Optional[str] = ..., rank_keys: _Optional[_Iterable[bytes]] = ..., pushers: _Optional[int] = ...) -> None: ...

class TensorDigest(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("epoch", "incarnation", "hello", "settings", "seed", "fence", "verdict", "undecided", "published", "tokens", "local_steps", "run_id", "kept_ranges")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    UNDECIDED_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    KEPT_RANGES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incarnation: _common_pb2.Incarnation
    hello: _common_pb2.Hello
    settings: _common_pb2.Settings
    seed: bool
    fence: int
    verdict: _common_pb2.Verdict
    undecided: _common_pb2.PushId
    published: _common_pb2.Version
    tokens: int
    local_steps: int
    run_id: str
    kept_ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.DataRange]
    def __init__(self, epoch: _Optional[int] = ..., incarnation: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., settings: _Optional[_Union[_common_pb2.Settings, _Mapping]] = ..., seed: _Optional[bool] = ..., fence: _Optional[int] = ..., verdict: _Optional[_Union[_common_pb2.Verdict, _Mapping]] = ..., undecided: _Optional[_Union[_common_pb2.PushId, _Mapping]] = ..., published: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., tokens: _Optional[int] = ..., local_steps: _Optional[int] = ..., run_id: _Optional[str] = ..., kept_ranges: _Optional[_Iterable[_Union[_common_pb2.DataRange, _Mapping]]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("caller", "phase", "steps", "tokens_per_s", "steps_per_s", "loss", "push_s", "pull_s", "base", "note", "late_ranks", "first_batches", "unrecorded_s")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    PUSH_S_FIELD_NUMBER: _ClassVar[int]
    PULL_S_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    LATE_RANKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BATCHES_FIELD_NUMBER: _ClassVar[int]
    UNRECORDED_S_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    phase: str
    steps: int
    tokens_per_s: float
    steps_per_s: float
    loss: float
    push_s: float
    pull_s: float
    base: _common_pb2.Version
    note: str
    late_ranks: _containers.RepeatedScalarFieldContainer[int]
    first_batches: bytes
    unrecorded_s: float
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., phase: _Optional[str] = ..., steps: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., steps_per_s: _Optional[float] = ..., loss: _Optional[float] = ..., push_s: _Optional[float] = ..., pull_s: _Optional[float] = ..., base: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., note: _Optional[str] = ..., late_ranks: _Optional[_Iterable[int]] = ..., first_batches: _Optional[bytes] = ..., unrecorded_s: _Optional[float] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("epoch", "published", "tokens", "local_steps", "stop", "phase", "donate", "no_more_pushes", "limit")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONATE_FIELD_NUMBER: _ClassVar[int]
    NO_MORE_PUSHES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    published: _common_pb2.Version
    tokens: int
    local_steps: int
    stop: bool
    phase: str
    donate: _common_pb2.Version
    no_more_pushes: bool
    limit: TokenLimit
    def __init__(self, epoch: _Optional[int] = ..., published: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., tokens: _Optional[int] = ..., local_steps: _Optional[int] = ..., stop: _Optional[bool] = ..., phase: _Optional[str] = ..., donate: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., no_more_pushes: _Optional[bool] = ..., limit: _Optional[_Union[TokenLimit, _Mapping]] = ...) -> None: ...

class TokenLimit(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    def __init__(self, tokens: _Optional[int] = ...) -> None: ...

class BeginPushRequest(_message.Message):
    __slots__ = ("caller", "seq", "base", "fence", "ranges", "tokens", "steps", "mean_loss", "donates", "wire")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MEAN_LOSS_FIELD_NUMBER: _ClassVar[int]
    DONATES_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    seq: int
    base: _common_pb2.Version
    fence: int
    ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.DataRange]
    tokens: int
    steps: int
    mean_loss: float
    donates: _common_pb2.Version
    wire: _data_pb2.Codec
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., seq: _Optional[int] = ..., base: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., fence: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[_common_pb2.DataRange, _Mapping]]] = ..., tokens: _Optional[int] = ..., steps: _Optional[int] = ..., mean_loss: _Optional[float] = ..., donates: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., wire: _Optional[_Union[_data_pb2.Codec, str]] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("attempt", "placement", "block_order", "wire")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ORDER_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    placement: _common_pb2.PlacementSpec
    block_order: _containers.RepeatedScalarFieldContainer[int]
    wire: _data_pb2.Codec
    def __init__(self, attempt: _Optional[int] = ..., placement: _Optional[_Union[_common_pb2.PlacementSpec, _Mapping]] = ..., block_order: _Optional[_Iterable[int]] = ..., wire: _Optional[_Union[_data_pb2.Codec, str]] = ...) -> None: ...

class Stale(_message.Message):
    __slots__ = ("kind", "sentence")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    kind: StaleKind
    sentence: str
    def __init__(self, kind: _Optional[_Union[StaleKind, str]] = ..., sentence: _Optional[str] = ...) -> None: ...

class Busy(_message.Message):
    __slots__ = ("retry_after_s", "sentence")
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    retry_after_s: float
    sentence: str
    def __init__(self, retry_after_s: _Optional[float] = ..., sentence: _Optional[str] = ...) -> None: ...

class BeginPushReply(_message.Message):
    __slots__ = ("ticket", "stale", "busy", "undecided", "verdict")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    UNDECIDED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    stale: Stale
    busy: Busy
    undecided: _common_pb2.PushId
    verdict: _common_pb2.Verdict
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., stale: _Optional[_Union[Stale, _Mapping]] = ..., busy: _Optional[_Union[Busy, _Mapping]] = ..., undecided: _Optional[_Union[_common_pb2.PushId, _Mapping]] = ..., verdict: _Optional[_Union[_common_pb2.Verdict, _Mapping]] = ...) -> None: ...

class FinishPushRequest(_message.Message):
    __slots__ = ("caller", "seq", "attempt", "digest_of_slave")
    class DigestOfSlaveEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_OF_SLAVE_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    seq: int
    attempt: int
    digest_of_slave: _containers.ScalarMap[str, bytes]
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., seq: _Optional[int] = ..., attempt: _Optional[int] = ..., digest_of_slave: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("round", "window_closes_in_s")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WINDOW_CLOSES_IN_S_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    window_closes_in_s: float
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., window_closes_in_s: _Optional[float] = ...) -> None: ...

class FinishPushReply(_message.Message):
    __slots__ = ("admitted", "busy", "verdict")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    admitted: Admitted
    busy: Busy
    verdict: _common_pb2.Verdict
    def __init__(self, admitted: _Optional[_Union[Admitted, _Mapping]] = ..., busy: _Optional[_Union[Busy, _Mapping]] = ..., verdict: _Optional[_Union[_common_pb2.Verdict, _Mapping]] = ...) -> None: ...

class AwaitVerdictRequest(_message.Message):
    __slots__ = ("caller", "push", "wait_s")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    push: _common_pb2.PushId
    wait_s: float
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., push: _Optional[_Union[_common_pb2.PushId, _Mapping]] = ..., wait_s: _Optional[float] = ...) -> None: ...

class AwaitVerdictReply(_message.Message):
    __slots__ = ("verdict", "undecided")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    UNDECIDED_FIELD_NUMBER: _ClassVar[int]
    verdict: _common_pb2.Verdict
    undecided: Busy
    def __init__(self, verdict: _Optional[_Union[_common_pb2.Verdict, _Mapping]] = ..., undecided: _Optional[_Union[Busy, _Mapping]] = ...) -> None: ...

class BeginPullRequest(_message.Message):
    __slots__ = ("caller", "reader", "at_least", "exact", "curve_key", "base", "pin_id")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    CURVE_KEY_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    reader: bool
    at_least: _common_pb2.Version
    exact: bool
    curve_key: bytes
    base: _common_pb2.Version
    pin_id: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., reader: _Optional[bool] = ..., at_least: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., exact: _Optional[bool] = ..., curve_key: _Optional[bytes] = ..., base: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., pin_id: _Optional[int] = ...) -> None: ...

class PullGrant(_message.Message):
    __slots__ = ("version", "fence", "pin_id", "placement", "block_order", "digest_of_slave", "tokens", "local_steps", "layout", "chunk_bytes", "epoch", "run_id", "wire", "base", "pin_s")
    class DigestOfSlaveEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ORDER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_OF_SLAVE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    PIN_S_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.Version
    fence: int
    pin_id: int
    placement: _common_pb2.PlacementSpec
    block_order: _containers.RepeatedScalarFieldContainer[int]
    digest_of_slave: _containers.ScalarMap[str, bytes]
    tokens: int
    local_steps: int
    layout: _common_pb2.Layout
    chunk_bytes: int
    epoch: int
    run_id: str
    wire: _data_pb2.Codec
    base: _common_pb2.Version
    pin_s: float
    def __init__(self, version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., fence: _Optional[int] = ..., pin_id: _Optional[int] = ..., placement: _Optional[_Union[_common_pb2.PlacementSpec, _Mapping]] = ..., block_order: _Optional[_Iterable[int]] = ..., digest_of_slave: _Optional[_Mapping[str, bytes]] = ..., tokens: _Optional[int] = ..., local_steps: _Optional[int] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., chunk_bytes: _Optional[int] = ..., epoch: _Optional[int] = ..., run_id: _Optional[str] = ..., wire: _Optional[_Union[_data_pb2.Codec, str]] = ..., base: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., pin_s: _Optional[float] = ...) -> None: ...

class BeginPullReply(_message.Message):
    __slots__ = ("grant", "busy")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    grant: PullGrant
    busy: Busy
    def __init__(self, grant: _Optional[_Union[PullGrant, _Mapping]] = ..., busy: _Optional[_Union[Busy, _Mapping]] = ...) -> None: ...

class FinishPullRequest(_message.Message):
    __slots__ = ("caller", "pin_id", "reader")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    pin_id: int
    reader: bool
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., pin_id: _Optional[int] = ..., reader: _Optional[bool] = ...) -> None: ...

class FinishPullReply(_message.Message):
    __slots__ = ("local_steps",)
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    local_steps: int
    def __init__(self, local_steps: _Optional[int] = ...) -> None: ...

class LeaseDataRequest(_message.Message):
    __slots__ = ("caller", "want_tokens", "request")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    WANT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    want_tokens: int
    request: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., want_tokens: _Optional[int] = ..., request: _Optional[int] = ...) -> None: ...

class LeaseDataReply(_message.Message):
    __slots__ = ("ranges",)
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.DataRange]
    def __init__(self, ranges: _Optional[_Iterable[_Union[_common_pb2.DataRange, _Mapping]]] = ...) -> None: ...

class ReturnDataRequest(_message.Message):
    __slots__ = ("caller", "ranges")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.DataRange]
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., ranges: _Optional[_Iterable[_Union[_common_pb2.DataRange, _Mapping]]] = ...) -> None: ...

class ReturnDataReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("caller", "reason")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    reason: str
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
