"""The placement: which slave holds which block. Versioned by placement_hash; changed only by a RESHARD."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import SlaveId
from dips.core.layout import FLOAT32_BYTES, Block, Layout
from dips.core.math.outer_numpy import n_pieces
from dips.core.wire import RESIDUAL_CODEC, WIRE_DTYPES, encoded_block_bytes

BYTES_PER_ELEM_FIXED = 20
"""theta v, v-1 and v+1, momentum v and v+1, float32 each (docs/capacity.md, memory of a slave)."""

BYTES_PER_ELEM_SLOT = 4
"""One staging slot, or one pinned version."""

MEMORY_FILES = ("none", "stagings", "versions")
"""What a slave keeps in files that the system maps, in place of memory of its own (the master's setting memory_files):
nothing; the staging slots; these and theta of all versions (docs/storage.md)."""

_MOMENTUM_BYTES = 8
"""Momentum v and v+1, which is never in a file: every outer step reads and writes all of it."""

KEPT_PRODUCTS = 3
"""Pairs of pushes whose products a slave keeps of each chunk (slave/data_port.py)."""

BYTES_PER_GRAM = 32
"""Of a block's number and the frames around it, in the answer to MEASURE."""

BYTES_PER_CHECKSUM = 56
"""A 64-bit checksum in a list of Python's: its place, 8 bytes, and the number itself, 36 that are allocated as 48."""


@dataclass(frozen=True)
class Placement:
    """The slave of each block: slave_of_block[block_id] is an index into slaves."""

    slaves: tuple[SlaveId, ...]
    slave_of_block: tuple[int, ...]

    @cached_property
    def placement_hash(self) -> bytes:
        text = ",".join(self.slaves) + "|" + ",".join(map(str, self.slave_of_block))
        return hashlib.sha256(text.encode()).digest()

    def blocks_of(self, slave: SlaveId, layout: Layout) -> list[Block]:
        """The slave's blocks in block-id order, which is also their order in its memory."""
        index = self.slaves.index(slave)
        return [block for block in layout.blocks if self.slave_of_block[block.block_id] == index]


def memory_bytes_needed(n_elems: int, staging_slots: int, pins: int, files: str = "none") -> int:
    """Memory of a slave that holds n_elems, for the parameters themselves. files: one of MEMORY_FILES."""
    return n_elems * _bytes_per_elem(staging_slots, pins) - file_bytes_needed(n_elems, staging_slots, pins, files)


def file_bytes_needed(n_elems: int, staging_slots: int, pins: int, files: str) -> int:
    """The part of a slave's parameters that is in files. files: one of MEMORY_FILES."""
    of_elem = {
        "none": 0,
        "stagings": BYTES_PER_ELEM_SLOT * staging_slots,
        "versions": _bytes_per_elem(staging_slots, pins) - _MOMENTUM_BYTES,
    }
    return n_elems * of_elem[files]


def _bytes_per_elem(staging_slots: int, pins: int) -> int:
    return BYTES_PER_ELEM_FIXED + BYTES_PER_ELEM_SLOT * (staging_slots + pins)


def table_bytes_needed(n_pieces: int, n_chunks: int, staging_slots: int, pins: int) -> int:
    """Memory of a slave for records of its shard's pieces and chunks, at most (docs/capacity.md has the terms)."""
    pairs = staging_slots * (staging_slots + 1) // 2
    kept = min(pairs - staging_slots, KEPT_PRODUCTS)
    of_piece = 16 + 16 * staging_slots + 8 * kept + 9 * pairs
    of_chunk = (16 + BYTES_PER_CHECKSUM) * staging_slots + 16 * kept + BYTES_PER_CHECKSUM * (3 + pins)
    return n_pieces * of_piece + n_chunks * of_chunk


def difference_bytes_needed(block_elems: int, chunk_bytes: int, pins: int, pull_wire: str) -> int:
    """Memory of a slave for a block's differences, which lead to v, v-1, v+1 and pinned versions, and for the residuals
    of v and v+1 (pull_wire: one of WIRE_DTYPES)."""
    codec = WIRE_DTYPES[pull_wire]
    if not codec.is_difference:
        return 0
    of_version = encoded_block_bytes(codec, block_elems, chunk_bytes)
    return (3 + pins) * of_version + 2 * encoded_block_bytes(RESIDUAL_CODEC, block_elems, chunk_bytes)


def check_rounding(blocks: Iterable[Block], pull_wire: str) -> None:
    """Raises Refused(CONFIG) where published versions are rounded (pull_wire: one of WIRE_DTYPES) and a block holds
    averaged buffers."""
    if WIRE_DTYPES[pull_wire].is_difference and any(block.averaged for block in blocks):
        raise Refused(
            RefusalCode.CONFIG,
            f"the run's pull_wire is {pull_wire!r}, whose rounding could make a running variance negative, and the "
            "model has averaged buffers: leave the master's pull_wire out, or the clusters' buffers=\"average\"",
        )


def shard_bytes_needed(
    blocks_elems: Iterable[int],
    chunk_bytes: int,
    staging_slots: int,
    pins: int,
    files: str = "none",
    pull_wire: str = "float32",
) -> int:
    """The memory_bytes that a slave with blocks of these numbers of elements needs."""
    n_elems = pieces = chunks = differences = 0
    for elems in blocks_elems:
        n_elems += elems
        pieces += n_pieces(elems)
        chunks += -(-elems * FLOAT32_BYTES // chunk_bytes)
        differences += difference_bytes_needed(elems, chunk_bytes, pins, pull_wire)
    arrays = memory_bytes_needed(n_elems, staging_slots, pins, files) + differences
    return arrays + table_bytes_needed(pieces, chunks, staging_slots, pins)


def place(
    layout: Layout,
    memory_bytes: Sequence[tuple[SlaveId, int]],
    staging_slots: int,
    pins: int,
    chunk_bytes: int,
    files: str = "none",
    pull_wire: str = "float32",
) -> Placement:
    """Assign the blocks to the slaves, largest first, each to the slave with the most free elements left.

    memory_bytes: each slave's stated memory. Slaves of equal memory end up with nearly equal loads.
    Raises Refused(MEMORY) when a block finds no room.
    """
    per_elem = memory_bytes_needed(1, staging_slots, pins, files)
    slaves = tuple(slave for slave, _ in sorted(memory_bytes))
    free_bytes = [total for _, total in sorted(memory_bytes)]
    capacity = [total // per_elem for total in free_bytes]
    used = [0] * len(slaves)
    slave_of_block = [0] * len(layout.blocks)
    for block in sorted(layout.blocks, key=lambda b: (-b.n_elems, b.block_id)):
        needed = shard_bytes_needed([block.n_elems], chunk_bytes, staging_slots, pins, files, pull_wire)
        room = [i for i in range(len(slaves)) if free_bytes[i] >= needed]
        if not room:
            sizes = (b.n_elems for b in layout.blocks)
            whole = shard_bytes_needed(sizes, chunk_bytes, staging_slots, pins, files, pull_wire)
            raise Refused(
                RefusalCode.MEMORY,
                f"the model has {layout.n_elems} elements and needs {whole} bytes on the slaves, and whole blocks find "
                f"no room on the {len(slaves)} slaves, which state {sum(n for _, n in memory_bytes)} bytes: start more "
                "slaves, raise their memory_bytes, lower the master's max_clusters, or set its memory_files",
            )
        best = min(room, key=lambda i: (used[i] / capacity[i], i))
        slave_of_block[block.block_id] = best
        used[best] += block.n_elems
        free_bytes[best] -= needed
    return Placement(slaves, tuple(slave_of_block))


def check_measured(placement: Placement, clusters: int, max_message_bytes: int) -> None:
    """Raises Refused(CONFIG) when a slave could not send the Gram matrices of its blocks in one message."""
    blocks = max(placement.slave_of_block.count(i) for i in range(len(placement.slaves)))
    of_block = BYTES_PER_GRAM + 8 * (clusters * (clusters + 1) // 2) + 10 * clusters
    if blocks * of_block > max_message_bytes:
        raise Refused(
            RefusalCode.CONFIG,
            f"with max_clusters {clusters} a slave of {blocks} blocks answers MEASURE with up to {blocks * of_block} "
            f"bytes, and messages have at most {max_message_bytes}: lower max_clusters, raise max_message_bytes, or "
            "start more slaves",
        )


# ---- reshard placement -----------------------------------------------------------------------------------------------
#
# Assigns the blocks of a placed model to other slaves, so that few of them move: what a RESHARD does to a placement.
#
# A block stays where it is unless its slave leaves, has no room for it, or holds more of its memory's share than others
# would after the move. Depends on its arguments alone, so that all masters get the same
# (docs/decisions/0019-reshard.md).


Need = tuple[int, int]
"""(bytes of memory that a block takes on a slave, block id)."""


@dataclass
class _SlaveLoad:
    """One slave's blocks, smallest first."""

    slave: SlaveId
    stated_bytes: int  # its memory
    needs: list[Need] = field(default_factory=list)
    used_bytes: int = 0

    @property
    def part(self) -> float:
        """The share of its memory that blocks take."""
        return self.used_bytes / max(1, self.stated_bytes)

    def part_with(self, n_bytes: int) -> float:
        return (self.used_bytes + n_bytes) / max(1, self.stated_bytes)

    def takes(self, n_bytes: int) -> bool:
        return self.used_bytes + n_bytes <= self.stated_bytes

    def put(self, need: Need) -> None:
        insort(self.needs, need)
        self.used_bytes += need[0]

    def drop(self, need: Need) -> None:
        del self.needs[bisect_left(self.needs, need)]
        self.used_bytes -= need[0]


def redeal(
    layout: Layout,
    before: Placement,
    memory_bytes: Sequence[tuple[SlaveId, int]],
    staging_slots: int,
    pins: int,
    chunk_bytes: int,
    files: str = "none",
    pull_wire: str = "float32",
) -> Placement:
    """The placement on these slaves, each with its stated memory, that moves few blocks and spreads them evenly.

    Raises Refused: CONFIG when there are more slaves than blocks, MEMORY when a slave's blocks find no room.
    """
    if len(memory_bytes) > len(layout.blocks):
        raise Refused(
            RefusalCode.CONFIG,
            f"the model has {len(layout.blocks)} blocks, fewer than the {len(memory_bytes)} slaves there would be",
        )
    loads = {slave: _SlaveLoad(slave, stated) for slave, stated in sorted(memory_bytes)}
    unplaced: list[Need] = []
    for block in layout.blocks:
        needed = shard_bytes_needed([block.n_elems], chunk_bytes, staging_slots, pins, files, pull_wire)
        need = (needed, block.block_id)
        load = loads.get(before.slaves[before.slave_of_block[block.block_id]])
        if load is not None:
            load.put(need)
        else:
            unplaced.append(need)
    in_order = list(loads.values())
    for load in in_order:
        # A slave may state less memory than before: its largest blocks go until the rest has room.
        while load.used_bytes > load.stated_bytes:
            unplaced.append(load.needs[-1])
            load.drop(load.needs[-1])
    for need in sorted(unplaced, key=lambda need: (-need[0], need[1])):
        _place_block(need, in_order)
    while _level(in_order):
        pass
    for load in in_order:
        if not load.needs:
            _give_one(load, in_order)
    slave_of_block = [0] * len(layout.blocks)
    for index, load in enumerate(in_order):
        for _, block_id in load.needs:
            slave_of_block[block_id] = index
    return Placement(tuple(loads), tuple(slave_of_block))


def _place_block(need: Need, loads: Sequence[_SlaveLoad]) -> None:
    room = [load for load in loads if load.takes(need[0])]
    if not room:
        total = sum(n for load in loads for n, _ in load.needs) + need[0]
        raise Refused(
            RefusalCode.MEMORY,
            f"the model's blocks would take more than {total} bytes, and block {need[1]} ({need[0]} bytes) finds no "
            f"room on the {len(loads)} slaves, which state {sum(load.stated_bytes for load in loads)} bytes: "
            "keep more slaves, raise their memory_bytes, or lower the master's max_clusters",
        )
    min(room, key=lambda load: (load.part_with(need[0]), load.slave)).put(need)


def _level(loads: Sequence[_SlaveLoad]) -> bool:
    """Move one block from the fullest slave to the emptiest if the fuller of the two is less full then; whether so."""
    giver = max(loads, key=lambda load: (load.part, load.slave))
    taker = min(loads, key=lambda load: (load.part, load.slave))
    if giver is taker or len(giver.needs) < 2:
        return False
    # With this many bytes moved both are equally full.
    gap = giver.used_bytes * taker.stated_bytes - taker.used_bytes * giver.stated_bytes
    even = gap // (giver.stated_bytes + taker.stated_bytes)
    at = bisect_right(giver.needs, even, key=lambda need: need[0])
    for need in (*giver.needs[max(0, at - 1) : at], *giver.needs[at : at + 1]):
        if taker.takes(need[0]) and taker.part_with(need[0]) < giver.part:
            giver.drop(need)
            taker.put(need)
            return True
    return False


def _give_one(empty: _SlaveLoad, loads: Sequence[_SlaveLoad]) -> None:
    """Every slave of a placement holds something: the smallest block of the fullest that can spare one."""
    givers = [load for load in loads if len(load.needs) > 1 and empty.takes(load.needs[0][0])]
    if not givers:
        raise Refused(
            RefusalCode.MEMORY, f"slave {empty.slave} states {empty.stated_bytes} bytes, in which no block has room"
        )
    giver = max(givers, key=lambda load: (load.part, load.slave))
    need = giver.needs[0]
    giver.drop(need)
    empty.put(need)
