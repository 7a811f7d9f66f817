"""A push and a pull of very much and of very many things: every byte arrives in its place.

There is no round, so that memory is enough for a tensor of more than 4 GiB (`--long`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from support.bulk import EPOCH, PUSH, RUN, SLAVE, VERSION, Bulk, BulkPort

from dips.core import allocator
from dips.core.clock import SystemClock
from dips.core.layout import digest_of_array
from dips.core.messages import PullGrant, Ticket
from dips.core.net.carriers import Common, carry_pull, carry_push
from dips.core.net.slave_sockets import SlaveSockets
from dips.core.net.transfer import digests_of

MIB = 1 << 20
QUICK = Bulk(1, 10 * MIB + 3, block_elems=1 << 32, chunk_bytes=MIB)
TINY = Bulk(10_000, 37, block_elems=1 << 22, chunk_bytes=MIB)
HUGE = Bulk(1, 1_160_000_003, block_elems=1 << 32, chunk_bytes=MIB)
"""4.3 GiB in one block: offsets within it need more than 32 bits."""


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.mark.parametrize(
    "bulk",
    [
        pytest.param(QUICK, id="40-MiB-tensor"),
        pytest.param(TINY, id="10000-tiny-tensors"),
        pytest.param(HUGE, id="4.3-GiB-tensor", marks=pytest.mark.long),
    ],
)
def test_what_is_pushed_is_there_and_comes_back(
    bulk: Bulk,
    context: zmq.Context[zmq.Socket[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connects: list[str] = []
    connect = SlaveSockets.reconnect

    def reconnect(links: SlaveSockets, slave: str) -> None:
        connects.append(slave)
        connect(links, slave)

    monkeypatch.setattr(SlaveSockets, "reconnect", reconnect)
    flat = allocator.zeros(bulk.n_elems)
    bulk.fill(flat)
    order = tuple(block.block_id for block in bulk.layout.blocks)
    common = Common(RUN, EPOCH, "bulk", bulk.layout, bulk.settings())
    clock = SystemClock()
    with BulkPort(bulk) as slave:
        placement = bulk.placement(slave.server.endpoint)
        ticket = Ticket(1, placement, order)
        push = carry_push(context, common, flat, PUSH, ticket, clock, threading.Event())
        assert push.done, push.failure
        ((_, digest),) = digests_of(bulk.layout, ticket.placement, bulk.chunk_bytes, push.known())
        assert digest == digest_of_array(flat, bulk.layout.blocks, bulk.chunk_bytes)
        assert (slave.server.port.last_refusal, slave.digest) == ("", digest)
        assert slave.serve_what_was_pushed() == digest

        flat.fill(np.nan)
        grant = PullGrant(
            VERSION, 0, 1, placement, order, ((SLAVE, digest),), 0, 1, None, bulk.chunk_bytes,
            EPOCH, RUN,
        )  # fmt: skip
        pull = carry_pull(context, common, flat, grant, clock, threading.Event())
    assert pull.done, pull.failure
    assert bulk.wrong_elems(flat) == 0
    assert connects == [SLAVE, SLAVE], "nothing was lost on the way, so no process had to connect again"
