"""The effects: what the master's state asks its process to do; and its events, some of which are completed effects.

Tokens and links are numbers chosen by the server; effects name them.
"""

from __future__ import annotations

from dataclasses import dataclass

from dips.core import messages
from dips.core.ids import Incarnation
from dips.core.machine import Log as Log
from dips.core.machine import Record as Record


@dataclass(frozen=True)
class Reply:
    token: int
    body: messages.ClusterReply | messages.StatusReply | messages.OperatorReply


@dataclass(frozen=True)
class Refuse:
    token: int
    refusal: messages.Refusal


@dataclass(frozen=True)
class ToSlave:
    link: int
    command: messages.SlaveCommand


@dataclass(frozen=True)
class CloseLink:
    link: int
    refusal: messages.Refusal


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


# ---- events ----


@dataclass(frozen=True)
class Pause:
    request: messages.OperatorRequest


@dataclass(frozen=True)
class Resume:
    request: messages.OperatorRequest


@dataclass(frozen=True)
class Stop:
    request: messages.OperatorRequest


OperatorAction = (
    messages.StatusRequest
    | Pause
    | Resume
    | Stop
    | messages.EvictRequest
    | messages.DrainRequest
    | messages.ReshardRequest
    | messages.ExtendRequest
)


@dataclass(frozen=True)
class ClusterCall:
    """A call, or one beat of the heartbeat stream, of a cluster or reader."""

    token: int
    request: messages.ClusterRequest


@dataclass(frozen=True)
class CallGone:
    """The caller hung up; its Reply is no longer wanted."""

    token: int


@dataclass(frozen=True)
class BeatsEnded:
    """A cluster's heartbeat stream broke, and no other of the same incarnation is open: its process may be dead."""

    cluster: str
    incarnation: Incarnation | None


@dataclass(frozen=True)
class OperatorCall:
    token: int
    action: OperatorAction


@dataclass(frozen=True)
class SlaveSaid:
    link: int
    message: messages.SlaveMessage


@dataclass(frozen=True)
class SlaveLinkDown:
    link: int


@dataclass(frozen=True)
class Revoked:
    """A certificate that was in use was revoked."""

    role: str  # a value of core/net/security.py's Role
    name: str
    reason: str


@dataclass(frozen=True)
class ReplicaNews:
    """What is wrong with the journal's replica that decisions are to wait for, or with the lease by which its standby
    takes over; empty: nothing."""

    trouble: str
    of_lease: bool = False


@dataclass(frozen=True)
class JournalWritten:
    """The entry is durable, and so is every earlier one."""

    entry_id: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    ClusterCall
    | CallGone
    | BeatsEnded
    | OperatorCall
    | SlaveSaid
    | SlaveLinkDown
    | Revoked
    | ReplicaNews
    | JournalWritten
    | Tick
)
