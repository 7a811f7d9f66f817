"""The events of the slave's state machine, made by the slave's shell and its helpers."""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.ids import Incarnation
from dips.core.messages import CommitRecord, Measured, Refusal, ShardList, SlaveCommand, SnapshotInfo
from dips.slave.state.staging import Slot


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
class Commanded:
    """A command arrived on the stream."""

    command: SlaveCommand


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
    result: SnapshotInfo | Measured | ShardList | None
    snapshots: tuple[SnapshotInfo, ...] | None = None  # on disk now, None if unchanged


@dataclass(frozen=True)
class Failed:
    """The job failed and changed nothing that counts; the slave goes on."""

    number: int
    refusal: Refusal
    snapshots: tuple[SnapshotInfo, ...] | None = None  # as in Done


@dataclass(frozen=True)
class Saved:
    """The version of SaveVersion is on disk with its manifest."""

    number: int
    info: SnapshotInfo
    snapshots: tuple[SnapshotInfo, ...]


@dataclass(frozen=True)
class SaveFailed:
    """The version of SaveVersion could not be written to disk."""

    number: int
    refusal: Refusal


@dataclass(frozen=True)
class SaveAgain:
    """The time of SaveLater has passed."""


@dataclass(frozen=True)
class RecordRead:
    """The answer to SendCommitRecord."""

    asked_by: Incarnation | None  # as in ReadRecord
    answer: CommitRecord


SaveEvent = Saved | SaveFailed | SaveAgain

Event = Linked | Unlinked | Fenced | Commanded | PromiseSaved | PushStaged | Done | Failed | SaveEvent | RecordRead
