"""What a cluster's session asks of the model, as values: all ranks of a cluster carry out the same ones, in one order.

Several are effects of the session as they are (worker/state/effects.py); the others add what only the shell knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.ids import PushId
from dips.core.messages import Caller, PullGrant, Settings, Ticket
from dips.worker.state.effects import Cancel, ClearResidual, CopyBase, Install, KeepResidual
from dips.worker.state.waiting import Times


@dataclass(frozen=True)
class ShareOut:
    """The data flow moves chunks of this size; ranks share the model out by whole chunks. Comes before all others."""

    chunk_bytes: int


@dataclass(frozen=True)
class Snapshot:
    """theta_at_push = the live parameters. may_stay_live: training will wait, so that no copy need be made; whole: the
    parameters themselves will be sent, not differences, so that checksums taken while copying are of use.
    """

    may_stay_live: bool
    whole: bool


@dataclass(frozen=True)
class Send:
    """Begin to send theta_at_push; the end is an event of this job."""

    job: int
    push: PushId
    ticket: Ticket
    caller: Caller
    settings: Settings
    times: Times


@dataclass(frozen=True)
class Fetch:
    """Begin to fetch a version; the end is an event of this job. The last two are those of Vectors.landing()."""

    job: int
    grant: PullGrant
    cause: str
    times: Times
    push_is_live: bool
    push_is_needed: bool


@dataclass(frozen=True)
class KeepPush:
    """Training goes on: theta_at_push must not be in the live parameters alone. needed: something will still be
    computed from it; else it is forgotten.
    """

    needed: bool


Command = ShareOut | Snapshot | CopyBase | Send | Fetch | KeepPush | Cancel | Install | KeepResidual | ClearResidual
