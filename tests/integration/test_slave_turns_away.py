"""A slave tells the master at once whom its data port turned away, however long its heartbeat is."""

from __future__ import annotations

from pathlib import Path

import zmq
from support.keyed_port import fresh_context
from support.master_for_slaves import MasterForSlaves
from support.slave_wire import slave_config, slave_here
from support.waiting import NO_LIMIT_S

from dips.core.messages import Settings
from dips.core.net.zmq_sockets import CurvePair, as_client
from dips.core.observe.tape import read_tape


async def test_a_refused_connection_is_told_without_waiting_for_the_next_beat(tmp_path: Path) -> None:
    tape = tmp_path / "tape"
    async with MasterForSlaves() as master:
        master.settings = Settings(heartbeat_s=NO_LIMIT_S)
        async with slave_here(slave_config(tmp_path / "s0", master.address, tape=tape)):
            link = await master.accept()
            hello = await link.hello()
            await link.welcome()
            with fresh_context() as context:
                stranger = context.socket(zmq.DEALER)
                # It comes once: each time may be refused with another sentence, and the last words would be a race.
                stranger.setsockopt(zmq.RECONNECT_IVL, -1)
                as_client(stranger, CurvePair.new(), CurvePair.new().public)
                stranger.connect(hello.data_endpoint)
                beat = await link.beat()
                if not beat.refused_connections:  # the first beat may have come before the stranger
                    beat = await link.beat(1)
            assert beat.refused_connections >= 1
            assert "security (CURVE, or none)" in beat.refused_connection
    (line, *_) = [line for line in read_tape(tape) if line["kind"] == "refused_connection"]
    assert line["last_reason"] == beat.refused_connection
