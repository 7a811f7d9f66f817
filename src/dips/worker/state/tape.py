"""The lines of a cluster's tape that its session writes, one class for each kind."""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.ids import DataRange, Incarnation, PushId, RoundId, Version
from dips.core.machine import Record


@dataclass(frozen=True, kw_only=True)
class SessionJoined(Record):
    """The master has admitted this process."""

    KIND = "joined"
    incarnation: Incarnation
    epoch: int
    seed: bool
    fence: int
    last_push: str
    published: Version | None
    run_id: str
    kept_tokens: int


@dataclass(frozen=True, kw_only=True)
class SessionFenced(Record):
    """This incarnation is over."""

    KIND = "fenced"
    incarnation: Incarnation | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class SessionLeaving(Record):
    """The cluster leaves, with work that does not count."""

    KIND = "leaving"
    reason: str
    lost_steps: int
    lost_tokens: int


@dataclass(frozen=True, kw_only=True)
class SessionLeft(Record):
    """The cluster has left."""

    KIND = "left"
    reason: str


@dataclass(frozen=True, kw_only=True)
class SessionFailed(Record):
    """The cluster cannot go on."""

    KIND = "failed"
    reason: str


@dataclass(frozen=True, kw_only=True)
class PushBegun(Record):
    """All pending work is to be pushed."""

    KIND = "push_begun"
    push: PushId
    base: Version | None
    tokens: int
    steps: int
    mean_loss: float


@dataclass(frozen=True, kw_only=True)
class PushSent(Record):
    """Every slave holds the push."""

    KIND = "push_sent"
    push: PushId
    attempt: int
    base: Version | None
    fence: int
    tokens: int
    ranges: tuple[DataRange, ...]
    digest_of_slave: dict[str, bytes]
    donates: Version | None
    transfer_s: float
    push_s: float
    wire: str


@dataclass(frozen=True, kw_only=True)
class PushFailed(Record):
    """An attempt to send the push failed."""

    KIND = "push_failed"
    push: PushId
    reason: str


@dataclass(frozen=True, kw_only=True)
class PushRefused(Record):
    """The master refused the push for good."""

    KIND = "push_refused"
    push: PushId
    code: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PushInWindow(Record):
    """The push is in the window of this round."""

    KIND = "admitted"
    push: PushId
    round: RoundId | None


@dataclass(frozen=True, kw_only=True)
class BaseStale(Record):
    """The push's base is too old."""

    KIND = "stale"
    push: PushId
    stale_kind: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class VerdictReceived(Record):
    """The verdict of a push."""

    KIND = "verdict"
    push: PushId
    verdict: str
    version: Version | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class VersionDonated(Record):
    """A copy of the base is given back to the slaves."""

    KIND = "donated"
    version: Version
    push: PushId


@dataclass(frozen=True, kw_only=True)
class DonationRefused(Record):
    """The copy was not needed, or not whole."""

    KIND = "not_donated"
    push: PushId
    reason: str


@dataclass(frozen=True, kw_only=True)
class PullFailed(Record):
    """An attempt to pull failed."""

    KIND = "pull_failed"
    reason: str


@dataclass(frozen=True, kw_only=True)
class VersionInstalled(Record):
    """A pulled version is the base."""

    KIND = "installed"
    version: Version
    mode: str
    transfer_s: float
    pull_s: float
    reset_inner: bool
    tokens: int
    local_steps: int
    digest_of_slave: dict[str, bytes]
    wire: str
