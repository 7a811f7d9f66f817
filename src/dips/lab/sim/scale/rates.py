"""Computes the durations of the simulation at scale: each is one of these formulas with a given rate.

Sizes follow docs/capacity.md (memory of a slave) and docs/architecture.md (what is copied where); float32 throughout.
Nothing here may depend on anything but its arguments.
"""

from __future__ import annotations

import math

from dips.core.layout import FLOAT32_BYTES

CONNECT_TRIPS, ENCRYPTED_TRIPS = 3, 2
"""Round trips until a connection carries the first request: TCP's, and ZeroMQ's greeting and READY; CURVE's key
exchange comes on top."""

FIRST_WINDOW_BYTES = 10 * 1448
"""What TCP sends before the first answer (RFC 6928): ten segments; it doubles with each round trip."""


def measure_s(n_elems: int, participants: int, memory_bytes_per_s: float) -> float:
    """Seconds of MEASURE, which reads theta and each participant's staging once."""
    return FLOAT32_BYTES * n_elems * (1 + participants) / memory_bytes_per_s


def outer_step_s(n_elems: int, accepted: int, memory_bytes_per_s: float) -> float:
    """Seconds of the outer step, which reads theta, momentum and the accepted stagings, and writes theta and momentum
    of the new version."""
    return FLOAT32_BYTES * n_elems * (4 + accepted) / memory_bytes_per_s


def snapshot_s(n_elems: int, disk_bytes_per_s: float) -> float:
    """Seconds in which a slave writes one snapshot durably, or reads it: theta and momentum."""
    return 2 * FLOAT32_BYTES * n_elems / disk_bytes_per_s


def copy_s(n_elems: int, copy_bytes_per_s: float) -> float:
    """Seconds in which a cluster copies the live parameters to or from its transfer buffer."""
    return FLOAT32_BYTES * n_elems / copy_bytes_per_s


def connect_s(round_trip_s: float, encrypted: bool) -> float:
    """Seconds until a new connection of the data flow carries its first request."""
    return (CONNECT_TRIPS + ENCRYPTED_TRIPS * encrypted) * round_trip_s


def ramp_s(bits_per_s: float, round_trip_s: float) -> float:
    """Seconds by which TCP's slow start delays what a new connection sends, compared with its full rate at once.

    It sends a window in each round trip until a window fills the link for as long: what the link could have carried
    meanwhile, less what it did.
    """
    bytes_per_s = bits_per_s / 8
    doublings = math.ceil(math.log2(max(1.0, bytes_per_s * round_trip_s / FIRST_WINDOW_BYTES)))
    sent_bytes = FIRST_WINDOW_BYTES * ((1 << doublings) - 1)
    return doublings * round_trip_s - sent_bytes / bytes_per_s
