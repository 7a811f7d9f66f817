"""The events of a cluster's session. Call and transfer ids are the session's own; they come back in events."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dips.core.errors import Refused
from dips.core.ids import Incarnation, PushId
from dips.core.messages import ClusterReply, DataRange, HeartbeatReply


@dataclass(frozen=True)
class Started:
    """The driver starts the session."""


@dataclass(frozen=True)
class Stepped:
    """One inner step was made on `tokens` tokens, of which `ranges` are leased. loss in nats per token.

    may_push: whether a push may begin before the next step.
    """

    tokens: int
    ranges: tuple[DataRange, ...] = ()
    loss: float = math.nan
    may_push: bool = True


@dataclass(frozen=True)
class CallDone:
    call_id: int
    reply: ClusterReply


@dataclass(frozen=True)
class CallFailed:
    """No answer came, or too late: whether the master acted on the call is unknown."""

    call_id: int
    sentence: str


@dataclass(frozen=True)
class CallRefused:
    call_id: int
    refused: Refused


@dataclass(frozen=True)
class PushRecorded:
    """The record of this push is durable: its number may be used."""

    push: PushId


@dataclass(frozen=True)
class PushNotRecorded:
    """The record could not be written yet; the driver tries again by itself."""

    push: PushId
    sentence: str


@dataclass(frozen=True)
class PushSent:
    """All slaves hold all chunks; digests: of the bytes sent to each slave."""

    transfer_id: int
    digest_of_slave: tuple[tuple[str, bytes], ...]
    seconds: float


@dataclass(frozen=True)
class PushFailed:
    """The push failed. base_gone: a slave cannot decode differences, since it does not have their base version."""

    transfer_id: int
    sentence: str
    base_gone: bool = False


@dataclass(frozen=True)
class Pulled:
    """The whole version is in the pull buffer, checked against the grant's digests."""

    transfer_id: int
    seconds: float


@dataclass(frozen=True)
class PullFailed:
    """The pull failed. corrupt: the bytes repeatedly did not have the digest that the master gave."""

    transfer_id: int
    sentence: str
    corrupt: bool = False


@dataclass(frozen=True)
class Beat:
    """The newest answer to this incarnation's heartbeats."""

    incarnation: Incarnation
    reply: HeartbeatReply


@dataclass(frozen=True)
class BeatRefused:
    incarnation: Incarnation
    refused: Refused


@dataclass(frozen=True)
class LeaseWanted:
    """The training loop needs at least so many tokens more."""

    tokens: int


@dataclass(frozen=True)
class StopWanted:
    """This cluster must leave, whatever the run does, once the open push is decided.

    push_pending: steps that are not in it are pushed too; False: the parameters may be in the middle of a step. A
    second request with push_pending=False waits for nothing.
    """

    reason: str
    push_pending: bool = True


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    Started
    | Stepped
    | CallDone
    | CallFailed
    | CallRefused
    | PushRecorded
    | PushNotRecorded
    | PushSent
    | PushFailed
    | Pulled
    | PullFailed
    | Beat
    | BeatRefused
    | LeaseWanted
    | StopWanted
    | Tick
)
