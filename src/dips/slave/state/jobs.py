"""The job under way on a slave's memory, and the messages about one that failed. Pure."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum

from dips.core.errors import Refused
from dips.core.ids import RoundId, Version
from dips.core.machine import MachineHistory, Phase, TransitionTable
from dips.core.messages import (
    Commit,
    Configure,
    ConfigureRefused,
    ListShard,
    Measure,
    MoveBlocks,
    Prepare,
    Refusal,
    RoundRefused,
    SnapshotInfo,
)
from dips.slave.state import effects
from dips.slave.state.effects import Effect

JobBody = Configure | Measure | Prepare | Commit | ListShard | MoveBlocks


@dataclass(frozen=True)
class Made:
    """The parameters that memory was allocated for; for equal ones it need not be allocated again."""

    layout_hash: bytes
    placement_hash: bytes
    staging_slots: int
    pinned_versions: int
    chunk_bytes: int


@dataclass(frozen=True)
class Job:
    """The job under way. slots: rows of staging memory that it reads."""

    number: int
    body: JobBody
    cause: str
    began_s: float
    slots: tuple[int, ...] = ()
    durable: bool = True


def is_load(info: SnapshotInfo | None, body: Configure) -> bool:
    """Whether this snapshot is the one that Configure asks for, by the name that it has now."""
    return info is not None and (info.version, info.round, info.digest) == (
        body.load,
        body.load_round,
        body.load_digest,
    )


def to_refusal(refused: Refused) -> Refusal:
    return Refusal(refused.code, refused.sentence, refused.retry_after_s)


def round_refused(round_id: RoundId, command: str, refused: Refused) -> Effect:
    return effects.SendUp(RoundRefused(round_id, command, to_refusal(refused)))


def say_failed(job: Job, refusal: Refusal) -> list[Effect]:
    """The message to the master and the log line about a failed job that changed nothing."""
    if isinstance(job.body, Configure):
        return [effects.SendUp(ConfigureRefused(refusal)), warn("configure", refusal.sentence, job.cause)]
    command = type(job.body).__name__.lower()
    return [
        effects.SendUp(RoundRefused(job.body.round, command, refusal)),
        warn(command, f"round {job.body.round}: {refusal.sentence}", job.cause),
    ]


def warn(key: str, sentence: str, cause: str = "") -> Effect:
    return effects.Log(logging.WARNING, key, sentence, cause)


# ---- saving ----------------------------------------------------------------------------------------------------------
#
# Durability "async": writes committed versions to disk afterwards, one at a time, always the newest next.
#
# A version is skipped when a newer one is there, a disk that fails is tried again, and no version is called durable
# before its manifest is. With durability "sync" this machine never leaves IDLE, because versions are durable before
# they are committed (docs/storage.md). Pure.


class SavePhase(Enum):
    IDLE = "IDLE"
    SAVING = "SAVING"
    WAITING = "WAITING"


_P = SavePhase

SAVE_TABLE: TransitionTable[SavePhase] = TransitionTable(
    "slave save",
    _P.IDLE,
    {
        (_P.IDLE, "behind"): {_P.SAVING},
        (_P.SAVING, "saved"): {_P.IDLE},
        (_P.SAVING, "failed"): {_P.WAITING},
        (_P.WAITING, "retry"): {_P.IDLE},
    },
)


class Saving:
    """State of the saves. durable: the newest version of the present history that is on disk with its COMMIT."""

    def __init__(self, story: MachineHistory) -> None:
        self.phase: Phase[SavePhase] = Phase(SAVE_TABLE, story)
        self.durable: Version | None = None
        self._newest: SnapshotInfo | None = None
        self._record = b""
        self._saves = 0
        self._valid_from = 1

    @property
    def behind(self) -> bool:
        """Whether the newest version that was committed is not on disk yet."""
        return self._newest is not None and self._newest.version != self.durable

    def committed(self, info: SnapshotInfo, record: bytes, durable: bool) -> None:
        """A version was committed in memory, or also on disk."""
        self._newest, self._record = info, record
        if durable:
            self.durable = info.version

    def loaded(self, info: SnapshotInfo | None) -> None:
        """Memory holds what the disk holds; a save that still runs belongs to the earlier state."""
        self._newest, self._record = info, b""
        self.durable = info.version if info is not None else None

    def dropped(self) -> None:
        """Memory is given up: nothing is to be saved, and a save that still runs does not count for later versions."""
        self.loaded(None)
        self._valid_from = self._saves + 1

    def begin(self, now_s: float) -> list[Effect]:
        """Save the newest version if it is not on disk. Call only while memory does not change."""
        if self._newest is None or not self.behind or self.phase.now is not SavePhase.IDLE:
            return []
        self.phase.move("behind", SavePhase.SAVING, now_s, str(self._newest.round))
        self._saves += 1
        return [effects.SaveVersion(self._saves, self._newest, self._record)]

    def saved(self, number: int, info: SnapshotInfo, now_s: float) -> list[Effect]:
        """A save succeeded; a later begin() saves what was committed meanwhile."""
        self.phase.move("saved", SavePhase.IDLE, now_s, str(info.round))
        if number >= self._valid_from:
            self.durable = info.version
        fields = {"version": str(info.version), "round": str(info.round), "digest": info.digest.hex()}
        return [effects.Record("persisted", str(info.round), dict(fields))]

    def failed(self, refusal: Refusal, now_s: float) -> list[Effect]:
        """A save failed: wait, then try again with the version that is newest then."""
        self.phase.move("failed", SavePhase.WAITING, now_s, "-", refusal.sentence)
        return [warn("save", refusal.sentence), effects.SaveLater(refusal.retry_after_s or RETRY_S)]

    def again(self, now_s: float) -> None:
        self.phase.move("retry", SavePhase.IDLE, now_s)


RETRY_S = 1.0
"""Wait after a failure that names no time of its own."""
