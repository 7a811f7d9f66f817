"""The placement: which slave holds which block. Versioned by placement_hash; changed only by a RESHARD."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import SlaveId
from dips.core.layout import FLOAT32_BYTES, Block, Layout
from dips.core.math.outer_numpy import n_pieces

BYTES_PER_ELEM_FIXED = 20
"""theta v, v-1 and v+1, momentum v and v+1, float32 each (docs/architecture.md, memory of a slave)."""

BYTES_PER_ELEM_SLOT = 4
"""One staging slot, or one pinned version."""

KEPT_PRODUCTS = 3
"""Pairs of pushes whose products a slave keeps of each chunk (slave/receipts.py)."""

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


def memory_bytes_needed(n_elems: int, staging_slots: int, pins: int) -> int:
    """Memory of a slave that holds n_elems, for the parameters themselves."""
    return n_elems * (BYTES_PER_ELEM_FIXED + BYTES_PER_ELEM_SLOT * (staging_slots + pins))


def table_bytes_needed(n_pieces: int, n_chunks: int, staging_slots: int, pins: int) -> int:
    """Memory of a slave for what it notes of its shard's pieces and chunks, at most (docs/budgets.md has the terms)."""
    pairs = staging_slots * (staging_slots + 1) // 2
    kept = min(pairs - staging_slots, KEPT_PRODUCTS)
    of_piece = 16 + 16 * staging_slots + 8 * kept + 9 * pairs
    of_chunk = (16 + BYTES_PER_CHECKSUM) * staging_slots + 16 * kept + BYTES_PER_CHECKSUM * (3 + pins)
    return n_pieces * of_piece + n_chunks * of_chunk


def shard_bytes_needed(blocks_elems: Iterable[int], chunk_bytes: int, staging_slots: int, pins: int) -> int:
    """The memory_bytes that a slave with blocks of these numbers of elements needs."""
    n_elems = pieces = chunks = 0
    for elems in blocks_elems:
        n_elems += elems
        pieces += n_pieces(elems)
        chunks += -(-elems * FLOAT32_BYTES // chunk_bytes)
    arrays = memory_bytes_needed(n_elems, staging_slots, pins)
    return arrays + table_bytes_needed(pieces, chunks, staging_slots, pins)


def place(
    layout: Layout, memory_bytes: Sequence[tuple[SlaveId, int]], staging_slots: int, pins: int, chunk_bytes: int
) -> Placement:
    """Assign the blocks to the slaves, largest first, each to the slave with the most free elements left.

    memory_bytes: each slave's stated memory. Slaves of equal memory end up with nearly equal loads.
    Raises Refused(MEMORY) when a block finds no room.
    """
    per_elem = memory_bytes_needed(1, staging_slots, pins)
    slaves = tuple(slave for slave, _ in sorted(memory_bytes))
    free_bytes = [total for _, total in sorted(memory_bytes)]
    capacity = [total // per_elem for total in free_bytes]
    used = [0] * len(slaves)
    slave_of_block = [0] * len(layout.blocks)
    for block in sorted(layout.blocks, key=lambda b: (-b.n_elems, b.block_id)):
        needed = shard_bytes_needed([block.n_elems], chunk_bytes, staging_slots, pins)
        room = [i for i in range(len(slaves)) if free_bytes[i] >= needed]
        if not room:
            whole = shard_bytes_needed((b.n_elems for b in layout.blocks), chunk_bytes, staging_slots, pins)
            raise Refused(RefusalCode.MEMORY, _too_big(layout, whole, sum(n for _, n in memory_bytes), len(slaves)))
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


def _too_big(layout: Layout, needed_bytes: int, stated_bytes: int, n_slaves: int) -> str:
    return (
        f"the model has {layout.n_elems} elements and needs {needed_bytes} bytes on the slaves, and whole blocks find "
        f"no room on the {n_slaves} slaves, which state {stated_bytes} bytes: start more slaves, raise their "
        "memory_bytes, or lower the master's max_clusters"
    )
