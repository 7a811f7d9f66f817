from dips.protos import common_pb2 as _common_pb2
from dips.protos import options_pb2 as _options_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("run_id", "interval_s")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    interval_s: float
    def __init__(self, run_id: _Optional[str] = ..., interval_s: _Optional[float] = ...) -> None: ...

class OperatorRequest(_message.Message):
    __slots__ = ("run_id", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("run_id", "cluster_id", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    cluster_id: str
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., cluster_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("run_id", "cluster_id", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    cluster_id: str
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., cluster_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ReshardRequest(_message.Message):
    __slots__ = ("run_id", "add", "remove", "cancel", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    add: _containers.RepeatedScalarFieldContainer[str]
    remove: _containers.RepeatedScalarFieldContainer[str]
    cancel: bool
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., add: _Optional[_Iterable[str]] = ..., remove: _Optional[_Iterable[str]] = ..., cancel: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("run_id", "tk_max_tokens", "no_limit", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TK_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NO_LIMIT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    tk_max_tokens: int
    no_limit: bool
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., tk_max_tokens: _Optional[int] = ..., no_limit: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class OperatorReply(_message.Message):
    __slots__ = ("sentence",)
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    sentence: str
    def __init__(self, sentence: _Optional[str] = ...) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("cluster_id", "incarnation", "alive", "phase", "beat_age_s", "steps", "tokens_per_s", "steps_per_s", "loss", "base", "tokens_applied", "pushes_applied", "pushes_excluded", "pushes_aborted", "incarnations", "last_verdict", "last_reason", "local_steps", "last_norm", "last_z", "last_cosine", "quarantined", "leased_tokens", "note", "steps_total", "cosine_usual", "cosine_rounds", "direction_alarm", "tokens_per_step", "draining", "ranks", "late_ranks")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_APPLIED_FIELD_NUMBER: _ClassVar[int]
    PUSHES_APPLIED_FIELD_NUMBER: _ClassVar[int]
    PUSHES_EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    PUSHES_ABORTED_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    LAST_VERDICT_FIELD_NUMBER: _ClassVar[int]
    LAST_REASON_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    LAST_NORM_FIELD_NUMBER: _ClassVar[int]
    LAST_Z_FIELD_NUMBER: _ClassVar[int]
    LAST_COSINE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    LEASED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    STEPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    COSINE_USUAL_FIELD_NUMBER: _ClassVar[int]
    COSINE_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_ALARM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    LATE_RANKS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    incarnation: _common_pb2.Incarnation
    alive: bool
    phase: str
    beat_age_s: float
    steps: int
    tokens_per_s: float
    steps_per_s: float
    loss: float
    base: _common_pb2.Version
    tokens_applied: int
    pushes_applied: int
    pushes_excluded: int
    pushes_aborted: int
    incarnations: int
    last_verdict: str
    last_reason: str
    local_steps: int
    last_norm: float
    last_z: float
    last_cosine: float
    quarantined: bool
    leased_tokens: int
    note: str
    steps_total: int
    cosine_usual: float
    cosine_rounds: int
    direction_alarm: bool
    tokens_per_step: float
    draining: bool
    ranks: int
    late_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cluster_id: _Optional[str] = ..., incarnation: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., alive: _Optional[bool] = ..., phase: _Optional[str] = ..., beat_age_s: _Optional[float] = ..., steps: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., steps_per_s: _Optional[float] = ..., loss: _Optional[float] = ..., base: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., tokens_applied: _Optional[int] = ..., pushes_applied: _Optional[int] = ..., pushes_excluded: _Optional[int] = ..., pushes_aborted: _Optional[int] = ..., incarnations: _Optional[int] = ..., last_verdict: _Optional[str] = ..., last_reason: _Optional[str] = ..., local_steps: _Optional[int] = ..., last_norm: _Optional[float] = ..., last_z: _Optional[float] = ..., last_cosine: _Optional[float] = ..., quarantined: _Optional[bool] = ..., leased_tokens: _Optional[int] = ..., note: _Optional[str] = ..., steps_total: _Optional[int] = ..., cosine_usual: _Optional[float] = ..., cosine_rounds: _Optional[int] = ..., direction_alarm: _Optional[bool] = ..., tokens_per_step: _Optional[float] = ..., draining: _Optional[bool] = ..., ranks: _Optional[int] = ..., late_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class SlaveStatus(_message.Message):
    __slots__ = ("slave_id", "incarnation", "alive", "phase", "beat_age_s", "data_endpoint", "version", "staging_bytes", "served_bytes", "refused_chunks", "resident_bytes", "incarnations", "durable", "refused_connections", "trouble")
    SLAVE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    DATA_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    SERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    slave_id: str
    incarnation: _common_pb2.Incarnation
    alive: bool
    phase: str
    beat_age_s: float
    data_endpoint: str
    version: _common_pb2.Version
    staging_bytes: int
    served_bytes: int
    refused_chunks: int
    resident_bytes: int
    incarnations: int
    durable: _common_pb2.Version
    refused_connections: int
    trouble: str
    def __init__(self, slave_id: _Optional[str] = ..., incarnation: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., alive: _Optional[bool] = ..., phase: _Optional[str] = ..., beat_age_s: _Optional[float] = ..., data_endpoint: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., staging_bytes: _Optional[int] = ..., served_bytes: _Optional[int] = ..., refused_chunks: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., incarnations: _Optional[int] = ..., durable: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., refused_connections: _Optional[int] = ..., trouble: _Optional[str] = ...) -> None: ...

class Alarm(_message.Message):
    __slots__ = ("kind", "clusters", "sentence")
    KIND_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    clusters: _containers.RepeatedScalarFieldContainer[str]
    sentence: str
    def __init__(self, kind: _Optional[str] = ..., clusters: _Optional[_Iterable[str]] = ..., sentence: _Optional[str] = ...) -> None: ...

class RoundSummary(_message.Message):
    __slots__ = ("round", "outcome", "reason", "version", "accepted", "excluded", "kappa", "rho", "merged_norm", "tokens", "wall_time_s")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    KAPPA_FIELD_NUMBER: _ClassVar[int]
    RHO_FIELD_NUMBER: _ClassVar[int]
    MERGED_NORM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_S_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    outcome: str
    reason: str
    version: _common_pb2.Version
    accepted: _containers.RepeatedScalarFieldContainer[str]
    excluded: _containers.RepeatedScalarFieldContainer[str]
    kappa: float
    rho: float
    merged_norm: float
    tokens: int
    wall_time_s: float
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., accepted: _Optional[_Iterable[str]] = ..., excluded: _Optional[_Iterable[str]] = ..., kappa: _Optional[float] = ..., rho: _Optional[float] = ..., merged_norm: _Optional[float] = ..., tokens: _Optional[int] = ..., wall_time_s: _Optional[float] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run_id", "epoch", "published", "tokens", "tk_max_tokens", "phase", "round", "phase_age_s", "window_closes_in_s", "waiting_for", "rounds_committed", "rounds_merged", "rounds_void", "rounds_aborted", "clusters", "slaves", "recent_rounds", "paused", "stopping", "stopped", "leased_tokens", "excluded_tokens", "settings", "durable", "recovery", "reshard", "refused_calls", "refused_call", "alarms", "waiting_code", "waiting_slaves", "decided")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TK_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PHASE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    WINDOW_CLOSES_IN_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_MERGED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_VOID_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_ABORTED_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    SLAVES_FIELD_NUMBER: _ClassVar[int]
    RECENT_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    LEASED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_FIELD_NUMBER: _ClassVar[int]
    RESHARD_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CALLS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CALL_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    WAITING_CODE_FIELD_NUMBER: _ClassVar[int]
    WAITING_SLAVES_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    published: _common_pb2.Version
    tokens: int
    tk_max_tokens: int
    phase: str
    round: _common_pb2.RoundId
    phase_age_s: float
    window_closes_in_s: float
    waiting_for: str
    rounds_committed: int
    rounds_merged: int
    rounds_void: int
    rounds_aborted: int
    clusters: _containers.RepeatedCompositeFieldContainer[ClusterStatus]
    slaves: _containers.RepeatedCompositeFieldContainer[SlaveStatus]
    recent_rounds: _containers.RepeatedCompositeFieldContainer[RoundSummary]
    paused: bool
    stopping: bool
    stopped: bool
    leased_tokens: int
    excluded_tokens: int
    settings: _common_pb2.Settings
    durable: _common_pb2.Version
    recovery: str
    reshard: str
    refused_calls: int
    refused_call: str
    alarms: _containers.RepeatedCompositeFieldContainer[Alarm]
    waiting_code: str
    waiting_slaves: _containers.RepeatedScalarFieldContainer[str]
    decided: _common_pb2.Version
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., published: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., tokens: _Optional[int] = ..., tk_max_tokens: _Optional[int] = ..., phase: _Optional[str] = ..., round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., phase_age_s: _Optional[float] = ..., window_closes_in_s: _Optional[float] = ..., waiting_for: _Optional[str] = ..., rounds_committed: _Optional[int] = ..., rounds_merged: _Optional[int] = ..., rounds_void: _Optional[int] = ..., rounds_aborted: _Optional[int] = ..., clusters: _Optional[_Iterable[_Union[ClusterStatus, _Mapping]]] = ..., slaves: _Optional[_Iterable[_Union[SlaveStatus, _Mapping]]] = ..., recent_rounds: _Optional[_Iterable[_Union[RoundSummary, _Mapping]]] = ..., paused: _Optional[bool] = ..., stopping: _Optional[bool] = ..., stopped: _Optional[bool] = ..., leased_tokens: _Optional[int] = ..., excluded_tokens: _Optional[int] = ..., settings: _Optional[_Union[_common_pb2.Settings, _Mapping]] = ..., durable: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., recovery: _Optional[str] = ..., reshard: _Optional[str] = ..., refused_calls: _Optional[int] = ..., refused_call: _Optional[str] = ..., alarms: _Optional[_Iterable[_Union[Alarm, _Mapping]]] = ..., waiting_code: _Optional[str] = ..., waiting_slaves: _Optional[_Iterable[str]] = ..., decided: _Optional[_Union[_common_pb2.Version, _Mapping]] = ...) -> None: ...
