"""What the master's state asks its server to do. An effect's completion, where it has one, is an event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dips.core.messages import ClusterReply, OperatorReply, Refusal, SlaveCommand, StatusReply


@dataclass(frozen=True)
class Reply:
    token: int
    body: ClusterReply | StatusReply | OperatorReply


@dataclass(frozen=True)
class Refuse:
    token: int
    refusal: Refusal


@dataclass(frozen=True)
class ToSlave:
    link: int
    command: SlaveCommand


@dataclass(frozen=True)
class CloseLink:
    link: int
    refusal: Refusal


@dataclass(frozen=True)
class WriteJournal:
    """Must be durable, after all earlier ones, before JournalWritten(entry_id) is said."""

    entry_id: int
    kind: str
    record_json: str
    snapshot_json: str


@dataclass(frozen=True)
class Record:
    """One line for the master's tape."""

    kind: str
    cause: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Log:
    """One line for people, written when the sentence of this key changes. Level as in logging."""

    level: int
    key: str
    sentence: str
    cause: str = ""


@dataclass(frozen=True)
class Halt:
    exit_code: int
    sentence: str


@dataclass(frozen=True)
class BeginAgain:
    """Begin a new epoch of at least this number and start the state machine anew from the journal, in this process.

    Comes only with RunConfig.rebuild. Nothing that follows it is carried out; calls and links end as at a Halt.
    """

    at_least: int
    sentence: str


Effect = Reply | Refuse | ToSlave | CloseLink | WriteJournal | Record | Log | Halt | BeginAgain
