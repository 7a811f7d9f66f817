"""The protocol's version, and the capabilities that both sides may offer beyond it.

A change that an older peer cannot read raises PROTOCOL_VERSION; docs/protocol.md is tied to it by a test.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import Hello
from dips.core.release import VERSION
from dips.core.wire import Codec

PROTOCOL_VERSION = 1
"""What this build speaks."""

PROTOCOL_MIN = 1
"""The oldest version that this build still understands."""


def codec_capability(codec: Codec) -> str:
    """The capability that a peer offers if it can read this codec."""
    return f"codec-{codec.name.lower()}"


RANKS = "ranks"
"""The capability of a master and a slave that know a cluster whose ranks each send and fetch a part of a transfer."""

PULL_DIFFERENCES = "pull-differences"
"""The capability of a slave that rounds the versions of a run with pull_wire, and serves their differences."""

CAPABILITIES: frozenset[str] = frozenset(
    {
        "resume-chunks",
        RANKS,
        PULL_DIFFERENCES,
        codec_capability(Codec.F32),
        *(codec_capability(codec) for codec in Codec if codec.is_difference),
    }
)
"""What this build can do beyond the bare protocol; peers use the intersection."""

CURVE_KEY_BYTES = 32
"""Of a public key of the data flow, as every message carries it."""

MAX_RANKS = 1024
"""Ranks of one cluster. Each has a data key and a connection to every slave."""

MAX_ALLOWED_KEYS = 16_384
"""Keys in the list that every slave gets: one for each rank, reader and slave, at most 200 bytes each."""

FINISH_HOLD_S = 5.0
"""How long the master holds a FinishPush while a slave's STAGED is still on its way. Callers wait longer for an answer,
or they would never learn which slave lacks what."""

MAX_WINDOW_CHUNKS = 64
"""Longest window: the data port's queues hold this many messages for each peer; more could overflow them silently."""

MAX_LEASED_CHUNKS = 256
"""Chunks of data that one LeaseData may ask for, so that no cluster takes the run's data away from the others."""


OWN_HELLO = Hello(PROTOCOL_MIN, PROTOCOL_VERSION, tuple(sorted(CAPABILITIES)), f"dips {VERSION}")
"""What each process of this release says first."""


@dataclass(frozen=True)
class Agreement:
    """The protocol version and capabilities that two peers use with each other."""

    version: int
    capabilities: frozenset[str]


def agree(protocol_min: int, protocol_max: int, capabilities: Iterable[str], peer: str) -> Agreement:
    """Take the intersection of what a peer offers and what this build speaks.

    Raises Refused(PROTOCOL_VERSION) when no version is common.
    """
    version = min(PROTOCOL_VERSION, protocol_max)
    if version < max(PROTOCOL_MIN, protocol_min):
        raise Refused(
            RefusalCode.PROTOCOL_VERSION,
            f"{peer} speaks protocol versions {protocol_min} to {protocol_max}, this side {PROTOCOL_MIN} to "
            f"{PROTOCOL_VERSION}: install the same release of dips on both",
        )
    return Agreement(version, CAPABILITIES & frozenset(capabilities))
