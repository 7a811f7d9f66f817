"""A slave in this process: the address that it names, its metrics, and how a signal ends it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from support.master_for_slaves import MasterForSlaves
from support.ports import own_port
from support.slave_wire import slave_config, slave_here
from support.waiting import NO_LIMIT_S, until

from dips.core.errors import ConfigError
from dips.core.net.security import METRICS_FILE
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
