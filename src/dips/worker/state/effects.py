"""The effects of a cluster's session, carried out by the driver. Install, CopyParameters and CopyBase are done at once,
on the training thread; the completion of a call, a transfer or a write is an event.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dips.core.errors import DipsError
from dips.core.ids import PushId, Version
from dips.core.machine import Log as Log
from dips.core.machine import Record as Record
from dips.core.messages import ClusterRequest, PullGrant, Ticket
from dips.core.wire import Codec
from dips.worker.state.work import Work

# ---- push record -----------------------------------------------------------------------------------------------------
#
# The record of a push that must be on disk before its number is used: its identity, its work and its base version.
#
# A cluster that dies after BeginPush learns from this record, when it resumes, that the push may have been counted.
# A value only; worker/checkpoint_files.py writes it, worker/state/saved.py gives it its JSON form.


@dataclass(frozen=True)
class PushRecord:
    """The identity of one push. base None: it seeds the run, or gives back the version that it `donates`."""

    id: PushId
    base: Version | None
    fence: int
    work: Work
    donates: Version | None = None


# ---- effects ---------------------------------------------------------------------------------------------------------


class InstallMode(Enum):
    """Ways to install a pulled version as the live parameters (docs/protocol.md, what a verdict means)."""

    REPLACE = "theta = pulled, to the bit"
    REBASE_FROM_PUSH = "theta = pulled + (theta_now - theta_at_push)"
    REBASE_FROM_BASE = "theta = pulled + (theta_now - theta_base)"


@dataclass(frozen=True)
class CallMaster:
    """Call the master; answer with CallDone, CallFailed or CallRefused of this id."""

    call_id: int
    request: ClusterRequest
    deadline_s: float


@dataclass(frozen=True)
class CopyParameters:
    """Copy the live parameters to the push buffer: theta_at_push."""


@dataclass(frozen=True)
class CopyBase:
    """Copy theta_base to the push buffer, to the bit: the slaves have lost that version."""


@dataclass(frozen=True)
class PersistPush:
    """Make this record durable before the push's number is used; answer with PushRecorded or PushNotRecorded.

    Only where SessionConfig.durable_pushes says so. Never given up: it is tried until it succeeds.
    """

    record: PushRecord


@dataclass(frozen=True)
class StartPush:
    """Send the push buffer to the slaves, without the chunks that they hold already."""

    transfer_id: int
    push: PushId
    ticket: Ticket
    epoch: int
    cause: str


@dataclass(frozen=True)
class StartPull:
    transfer_id: int
    grant: PullGrant
    cause: str


@dataclass(frozen=True)
class CancelTransfer:
    """Cancel a transfer; its completion, if it still comes, is ignored."""

    transfer_id: int


@dataclass(frozen=True)
class Install:
    """Make the pull buffer the live parameters, and remember it as theta_base."""

    mode: InstallMode
    reset_inner: bool


@dataclass(frozen=True)
class KeepResidual:
    """The push buffer was applied as differences in this codec: keep what rounding lost as the next push's residual.

    residual = (push - base + residual) - differences sent; done before theta_base and the push buffer change.
    """

    wire: Codec


@dataclass(frozen=True)
class ClearResidual:
    """Set the residual to zero: the steps that it comes from no longer count."""


@dataclass(frozen=True)
class Finished:
    """The session is over. error: set if that is a failure, to be raised in the training loop."""

    reason: str
    error: DipsError | None = None


Effect = (
    CallMaster
    | CopyParameters
    | CopyBase
    | PersistPush
    | StartPush
    | StartPull
    | CancelTransfer
    | Install
    | KeepResidual
    | ClearResidual
    | Record
    | Log
    | Finished
)
