"""A move of blocks that the slave has already, and what ends one; moves over real links stand in tests/slow."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.slave_values import BASE, PLACEMENT, R2, V0, V1
from support.slave_wire import LAYOUT, placement_over

from dips.core.clock import SystemClock
from dips.core.errors import RefusalCode, Refused
from dips.core.layout import Chunk, digest_of_array
from dips.core.messages import MoveBlocks, PlacementSpec, Refusal, SlaveAddress
from dips.core.net.transfer import PullTransfer, SlaveRequest
from dips.slave.disk import LocalDisk
from dips.slave.memory import ShardMemory
from dips.slave.mover import Mover
from dips.slave.ring import Ring
from dips.slave.state.checks import given_up, settings_of_moves

THETA, MOMENTUM = np.random.default_rng(4).standard_normal((2, LAYOUT.n_elems)).astype(np.float32)
THETA_DIGEST, MOMENTUM_DIGEST = (digest_of_array(of, LAYOUT.blocks, 1024) for of in (THETA, MOMENTUM))
HERE = PlacementSpec((SlaveAddress("s0", "tcp://127.0.0.1:1"),), PLACEMENT.slave_of_block, PLACEMENT.placement_hash)
MOVE = MoveBlocks(R2, V0, V1, LAYOUT, LAYOUT.layout_hash, HERE, HERE, 4, 2, THETA_DIGEST, MOMENTUM_DIGEST)


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    ring = Ring(LocalDisk(tmp_path), "run", "s0", 1)
    ring.scan()
    return ring


@pytest.fixture
def disk() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as disk:
        yield disk


def mover_of(ring: Ring, disk: ThreadPoolExecutor, body: MoveBlocks = MOVE) -> Mover:
    memory = ShardMemory(LAYOUT.blocks, 1024, 2, 1 << 20)
    memory.take().theta[:] = THETA
    memory.next_momentum[:] = MOMENTUM
    memory.name_shadow(replace(BASE, committed=False), [])
    memory.flip(BASE)
    return Mover("s0", "run", 1, body, 1024, memory, ring, disk, SystemClock(), None)


@pytest.mark.parametrize("wrong", [None, "theta_digest", "momentum_digest", "cancelled"])
def test_blocks_that_are_here_are_sealed_in_a_file_with_the_listed_bits_and_no_others(
    ring: Ring, disk: ThreadPoolExecutor, wrong: str | None
) -> None:
    if wrong is not None:
        changes: dict[str, Any] = {} if wrong == "cancelled" else {wrong: b"other bits"}
        mover = mover_of(ring, disk, replace(MOVE, **changes))
        if wrong == "cancelled":
            mover.cancel()
        with pytest.raises(Refused) as refused:
            mover.run()
        assert refused.value.code is (RefusalCode.BUSY if wrong == "cancelled" else RefusalCode.DIGEST)
        assert ring.infos() == ()
    info = mover_of(ring, disk).run()
    assert (info.version, info.round, info.digest, info.committed) == (V1, R2, THETA_DIGEST, False)
    assert ring.infos() == (info,)
    found = np.empty((2, LAYOUT.n_elems), np.float32)
    ring.load(info, *found)
    np.testing.assert_array_equal(found, [THETA, MOMENTUM])


def test_blocks_are_not_taken_from_another_machine_without_keys(ring: Ring, disk: ThreadPoolExecutor) -> None:
    there = placement_over("s1")
    far = PlacementSpec((SlaveAddress("s1", "tcp://192.0.2.7:5555"),), there.slave_of_block, there.placement_hash)
    with pytest.raises(Refused) as refused:
        mover_of(ring, disk, replace(MOVE, sources=far)).run()
    assert refused.value.code is RefusalCode.NOT_LOOPBACK
    assert ring.infos() == ()


def refused_by_s1(code: RefusalCode) -> PullTransfer:
    transfer = PullTransfer({"s1": [Chunk(0, 0, 1024)]}, None, settings_of_moves(1024), 0.0)
    (ask,) = (action for action in transfer.actions(0.0) if isinstance(action, SlaveRequest))
    transfer.refused(ask.slave, ask.request, Refusal(code, "not here"), 0.1)
    return transfer


@pytest.mark.parametrize(
    ("transfer", "ends_with"),
    [
        (SimpleNamespace(failure=None, done=True), None),
        (SimpleNamespace(failure=None, done=False), RefusalCode.BUSY),  # it was cancelled
        (refused_by_s1(RefusalCode.VERSION_GONE), RefusalCode.VERSION_GONE),
    ],
)
def test_blocks_of_another_slave_are_fetched_and_sealed_if_all_of_them_come(
    ring: Ring, disk: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, transfer: Any, ends_with: RefusalCode | None
) -> None:
    def carry(*given: Any, momentum: bool) -> Any:
        _, _, into, source, block, version = given[:6]
        assert (source, version) == ("s1", V0)
        into[:] = (MOMENTUM if momentum else THETA)[block.start_elem : block.start_elem + block.n_elems]
        return transfer

    monkeypatch.setattr("dips.slave.mover.carry_block", carry)
    there = replace(HERE, slaves=(SlaveAddress("s1", "tcp://127.0.0.1:1"),))
    moves = mover_of(ring, disk, replace(MOVE, sources=there))
    if ends_with is not None:
        with pytest.raises(Refused) as refused:
            moves.run()
        assert (refused.value.code, ring.infos()) == (ends_with, ())
        return
    found = np.empty((2, LAYOUT.n_elems), np.float32)
    ring.load(moves.run(), *found)
    np.testing.assert_array_equal(found, [THETA, MOMENTUM])


@pytest.mark.parametrize(
    ("code", "ends_with"),
    [
        (RefusalCode.VERSION_GONE, RefusalCode.VERSION_GONE),
        (RefusalCode.RUN_ID, RefusalCode.RUN_ID),
        (RefusalCode.STALE_EPOCH, RefusalCode.BUSY),
    ],
)
def test_a_move_whose_source_refuses_is_tried_again_unless_it_is_in_vain(
    code: RefusalCode, ends_with: RefusalCode
) -> None:
    refused = given_up(refused_by_s1(code))
    assert (refused.code, refused.retry_after_s > 0) == (ends_with, ends_with is RefusalCode.BUSY)
    assert "not here" in refused.sentence
