"""What a slave demands of a Configure, a Prepare and a Welcome before it acts on them. Pure; raises Refused."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import SlaveId
from dips.core.layout import Block
from dips.core.messages import Configure, Prepare, Settings, SnapshotInfo
from dips.core.placement import Placement, memory_bytes_needed

MAX_WINDOW_CHUNKS = 64
"""The data port's queues hold this many messages for each peer; a longer window could overflow them silently."""

MIN_CHUNK_BYTES = 1024
"""Smaller chunks would spend more on headers than on parameters."""


def own_blocks(slave_id: str, configure: Configure) -> list[Block]:
    """The blocks that the placement gives this slave, in block-id order. Raises Refused(CONFIG or LAYOUT)."""
    layout, spec = configure.layout, configure.placement
    if layout.layout_hash != configure.layout_hash:
        raise Refused(
            RefusalCode.LAYOUT,
            "the layout's hash does not fit the layout: master and slave differ in release",
        )
    names = tuple(SlaveId(address.slave_id) for address in spec.slaves)
    placement = Placement(names, spec.slave_of_block)
    if slave_id not in names:
        raise Refused(RefusalCode.CONFIG, f"the placement does not name slave {slave_id!r}: it has {', '.join(names)}")
    if len(spec.slave_of_block) != len(layout.blocks) or any(i >= len(names) for i in spec.slave_of_block):
        raise Refused(RefusalCode.CONFIG, f"the placement does not cover the layout's {len(layout.blocks)} blocks")
    if placement.placement_hash != spec.placement_hash:
        raise Refused(RefusalCode.CONFIG, "the placement's hash does not fit it: master and slave differ in release")
    return placement.blocks_of(SlaveId(slave_id), layout)


def check_memory(blocks: Sequence[Block], configure: Configure, memory_bytes: int) -> None:
    """Raises Refused(MEMORY) when the blocks do not fit what this slave may use, before anything is allocated."""
    n_elems = sum(block.n_elems for block in blocks)
    slots, pins = configure.staging_slots, configure.pinned_versions
    needed = memory_bytes_needed(n_elems, slots, pins)
    if needed > memory_bytes:
        raise Refused(
            RefusalCode.MEMORY,
            f"{n_elems} elements with {slots} staging slots and {pins} pinned versions need {needed} bytes, "
            f"this slave may use {memory_bytes}: raise its memory_bytes, start more slaves, or serve fewer clusters",
        )


def check_settings(settings: Settings, max_chunk_bytes: int) -> None:
    """Raises Refused(CONFIG) when the run's frames do not fit the limits that the data port was bound with."""
    size = settings.chunk_bytes
    if not MIN_CHUNK_BYTES <= size <= max_chunk_bytes or size % 4:
        raise Refused(
            RefusalCode.CONFIG,
            f"the run's chunk_bytes is {size}; this slave takes multiples of 4 from {MIN_CHUNK_BYTES} to "
            f"{max_chunk_bytes}: raise the slave's max_chunk_bytes or lower the master's chunk_bytes",
        )
    if not 1 <= settings.window_chunks <= MAX_WINDOW_CHUNKS:
        raise Refused(
            RefusalCode.CONFIG,
            f"the run's window_chunks is {settings.window_chunks}, slaves take 1 to {MAX_WINDOW_CHUNKS}: lower it "
            "on the master",
        )


def check_load(configure: Configure, current: SnapshotInfo | None, snapshots: Sequence[SnapshotInfo]) -> None:
    """Raises Refused(SEED_EXISTS) when a master that knows no version meets a slave that holds committed ones.

    `empty` says that the master knows of them: none is common to all slaves, and a cluster brings the parameters.
    """
    held = [info for info in (*snapshots, *([current] if current else [])) if info.committed]
    if configure.load is None and held and not configure.empty:
        raise Refused(
            RefusalCode.SEED_EXISTS,
            f"this slave holds version {max(info.version for info in held)} of the run and the master knows none: "
            "restore the master's journal, or give the slave an empty directory to begin anew",
        )


def find_load(configure: Configure, candidates: Sequence[SnapshotInfo]) -> SnapshotInfo | None:
    """The snapshot that Configure asks for, committed ones before shadows, else the one that it has as its origin.

    Raises Refused(VERSION_GONE).
    """
    if configure.load is None:
        return None
    names = [(configure.load, configure.load_round)]
    if configure.origin is not None:
        names.append((configure.origin, configure.origin_round))
    for name in names:
        fits = [info for info in candidates if (info.version, info.round) == name and _fits(info, configure)]
        if fits:
            return max(fits, key=lambda info: info.committed)
    held = ", ".join(f"{info.version} ({info.round})" for info in candidates) or "none"
    raise Refused(
        RefusalCode.VERSION_GONE,
        f"no verified snapshot of version {configure.load} ({configure.load_round}) with the digest of its COMMIT "
        f"is here (here: {held})",
    )


def _fits(info: SnapshotInfo, configure: Configure) -> bool:
    return (
        info.digest == configure.load_digest
        and info.layout_hash == configure.layout_hash
        and info.placement_hash == configure.placement.placement_hash
    )


def check_prepare(prepare: Prepare, current: SnapshotInfo | None, snapshots: Sequence[SnapshotInfo]) -> None:
    """Raises Refused when the round does not start from the version that stands in memory, or is not a round.

    snapshots: what is on disk; parameters that a cluster donates must stand on a newer timeline than any of it.
    """
    here = current.version if current else None
    newest = max((info.version for info in snapshots if info.committed), default=None)
    if here is None and prepare.from_version is None and newest and prepare.to_version.timeline <= newest.timeline:
        raise Refused(RefusalCode.SEED_EXISTS, f"round {prepare.round} would seed over version {newest} on disk")
    if prepare.from_version is None and here is not None:
        raise Refused(RefusalCode.SEED_EXISTS, f"round {prepare.round} would seed over version {here}")
    if prepare.from_version != here:
        raise Refused(
            RefusalCode.VERSION_GONE,
            f"round {prepare.round} starts from {prepare.from_version}, this slave is at {here}",
        )
    if here is not None and prepare.to_version <= here:
        raise Refused(RefusalCode.MALFORMED, f"round {prepare.round} goes from {here} back to {prepare.to_version}")
    n_accepted = len(prepare.accepted)
    if not n_accepted or len(prepare.weights) != n_accepted or (here is None and n_accepted != 1):
        raise Refused(
            RefusalCode.MALFORMED,
            f"round {prepare.round} has {n_accepted} pushes and {len(prepare.weights)} weights",
        )
    scalars = (
        *prepare.weights,
        prepare.scale,
        prepare.outer_lr,
        prepare.momentum_decay,
        prepare.momentum_lookahead,
        prepare.gradient_weight,
    )
    if not all(math.isfinite(value) for value in scalars):
        raise Refused(RefusalCode.NONFINITE, f"round {prepare.round} has a weight, scale or rate that is not finite")
