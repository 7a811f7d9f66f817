"""Messages between operators and master; import them from dips.core.messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from dips.core.ids import Incarnation, RoundId, Version
from dips.core.messages_shared import NAN, Settings


@dataclass(frozen=True)
class ClusterStatus:
    cluster_id: str
    incarnation: Incarnation | None = None
    alive: bool = False
    phase: str = ""
    beat_age_s: float = 0.0
    steps: int = 0
    tokens_per_s: float = 0.0
    steps_per_s: float = 0.0
    loss: float = NAN
    base: Version | None = None
    tokens_applied: int = 0
    pushes_applied: int = 0
    pushes_excluded: int = 0
    pushes_aborted: int = 0
    incarnations: int = 0
    last_verdict: str = ""
    last_reason: str = ""
    local_steps: int = 0
    last_norm: float = NAN
    last_z: float = NAN
    last_cosine: float = NAN
    quarantined: bool = False
    leased_tokens: int = 0
    note: str = ""
    steps_total: int = 0
    cosine_usual: float = NAN
    cosine_rounds: int = 0
    direction_alarm: bool = False
    tokens_per_step: float = 0.0
    draining: bool = False


@dataclass(frozen=True)
class SlaveStatus:
    slave_id: str
    incarnation: Incarnation | None = None
    alive: bool = False
    phase: str = ""
    beat_age_s: float = 0.0
    data_endpoint: str = ""
    version: Version | None = None
    staging_bytes: int = 0
    served_bytes: int = 0
    refused_chunks: int = 0
    resident_bytes: int = 0
    incarnations: int = 0
    durable: Version | None = None
    refused_connections: int = 0
    trouble: str = ""


@dataclass(frozen=True)
class RoundSummary:
    round: RoundId
    outcome: str
    reason: str = ""
    version: Version | None = None
    accepted: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    kappa: float = NAN
    rho: float = NAN
    merged_norm: float = NAN
    tokens: int = 0
    wall_time_s: float = 0.0


@dataclass(frozen=True)
class Alarm:
    """A condition, until it is over. kind: a word of master/state/status.py; clusters: empty for the run."""

    kind: str
    clusters: tuple[str, ...]
    sentence: str


@dataclass(frozen=True)
class StatusReply:
    run_id: str
    epoch: int
    published: Version | None
    tokens: int
    tk_max_tokens: int
    phase: str
    round: RoundId | None
    phase_age_s: float
    window_closes_in_s: float
    waiting_for: str
    rounds_committed: int = 0
    rounds_merged: int = 0
    rounds_void: int = 0
    rounds_aborted: int = 0
    clusters: tuple[ClusterStatus, ...] = ()
    slaves: tuple[SlaveStatus, ...] = ()
    recent_rounds: tuple[RoundSummary, ...] = ()
    paused: bool = False
    stopping: bool = False
    stopped: bool = False
    leased_tokens: int = 0
    excluded_tokens: int = 0
    settings: Settings = field(default_factory=Settings)
    durable: Version | None = None
    recovery: str = ""
    reshard: str = ""
    refused_calls: int = 0
    refused_call: str = ""
    alarms: tuple[Alarm, ...] = ()
    waiting_code: str = "none"
    waiting_slaves: tuple[str, ...] = ()


@dataclass(frozen=True)
class StatusRequest:
    run_id: str = ""


@dataclass(frozen=True)
class WatchRequest:
    run_id: str = ""
    interval_s: float = 1.0


@dataclass(frozen=True)
class OperatorRequest:
    run_id: str = ""
    reason: str = ""


@dataclass(frozen=True)
class EvictRequest:
    run_id: str
    cluster_id: str
    reason: str = ""


@dataclass(frozen=True)
class DrainRequest:
    run_id: str
    cluster_id: str
    reason: str = ""


@dataclass(frozen=True)
class ReshardRequest:
    run_id: str
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    cancel: bool = False
    reason: str = ""


@dataclass(frozen=True)
class ExtendRequest:
    """Takes back the run's end. tk_max_tokens: its new limit, 0: as it is; no_limit: none instead."""

    run_id: str = ""
    tk_max_tokens: int = 0
    no_limit: bool = False
    reason: str = ""


@dataclass(frozen=True)
class OperatorReply:
    sentence: str
