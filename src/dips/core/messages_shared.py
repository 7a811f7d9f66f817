"""Values that several conversations share; import them from dips.core.messages, which says what they are for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from dips.core.errors import RefusalCode
from dips.core.ids import Incarnation, PushId, RoundId, Version

NAN = math.nan
"""Unknown, in a field that holds a measurement."""


class DataMode(IntEnum):
    OWN = 1
    LEASED = 2


class VerdictKind(IntEnum):
    APPLIED = 1
    EXCLUDED = 2
    ABORTED = 3
    ROLLED_BACK = 4


class StaleKind(IntEnum):
    VERSIONS = 1
    FENCE = 2
    TIMELINE = 3


@dataclass(frozen=True)
class Hello:
    protocol_min: int
    protocol_max: int
    capabilities: tuple[str, ...] = ()
    software: str = ""


@dataclass(frozen=True)
class Caller:
    run_id: str
    epoch: int
    name: str
    incarnation: Incarnation | None = None
    cause_id: str = ""


@dataclass(frozen=True)
class Refusal:
    code: RefusalCode
    sentence: str
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class SlaveAddress:
    slave_id: str
    data_endpoint: str
    curve_key: bytes = b""


@dataclass(frozen=True)
class PlacementSpec:
    """Mirrors the message Placement."""

    slaves: tuple[SlaveAddress, ...]
    slave_of_block: tuple[int, ...]
    placement_hash: bytes


@dataclass(frozen=True)
class DataPlan:
    mode: DataMode
    corpus_digest: bytes = b""
    total_tokens: int = 0
    chunk_tokens: int = 0


@dataclass(frozen=True, order=True)
class DataRange:
    lease_id: int
    pass_index: int
    chunk: int
    begin_tokens: int
    end_tokens: int

    @property
    def tokens(self) -> int:
        return self.end_tokens - self.begin_tokens


@dataclass(frozen=True)
class Verdict:
    push: PushId
    kind: VerdictKind
    version: Version | None
    reason: str = ""
    reset_inner_optimizer: bool = False
    round: RoundId | None = None


@dataclass(frozen=True)
class Settings:
    sync_every_steps: int = 64
    dynamic_local_steps: bool = False
    heartbeat_s: float = 2.0
    evict_after_beats: int = 5
    verdict_wait_s: float = 30.0
    chunk_bytes: int = 1 << 20
    window_chunks: int = 64
    max_staleness_versions: int = 0
    tk_max_tokens: int = 0
    outer_lr: float = 0.7
    outer_momentum: float = 0.8
    preset: str = "safe"
    durability: str = "sync"
    max_message_bytes: int = 64 << 20
    ticket_ttl_s: float = 60.0
    round_timeout_s: float = 30.0
    overlap: str = "none"
    verdict_wait_measured: bool = False
    frozen: str = "same"


@dataclass(frozen=True)
class Busy:
    retry_after_s: float
    sentence: str
