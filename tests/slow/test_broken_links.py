"""A slave that dies in the middle of a transfer is heard of from its connection, and not by waiting for its answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from support.waiting import NO_LIMIT_S

from dips.core.clock import SystemClock
from dips.core.ids import Version
from dips.core.layout import Layout, Parameter
from dips.core.messages import PlacementSpec, PullGrant, SlaveAddress
from dips.core.net.carriers import Common, LoopChoice, carry_pull
from dips.core.net.transfer import TransferSettings

LAYOUT = Layout((Parameter("w", (1000,), "float32", "w"),))


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


class Mute:
    """A slave that takes what is asked and answers nothing, until it is gone."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.placement = PlacementSpec((SlaveAddress("s0", f"tcp://127.0.0.1:{port}"),), (0,), b"p")

    def hears(self) -> bool:
        return bool(self._router.poll(int(1000 * NO_LIMIT_S)))

    def die(self) -> None:
        self._router.close(linger=0)
        self._context.term()


@pytest.mark.parametrize("loop", ["python", "compiled"])
def test_a_transfer_from_a_slave_that_died_is_given_up(
    context: zmq.Context[zmq.Socket[bytes]], loop: LoopChoice
) -> None:
    slave = Mute()
    grant = PullGrant(
        Version(1, 1), 0, 1, slave.placement, (0,), (("s0", b"d"),), 0, 0, None, 4096, 1, "run"
    )  # fmt: skip
    settings = TransferSettings(4096, 4, NO_LIMIT_S, NO_LIMIT_S)  # its silence would last longer than this test
    common = Common("run", 1, "cause", LAYOUT, settings, loop=loop)

    def hear_and_die() -> None:
        slave.hears()
        slave.die()

    killer = threading.Thread(target=hear_and_die)
    killer.start()
    flat = np.zeros(LAYOUT.n_elems, np.float32)
    transfer = carry_pull(context, common, flat, grant, SystemClock(), threading.Event())
    killer.join()
    assert not transfer.done
    assert "has ended" in transfer.failure
