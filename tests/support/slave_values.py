"""The versions, rounds, pushes and snapshots that the tests of a slave's decisions speak of."""

from __future__ import annotations

from support.slave_wire import LAYOUT, placement_over, push_id

from dips.core import messages
from dips.core.errors import RefusalCode
from dips.core.ids import RoundId, Version

PLACEMENT = placement_over("s0")
V0, V1, V2 = (Version(1, v) for v in range(3))
R1, R2, R3 = (RoundId(1, n) for n in (1, 2, 3))
A, B = push_id("a"), push_id("b")


def snapshot(version: Version, round_id: RoundId, committed: bool = True, digest: bytes = b"") -> messages.SnapshotInfo:
    return messages.SnapshotInfo(
        version, round_id, LAYOUT.layout_hash, PLACEMENT.placement_hash, digest or str(version).encode(), committed,
        b"hash" if committed else b"",
    )  # fmt: skip


BASE = snapshot(V0, R1)
SHADOW = snapshot(V1, R2, committed=False)
NEXT = snapshot(V1, R2)
FULL = messages.Refusal(RefusalCode.DISK, "the disk is full")
FULL_NOW = messages.Refusal(RefusalCode.DISK, "the disk is full", 1.5)
WELCOME = messages.Welcome(messages.Hello(1, 1), messages.Settings())
ASYNC = messages.Settings(durability="async")
