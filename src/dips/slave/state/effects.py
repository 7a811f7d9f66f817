"""The effects of the slave's state machine, which the shell carries out in order; and its events, which shell and data
port make, some of them as the ends of effects."""

from __future__ import annotations

from dataclasses import dataclass

from dips.core import messages
from dips.core.ids import Incarnation
from dips.core.machine import Log as Log
from dips.core.machine import Record as Record
from dips.slave.state.staging import Slot

JobCommand = (
    messages.Configure
    | messages.Measure
    | messages.Prepare
    | messages.Commit
    | messages.ListShard
    | messages.MoveBlocks
)
"""The commands that take time: one at a time works on memory."""


@dataclass(frozen=True)
class SendUp:
    """Send this body to the master, if the stream is still open."""

    body: messages.SlaveBody


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
    settings: messages.Settings  # the run's
    slots: tuple[Slot, ...] = ()  # Measure, Prepare: where the pushes are, in the command's order
    # Configure: memory is made, and filled from this snapshot (None: left empty); a shadow becomes a committed one. One
    # of another name than configure.load is its origin: it gets that name, and what came after it leaves.
    source: messages.SnapshotInfo | None = None
    shadow: messages.SnapshotInfo | None = (
        None  # Commit, or a Configure that names it: it is in memory and becomes current
    )
    delay_s: float = 0.0
    number: int = 0  # given when it begins

    @property
    def durable(self) -> bool:
        """Whether the shadow's file, or its manifest, must be on disk before the job is done."""
        return self.settings.durability != "async"


@dataclass(frozen=True)
class CancelMove:
    """The result of this move is no longer needed: end it soon, as Failed."""

    number: int


@dataclass(frozen=True)
class SaveVersion:
    """Write this version, the newest in memory, and its manifest to disk; then Saved or SaveFailed."""

    number: int
    info: messages.SnapshotInfo
    commit_record: bytes


@dataclass(frozen=True)
class SaveLater:
    """Send the event SaveAgain after this time."""

    delay_s: float


@dataclass(frozen=True)
class DropShadow:
    """Forget this shadow, in memory or moved to disk by a RESHARD; its file is free space."""

    shadow: messages.SnapshotInfo


@dataclass(frozen=True)
class HoldSlots:
    """Accept chunks of the pushes in these slots, and forget what has landed of all others.

    Another attempt in the same opening keeps the chunks that have landed.
    """

    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class GiveUp:
    """This slave can never serve this master: end with the sentence and exit code 3."""

    refusal: messages.Refusal


Effect = (
    SendUp
    | CloseLink
    | SavePromise
    | Serve
    | Run
    | CancelMove
    | SaveVersion
    | SaveLater
    | DropShadow
    | HoldSlots
    | Record
    | Log
    | GiveUp
    | messages.SlaveCommand
    | messages.Retain
    | messages.Allow
    | messages.StopSlave
)
"""A command that needs no more than itself is its own effect: Retain keeps versions readable in addition to the current
one and the one before, Allow admits these keys to the data port and no others, StopSlave ends the process with exit
code 0. SlaveCommand is a SendCommitRecord with the incarnation that asks: read the record from its manifest, then
RecordRead."""


# ---- events ----


@dataclass(frozen=True)
class Linked:
    """A stream to the master is open."""


@dataclass(frozen=True)
class Unlinked:
    """The stream ended."""

    why: str


@dataclass(frozen=True)
class Fenced:
    """The master ended the stream because this incarnation is over: the next hello names none."""


@dataclass(frozen=True)
class PromiseSaved:
    """The promise of this epoch is on disk."""

    epoch: int


@dataclass(frozen=True)
class PushStaged:
    """Every chunk of the push in this slot that belongs to this slave has landed and is verified."""

    slot: Slot
    digest: bytes


@dataclass(frozen=True)
class Done:
    """The job with this number is done."""

    number: int
    # What is in memory now (Configure, Commit; None: no version exists), the shadow that was made (Prepare,
    # MoveBlocks), or the answer to the master itself (Measure, ListShard).
    result: messages.SnapshotInfo | messages.Measured | messages.ShardList | None
    snapshots: tuple[messages.SnapshotInfo, ...] | None = None  # on disk now, None if unchanged


@dataclass(frozen=True)
class Failed:
    """The job failed and changed nothing that counts; the slave goes on."""

    number: int
    refusal: messages.Refusal
    snapshots: tuple[messages.SnapshotInfo, ...] | None = None  # as in Done


@dataclass(frozen=True)
class Saved:
    """The version of SaveVersion is on disk with its manifest."""

    number: int
    info: messages.SnapshotInfo
    snapshots: tuple[messages.SnapshotInfo, ...]


@dataclass(frozen=True)
class SaveFailed:
    """The version of SaveVersion could not be written to disk."""

    number: int
    refusal: messages.Refusal


@dataclass(frozen=True)
class SaveAgain:
    """The time of SaveLater has passed."""


@dataclass(frozen=True)
class RecordRead:
    """The answer to SendCommitRecord."""

    asked_by: Incarnation | None
    answer: messages.CommitRecord


SaveEvent = Saved | SaveFailed | SaveAgain

OfMaster = Linked | Unlinked | Fenced | messages.SlaveCommand
"""A command that arrives on the stream is its own event."""

Event = OfMaster | PromiseSaved | PushStaged | Done | Failed | SaveEvent | RecordRead
