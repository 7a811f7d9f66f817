"""Checks Configure, Prepare, MoveBlocks and the run's settings before a slave acts on them, and says how a move of
blocks ends. Pure; raises Refused."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import SlaveId
from dips.core.layout import Block
from dips.core.messages import Configure, MoveBlocks, PlacementSpec, Prepare, Settings, SnapshotInfo
from dips.core.net.transfer import PullTransfer, TransferSettings
from dips.core.placement import MEMORY_FILES, Placement, check_rounding, shard_bytes_needed
from dips.core.protocol import MAX_WINDOW_CHUNKS
from dips.core.wire import WIRE_DTYPES

MIN_CHUNK_BYTES = 1024
"""Smallest chunk size: smaller ones would spend more on headers than on parameters."""


def own_blocks(slave_id: str, configure: Configure | MoveBlocks) -> list[Block]:
    """The blocks that the placement gives this slave, in block-id order. Raises Refused(CONFIG or LAYOUT)."""
    layout, spec = configure.layout, configure.placement
    if layout.layout_hash != configure.layout_hash:
        raise Refused(
            RefusalCode.LAYOUT,
            "the layout's hash does not fit the layout: master and slave differ in release",
        )
    placement = placement_of(spec, len(layout.blocks))
    if slave_id not in placement.slaves:
        names = ", ".join(placement.slaves)
        raise Refused(RefusalCode.CONFIG, f"the placement does not name slave {slave_id!r}: it has {names}")
    return placement.blocks_of(SlaveId(slave_id), layout)


def placement_of(spec: PlacementSpec, n_blocks: int) -> Placement:
    """The placement that a message carries. Raises Refused(CONFIG) unless it covers the layout and has its hash."""
    names = tuple(SlaveId(address.slave_id) for address in spec.slaves)
    if len(spec.slave_of_block) != n_blocks or any(not 0 <= i < len(names) for i in spec.slave_of_block):
        raise Refused(RefusalCode.CONFIG, f"the placement does not cover the layout's {n_blocks} blocks")
    placement = Placement(names, spec.slave_of_block)
    if placement.placement_hash != spec.placement_hash:
        raise Refused(RefusalCode.CONFIG, "the placement's hash does not fit it: master and slave differ in release")
    return placement


# ---- moves of blocks for a RESHARD (docs/decisions/0019-reshard.md) ----


WINDOW_CHUNKS = 16
"""16 MiB on their way with chunks of 1 MiB: 10 Gbit/s at a round trip of 13 ms."""

SILENCE_S = 3.0

STALL_S = 30.0
"""Without a chunk for so long the move is given up; the master begins it again when it can."""


def settings_of_moves(chunk_bytes: int) -> TransferSettings:
    """The settings of each transfer of a move."""
    return TransferSettings(chunk_bytes, WINDOW_CHUNKS, SILENCE_S, STALL_S)


def given_up(transfer: PullTransfer) -> Refused:
    """The refusal with which a move ends whose transfer failed. Only what will not come back is not BUSY."""
    if transfer.refusal in (RefusalCode.VERSION_GONE, RefusalCode.RUN_ID):
        return Refused(transfer.refusal, transfer.failure)
    return Refused(RefusalCode.BUSY, transfer.failure, 1.0)


def cancelled(move: MoveBlocks) -> Refused:
    """The refusal with which a move ends that is no longer needed."""
    return Refused(RefusalCode.BUSY, f"round {move.round} was given up", 1.0)


def check_move(slave_id: str, move: MoveBlocks, current: SnapshotInfo | None) -> None:
    """Check that blocks can be moved. Raises Refused when this slave does not hold the version, or a source has no
    address."""
    sources = placement_of(move.sources, len(move.layout.blocks))
    here = current.version if current else None
    if slave_id in sources.slaves and here != move.from_version:
        raise Refused(
            RefusalCode.VERSION_GONE, f"round {move.round} moves blocks of {move.from_version}, here is {here}"
        )
    if move.to_version <= move.from_version:
        raise Refused(RefusalCode.MALFORMED, f"round {move.round} goes from {move.from_version} to {move.to_version}")
    wanted = {sources.slave_of_block[block.block_id] for block in own_blocks(slave_id, move)}
    for index in sorted(wanted):
        address = move.sources.slaves[index]
        if address.slave_id != slave_id and not address.data_endpoint:
            raise Refused(RefusalCode.BUSY, f"slave {address.slave_id} has no address: it is away", 1.0)


# ---- commands and settings ----


def check_memory(
    blocks: Sequence[Block], configure: Configure | MoveBlocks, settings: Settings, memory_bytes: int
) -> None:
    """Check, before anything is allocated, that the blocks fit this slave's memory. Raises Refused: MEMORY, and CONFIG
    for blocks that the run's settings do not allow."""
    check_rounding(blocks, settings.pull_wire)
    n_elems = sum(block.n_elems for block in blocks)
    slots, pins = configure.staging_slots, configure.pinned_versions
    sizes = (block.n_elems for block in blocks)
    needed = shard_bytes_needed(sizes, settings.chunk_bytes, slots, pins, settings.memory_files, settings.pull_wire)
    if needed > memory_bytes:
        raise Refused(
            RefusalCode.MEMORY,
            f"{n_elems} elements with {slots} staging slots and {pins} pinned versions need {needed} bytes, "
            f"this slave may use {memory_bytes}: raise its memory_bytes, start more slaves, serve fewer clusters, "
            "set the master's memory_files, or leave its pull_wire out",
        )


def check_settings(settings: Settings, max_chunk_bytes: int, snapshots_kept: int) -> None:
    """Check that the run's frames fit the limits that the data port was bound with, that its settings are known, and
    that the ring keeps what the run goes back to when another slave dies.

    Raises Refused(CONFIG).
    """
    for name, value, known in (
        ("memory_files", settings.memory_files, MEMORY_FILES), ("pull_wire", settings.pull_wire, WIRE_DTYPES),
    ):  # fmt: skip
        if value not in known:
            sentence = f"the run's {name} is {value!r:.80}, this slave's release knows {', '.join(known)}"
            raise Refused(RefusalCode.CONFIG, f"{sentence}: use the master's release")
    # Another slave's disk may be `lag` versions behind when a round begins, which makes one more. This slave has a file
    # more than it keeps, so the newest version there is still here, if it keeps one more than `lag`.
    lag = settings.async_lag_versions
    if settings.durability == "async" and snapshots_kept <= lag:
        raise Refused(
            RefusalCode.CONFIG,
            f"the run's disks may be {lag} versions behind (durability async), and this slave keeps {snapshots_kept} "
            f"snapshots, so it would overwrite the version that the run goes back to: raise its snapshots_kept to "
            f"{lag + 1}, or lower the master's async_lag_versions to {snapshots_kept - 1}",
        )
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
    """Raises Refused(SEED_EXISTS) when the master knows no version and this slave holds committed ones.

    `empty` says that the master knows of them: none is common to all slaves, and a cluster brings the parameters.
    """
    held = [info for info in (*snapshots, *([current] if current else [])) if info.committed]
    if configure.load is None and held and not configure.empty:
        raise Refused(
            RefusalCode.SEED_EXISTS,
            f"this slave holds version {max(info.version for info in held)} of the run and the master knows none: "
            "restore the master's journal, or give the slave an empty directory to begin again",
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
    same = (configure.load_digest, configure.layout_hash, configure.placement.placement_hash)
    for name in names:
        fits = [
            info
            for info in candidates
            if (info.version, info.round) == name and (info.digest, info.layout_hash, info.placement_hash) == same
        ]
        if fits:
            return max(fits, key=lambda info: info.committed)
    held = ", ".join(f"{info.version} ({info.round})" for info in candidates) or "none"
    raise Refused(
        RefusalCode.VERSION_GONE,
        f"no verified snapshot of version {configure.load} ({configure.load_round}) with the digest of its COMMIT "
        f"is here (here: {held})",
    )


def is_load(info: SnapshotInfo | None, body: Configure) -> bool:
    """Whether this snapshot is the one that Configure asks for, by the name that it has now."""
    return info is not None and (info.version, info.round, info.digest) == (
        body.load,
        body.load_round,
        body.load_digest,
    )


def scalars_of(prepare: Prepare) -> dict[str, float]:
    """The scalars of the outer step."""
    names = "scale outer_lr momentum_decay momentum_lookahead gradient_weight averaged_share"
    return {name: getattr(prepare, name) for name in names.split()}


def check_prepare(prepare: Prepare, current: SnapshotInfo | None, snapshots: Sequence[SnapshotInfo]) -> None:
    """Raises Refused when the round does not start from the version in memory, or the command is not consistent.

    snapshots: those on disk; parameters that a cluster donates must be on a newer timeline than any of them.
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
    if not all(map(math.isfinite, (*prepare.weights, *scalars_of(prepare).values()))):
        raise Refused(RefusalCode.NONFINITE, f"round {prepare.round} has a weight, scale or rate that is not finite")
