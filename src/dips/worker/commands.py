"""What a cluster's session asks of the model, as values: all ranks of a cluster carry out the same ones, in one order.

Several are effects of the session as they are (worker/state/effects.py); the others add what only the shell knows. The
leader of several ranks tells the others these commands, questions, and that training goes on, as bytes: JSON, in which
the master's messages are as they are on the wire, in base64; but GoOn, which ends every meeting, is a few fixed bytes.
No pickle: a rank carries out what is listed here, and nothing else.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from enum import Enum
from typing import Any, get_origin, get_type_hints

from dips.core.errors import ConfigError, DipsError, FatalError, RefusalCode, Refused, RemoteProtocolError, RetryLater
from dips.core.ids import PushId
from dips.core.messages import Caller, DataRange, PullGrant, Settings, Ticket
from dips.core.net.codec_protobuf import decode, encode
from dips.core.net.messages_pb2 import CODECS
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

# ---- what only several ranks are told --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """Say how your part of the running job stands (meetings.Report)."""


@dataclass(frozen=True)
class AskEnds:
    """Say how your part of this job ended."""

    job: int


@dataclass(frozen=True)
class BeginCheckpoint:
    """Copy your part of the checkpoint of this number, and have it written. session: JSON of the session."""

    number: int
    session: str


@dataclass(frozen=True)
class CommitCheckpoint:
    """Wait until your part is written, and say what."""


@dataclass(frozen=True)
class FindCheckpoint:
    """Say whether the checkpoint of this number can be read."""

    number: int


@dataclass(frozen=True)
class PutBack:
    """Go on from the one that you found, which is of the share that you have."""

    with_residual: bool


@dataclass(frozen=True)
class Ranges:
    """Parts of the corpus for all ranks. are_all: these are all that the cluster still holds; else they are added."""

    ranges: tuple[DataRange, ...]
    are_all: bool


@dataclass(frozen=True)
class GoOn:
    """Training goes on, and these are the news of the run."""

    # the run has ended for this cluster, or it leaves; released: the run itself lets it go; ends: for a SIGTERM
    done: bool = False
    released: bool = False
    ends: bool = False
    # the base, both 0 when there is none
    timeline: int = 0
    version: int = 0
    progress: int = 0  # tokens of the run
    next_meeting_steps: int = 1
    push_is_near: bool = False  # a push is due at the next meeting
    local_steps: int = 0  # between two pushes
    total_tokens: int = 0  # after which the run ends; 0: unknown
    times_forgotten: int = 0  # goes up when the master took leased ranges back
    resumed: bool = False  # from a checkpoint, at the start
    checkpoint_is_due: bool = False  # all are to ask for one at this step's end


@dataclass(frozen=True)
class GiveUp:
    """The leader has failed. kind: of its error, where all ranks are to raise the same."""

    kind: str
    sentence: str
    code: int = 0  # of a refusal

    @classmethod
    def of(cls, error: BaseException) -> GiveUp:
        code = error.code.value if isinstance(error, Refused) else 0
        return cls(type(error).__name__ if isinstance(error, DipsError) else "", str(error), code)

    def error(self) -> DipsError:
        """The error that a follower raises."""
        if self.kind == Refused.__name__:
            return Refused(RefusalCode(self.code), self.sentence)
        if self.kind == ConfigError.__name__:
            return ConfigError(self.sentence)
        if self.kind == RetryLater.__name__:
            return RetryLater(self.sentence)
        return FatalError("rank 0 of this cluster has failed: its own error says why")


Order = Command | Ask | AskEnds | BeginCheckpoint | CommitCheckpoint | FindCheckpoint | PutBack | Ranges | GoOn | GiveUp

_KINDS: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        ShareOut, Snapshot, CopyBase, Send, Fetch, KeepPush, Cancel, Install, KeepResidual, ClearResidual, Ask, AskEnds,
        BeginCheckpoint, CommitCheckpoint, FindCheckpoint, PutBack, Ranges, GiveUp,
    )
}  # fmt: skip

_HINTS = {kind: get_type_hints(kind) for kind in _KINDS.values()}
"""Types of their fields, which take longer to find than all else in an order takes to read."""

_GO_ON = b"G"
"""First byte of GoOn; JSON begins with a brace."""

_GO_ON_FIELDS = struct.Struct("<???qqqq?qqq??")


def to_bytes(order: Order) -> bytes:
    if isinstance(order, GoOn):
        return _GO_ON + _GO_ON_FIELDS.pack(*vars(order).values())
    values = {field.name: _written(getattr(order, field.name)) for field in fields(order)}
    return json.dumps({"order": type(order).__name__, **values}, separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Order:
    """Raises RemoteProtocolError for what is no order, as from a rank with another release."""
    try:
        if data[:1] == _GO_ON:
            return GoOn(*_GO_ON_FIELDS.unpack(data[1:]))
        raw = json.loads(data)
        kind = _KINDS[raw.pop("order")]
        hints = _HINTS[kind]
        if raw.keys() != hints.keys():
            raise ValueError(f"{kind.__name__} has fields {sorted(raw)}")
        order: Order = kind(**{name: _read(value, hints[name]) for name, value in raw.items()})
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, Refused) as error:
        raise RemoteProtocolError(
            f"rank 0 of this cluster sent an order that cannot be read ({error}): install the same release of dips on "
            "all of its ranks"
        ) from error
    return order


def _written(value: Any) -> Any:
    if type(value) in CODECS:
        return base64.b64encode(encode(value)).decode()
    if isinstance(value, Times):
        return asdict(value)
    if isinstance(value, tuple):
        return [astuple(part) for part in value]
    return value.name if isinstance(value, Enum) else value


def _read(value: Any, kind: Any) -> Any:
    if get_origin(kind) is tuple:
        for numbers in value:
            if any(type(number) is not int for number in numbers):
                raise ValueError(f"{tuple(numbers)} is no range of the corpus")
        return tuple(DataRange(*numbers) for numbers in value)
    if kind in CODECS:
        return decode(base64.b64decode(value, validate=True), kind)
    if kind is Times:
        return Times(**{field.name: float(value[field.name]) for field in fields(Times)})
    if issubclass(kind, Enum):
        return kind[value]
    if type(value) is not kind:
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return value
