"""Decides which keys this slave's data port admits, what the owner of each may ask, and how much at a time. Pure.

The list is the master's (Allow). A cluster has one key for each of its ranks, and each of them may do the same. A
connection belongs to one key for as long as it lasts. Every message is checked against the list as it is now: a key
that left it is refused from the next message on. Without a list no key is admitted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import Allow, AllowedKey, KeyRole
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.protocol import CURVE_KEY_BYTES, MAX_ALLOWED_KEYS

MAX_OWNER_CHARACTERS = 128


class Admission:
    """The list of admitted keys. A connection's user id is its key in hexadecimal, given when the key is admitted."""

    def __init__(self) -> None:
        self._listed: Mapping[str, AllowedKey] = {}

    def set_keys(self, keys: Sequence[AllowedKey]) -> None:
        """Replace the list: from now on these keys and no others are admitted."""
        self._listed = {allowed.curve_key.hex(): allowed for allowed in keys}

    @property
    def keys(self) -> Mapping[str, AllowedKey]:
        """The list, by user id: another object as soon as it is another list."""
        return self._listed

    def n_keys_above(self, most: int) -> int:
        """How many keys all owners together have beyond the first `most` of each."""
        keys_of = Counter((allowed.role, allowed.owner) for allowed in self._listed.values())
        return sum(max(0, n - most) for n in keys_of.values())

    def user_of(self, key: bytes) -> str | None:
        """The user id of a key that is on the list; None: it is not admitted."""
        user = key.hex()
        return user if user in self._listed else None

    def listed(self, user: str) -> bool:
        """Whether the key of this connection still is on the list."""
        return user in self._listed

    def owner(self, user: str) -> str:
        """Role and name of a user's owner, the same for all of its keys."""
        allowed = self._listed.get(user)
        return "no one" if allowed is None else owner_of(allowed.role, allowed.owner)

    def check(self, user: str, header: DataHeader) -> None:
        """Check a request against the list. Raises Refused(KEY) unless the connection's owner may make it.

        Only its own cluster may write or query a push; every listed owner may read parameters, slaves the momentum too.
        """
        allowed = self._listed.get(user)
        if allowed is None:
            raise Refused(
                RefusalCode.KEY,
                f"data key {user[:8]} is no longer on the master's list: its owner joined again, left, was evicted "
                "or revoked",
            )
        if header.op is DataOp.GET_CHUNK and (allowed.role is KeyRole.SLAVE or not header.momentum):
            return
        if header.op is DataOp.GET_CHUNK:
            raise Refused(RefusalCode.KEY, f"only slaves may read the momentum, not {self.owner(user)}")
        if allowed.role is not KeyRole.CLUSTER or header.push is None or header.push.cluster != allowed.owner:
            raise Refused(
                RefusalCode.KEY,
                f"push {header.push} is not {self.owner(user)}'s: a cluster sends its own pushes only",
            )


def owner_of(role: KeyRole, name: str) -> str:
    """As Admission.owner() says it."""
    return f"{role.name.lower()} {name}"


def what_is_wrong(allow: Allow) -> str:
    """Check a list of keys: the sentence that says why it cannot be used; empty when it can."""
    keys = allow.keys
    if len(keys) > MAX_ALLOWED_KEYS:
        return f"it lists {len(keys)} keys, at most {MAX_ALLOWED_KEYS} can be"
    if any(len(allowed.curve_key) != CURVE_KEY_BYTES for allowed in keys):
        return f"it lists a key that has not {CURVE_KEY_BYTES} bytes"
    if any(not 0 < len(allowed.owner) <= MAX_OWNER_CHARACTERS for allowed in keys):
        return f"it lists an owner whose name has not 1 to {MAX_OWNER_CHARACTERS} characters"
    if len({allowed.curve_key for allowed in keys}) != len(keys):
        return "it lists one key twice"
    return ""


# ---- credits ---------------------------------------------------------------------------------------------------------
#
# Sets how many unanswered requests each sender may have: the slave's side of the transfer schedule.
#
# A slave whose link or processor is the bottleneck serves a few streams at full rate and the rest slowly, since streams
# that share it equally would all end late. The stream with the shortest remaining time goes first, so that pushes that
# are nearly complete reach the window. How many run at full rate is found by trying: one more for an interval, kept if
# more bytes arrived in all; else one fewer, kept if not less arrived. So where the senders' own links are the
# bottleneck, all streams end up at full rate.
#
# A stream that is slow by itself takes no place from others, and every sender gets at least HELD requests, so none
# starves and the link is never idle for want of a request. All ranks of a cluster are one stream, which takes one
# place, whatever their number. Pure: time is an argument. It decides the rate only: a sender that ignores it breaks
# nothing, since the data port bounds what may be in flight.


Key = TypeVar("Key", bound=Hashable)

HELD = 2
"""Requests of each sender of a stream that is held back. Two keep even a slow link busy: while one is on its way in,
the answer to the other is on its way back (at 20 Mbit/s a 1 MiB chunk takes 0.4 s, a round trip over the sea 0.1 s).
One for each rank of a cluster was tried: over 50 ms, where slaves are just wide enough, a push then took 1.2 times as
long as alone instead of 1.1."""

INTERVAL_S = 0.25
"""Rates are taken over this long: some round trips, and dozens of chunks on a fast link."""

LEAST_BYTES = 8 << 20
LONGEST_INTERVAL_S = 4 * INTERVAL_S
"""An interval lasts until LEAST_BYTES came, since a rate of two chunks says little, but no longer than this."""

IDLE_S = 5.0
OPENED_IDLE_S = 600.0
"""A stream without a message for so long is forgotten; later if it was opened. One that sends again counts as of
unknown length."""

SLOW_SHARE = 0.5
"""A stream that at full rate makes less than this share of the fastest one's rate is slow by itself."""

GAIN, LOSS = 1.05, 0.95
"""Least gain of one more stream, and largest loss of one fewer, in the total rate: above the noise of intervals."""

FIRST_STREAMS = 2
REST_INTERVALS = 16
"""Between two tries once the number is found; a try in the wrong direction costs a part of one interval."""

MAX_STREAMS = 1024
"""Most streams that are tracked; all others are held back."""


class StreamCap:
    """Finds how many streams run at full rate: more as long as that increases the rate, then tries whether fewer do."""

    def __init__(self) -> None:
        self.streams = FIRST_STREAMS
        self._before: float | None = None
        self._direction = 1
        self._rest = 0

    def changed(self) -> None:
        """Streams opened or closed: earlier measurements cannot be compared any longer."""
        self._before = None
        self._direction, self._rest = 1, 0

    def measured(self, bytes_per_s: float, n_streams: int) -> None:
        """An interval is over in which `streams` of `n_streams` ran at full rate."""
        self.streams = min(self.streams, max(1, n_streams))
        if self._rest > 0:
            self._rest -= 1
            if self._rest == 0:
                self._direction, self._before = 1, None
            return
        if self._before is not None and bytes_per_s < self._before * (GAIN if self._direction > 0 else LOSS):
            self.streams -= self._direction
            self._turn_or_rest()
            return
        self._before = bytes_per_s
        if not 1 <= self.streams + self._direction <= n_streams:
            self._turn_or_rest()
            return
        self.streams += self._direction

    def _turn_or_rest(self) -> None:
        """Up was no use: try down once. Down was no use, or is at its end: leave it for a while."""
        if self._direction > 0 and self.streams > 1 and self._before is not None:
            self._direction = -1
            self.streams -= 1
        else:
            self._rest = REST_INTERVALS


@dataclass
class _Stream:
    """One sender's stream."""

    number: int
    remaining_bytes: float
    last_seen_s: float
    stays: bool
    came_bytes: int = 0
    able_bytes_per_s: float | None = None  # its rate while it was not held back; None until that was measured
    held: bool = False


class Credits(Generic[Key]):
    """Gives credits to the streams of one direction. most: requests of a stream at full rate."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._streams: dict[Key, _Stream] = {}
        self._cap = StreamCap()
        self._numbers = 0
        self._began_s = -math.inf
        self._came_bytes = 0

    def note_open(self, key: Key, remaining_bytes: float, now_s: float) -> None:
        """A push is expected, or has so many bytes left."""
        known = self._streams.get(key)
        if known is not None:
            known.remaining_bytes, known.stays = remaining_bytes, True
        else:
            self._add(key, remaining_bytes, now_s, stays=True)
        self._rank(now_s)

    def note_landed(self, key: Key, n_bytes: int, now_s: float) -> None:
        """Note that n_bytes of this stream arrived. A key that was never opened is a stream of unknown length."""
        self._settle(now_s)
        stream = self._streams.get(key)
        if stream is None:
            if len(self._streams) >= MAX_STREAMS:
                return
            stream = self._add(key, math.inf, now_s, stays=False)
            self._rank(now_s)
        stream.last_seen_s = now_s
        stream.came_bytes += n_bytes
        stream.remaining_bytes = max(0.0, stream.remaining_bytes - n_bytes)
        self._came_bytes += n_bytes

    def note_closed(self, key: Key, now_s: float) -> None:
        """Forget a stream that is complete, decided or gone; unknown keys are ignored."""
        if self._streams.pop(key, None) is not None:
            self._begin_interval(now_s)
            self._cap.changed()
            self._rank(now_s)

    def credit(self, key: Key, now_s: float) -> int:
        """Requests that each of this stream's senders may have unanswered from now on; at least 1."""
        self._settle(now_s)
        stream = self._streams.get(key)
        if stream is None:
            return self._most if len(self._streams) < MAX_STREAMS else min(HELD, self._most)
        return min(HELD, self._most) if stream.held else self._most

    # ---- parts ----

    def _add(self, key: Key, remaining_bytes: float, now_s: float, *, stays: bool) -> _Stream:
        self._numbers += 1
        self._streams[key] = _Stream(self._numbers, remaining_bytes, now_s, stays)
        self._begin_interval(now_s)
        self._cap.changed()
        return self._streams[key]

    def _begin_interval(self, now_s: float) -> None:
        self._began_s = now_s
        self._came_bytes = 0
        for stream in self._streams.values():
            stream.came_bytes = 0

    def _settle(self, now_s: float) -> None:
        """When an interval is over: take the rates, look for the number of streams, and rank again."""
        took_s = now_s - self._began_s
        if took_s < INTERVAL_S or (self._came_bytes < LEAST_BYTES and took_s < LONGEST_INTERVAL_S):
            return
        busy = [stream for stream in self._streams.values() if stream.came_bytes]
        for stream in busy:
            if not stream.held:
                stream.able_bytes_per_s = stream.came_bytes / took_s
        fastest = self._fastest()
        counted = [stream for stream in busy if not _is_slow(stream, fastest)]
        n_full = sum(not stream.held for stream in counted)
        # Which are slow may only just have become known: then it was not `streams` of them that were measured.
        as_tried = n_full == min(self._cap.streams, len(counted))
        if took_s < 2 * LONGEST_INTERVAL_S and len(counted) > 1 and as_tried:
            self._cap.measured(self._came_bytes / took_s, len(counted))
        for key in [
            k for k, s in self._streams.items() if now_s - s.last_seen_s > (OPENED_IDLE_S if s.stays else IDLE_S)
        ]:
            del self._streams[key]
        self._rank(now_s)
        self._begin_interval(now_s)

    def _fastest(self) -> float:
        return max((s.able_bytes_per_s or 0.0 for s in self._streams.values()), default=0.0)

    def _rank(self, now_s: float) -> None:
        """Of the streams that are not slow by themselves, the first run at full rate and the others are held back."""
        fastest, places = self._fastest(), self._cap.streams
        for stream in sorted(self._streams.values(), key=lambda s: (_left_s(s, fastest), s.number)):
            counts = not _is_slow(stream, fastest) and now_s - stream.last_seen_s <= LONGEST_INTERVAL_S
            stream.held = counts and places <= 0
            places -= counts


def _is_slow(stream: _Stream, fastest: float) -> bool:
    able = stream.able_bytes_per_s
    return able is not None and able < SLOW_SHARE * fastest


def _left_s(stream: _Stream, fastest: float) -> float:
    """Seconds that it still needs at full rate; one whose rate is not known yet may be as fast as the fastest."""
    return stream.remaining_bytes / (stream.able_bytes_per_s or fastest or 1.0)
