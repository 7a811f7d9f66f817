"""The rules of core/net/flow.py and core/net/steps.py, compiled over arrays, decide what they decide in the interpreter
over lists: the same columns after every step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from dips.core.chunks import Chunk
from dips.core.net import flow, steps
from dips.core.net.data_header import MissingChunk
from dips.core.net.transfer import PullTransfer, PushTransfer, SlaveRequest, Transfer, TransferSettings

CHUNK = 1 << 16
N_LANES = 5
CHECKSUM = 2**64 - 5
SETTINGS = TransferSettings(CHUNK, 64)

numba = pytest.importorskip("numba")


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """By name: the steps that a loop calls, compiled."""
    for function in (*flow.STEPS, *steps.STEPS):
        numba.extending.register_jitable(function)
    called = {}
    for module, name, args in (
        (steps, "begin_turns", "columns, now_s"),
        (steps, "next_request", "columns, now_s"),
        (steps, "next_deadline_s", "columns"),
        (steps, "take_ack", "columns, slot, complete, now_s, credit"),
        (steps, "take_landed", "columns, slot, checksum, now_s, credit"),
        (flow, "slot_of", "flow, lane, request"),
    ):
        scope: dict[str, Any] = {name: getattr(module, name)}
        exec(f"def run({args}): return {name}({args})", scope)
        called[name] = numba.njit(scope["run"])
    return called


def shares() -> dict[str, list[Chunk]]:
    return {
        f"s{lane}": [Chunk(100 * lane + i // 7, i % 7 * CHUNK, CHUNK) for i in range(200 - 20 * lane)]
        for lane in range(N_LANES)
    }


def begun(transfer: Transfer) -> Transfer:
    """A push whose first query is answered: everything is missing."""
    if isinstance(transfer, PushTransfer):
        for ask in transfer.actions(0.0):
            assert isinstance(ask, SlaveRequest)
            lacking = [MissingChunk(c.block_id, c.offset_bytes) for c in shares()[ask.slave]]
            transfer.missing(ask.slave, ask.request, lacking, False, 0.01)
    return transfer


def values(columns: Any) -> list[Any]:
    return [values(column) for column in columns] if isinstance(columns, tuple) else [float(x) for x in columns]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pushing", [True, False])
def test_compiled_steps_leave_the_same_columns(compiled: dict[str, Any], pushing: bool, seed: int) -> None:
    made = [
        PushTransfer(shares(), SETTINGS, 0.0, arrays=arrays)
        if pushing
        else PullTransfer(shares(), {}, SETTINGS, 0.0, arrays=arrays)
        for arrays in (False, True)
    ]
    plain, fast = (begun(transfer).columns for transfer in made)
    dice, now_s, in_flight = random.Random(seed), 0.01, list[tuple[int, int]]()
    while True:
        now_s += 0.01 * dice.random()
        steps.begin_turns(plain, now_s)
        compiled["begin_turns"](fast, now_s)
        while (slot := steps.next_request(plain, now_s)) != flow.NONE:
            assert compiled["next_request"](fast, now_s) == slot
            in_flight.append((plain.flow.requests.lane[slot], plain.flow.requests.request[slot]))
        assert compiled["next_request"](fast, now_s) == flow.NONE
        assert compiled["next_deadline_s"](fast) == steps.next_deadline_s(plain)
        assert values(fast) == values(plain)
        if not in_flight:
            break
        lane, request = in_flight.pop(dice.randrange(len(in_flight)))
        slot = flow.slot_of(plain.flow, lane, request)
        assert compiled["slot_of"](fast.flow, lane, request) == slot != flow.NONE
        assert compiled["slot_of"](fast.flow, lane, request + 1_000_000) == flow.NONE
        credit = dice.choice([0, 0, 0, 5, 20])
        if pushing:
            chunk = plain.flow.requests.chunk[slot]
            last = plain.lanes.n_moved[lane] + 1 == plain.lanes.n_chunks[lane] and chunk != steps.QUERY
            steps.take_ack(plain, slot, last, now_s, credit)
            compiled["take_ack"](fast, slot, last, now_s, credit)
        else:
            whole = steps.take_landed(plain, slot, CHECKSUM, now_s, credit)
            assert compiled["take_landed"](fast, slot, np.uint64(CHECKSUM), now_s, credit) == whole
    assert all(all(transfer.columns.chunks.moved) for transfer in made)
