"""The lines of a slave's tape, one class for each kind."""

from __future__ import annotations

from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.machine import Record


class EpochPromised(Record, kind="promised"):
    """Nothing of an older epoch is obeyed from now on."""

    epoch: int


class IncarnationBegun(Record, kind="incarnation"):
    """The master gave this slave a new incarnation."""

    incarnation: Incarnation | None


class KeysAllowed(Record, kind="allowed"):
    """The data port admits the keys of these, and no others."""

    owners: list[str]


class CommandRefused(Record, kind="refused_command"):
    """A command was not obeyed."""

    command: str = ""
    reason: str


class StagingComplete(Record, kind="staged"):
    """All of a push is here, and verified."""

    push: PushId
    attempt: int
    digest: bytes


class ShardLoaded(Record, kind="configured"):
    """Memory is made, and holds this version, or none."""

    took_s: float
    version: Version | None = None
    round: RoundId | None = None
    digest: bytes | None = None


class ShardMeasured(Record, kind="measured"):
    """The pushes of a round were measured; sums of all blocks, unless they are too many."""

    took_s: float
    round: RoundId
    version: Version
    gram: list[str] | None = None
    nonfinite_elems: list[int] | None = None
    all_zero: list[bool] | None = None  # of each push; None: of none


class ShardListed(Record, kind="listed"):
    """The checksums of all chunks were sent."""

    took_s: float
    round: RoundId
    version: Version


class ShadowPrepared(Record, kind="prepared"):
    """The next version is here, not committed yet."""

    took_s: float
    version: Version
    round: RoundId
    digest: bytes
    durable: bool
    finite: bool


class VersionCommitted(Record, kind="committed"):
    """A version is the current one."""

    took_s: float
    version: Version
    round: RoundId
    digest: bytes
    commit_hash: bytes
    durable: bool


class OriginLoaded(Record, kind="rolled_back"):
    """An older version has a new name."""

    took_s: float
    version: Version
    round: RoundId
    digest: bytes
    origin: Version


class RoundAborted(Record, kind="aborted"):
    """A round was given up."""

    round: RoundId
    reason: str


class VersionSaved(Record, kind="persisted"):
    """A version that was committed in memory is on disk."""

    version: Version
    round: RoundId
    digest: bytes
