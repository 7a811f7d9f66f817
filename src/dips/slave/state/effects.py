"""The effects of the slave's state machine. The slave's shell carries them out in order."""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.ids import Incarnation
from dips.core.machine import Log as Log
from dips.core.machine import Record as Record
from dips.core.messages import (
    Allow,
    Commit,
    Configure,
    ListShard,
    Measure,
    MoveBlocks,
    Prepare,
    Refusal,
    Retain,
    SendCommitRecord,
    SlaveBody,
    SnapshotInfo,
    StopSlave,
)
from dips.slave.state.staging import Slot

JobCommand = Configure | Measure | Prepare | Commit | ListShard | MoveBlocks
"""The commands that take time: one at a time works on memory."""


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
class Run:
    """Do this command. At most one is under way, and its end is Done or Failed with the same number.

    The machine keeps it until then as its job. A disk that fails after a commit point gets the same one again, with
    another number and a delay.
    """

    command: JobCommand
    cause: str
    began_s: float
    slots: tuple[Slot, ...] = ()  # Measure, Prepare: where the pushes are, in the command's order
    chunk_bytes: int = 0  # Configure, MoveBlocks: of the run's settings
    memory_files: str = "none"  # Configure: of the run's settings
    pull_wire: str = "float32"  # Configure, MoveBlocks: of the run's settings
    # Configure: memory is made, and filled from this snapshot (None: left empty); a shadow becomes a committed one. One
    # of another name than configure.load is its origin: it gets that name, and what came after it leaves.
    source: SnapshotInfo | None = None
    shadow: SnapshotInfo | None = None  # Commit, or a Configure that names it: it is in memory and becomes current
    durable: bool = True  # the shadow's file, or its manifest, must be on disk before the job is done
    delay_s: float = 0.0
    number: int = 0  # given when it begins


@dataclass(frozen=True)
class CancelMove:
    """The result of this move is no longer needed: end it soon, as Failed."""

    number: int


@dataclass(frozen=True)
class DropMoved:
    """Free the file that a move wrote."""

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
    command: SendCommitRecord


@dataclass(frozen=True)
class DropShadow:
    """Forget the shadow in memory; its file is free space."""

    shadow: SnapshotInfo


@dataclass(frozen=True)
class HoldSlots:
    """Accept chunks of the pushes in these slots, and forget what has landed of all others.

    Another attempt in the same opening keeps the chunks that have landed.
    """

    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class GiveUp:
    """This slave can never serve this master: end with the sentence and exit code 3."""

    refusal: Refusal


Effect = (
    SendUp
    | CloseLink
    | SavePromise
    | Serve
    | Run
    | CancelMove
    | DropMoved
    | SaveVersion
    | SaveLater
    | ReadRecord
    | DropShadow
    | HoldSlots
    | Record
    | Log
    | GiveUp
    | Retain
    | Allow
    | StopSlave
)
"""A command that needs no more than itself is its own effect: Retain keeps versions readable in addition to the current
one and the one before, Allow admits these keys to the data port and no others, StopSlave ends the process with exit
code 0."""
