"""The job under way on a slave's memory, and the messages about one that failed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.errors import Refused
from dips.core.ids import RoundId
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
    return effects.Log("WARNING", key, sentence, cause)
