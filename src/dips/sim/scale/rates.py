"""Computes the durations of the simulation at scale: each is one of these formulas with a given rate.

Sizes follow docs/capacity.md (memory of a slave) and docs/architecture.md (what is copied where); float32 throughout.
Nothing here may depend on anything but its arguments.
"""

from __future__ import annotations

from dips.core.layout import FLOAT32_BYTES


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
