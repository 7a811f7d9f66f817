"""The lines of a cluster's tape that its session writes, one class for each kind."""

from __future__ import annotations

from dips.core.ids import DataRange, Incarnation, PushId, RoundId, Version
from dips.core.machine import Record


class SessionJoined(Record, kind="joined"):
    """The master has admitted this process."""

    incarnation: Incarnation
    epoch: int
    seed: bool
    fence: int
    last_push: str
    published: Version | None
    run_id: str
    kept_tokens: int


class SessionFenced(Record, kind="fenced"):
    """This incarnation is over."""

    incarnation: Incarnation | None
    reason: str


class SessionLeaving(Record, kind="leaving"):
    """The cluster leaves, with work that does not count."""

    reason: str
    lost_steps: int
    lost_tokens: int


class SessionLeft(Record, kind="left"):
    """The cluster has left."""

    reason: str


class SessionFailed(Record, kind="failed"):
    """The cluster cannot go on."""

    reason: str


class PushBegun(Record, kind="push_begun"):
    """All pending work is to be pushed."""

    push: PushId
    base: Version | None
    tokens: int
    steps: int
    mean_loss: float


class PushSent(Record, kind="push_sent"):
    """Every slave holds the push."""

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


class PushFailed(Record, kind="push_failed"):
    """An attempt to send the push failed."""

    push: PushId
    reason: str


class PushRefused(Record, kind="push_refused"):
    """The master refused the push for good."""

    push: PushId
    code: str
    reason: str


class PushInWindow(Record, kind="admitted"):
    """The push is in the window of this round."""

    push: PushId
    round: RoundId | None


class BaseStale(Record, kind="stale"):
    """The push's base is too old."""

    push: PushId
    stale_kind: str
    reason: str


class VerdictReceived(Record, kind="verdict"):
    """The verdict of a push."""

    push: PushId
    verdict: str
    version: Version | None
    reason: str


class VersionDonated(Record, kind="donated"):
    """A copy of the base is given back to the slaves."""

    version: Version
    push: PushId


class DonationRefused(Record, kind="not_donated"):
    """The copy was not needed, or not whole."""

    push: PushId
    reason: str


class PullFailed(Record, kind="pull_failed"):
    """An attempt to pull failed."""

    reason: str


class VersionInstalled(Record, kind="installed"):
    """A pulled version is the base."""

    version: Version
    mode: str
    transfer_s: float
    pull_s: float
    reset_inner: bool
    tokens: int
    local_steps: int
    digest_of_slave: dict[str, bytes]
    wire: str
