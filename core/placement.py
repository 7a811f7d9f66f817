"""Which slave holds which block. Versioned by placement_hash; changed only by a RESHARD."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import SlaveId
from dips.core.layout import Block, Layout

BYTES_PER_ELEM_FIXED = 20
"""theta v, v-1 and v+1, momentum v and v+1, float32 each (docs/architecture.md, memory of a slave)."""

BYTES_PER_ELEM_SLOT = 4
"""One staging slot, or one pinned version."""


@dataclass(frozen=True)
class Placement:
    """slave_of_block[block_id] is an index into slaves."""

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
    """Memory that a slave holding n_elems needs for parameters."""
    return n_elems * (BYTES_PER_ELEM_FIXED + BYTES_PER_ELEM_SLOT * (staging_slots + pins))


def place(
    layout: Layout, memory_bytes: Sequence[tuple[SlaveId, int]], staging_slots: int, pins: int
) -> Placement:
    """Deal the blocks to the slaves, largest first, each to the slave with the most free elements left.

    memory_bytes: each slave's stated memory. Slaves of equal memory end up with nearly equal loads.
    Raises Refused(MEMORY) when a block finds no room.
    """
    per_elem = memory_bytes_needed(1, staging_slots, pins)
    slaves = tuple(slave for slave, _ in sorted(memory_bytes))
    capacity = [total // per_elem for _, total in sorted(memory_bytes)]
    used = [0] * len(slaves)
    slave_of_block = [0] * len(layout.blocks)
    for block in sorted(layout.blocks, key=lambda b: (-b.n_elems, b.block_id)):
        room = [i for i in range(len(slaves)) if capacity[i] - used[i] >= block.n_elems]
        if not room:
            raise Refused(RefusalCode.MEMORY, _too_big(layout, sum(capacity), per_elem, len(slaves)))
        best = min(room, key=lambda i: (used[i] / capacity[i], i))
        slave_of_block[block.block_id] = best
        used[best] += block.n_elems
    return Placement(slaves, tuple(slave_of_block))


def _too_big(layout: Layout, capacity_elems: int, per_elem: int, n_slaves: int) -> str:
    return (
        f"the model has {layout.n_elems} elements and needs {layout.n_elems * per_elem} bytes on the slaves "
        f"({per_elem} bytes for each element), but the {n_slaves} slaves state room for {capacity_elems} "
        "elements: start more slaves, raise their memory_bytes, or lower the master's max_clusters"
    )
