"""Computes the durations of the simulation at scale: each is one of these formulas with a given rate.

Sizes follow docs/architecture.md (memory of a slave, what is copied where); float32 throughout. Nothing here may
depend on anything but its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

FLOAT32_BYTES = 4


def transfer_s(n_bytes: float, bits_per_s: float) -> float:
    """Seconds of a transfer that has its link for itself."""
    return 8.0 * n_bytes / bits_per_s


def measure_bytes(n_elems: int, participants: int) -> int:
    """Bytes that MEASURE reads: theta and each participant's staging, once."""
    return FLOAT32_BYTES * n_elems * (1 + participants)


def outer_step_bytes(n_elems: int, accepted: int) -> int:
    """Bytes that PREPARE moves: it reads theta, momentum and the accepted stagings, and writes new theta and
    momentum."""
    return FLOAT32_BYTES * n_elems * (4 + accepted)


def snapshot_bytes(n_elems: int) -> int:
    """Bytes that are written and fsynced before PREPARED: theta and momentum of the new version."""
    return 2 * FLOAT32_BYTES * n_elems


def measure_s(n_elems: int, participants: int, memory_bytes_per_s: float) -> float:
    return measure_bytes(n_elems, participants) / memory_bytes_per_s


def prepare_s(n_elems: int, accepted: int, memory_bytes_per_s: float, disk_bytes_per_s: float) -> float:
    """Seconds of the outer step and the durable shadow of its result."""
    step_s = outer_step_bytes(n_elems, accepted) / memory_bytes_per_s
    return step_s + snapshot_bytes(n_elems) / disk_bytes_per_s


def load_s(n_elems: int, disk_bytes_per_s: float) -> float:
    """Seconds in which a restarted slave reads its snapshot."""
    return snapshot_bytes(n_elems) / disk_bytes_per_s


def copy_s(n_elems: int, copy_bytes_per_s: float) -> float:
    """Seconds in which a cluster copies the live parameters to or from its transfer buffer."""
    return FLOAT32_BYTES * n_elems / copy_bytes_per_s


def fair_shares(wanted: Sequence[float], capacity: float) -> list[float]:
    """Max-min fair rates of flows that want so much and share `capacity`: no rate can grow without
    reducing that of a flow that has no more."""
    shares = [0.0] * len(wanted)
    left = capacity
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for done, index in enumerate(order):
        shares[index] = min(wanted[index], left / (len(order) - done))
        left -= shares[index]
    return shares
