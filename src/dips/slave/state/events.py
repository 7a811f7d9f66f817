"""The events of the slave's state machine, made by the slave's shell and its helpers."""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.ids import Incarnation, PushId
from dips.core.messages import BlockGram, CommitRecord, Refusal, SlaveCommand, SnapshotInfo


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
    """Every chunk of this push that belongs to this slave has landed and is verified. opening: as in OpenSlot."""

    push: PushId
    attempt: int
    opening: int
    digest: bytes


@dataclass(frozen=True)
class LoadDone:
    """Memory is made and holds `current` (None: no version exists)."""

    job: int
    current: SnapshotInfo | None
    snapshots: tuple[SnapshotInfo, ...]


@dataclass(frozen=True)
class MeasureDone:
    """The Gram matrices of this slave's blocks, in block-id order; directions: as in Measured."""

    job: int
    blocks: tuple[BlockGram, ...]
    directions: tuple[float, ...] = ()


@dataclass(frozen=True)
class PrepareDone:
    """The shadow is in memory and, if the job was durable, on disk."""

    job: int
    shadow: SnapshotInfo
    snapshots: tuple[SnapshotInfo, ...]


@dataclass(frozen=True)
class CommitDone:
    """The manifest is on disk if the job was durable, memory has flipped, and the data port serves the new version."""

    job: int
    current: SnapshotInfo
    snapshots: tuple[SnapshotInfo, ...]


@dataclass(frozen=True)
class ListDone:
    """xxh3-64 of each chunk of the current version, in (block, offset) order."""

    job: int
    theta: tuple[int, ...]
    momentum: tuple[int, ...]


@dataclass(frozen=True)
class MoveDone:
    """The shard of the new placement is on disk, as a shadow."""

    job: int
    shadow: SnapshotInfo
    snapshots: tuple[SnapshotInfo, ...]


@dataclass(frozen=True)
class JobFailed:
    """The job failed and changed nothing that counts; the slave goes on. snapshots: on disk now, None if unchanged."""

    job: int
    refusal: Refusal
    snapshots: tuple[SnapshotInfo, ...] | None = None


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
    """The answer to SendCommitRecord. asked_by: as in ReadRecord."""

    asked_by: Incarnation | None
    answer: CommitRecord


JobEvent = LoadDone | MeasureDone | PrepareDone | CommitDone | ListDone | MoveDone | JobFailed
SaveEvent = Saved | SaveFailed | SaveAgain

Event = Linked | Unlinked | Fenced | Commanded | PromiseSaved | PushStaged | JobEvent | SaveEvent | RecordRead
