"""The events that a cluster's session takes, and the effects that it returns, which the shell carries out in order.

Whatever takes time is a job: a Run effect begins it, an event with the same number ends it (Done or Failed). All other
effects are done at once, on the training thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from dips.core.errors import DipsError, Refused
from dips.core.ids import Incarnation, PushId, Version
from dips.core.machine import Log as Log
from dips.core.machine import Record as Record
from dips.core.messages import ClusterReply, ClusterRequest, DataRange, HeartbeatReply, PullGrant, Ticket
from dips.core.wire import Codec
from dips.worker.state.work import Work

# ---- jobs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PushRecord:
    """The identity of one push, which a checkpoint directory keeps before the push's number is used.

    A cluster that dies after BeginPush learns from it, when it resumes, that the push may have been counted. base None:
    it seeds the run, or gives back the version that it `donates`.
    """

    id: PushId
    base: Version | None
    fence: int
    work: Work
    donates: Version | None = None


@dataclass(frozen=True)
class SendPush:
    """Send the push buffer to the slaves of the ticket, without the chunks that they hold already."""

    push: PushId
    ticket: Ticket


Command = ClusterRequest | PushRecord | SendPush | PullGrant


@dataclass(frozen=True)
class Run:
    """Begin a job.

    A request is sent to the master. A PushRecord is made durable, however long that takes (asked for only where
    SessionConfig.durable_pushes says so). The version of a PullGrant is fetched into the pull buffer.
    """

    job: int
    command: Command
    cause: str
    deadline_s: float = math.inf  # of a call


DigestOfSlave = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class Done:
    """The job has ended."""

    job: int
    # the master's answer, which may be a refusal; for a push that all slaves hold, the digests of the bytes sent to
    # each of them; None for a record that is durable, and for a version that is in the pull buffer and has the grant's
    # digests
    result: ClusterReply | Refused | DigestOfSlave | None = None
    seconds: float = 0.0  # how long a transfer took


@dataclass(frozen=True)
class Failed:
    """The job has failed; a record's, for good. Whether the master acted on a call without an answer is unknown."""

    job: int
    sentence: str
    # differences cannot be sent or fetched: a slave does not have the base of a push's, or those to the base of a pull
    base_gone: bool = False
    corrupt: bool = False  # the bytes of a pull repeatedly did not have the digest that the master gave


@dataclass(frozen=True)
class Delayed:
    """The job has not succeeded yet; the shell tries again by itself."""

    job: int
    sentence: str


@dataclass(frozen=True)
class Cancel:
    """End a transfer; how it ends no longer matters."""

    job: int


# ---- further effects -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CopyParameters:
    """Copy the live parameters to the push buffer: theta_at_push."""


@dataclass(frozen=True)
class CopyBase:
    """Copy theta_base to the push buffer, to the bit: the slaves have lost that version."""


class InstallMode(Enum):
    """Ways to install a pulled version as the live parameters (docs/protocol.md, what a verdict means)."""

    REPLACE = "theta = pulled, to the bit"
    REBASE_FROM_PUSH = "theta = pulled + (theta_now - theta_at_push)"
    REBASE_FROM_BASE = "theta = pulled + (theta_now - theta_base)"


@dataclass(frozen=True)
class Install:
    """Make the pull buffer the live parameters, and remember it as theta_base."""

    mode: InstallMode
    reset_inner: bool
    # of the change by the steps since theta_at_push (REBASE_FROM_PUSH): how much of it is kept
    share: float = 1.0


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
    """The session is over."""

    reason: str
    error: DipsError | None = None  # set if that is a failure, to be raised in the training loop


Effect = Run | Cancel | CopyParameters | CopyBase | Install | KeepResidual | ClearResidual | Record | Log | Finished

# ---- further events --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """The shell starts the session."""


@dataclass(frozen=True)
class Stepped:
    """One inner step was made on `tokens` tokens, of which `ranges` are leased. loss in nats per token."""

    tokens: int
    ranges: tuple[DataRange, ...] = ()
    loss: float = math.nan
    # so many were made, on all these tokens; more than one only where nothing had to be decided between them
    steps: int = 1


@dataclass(frozen=True)
class Beat:
    """The newest answer to this incarnation's heartbeats."""

    incarnation: Incarnation
    answer: HeartbeatReply | Refused


@dataclass(frozen=True)
class LeaseWanted:
    """The training loop needs at least so many tokens more."""

    tokens: int


@dataclass(frozen=True)
class StopWanted:
    """This cluster must leave, whatever the run does, once the open push is decided. A second request with
    push_pending=False waits for nothing; any second one ends the patience of the first."""

    reason: str
    # steps that are not in it are pushed too; False: the parameters may be in the middle of a step
    push_pending: bool = True
    # the loop has come to its own end: until the run has merged its first pushes, it waits for that as long as a loop
    # trains while the master is away
    patient: bool = False


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Started | Stepped | Done | Failed | Delayed | Beat | LeaseWanted | StopWanted | Tick
