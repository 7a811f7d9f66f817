"""What a move of blocks refuses before it opens a connection; moves over real links stand in tests/integration."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.slave_bench import PLACEMENT, R2, V0, V1
from support.slave_wire import LAYOUT, placement_over

from dips.core.clock import SystemClock
from dips.core.errors import RefusalCode, Refused
from dips.core.messages import MoveBlocks, PlacementSpec, SlaveAddress
from dips.slave.disk import LocalDisk
from dips.slave.mover import Mover
from dips.slave.ring import Ring


def test_blocks_are_not_taken_from_another_machine_without_keys(tmp_path: Path) -> None:
    there, here = placement_over("s1"), PLACEMENT
    far = PlacementSpec((SlaveAddress("s1", "tcp://192.0.2.7:5555"),), there.slave_of_block, there.placement_hash)
    near = PlacementSpec((SlaveAddress("s0", "tcp://127.0.0.1:1"),), here.slave_of_block, here.placement_hash)
    body = MoveBlocks(R2, V0, V1, LAYOUT, LAYOUT.layout_hash, near, far, 4, 2, b"theta", b"momentum")
    ring = Ring(LocalDisk(tmp_path), "run", "s0", 1)
    ring.scan()
    with ThreadPoolExecutor(1) as disk:
        mover = Mover("s0", "run", 1, body, 1024, None, ring, disk, SystemClock(), None)
        with pytest.raises(Refused, match=r"the data endpoint of slave s1") as refused:
            mover.run()
    assert refused.value.code is RefusalCode.NOT_LOOPBACK
    assert ring.infos() == ()
