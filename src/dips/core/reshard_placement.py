"""Assigns the blocks of a placed model to other slaves, so that few of them move: what a RESHARD does to a placement.

A block stays where it is unless its slave leaves, has no room for it, or holds more of its memory's share than others
would after the move. Depends on its arguments alone, so that all masters get the same (docs/decisions/0019-reshard.md).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import SlaveId
from dips.core.layout import Layout
from dips.core.placement import Placement, shard_bytes_needed

Need = tuple[int, int]
"""(bytes of memory that a block takes on a slave, block id)."""


@dataclass
class _SlaveLoad:
    """One slave's blocks, smallest first. stated_bytes: its memory."""

    slave: SlaveId
    stated_bytes: int
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
        need = (shard_bytes_needed([block.n_elems], chunk_bytes, staging_slots, pins), block.block_id)
        load = loads.get(before.slaves[before.slave_of_block[block.block_id]])
        if load is not None:
            load.put(need)
        else:
            unplaced.append(need)
    in_order = list(loads.values())
    unplaced += [need for load in in_order for need in _overflow(load)]
    for need in sorted(unplaced, key=lambda need: (-need[0], need[1])):
        _place_block(need, in_order)
    while _level(in_order):
        pass
    for load in in_order:
        if not load.needs:
            _give_one(load, in_order)
    return _placement(layout, in_order)


def _overflow(load: _SlaveLoad) -> list[Need]:
    """Blocks that a slave no longer has room for, because it states less memory than before; largest first."""
    out: list[Need] = []
    while load.used_bytes > load.stated_bytes:
        need = load.needs[-1]
        load.drop(need)
        out.append(need)
    return out


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


def _placement(layout: Layout, loads: Sequence[_SlaveLoad]) -> Placement:
    slave_of_block = [0] * len(layout.blocks)
    for index, load in enumerate(loads):
        for _, block_id in load.needs:
            slave_of_block[block_id] = index
    return Placement(tuple(load.slave for load in loads), tuple(slave_of_block))
