"""A slave in this process: the addresses that it names and tries, its metrics, who it turns away, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.keyed_port import fresh_context
from support.master_for_slaves import MasterForSlaves
from support.ports import own_port
from support.slave_wire import slave_config, slave_here
from support.waiting import NO_LIMIT_S, until

from dips.core.errors import ConfigError
from dips.core.messages import PlacementSpec, Settings, SlaveAddress
from dips.core.net.security import METRICS_FILE
from dips.core.net.slave_sockets import SlaveSockets
from dips.core.net.zmq_sockets import CurvePair, as_client
from dips.core.observe.tape import read_tape
from dips.slave import process
from dips.slave.process import run


def guards() -> int:
    return sum(thread.name == "dips-guard" for thread in threading.enumerate())


@pytest.mark.parametrize(("advertise", "expected"), [("127.0.0.2:0", "tcp://127.0.0.2:{}"), ("", "tcp://127.0.0.1:{}")])
async def test_clusters_are_told_the_address_that_they_reach(tmp_path: Path, advertise: str, expected: str) -> None:
    port = own_port()
    async with MasterForSlaves() as master:
        config = slave_config(
            tmp_path, master.address, advertise=advertise, data_port=port, metrics_listen="127.0.0.1:0"
        )
        async with slave_here(config):
            hello = await (await master.accept()).hello()
            assert hello.data_endpoint == expected.format(port)
            file = tmp_path / METRICS_FILE
            await asyncio.to_thread(until, file.exists, "the slave serves its metrics, with its kernels compiled")
            assert guards() == 1
    assert not (tmp_path / METRICS_FILE).exists()
    assert guards() == 0


async def test_an_address_that_only_this_machine_reaches_is_refused_where_the_master_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "is_elsewhere", lambda master: True)
    async with MasterForSlaves() as master:
        with pytest.raises(ConfigError, match="data_host"):
            async with slave_here(slave_config(tmp_path, master.address)):
                pass


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_with_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    tape, said = tmp_path / "tape", list[str]()

    def end_it() -> None:
        file = tmp_path / "s0" / METRICS_FILE
        until(lambda: file.exists() and "targets" in file.read_text(), "the slave serves its metrics")
        (found,) = json.loads(file.read_text())
        labels = {"role": "slave", "name": "s0", "run": config.run_id, "instance": f"{config.run_id}/s0"}
        assert found["labels"] == labels
        with urllib.request.urlopen(f"http://{found['targets'][0]}/metrics", timeout=NO_LIMIT_S) as answer:
            said.append(answer.read().decode())
        until(lambda: tape.exists() and "started" in tape.read_text(), "the slave has started")
        os.kill(os.getpid(), number)

    config = slave_config(
        tmp_path / "s0", "127.0.0.1:9", tape=tape, metrics_listen="127.0.0.1:0", record_pushes=True
    )  # fmt: skip
    thread = threading.Thread(target=end_it)
    thread.start()
    assert run(config) == code
    thread.join()
    assert "dips_slave_" in said[0]
    kinds = [line["kind"] for line in read_tape(tape)]
    assert "started" in kinds
    assert kinds[-1] == "stopped"
    assert guards() == 0


def test_what_cannot_be_is_an_exit_code_and_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s0").write_text("a file")
    assert run(slave_config(tmp_path / "s0", "127.0.0.1:9")) not in (0, 130, 143)
    assert "dips slave s0" in capsys.readouterr().err


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


def test_the_addresses_of_a_name_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dips.core.net.slave_sockets.require_loopback", lambda address, what: None)
    asked = socket.getaddrinfo

    def answered(host: str, port: int, *more: Any, **options: Any) -> list[Any]:
        """127.0.0.2 stands for a record of old: nothing listens there."""
        places = ("127.0.0.2", "127.0.0.1") if host.endswith(".example") else (host,)
        return [row for place in places for row in asked(place, port, *more, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", answered)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        names = ("s0", "s1")
        placement = PlacementSpec(tuple(SlaveAddress(s, f"tcp://{s}.example:{port}") for s in names), (0, 1), b"p")
        refused: list[set[str]] = []
        for _ in range(2):
            links, received, failed = SlaveSockets(context, placement, 4096), set[bytes](), set[str]()
            links.open(names)
            for slave in names:
                links.send(slave, slave.encode())

            def both_receive(
                links: SlaveSockets = links, received: set[bytes] = received, failed: set[str] = failed
            ) -> bool:
                list(links.receive(0.02))
                for slave, _ in list(links.turned_away()):
                    failed.add(slave)
                    links.reconnect(slave)
                    links.send(slave, slave.encode())
                while router.poll(0):
                    received.add(router.recv_multipart()[-1])
                return received == {b"s0", b"s1"}

            until(both_receive, "both receive it")
            links.all_answered()
            links.close()
            refused.append(failed)
    assert refused == [{"s0", "s1"}, set()]
