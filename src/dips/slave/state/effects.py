"""The effects of the slave's state machine. The slave's shell carries them out in order.

A Run effect is a job: at most one is under way, and its completion is an event with the same number.
delay_s: how long to wait before it begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.machine import Log as Log
from dips.core.machine import Record as Record
from dips.core.messages import AllowedKey, Configure, MoveBlocks, Prepare, Refusal, SlaveBody, SnapshotInfo
from dips.core.wire import Codec


@dataclass(frozen=True)
class SendUp:
    """Send this body to the master, if the stream is still open."""

    body: SlaveBody


@dataclass(frozen=True)
class CloseLink:
    """End the stream and dial again later."""

    sentence: str


@dataclass(frozen=True)
class SavePromise:
    """Write the promised epoch and fsync it, then PromiseSaved."""

    epoch: int


@dataclass(frozen=True)
class Serve:
    """The data port refuses chunks of older epochs from now on."""

    epoch: int


@dataclass(frozen=True)
class RunLoad:
    """Make memory for the blocks and fill it from `source` (None: leave it empty); a shadow becomes a committed one.

    A source of another name than configure.load is its origin: it gets that name, and what came after it leaves.
    """

    job: int
    configure: Configure
    chunk_bytes: int
    source: SnapshotInfo | None
    delay_s: float = 0.0


@dataclass(frozen=True)
class RunMeasure:
    """Gram matrices of the pushes in `slots` (cluster-id order) at the current version; bases: theirs."""

    job: int
    round: RoundId
    slots: tuple[int, ...]
    bases: tuple[Version | None, ...]


@dataclass(frozen=True)
class RunPrepare:
    """Compute the shadow of the next version from the pushes in `slots`; write it to disk if `durable`."""

    job: int
    prepare: Prepare
    slots: tuple[int, ...]
    durable: bool = True


@dataclass(frozen=True)
class RunCommit:
    """Write the manifest of the shadow in memory if `durable` (its file too, if it is not there); flip."""

    job: int
    shadow: SnapshotInfo
    commit_hash: bytes
    commit_record: bytes
    durable: bool = True
    delay_s: float = 0.0


@dataclass(frozen=True)
class RunList:
    """Checksums of all chunks of the current version, theta's and the momentum's, then ListDone."""

    job: int


@dataclass(frozen=True)
class RunMove:
    """Assemble a shard of another placement durably in a file, then MoveDone (slave/mover.py)."""

    job: int
    move: MoveBlocks
    chunk_bytes: int


@dataclass(frozen=True)
class CancelMove:
    """The result of this RunMove is no longer needed: end it soon, as failed."""

    job: int


@dataclass(frozen=True)
class DropMoved:
    """Free the file that a RunMove wrote."""

    shadow: SnapshotInfo


@dataclass(frozen=True)
class SaveVersion:
    """Write this version, the newest in memory, and its manifest to disk; then Saved or SaveFailed."""

    number: int
    info: SnapshotInfo
    commit_record: bytes


@dataclass(frozen=True)
class SaveLater:
    """Send the event SaveAgain after this time."""

    delay_s: float


@dataclass(frozen=True)
class ReadRecord:
    """Read the COMMIT record of a snapshot from its manifest, then RecordRead for the incarnation that asked."""

    asked_by: Incarnation | None
    version: Version
    round: RoundId


@dataclass(frozen=True)
class DropShadow:
    """Forget the shadow in memory; its file is free space."""

    shadow: SnapshotInfo


@dataclass(frozen=True)
class OpenSlot:
    """Accept chunks of this push. The same `opening` keeps the chunks that have landed, another one begins with none.

    A difference codec in `wire` is decoded against the parameters of `base`.
    """

    push: PushId
    attempt: int
    slot: int
    opening: int
    wire: Codec = Codec.F32
    base: Version | None = None


@dataclass(frozen=True)
class CloseSlot:
    """Accept no more chunks of this push, and forget those that landed."""

    push: PushId


@dataclass(frozen=True)
class CloseAllSlots:
    """Forget every push of the incarnation that ended."""


@dataclass(frozen=True)
class SetPins:
    """Keep these versions readable, in addition to the current one and the one before."""

    versions: tuple[Version, ...]


@dataclass(frozen=True)
class SetAllowed:
    """The data port admits these keys and no others, and no longer serves connections of other keys."""

    keys: tuple[AllowedKey, ...]


@dataclass(frozen=True)
class EndProcess:
    """The master asks this slave to end, exit code 0."""

    reason: str


@dataclass(frozen=True)
class GiveUp:
    """This slave can never serve this master: end with the sentence and exit code 3."""

    refusal: Refusal


Effect = (
    SendUp
    | CloseLink
    | SavePromise
    | Serve
    | RunLoad
    | RunMeasure
    | RunPrepare
    | RunCommit
    | RunList
    | RunMove
    | CancelMove
    | DropMoved
    | SaveVersion
    | SaveLater
    | ReadRecord
    | DropShadow
    | OpenSlot
    | CloseSlot
    | CloseAllSlots
    | SetPins
    | SetAllowed
    | Record
    | Log
    | EndProcess
    | GiveUp
)
