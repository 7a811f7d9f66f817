"""The lines of a slave's tape, one class for each kind."""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.machine import Record


@dataclass(frozen=True, kw_only=True)
class EpochPromised(Record):
    """Nothing of an older epoch is obeyed from now on."""

    KIND = "promised"
    epoch: int


@dataclass(frozen=True, kw_only=True)
class IncarnationBegun(Record):
    """The master gave this slave a new incarnation."""

    KIND = "incarnation"
    incarnation: Incarnation | None


@dataclass(frozen=True, kw_only=True)
class KeysAllowed(Record):
    """The data port admits the keys of these, and no others."""

    KIND = "allowed"
    owners: list[str]


@dataclass(frozen=True, kw_only=True)
class CommandRefused(Record):
    """A command was not obeyed."""

    KIND = "refused_command"
    command: str = ""
    reason: str


@dataclass(frozen=True, kw_only=True)
class StagingComplete(Record):
    """All of a push is here, and verified."""

    KIND = "staged"
    push: PushId
    attempt: int
    digest: bytes


@dataclass(frozen=True, kw_only=True)
class ShardLoaded(Record):
    """Memory is made, and holds this version, or none."""

    KIND = "configured"
    took_s: float
    version: Version | None = None
    round: RoundId | None = None
    digest: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class ShardMeasured(Record):
    """The pushes of a round were measured; sums of all blocks, unless they are too many."""

    KIND = "measured"
    took_s: float
    round: RoundId
    version: Version
    gram: list[str] | None = None
    nonfinite_elems: list[int] | None = None
    all_zero: list[bool] | None = None  # of each push; None: of none


@dataclass(frozen=True, kw_only=True)
class ShardListed(Record):
    """The checksums of all chunks were sent."""

    KIND = "listed"
    took_s: float
    round: RoundId
    version: Version


@dataclass(frozen=True, kw_only=True)
class ShadowPrepared(Record):
    """The next version is here, not committed yet."""

    KIND = "prepared"
    took_s: float
    version: Version
    round: RoundId
    digest: bytes
    durable: bool
    finite: bool


@dataclass(frozen=True, kw_only=True)
class VersionCommitted(Record):
    """A version is the current one."""

    KIND = "committed"
    took_s: float
    version: Version
    round: RoundId
    digest: bytes
    commit_hash: bytes
    durable: bool


@dataclass(frozen=True, kw_only=True)
class OriginLoaded(Record):
    """An older version has a new name."""

    KIND = "rolled_back"
    took_s: float
    version: Version
    round: RoundId
    digest: bytes
    origin: Version


@dataclass(frozen=True, kw_only=True)
class RoundAborted(Record):
    """A round was given up."""

    KIND = "aborted"
    round: RoundId
    reason: str


@dataclass(frozen=True, kw_only=True)
class VersionSaved(Record):
    """A version that was committed in memory is on disk."""

    KIND = "persisted"
    version: Version
    round: RoundId
    digest: bytes
