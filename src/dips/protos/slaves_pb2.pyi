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

class KeyRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KEY_ROLE_UNSPECIFIED: _ClassVar[KeyRole]
    KEY_ROLE_CLUSTER: _ClassVar[KeyRole]
    KEY_ROLE_READER: _ClassVar[KeyRole]
    KEY_ROLE_SLAVE: _ClassVar[KeyRole]
KEY_ROLE_UNSPECIFIED: KeyRole
KEY_ROLE_CLUSTER: KeyRole
KEY_ROLE_READER: KeyRole
KEY_ROLE_SLAVE: KeyRole

class SlaveMessage(_message.Message):
    __slots__ = ("caller", "hello", "promised", "ready", "beat", "staged", "measured", "prepared", "round_refused", "flipped", "configure_refused", "commit_record", "shard_list")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    ROUND_REFUSED_FIELD_NUMBER: _ClassVar[int]
    FLIPPED_FIELD_NUMBER: _ClassVar[int]
    CONFIGURE_REFUSED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_RECORD_FIELD_NUMBER: _ClassVar[int]
    SHARD_LIST_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    hello: SlaveHello
    promised: Promised
    ready: Ready
    beat: SlaveBeat
    staged: Staged
    measured: Measured
    prepared: Prepared
    round_refused: RoundRefused
    flipped: Flipped
    configure_refused: ConfigureRefused
    commit_record: CommitRecord
    shard_list: ShardList
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., hello: _Optional[_Union[SlaveHello, _Mapping]] = ..., promised: _Optional[_Union[Promised, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., beat: _Optional[_Union[SlaveBeat, _Mapping]] = ..., staged: _Optional[_Union[Staged, _Mapping]] = ..., measured: _Optional[_Union[Measured, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., round_refused: _Optional[_Union[RoundRefused, _Mapping]] = ..., flipped: _Optional[_Union[Flipped, _Mapping]] = ..., configure_refused: _Optional[_Union[ConfigureRefused, _Mapping]] = ..., commit_record: _Optional[_Union[CommitRecord, _Mapping]] = ..., shard_list: _Optional[_Union[ShardList, _Mapping]] = ...) -> None: ...

class SnapshotInfo(_message.Message):
    __slots__ = ("version", "round", "layout_hash", "placement_hash", "digest", "committed", "commit_hash", "restored_timeline")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_HASH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_HASH_FIELD_NUMBER: _ClassVar[int]
    RESTORED_TIMELINE_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.Version
    round: _common_pb2.RoundId
    layout_hash: bytes
    placement_hash: bytes
    digest: bytes
    committed: bool
    commit_hash: bytes
    restored_timeline: int
    def __init__(self, version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., layout_hash: _Optional[bytes] = ..., placement_hash: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., committed: _Optional[bool] = ..., commit_hash: _Optional[bytes] = ..., restored_timeline: _Optional[int] = ...) -> None: ...

class SlaveHello(_message.Message):
    __slots__ = ("hello", "data_endpoint", "memory_bytes", "promised_epoch", "snapshots", "curve_key", "directory_id")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DATA_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMISED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    CURVE_KEY_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    data_endpoint: str
    memory_bytes: int
    promised_epoch: int
    snapshots: _containers.RepeatedCompositeFieldContainer[SnapshotInfo]
    curve_key: bytes
    directory_id: bytes
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., data_endpoint: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., promised_epoch: _Optional[int] = ..., snapshots: _Optional[_Iterable[_Union[SnapshotInfo, _Mapping]]] = ..., curve_key: _Optional[bytes] = ..., directory_id: _Optional[bytes] = ...) -> None: ...

class Promised(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("version", "digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.Version
    digest: bytes
    def __init__(self, version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class ConfigureRefused(_message.Message):
    __slots__ = ("refusal",)
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    refusal: _common_pb2.Refusal
    def __init__(self, refusal: _Optional[_Union[_common_pb2.Refusal, _Mapping]] = ...) -> None: ...

class SlaveBeat(_message.Message):
    __slots__ = ("staging_bytes", "served_bytes", "refused_chunks", "resident_bytes", "staging_open", "progress", "durable", "refused_connections", "refused_connection", "note")
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    SERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGING_OPEN_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CONNECTION_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    staging_bytes: int
    served_bytes: int
    refused_chunks: int
    resident_bytes: int
    staging_open: int
    progress: _containers.RepeatedCompositeFieldContainer[StagingProgress]
    durable: _common_pb2.Version
    refused_connections: int
    refused_connection: str
    note: str
    def __init__(self, staging_bytes: _Optional[int] = ..., served_bytes: _Optional[int] = ..., refused_chunks: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., staging_open: _Optional[int] = ..., progress: _Optional[_Iterable[_Union[StagingProgress, _Mapping]]] = ..., durable: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., refused_connections: _Optional[int] = ..., refused_connection: _Optional[str] = ..., note: _Optional[str] = ...) -> None: ...

class StagingProgress(_message.Message):
    __slots__ = ("push", "attempt", "landed_bytes")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LANDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    push: _common_pb2.PushId
    attempt: int
    landed_bytes: int
    def __init__(self, push: _Optional[_Union[_common_pb2.PushId, _Mapping]] = ..., attempt: _Optional[int] = ..., landed_bytes: _Optional[int] = ...) -> None: ...

class Staged(_message.Message):
    __slots__ = ("push", "attempt", "digest")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    push: _common_pb2.PushId
    attempt: int
    digest: bytes
    def __init__(self, push: _Optional[_Union[_common_pb2.PushId, _Mapping]] = ..., attempt: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class BlockGram(_message.Message):
    __slots__ = ("block", "gram", "nonfinite_elems")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    GRAM_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_ELEMS_FIELD_NUMBER: _ClassVar[int]
    block: int
    gram: _containers.RepeatedScalarFieldContainer[float]
    nonfinite_elems: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block: _Optional[int] = ..., gram: _Optional[_Iterable[float]] = ..., nonfinite_elems: _Optional[_Iterable[int]] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("round", "blocks", "directions", "all_zero")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIRECTIONS_FIELD_NUMBER: _ClassVar[int]
    ALL_ZERO_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    blocks: _containers.RepeatedCompositeFieldContainer[BlockGram]
    directions: _containers.RepeatedScalarFieldContainer[float]
    all_zero: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockGram, _Mapping]]] = ..., directions: _Optional[_Iterable[float]] = ..., all_zero: _Optional[_Iterable[bool]] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("round", "digest")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    digest: bytes
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class RoundRefused(_message.Message):
    __slots__ = ("round", "command", "refusal")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    command: str
    refusal: _common_pb2.Refusal
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., command: _Optional[str] = ..., refusal: _Optional[_Union[_common_pb2.Refusal, _Mapping]] = ...) -> None: ...

class Flipped(_message.Message):
    __slots__ = ("round", "version")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    version: _common_pb2.Version
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ...) -> None: ...

class CommitRecord(_message.Message):
    __slots__ = ("version", "round", "record", "refusal")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.Version
    round: _common_pb2.RoundId
    record: bytes
    refusal: _common_pb2.Refusal
    def __init__(self, version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., record: _Optional[bytes] = ..., refusal: _Optional[_Union[_common_pb2.Refusal, _Mapping]] = ...) -> None: ...

class ShardList(_message.Message):
    __slots__ = ("round", "theta", "momentum")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    THETA_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    theta: _containers.RepeatedScalarFieldContainer[int]
    momentum: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., theta: _Optional[_Iterable[int]] = ..., momentum: _Optional[_Iterable[int]] = ...) -> None: ...

class SlaveCommand(_message.Message):
    __slots__ = ("run_id", "epoch", "incarnation", "cause_id", "welcome", "configure", "open_staging", "close_staging", "measure", "prepare", "abort_round", "commit", "retain", "stop", "send_commit_record", "allow", "list_shard", "move_blocks")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_ID_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    OPEN_STAGING_FIELD_NUMBER: _ClassVar[int]
    CLOSE_STAGING_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    ABORT_ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SEND_COMMIT_RECORD_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FIELD_NUMBER: _ClassVar[int]
    LIST_SHARD_FIELD_NUMBER: _ClassVar[int]
    MOVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    incarnation: _common_pb2.Incarnation
    cause_id: str
    welcome: Welcome
    configure: Configure
    open_staging: OpenStaging
    close_staging: CloseStaging
    measure: Measure
    prepare: Prepare
    abort_round: AbortRound
    commit: Commit
    retain: Retain
    stop: StopSlave
    send_commit_record: SendCommitRecord
    allow: Allow
    list_shard: ListShard
    move_blocks: MoveBlocks
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., incarnation: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., cause_id: _Optional[str] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., configure: _Optional[_Union[Configure, _Mapping]] = ..., open_staging: _Optional[_Union[OpenStaging, _Mapping]] = ..., close_staging: _Optional[_Union[CloseStaging, _Mapping]] = ..., measure: _Optional[_Union[Measure, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., abort_round: _Optional[_Union[AbortRound, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., retain: _Optional[_Union[Retain, _Mapping]] = ..., stop: _Optional[_Union[StopSlave, _Mapping]] = ..., send_commit_record: _Optional[_Union[SendCommitRecord, _Mapping]] = ..., allow: _Optional[_Union[Allow, _Mapping]] = ..., list_shard: _Optional[_Union[ListShard, _Mapping]] = ..., move_blocks: _Optional[_Union[MoveBlocks, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("hello", "settings")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    settings: _common_pb2.Settings
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., settings: _Optional[_Union[_common_pb2.Settings, _Mapping]] = ...) -> None: ...

class Configure(_message.Message):
    __slots__ = ("layout", "layout_hash", "placement", "staging_slots", "load", "load_round", "load_digest", "commit_hash", "commit_record", "pinned_versions", "origin", "origin_round", "empty")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    STAGING_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LOAD_ROUND_FIELD_NUMBER: _ClassVar[int]
    LOAD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMMIT_HASH_FIELD_NUMBER: _ClassVar[int]
    COMMIT_RECORD_FIELD_NUMBER: _ClassVar[int]
    PINNED_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_ROUND_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    layout: _common_pb2.Layout
    layout_hash: bytes
    placement: _common_pb2.PlacementSpec
    staging_slots: int
    load: _common_pb2.Version
    load_round: _common_pb2.RoundId
    load_digest: bytes
    commit_hash: bytes
    commit_record: bytes
    pinned_versions: int
    origin: _common_pb2.Version
    origin_round: _common_pb2.RoundId
    empty: bool
    def __init__(self, layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., layout_hash: _Optional[bytes] = ..., placement: _Optional[_Union[_common_pb2.PlacementSpec, _Mapping]] = ..., staging_slots: _Optional[int] = ..., load: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., load_round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., load_digest: _Optional[bytes] = ..., commit_hash: _Optional[bytes] = ..., commit_record: _Optional[bytes] = ..., pinned_versions: _Optional[int] = ..., origin: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., origin_round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., empty: _Optional[bool] = ...) -> None: ...

class ListShard(_message.Message):
    __slots__ = ("round", "version")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    version: _common_pb2.Version
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ...) -> None: ...

class MoveBlocks(_message.Message):
    __slots__ = ("round", "from_version", "to_version", "layout", "layout_hash", "placement", "sources", "staging_slots", "pinned_versions", "theta_digest", "momentum_digest")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FROM_VERSION_FIELD_NUMBER: _ClassVar[int]
    TO_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    STAGING_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PINNED_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    THETA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_DIGEST_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    from_version: _common_pb2.Version
    to_version: _common_pb2.Version
    layout: _common_pb2.Layout
    layout_hash: bytes
    placement: _common_pb2.PlacementSpec
    sources: _common_pb2.PlacementSpec
    staging_slots: int
    pinned_versions: int
    theta_digest: bytes
    momentum_digest: bytes
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., from_version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., to_version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., layout_hash: _Optional[bytes] = ..., placement: _Optional[_Union[_common_pb2.PlacementSpec, _Mapping]] = ..., sources: _Optional[_Union[_common_pb2.PlacementSpec, _Mapping]] = ..., staging_slots: _Optional[int] = ..., pinned_versions: _Optional[int] = ..., theta_digest: _Optional[bytes] = ..., momentum_digest: _Optional[bytes] = ...) -> None: ...

class SendCommitRecord(_message.Message):
    __slots__ = ("version", "round")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.Version
    round: _common_pb2.RoundId
    def __init__(self, version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ...) -> None: ...

class OpenStaging(_message.Message):
    __slots__ = ("push", "attempt", "slot", "base", "fence", "tokens", "ranges", "wire")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    push: _common_pb2.PushId
    attempt: int
    slot: int
    base: _common_pb2.Version
    fence: int
    tokens: int
    ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.DataRange]
    wire: _data_pb2.Codec
    def __init__(self, push: _Optional[_Union[_common_pb2.PushId, _Mapping]] = ..., attempt: _Optional[int] = ..., slot: _Optional[int] = ..., base: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., fence: _Optional[int] = ..., tokens: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[_common_pb2.DataRange, _Mapping]]] = ..., wire: _Optional[_Union[_data_pb2.Codec, str]] = ...) -> None: ...

class CloseStaging(_message.Message):
    __slots__ = ("push",)
    PUSH_FIELD_NUMBER: _ClassVar[int]
    push: _common_pb2.PushId
    def __init__(self, push: _Optional[_Union[_common_pb2.PushId, _Mapping]] = ...) -> None: ...

class StagedPush(_message.Message):
    __slots__ = ("push", "attempt")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    push: _common_pb2.PushId
    attempt: int
    def __init__(self, push: _Optional[_Union[_common_pb2.PushId, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class Measure(_message.Message):
    __slots__ = ("round", "version", "participants")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    version: _common_pb2.Version
    participants: _containers.RepeatedCompositeFieldContainer[StagedPush]
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., participants: _Optional[_Iterable[_Union[StagedPush, _Mapping]]] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("round", "from_version", "to_version", "accepted", "weights", "scale", "outer_lr", "momentum_decay", "momentum_lookahead", "gradient_weight", "averaged_share")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FROM_VERSION_FIELD_NUMBER: _ClassVar[int]
    TO_VERSION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    OUTER_LR_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_DECAY_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    AVERAGED_SHARE_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    from_version: _common_pb2.Version
    to_version: _common_pb2.Version
    accepted: _containers.RepeatedCompositeFieldContainer[StagedPush]
    weights: _containers.RepeatedScalarFieldContainer[float]
    scale: float
    outer_lr: float
    momentum_decay: float
    momentum_lookahead: float
    gradient_weight: float
    averaged_share: float
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., from_version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., to_version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., accepted: _Optional[_Iterable[_Union[StagedPush, _Mapping]]] = ..., weights: _Optional[_Iterable[float]] = ..., scale: _Optional[float] = ..., outer_lr: _Optional[float] = ..., momentum_decay: _Optional[float] = ..., momentum_lookahead: _Optional[float] = ..., gradient_weight: _Optional[float] = ..., averaged_share: _Optional[float] = ...) -> None: ...

class AbortRound(_message.Message):
    __slots__ = ("round", "reason")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    reason: str
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("round", "version", "commit_hash", "commit_record")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMIT_HASH_FIELD_NUMBER: _ClassVar[int]
    COMMIT_RECORD_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    version: _common_pb2.Version
    commit_hash: bytes
    commit_record: bytes
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., commit_hash: _Optional[bytes] = ..., commit_record: _Optional[bytes] = ...) -> None: ...

class Retain(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[_common_pb2.Version]
    def __init__(self, versions: _Optional[_Iterable[_Union[_common_pb2.Version, _Mapping]]] = ...) -> None: ...

class AllowedKey(_message.Message):
    __slots__ = ("role", "owner", "curve_key")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    CURVE_KEY_FIELD_NUMBER: _ClassVar[int]
    role: KeyRole
    owner: str
    curve_key: bytes
    def __init__(self, role: _Optional[_Union[KeyRole, str]] = ..., owner: _Optional[str] = ..., curve_key: _Optional[bytes] = ...) -> None: ...

class Allow(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[AllowedKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[AllowedKey, _Mapping]]] = ...) -> None: ...

class StopSlave(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
