"""Differences from a data port to a reader over real sockets, on the loops of both ends: Python's and compiled."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from support.published_shard import BLOCKS, CHUNK_BYTES, Shard
from support.slave_wire import LAYOUT, RUN
from support.waiting import NO_LIMIT_S

from dips.core.clock import SystemClock
from dips.core.errors import RefusalCode
from dips.core.ids import Version
from dips.core.math import wire_numba
from dips.core.messages import PlacementSpec, PullGrant, SlaveAddress
from dips.core.net import carry_numba
from dips.core.net.carriers import Common, LoopChoice, carry_pull
from dips.core.net.transfer import PullTransfer, TransferSettings
from dips.core.wire import WIRE_DTYPES, Codec
from dips.slave import serve_numba
from dips.slave.data_server import DataServer, LoopName
from dips.slave.memory import F32

ORDER = tuple(range(len(BLOCKS)))
ROUNDS = 3


class Served:
    def __init__(self, pull_wire: str, loop: LoopName) -> None:
        shard, self.codec = Shard(pull_wire), WIRE_DTYPES[pull_wire]
        self.held = [shard.theta.copy()]
        for _ in range(ROUNDS):
            shard.next()
            self.held.append(shard.theta.copy())
        self.crashed: list[BaseException] = []
        self.server = DataServer("127.0.0.1", 0, RUN, 1 << 20, lambda staged: None, self.crashed.append, loop=loop)
        self.server.start()
        done = threading.Event()
        self.server.do(self.server.port.set_memory, shard.memory.map, shard.memory.staging)
        assert shard.memory.current is not None
        info = shard.memory.current.info
        assert info is not None
        self.server.do(self.server.port.set_readable, shard.memory.readable(), info.version)
        self.server.do(done.set)
        done.wait(NO_LIMIT_S)
        self.digest = info.digest
        self.shard = shard

    def pull(
        self, loop: LoopChoice, behind: int, theta: F32 | None = None, codec: Codec | None = None
    ) -> tuple[PullTransfer, F32]:
        """Pull the newest version; theta: what the reader has of the base, None: the right parameters."""
        base = ROUNDS - behind
        placement = PlacementSpec((SlaveAddress("s0", self.server.endpoint),), (0,) * len(BLOCKS), b"")
        grant = PullGrant(
            Version(1, ROUNDS), 0, 1, placement, ORDER, (("s0", self.digest),), 0, 1, None, CHUNK_BYTES, 1, RUN,
            codec or self.codec, Version(1, base),
        )  # fmt: skip
        common = Common(RUN, 1, "cause", LAYOUT, TransferSettings(CHUNK_BYTES, 4), loop=loop)
        into = np.full(LAYOUT.n_elems, np.nan, np.float32)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            held = self.held[base] if theta is None else theta
            transfer = carry_pull(context, common, into, grant, SystemClock(), threading.Event(), base=held)
        finally:
            context.destroy(linger=0)
        return transfer, into


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    wire_numba.warm_up()
    serve_numba.warm_up()
    carry_numba.warm_up()


@pytest.fixture(params=["python", "compiled"])
def loop(request: pytest.FixtureRequest) -> LoopChoice:
    choice: LoopChoice = request.param
    return choice


@pytest.fixture(params=["python", "compiled"])
def server_loop(request: pytest.FixtureRequest) -> LoopName:
    name: LoopName = request.param
    return name


@pytest.fixture(params=["int8", "int4"])
def served(request: pytest.FixtureRequest, server_loop: LoopName) -> Iterator[Served]:
    served = Served(request.param, server_loop)
    yield served
    served.server.stop()
    assert not served.crashed


@pytest.mark.parametrize("behind", [1, 2])
def test_the_newest_version_is_there_to_the_bit(served: Served, loop: LoopChoice, behind: int) -> None:
    transfer, into = served.pull(loop, behind)
    assert transfer.done, transfer.failure
    assert into.tobytes() == served.held[-1].tobytes()


def test_what_is_not_there_ends_the_pull_with_the_remedy(served: Served, loop: LoopChoice) -> None:
    for behind, codec in ((3, served.codec), (1, Codec.BF16)):
        transfer, _ = served.pull(loop, behind, served.held[0], codec)
        assert transfer.base_gone
        assert "for parameters" in transfer.failure


def test_a_reader_with_another_base_ends_as_if_it_were_gone(served: Served, loop: LoopChoice) -> None:
    other = served.held[-2].copy()
    other += np.float32(1)
    transfer, _ = served.pull(loop, 1, other)
    assert transfer.base_gone
    assert transfer.refusal is RefusalCode.BASE_GONE
    assert "lead to other parameters" in transfer.failure
