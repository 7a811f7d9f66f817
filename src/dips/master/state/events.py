"""The events of the master's state machine. Tokens and links are numbers chosen by the server; effects name them."""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.ids import Incarnation
from dips.core.messages import (
    ClusterRequest,
    DrainRequest,
    EvictRequest,
    ExtendRequest,
    OperatorRequest,
    ReshardRequest,
    SlaveMessage,
    StatusRequest,
)


@dataclass(frozen=True)
class Pause:
    request: OperatorRequest


@dataclass(frozen=True)
class Resume:
    request: OperatorRequest


@dataclass(frozen=True)
class Stop:
    request: OperatorRequest


OperatorAction = StatusRequest | Pause | Resume | Stop | EvictRequest | DrainRequest | ReshardRequest | ExtendRequest


@dataclass(frozen=True)
class ClusterCall:
    """A call, or one beat of the heartbeat stream, of a cluster or reader."""

    token: int
    request: ClusterRequest


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
    message: SlaveMessage


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
