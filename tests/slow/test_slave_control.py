"""A slave's stream to the master over real gRPC: it dials for ever, obeys only whom it promised, and beats on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import slave_wire
from support.master_for_slaves import MasterForSlaves, SlaveLink
from support.waiting import NO_LIMIT_S

from dips.core import messages as m
from dips.core.errors import NAME_TAKEN_EXIT, FatalError, LocalProtocolError, RefusalCode, Refused
from dips.core.ids import RoundId, Version
from dips.core.layout import Layout, Parameter
from dips.core.math import outer_numba
from dips.core.observe import tape
from dips.slave import control
from dips.slave.config import SlaveConfig
from dips.slave.process import serve
from dips.slave.ring import Ring, SnapshotStore

A, B = slave_wire.push_id("a"), slave_wire.push_id("b")
V0 = Version(1, 0)
R1, R2 = RoundId(1, 1), RoundId(1, 2)
BLOCKS = list(slave_wire.LAYOUT.blocks)
RNG = np.random.default_rng(9)
SEED, ONE = (RNG.standard_normal(slave_wire.LAYOUT.n_elems).astype(np.float32) for _ in range(2))


async def seed(link: SlaveLink, client: slave_wire.DataClient, values: np.ndarray = SEED) -> None:
    """Version 0 from push A in slot 0."""
    link.send(slave_wire.open_staging(A, 0))
    await client.put_all(A, values)
    await link.expect(m.Staged)
    await link.publish(slave_wire.prepare_of(R1, V0, [A], None))


async def ended_by(master: MasterForSlaves, config: SlaveConfig, play: Callable[[SlaveLink], Awaitable[None]]) -> Any:
    """What ends a slave in this process when its master plays this; None when it ends in peace."""
    slave = asyncio.create_task(serve(config, asyncio.Event()))
    link = await master.accept()
    await play(link)
    await asyncio.wait({slave})
    assert slave.done()
    return slave.exception()


async def test_a_full_disk_under_the_tape_ends_the_slave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def push(link: SlaveLink) -> None:
        hello = await link.hello()
        await link.welcome()
        link.send(slave_wire.configure_for(slave_wire.placement_over("s0")))
        await link.expect(m.Ready)
        link.send(slave_wire.open_staging(A, 0))
        client = slave_wire.DataClient(hello.data_endpoint, BLOCKS)
        monkeypatch.setattr(tape, "_append", full)
        await client.put_all(A, SEED)
        client.close()

    async with MasterForSlaves() as master:
        config = slave_wire.slave_config(tmp_path / "s0", master.address, tape=tmp_path / "s0.jsonl")
        error = await ended_by(master, config, push)
    assert isinstance(error, FatalError)
    assert "make room on its disk, then start again" in str(error)


async def test_a_bug_in_the_beats_ends_the_slave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(*args: object) -> None:
        raise RuntimeError("that is odd")

    async def beat(link: SlaveLink) -> None:
        await link.hello()
        monkeypatch.setattr(control, "resident_bytes", odd)
        await link.welcome()

    async with MasterForSlaves() as master:
        error = await ended_by(master, slave_wire.slave_config(tmp_path / "s0", master.address), beat)
    assert isinstance(error, LocalProtocolError)
    assert "RuntimeError: that is odd" in str(error)


async def test_beats_go_on_while_a_round_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement that does not end delays no beat and no other command."""
    real, go_on = outer_numba.measure_pieces, threading.Event()

    def slow(*args: Any) -> Any:
        assert go_on.wait(NO_LIMIT_S)
        return real(*args)

    settings = m.Settings(heartbeat_s=0.05, chunk_bytes=1024)
    async with (
        MasterForSlaves(settings=settings) as master,
        slave_wire.slave_here(slave_wire.slave_config(tmp_path / "s0", master.address)),
    ):
        link = await master.accept()
        hello = await link.configured(slave_wire.configure_for(slave_wire.placement_over("s0")))
        client = slave_wire.DataClient(hello.data_endpoint, BLOCKS)
        await seed(link, client)
        before = len(link.beats)
        monkeypatch.setattr(outer_numba, "measure_pieces", slow)
        link.send(m.Measure(R2, V0, (m.StagedPush(A, 1),)))
        link.send(slave_wire.open_staging(B, 1))
        chunk = client.chunks()[0]
        assert (await client.put_patiently(B, ONE, chunk)).refusal is None
        assert (await link.beat(before + 3)).resident_bytes > 0
        go_on.set()
        await link.expect(m.Measured)
        client.close()


async def test_only_a_stop_by_the_master_ends_the_process_with_zero(tmp_path: Path) -> None:
    async with MasterForSlaves() as master:
        process = await slave_wire.SlaveProcess.start(slave_wire.slave_config(tmp_path / "s0", master.address))
        link = await master.accept()
        await link.hello()
        await link.welcome()
        link.send(m.StopSlave("the run has reached its end"))
        code, said = await process.wait()
        assert code == 0
        assert "the run has reached its end" in said
        process = await slave_wire.SlaveProcess.start(slave_wire.slave_config(tmp_path / "s0", master.address))
        await (await master.accept()).hello()
        assert (await process.end())[0] == 143, "a supervisor that did not send SIGTERM starts it again"


async def test_a_second_slave_asks_again_while_told_to_and_then_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    async with MasterForSlaves() as master:
        config = slave_wire.slave_config(tmp_path / "s0", master.address)
        process = await slave_wire.SlaveProcess.start(config)
        drawn = []
        for retry_after_s in (0.5, 0.0):
            link = await master.accept()
            drawn.append((await link.hello()).directory_id)
            link.refuse(Refused(RefusalCode.NAME_TAKEN, "another process is slave 's0'", retry_after_s))
        code, said = await process.wait()
    assert code == NAME_TAKEN_EXIT
    assert said.strip().endswith("dips slave s0: another process is slave 's0'")
    with contextlib.closing(SnapshotStore(tmp_path / "s0", config.run_id, "s0", 1)) as store:
        assert drawn == [store.directory_id] * 2


async def test_a_large_configure_passes_the_stream(tmp_path: Path) -> None:
    """A layout of 20,000 parameters is megabytes of control message; grpc's own limit of 4 MB must not stop it."""
    names = [f"layers.{i}.{'x' * 200}" for i in range(20_000)]
    layout = Layout(tuple(Parameter(name, (1,), "float32", "all") for name in names))
    async with (
        MasterForSlaves() as master,
        slave_wire.slave_here(slave_wire.slave_config(tmp_path / "s0", master.address)),
    ):
        link = await master.accept()
        await link.hello()
        await link.welcome()
        body: m.Configure = slave_wire.configure_for(slave_wire.placement_over("s0", layout=layout), layout=layout)
        link.send(body)
        await link.expect(m.Ready)


async def test_messages_may_be_as_long_as_the_run_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the default of max_message_bytes."""
    record = bytes(65 << 20)
    commit_hash = hashlib.sha256(record).digest()
    monkeypatch.setattr(Ring, "record", lambda ring, version, round_id: (record, commit_hash))
    settings = m.Settings(heartbeat_s=0.1, chunk_bytes=1024, max_message_bytes=256 << 20)
    here = MasterForSlaves(settings=settings)
    async with here as master, slave_wire.slave_here(slave_wire.slave_config(tmp_path / "s0", master.address)):
        link = await master.accept()
        await link.hello()
        await link.welcome()
        link.send(m.SendCommitRecord(V0, R1))
        assert hashlib.sha256((await link.expect(m.CommitRecord)).record).digest() == commit_hash
