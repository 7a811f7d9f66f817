"""The effects: what the master's state asks its process to do. Completions of effects come back as events."""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.machine import Log as Log
from dips.core.machine import Record as Record
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
    """Write this entry after all earlier ones: what happened, and the whole state after it.

    JournalWritten(entry_id) follows when it is durable.
    """

    entry_id: int
    kind: str
    record_json: str
    snapshot_json: str


@dataclass(frozen=True)
class Halt:
    exit_code: int
    sentence: str


@dataclass(frozen=True)
class BeginAgain:
    """Begin a new epoch of at least this number and start the state machine again from the journal, in this process.

    Only with RunConfig.rebuild. Effects after it are not carried out; calls and links end as at a Halt.
    """

    at_least: int
    sentence: str


Effect = Reply | Refuse | ToSlave | CloseLink | WriteJournal | Record | Log | Halt | BeginAgain
