from dips.protos import options_pb2 as _options_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefusalCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_UNSPECIFIED: _ClassVar[RefusalCode]
    REFUSAL_PROTOCOL_VERSION: _ClassVar[RefusalCode]
    REFUSAL_RUN_ID: _ClassVar[RefusalCode]
    REFUSAL_LAYOUT: _ClassVar[RefusalCode]
    REFUSAL_DATA_PLAN: _ClassVar[RefusalCode]
    REFUSAL_FENCED: _ClassVar[RefusalCode]
    REFUSAL_STALE_EPOCH: _ClassVar[RefusalCode]
    REFUSAL_SEED_EXISTS: _ClassVar[RefusalCode]
    REFUSAL_TOKENS: _ClassVar[RefusalCode]
    REFUSAL_RANGES: _ClassVar[RefusalCode]
    REFUSAL_SEQ: _ClassVar[RefusalCode]
    REFUSAL_MEMORY: _ClassVar[RefusalCode]
    REFUSAL_CHUNK: _ClassVar[RefusalCode]
    REFUSAL_UNKNOWN_PUSH: _ClassVar[RefusalCode]
    REFUSAL_VERSION_GONE: _ClassVar[RefusalCode]
    REFUSAL_NONFINITE: _ClassVar[RefusalCode]
    REFUSAL_BUSY: _ClassVar[RefusalCode]
    REFUSAL_STOPPING: _ClassVar[RefusalCode]
    REFUSAL_MALFORMED: _ClassVar[RefusalCode]
    REFUSAL_NOT_LOOPBACK: _ClassVar[RefusalCode]
    REFUSAL_CONFIG: _ClassVar[RefusalCode]
    REFUSAL_DISK: _ClassVar[RefusalCode]
    REFUSAL_DIGEST: _ClassVar[RefusalCode]
    REFUSAL_UNKNOWN_NAME: _ClassVar[RefusalCode]
    REFUSAL_BASE_GONE: _ClassVar[RefusalCode]
    REFUSAL_KEY: _ClassVar[RefusalCode]
    REFUSAL_IDENTITY: _ClassVar[RefusalCode]
    REFUSAL_FROZEN: _ClassVar[RefusalCode]
    REFUSAL_NAME_TAKEN: _ClassVar[RefusalCode]

class DataMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_MODE_UNSPECIFIED: _ClassVar[DataMode]
    DATA_MODE_OWN: _ClassVar[DataMode]
    DATA_MODE_LEASED: _ClassVar[DataMode]

class VerdictKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[VerdictKind]
    VERDICT_APPLIED: _ClassVar[VerdictKind]
    VERDICT_EXCLUDED: _ClassVar[VerdictKind]
    VERDICT_ABORTED: _ClassVar[VerdictKind]
    VERDICT_ROLLED_BACK: _ClassVar[VerdictKind]
REFUSAL_UNSPECIFIED: RefusalCode
REFUSAL_PROTOCOL_VERSION: RefusalCode
REFUSAL_RUN_ID: RefusalCode
REFUSAL_LAYOUT: RefusalCode
REFUSAL_DATA_PLAN: RefusalCode
REFUSAL_FENCED: RefusalCode
REFUSAL_STALE_EPOCH: RefusalCode
REFUSAL_SEED_EXISTS: RefusalCode
REFUSAL_TOKENS: RefusalCode
REFUSAL_RANGES: RefusalCode
REFUSAL_SEQ: RefusalCode
REFUSAL_MEMORY: RefusalCode
REFUSAL_CHUNK: RefusalCode
REFUSAL_UNKNOWN_PUSH: RefusalCode
REFUSAL_VERSION_GONE: RefusalCode
REFUSAL_NONFINITE: RefusalCode
REFUSAL_BUSY: RefusalCode
REFUSAL_STOPPING: RefusalCode
REFUSAL_MALFORMED: RefusalCode
REFUSAL_NOT_LOOPBACK: RefusalCode
REFUSAL_CONFIG: RefusalCode
REFUSAL_DISK: RefusalCode
REFUSAL_DIGEST: RefusalCode
REFUSAL_UNKNOWN_NAME: RefusalCode
REFUSAL_BASE_GONE: RefusalCode
REFUSAL_KEY: RefusalCode
REFUSAL_IDENTITY: RefusalCode
REFUSAL_FROZEN: RefusalCode
REFUSAL_NAME_TAKEN: RefusalCode
DATA_MODE_UNSPECIFIED: DataMode
DATA_MODE_OWN: DataMode
DATA_MODE_LEASED: DataMode
VERDICT_UNSPECIFIED: VerdictKind
VERDICT_APPLIED: VerdictKind
VERDICT_EXCLUDED: VerdictKind
VERDICT_ABORTED: VerdictKind
VERDICT_ROLLED_BACK: VerdictKind

class Hello(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "capabilities", "software")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    software: str
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., software: _Optional[str] = ...) -> None: ...

class Incarnation(_message.Message):
    __slots__ = ("epoch", "n")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    n: int
    def __init__(self, epoch: _Optional[int] = ..., n: _Optional[int] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("timeline", "v")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    v: int
    def __init__(self, timeline: _Optional[int] = ..., v: _Optional[int] = ...) -> None: ...

class RoundId(_message.Message):
    __slots__ = ("epoch", "n")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    n: int
    def __init__(self, epoch: _Optional[int] = ..., n: _Optional[int] = ...) -> None: ...

class PushId(_message.Message):
    __slots__ = ("cluster", "incarnation", "seq")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    incarnation: Incarnation
    seq: int
    def __init__(self, cluster: _Optional[str] = ..., incarnation: _Optional[_Union[Incarnation, _Mapping]] = ..., seq: _Optional[int] = ...) -> None: ...

class Caller(_message.Message):
    __slots__ = ("run_id", "epoch", "name", "incarnation", "cause_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    name: str
    incarnation: Incarnation
    cause_id: str
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., name: _Optional[str] = ..., incarnation: _Optional[_Union[Incarnation, _Mapping]] = ..., cause_id: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "sentence", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: RefusalCode
    sentence: str
    retry_after_s: float
    def __init__(self, code: _Optional[_Union[RefusalCode, str]] = ..., sentence: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Parameter(_message.Message):
    __slots__ = ("name", "shape", "dtype", "layer", "averaged")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    AVERAGED_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    layer: str
    averaged: bool
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., layer: _Optional[str] = ..., averaged: _Optional[bool] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("parameters", "block_elems", "description")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ELEMS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    parameters: _containers.RepeatedCompositeFieldContainer[Parameter]
    block_elems: int
    description: str
    def __init__(self, parameters: _Optional[_Iterable[_Union[Parameter, _Mapping]]] = ..., block_elems: _Optional[int] = ..., description: _Optional[str] = ...) -> None: ...

class SlaveAddress(_message.Message):
    __slots__ = ("slave_id", "data_endpoint", "curve_key")
    SLAVE_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CURVE_KEY_FIELD_NUMBER: _ClassVar[int]
    slave_id: str
    data_endpoint: str
    curve_key: bytes
    def __init__(self, slave_id: _Optional[str] = ..., data_endpoint: _Optional[str] = ..., curve_key: _Optional[bytes] = ...) -> None: ...

class PlacementSpec(_message.Message):
    __slots__ = ("slaves", "slave_of_block", "placement_hash")
    SLAVES_FIELD_NUMBER: _ClassVar[int]
    SLAVE_OF_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_HASH_FIELD_NUMBER: _ClassVar[int]
    slaves: _containers.RepeatedCompositeFieldContainer[SlaveAddress]
    slave_of_block: _containers.RepeatedScalarFieldContainer[int]
    placement_hash: bytes
    def __init__(self, slaves: _Optional[_Iterable[_Union[SlaveAddress, _Mapping]]] = ..., slave_of_block: _Optional[_Iterable[int]] = ..., placement_hash: _Optional[bytes] = ...) -> None: ...

class DataPlan(_message.Message):
    __slots__ = ("mode", "corpus_digest", "total_tokens", "chunk_tokens")
    MODE_FIELD_NUMBER: _ClassVar[int]
    CORPUS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    mode: DataMode
    corpus_digest: bytes
    total_tokens: int
    chunk_tokens: int
    def __init__(self, mode: _Optional[_Union[DataMode, str]] = ..., corpus_digest: _Optional[bytes] = ..., total_tokens: _Optional[int] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class DataRange(_message.Message):
    __slots__ = ("lease_id", "pass_index", "chunk", "begin_tokens", "end_tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PASS_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    pass_index: int
    chunk: int
    begin_tokens: int
    end_tokens: int
    def __init__(self, lease_id: _Optional[int] = ..., pass_index: _Optional[int] = ..., chunk: _Optional[int] = ..., begin_tokens: _Optional[int] = ..., end_tokens: _Optional[int] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("push", "kind", "version", "reason", "reset_inner_optimizer", "round")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RESET_INNER_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    push: PushId
    kind: VerdictKind
    version: Version
    reason: str
    reset_inner_optimizer: bool
    round: RoundId
    def __init__(self, push: _Optional[_Union[PushId, _Mapping]] = ..., kind: _Optional[_Union[VerdictKind, str]] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., reason: _Optional[str] = ..., reset_inner_optimizer: _Optional[bool] = ..., round: _Optional[_Union[RoundId, _Mapping]] = ...) -> None: ...

class Settings(_message.Message):
    __slots__ = ("sync_every_steps", "dynamic_local_steps", "heartbeat_s", "evict_after_beats", "verdict_wait_s", "chunk_bytes", "window_chunks", "max_staleness_versions", "tk_max_tokens", "outer_lr", "outer_momentum", "preset", "durability", "max_message_bytes", "ticket_ttl_s", "round_timeout_s", "overlap", "verdict_wait_measured", "frozen", "memory_files", "overlap_share", "pull_wire", "async_lag_versions")
    SYNC_EVERY_STEPS_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    EVICT_AFTER_BEATS_FIELD_NUMBER: _ClassVar[int]
    VERDICT_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TK_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTER_LR_FIELD_NUMBER: _ClassVar[int]
    OUTER_MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    PRESET_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TICKET_TTL_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    VERDICT_WAIT_MEASURED_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FILES_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_SHARE_FIELD_NUMBER: _ClassVar[int]
    PULL_WIRE_FIELD_NUMBER: _ClassVar[int]
    ASYNC_LAG_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    sync_every_steps: int
    dynamic_local_steps: bool
    heartbeat_s: float
    evict_after_beats: int
    verdict_wait_s: float
    chunk_bytes: int
    window_chunks: int
    max_staleness_versions: int
    tk_max_tokens: int
    outer_lr: float
    outer_momentum: float
    preset: str
    durability: str
    max_message_bytes: int
    ticket_ttl_s: float
    round_timeout_s: float
    overlap: str
    verdict_wait_measured: bool
    frozen: str
    memory_files: str
    overlap_share: float
    pull_wire: str
    async_lag_versions: int
    def __init__(self, sync_every_steps: _Optional[int] = ..., dynamic_local_steps: _Optional[bool] = ..., heartbeat_s: _Optional[float] = ..., evict_after_beats: _Optional[int] = ..., verdict_wait_s: _Optional[float] = ..., chunk_bytes: _Optional[int] = ..., window_chunks: _Optional[int] = ..., max_staleness_versions: _Optional[int] = ..., tk_max_tokens: _Optional[int] = ..., outer_lr: _Optional[float] = ..., outer_momentum: _Optional[float] = ..., preset: _Optional[str] = ..., durability: _Optional[str] = ..., max_message_bytes: _Optional[int] = ..., ticket_ttl_s: _Optional[float] = ..., round_timeout_s: _Optional[float] = ..., overlap: _Optional[str] = ..., verdict_wait_measured: _Optional[bool] = ..., frozen: _Optional[str] = ..., memory_files: _Optional[str] = ..., overlap_share: _Optional[float] = ..., pull_wire: _Optional[str] = ..., async_lag_versions: _Optional[int] = ...) -> None: ...
