"""A slave's stream to the master over real gRPC: it dials for ever, obeys only whom it promised, and beats on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.master_for_slaves import MasterForSlaves, SlaveLink
from support.slave_wire import (
    LAYOUT,
    DataClient,
    SlaveProcess,
    configure_for,
    open_staging,
    placement_over,
    prepare_of,
    push_id,
    shard_of,
    slave_config,
    slave_here,
)
from support.waiting import NO_LIMIT_S

from dips.core.errors import NAME_TAKEN_EXIT, ConfigError, FatalError, LocalProtocolError, RefusalCode, Refused
from dips.core.ids import RoundId, SlaveId, Version
from dips.core.layout import Layout, Parameter
from dips.core.math import outer_numba
from dips.core.messages import (
    AbortRound,
    Commit,
    Configure,
    ConfigureRefused,
    Flipped,
    Hello,
    Measure,
    Measured,
    Prepared,
    Promised,
    Ready,
    RoundRefused,
    Settings,
    Staged,
    StagedPush,
    StopSlave,
    Welcome,
)
from dips.core.observe import tape
from dips.slave import control, ring
from dips.slave.config import SlaveConfig
from dips.slave.memory import ShardMemory
from dips.slave.process import serve
from dips.slave.ring import SnapshotStore

A, B = push_id("a"), push_id("b")
V0, V1 = Version(1, 0), Version(1, 1)
R1, R2 = RoundId(1, 1), RoundId(1, 2)
BLOCKS = list(LAYOUT.blocks)
RNG = np.random.default_rng(9)
SEED, ONE, TWO = (RNG.standard_normal(LAYOUT.n_elems).astype(np.float32) for _ in range(3))


async def seed(link: SlaveLink, client: DataClient, values: np.ndarray = SEED) -> None:
    """Version 0 from push A in slot 0."""
    link.send(open_staging(A, 0))
    await client.put_all(A, values)
    await link.expect(Staged)
    await link.publish(prepare_of(R1, V0, [A], None))


async def test_it_dials_until_there_is_a_master_and_again_when_it_is_back(tmp_path: Path) -> None:
    first = MasterForSlaves()
    await first.start()
    port = int(first.address.split(":")[1])
    async with slave_here(slave_config(tmp_path / "s0", first.address)):
        link = await first.accept()
        await link.hello()
        await link.welcome(1)
        link.send(configure_for(placement_over("s0")))
        await link.expect(Ready)
        await first.stop()

        second = MasterForSlaves()
        await asyncio.sleep(0.3)  # the slave's first tries find nobody; where they come later, this test asks less
        await second.start(port)
        link = await second.accept()
        assert (await link.hello()).promised_epoch == 1
        assert link.callers[0].incarnation is not None
        await link.welcome(2)
        link.send(configure_for(placement_over("s0")))
        assert await link.expect(Ready) == Ready(None)
        await second.stop()


async def test_the_same_incarnation_goes_on_where_the_stream_broke(tmp_path: Path) -> None:
    async with MasterForSlaves() as master, slave_here(slave_config(tmp_path / "s0", master.address)):
        link = await master.accept()
        hello = await link.configured(configure_for(placement_over("s0")))
        client = DataClient(hello.data_endpoint, BLOCKS)
        link.send(open_staging(A, 0))
        digest = await client.put_all(A, SEED)
        await link.expect(Staged)
        link.close()
        link = await master.accept()
        await link.hello()
        await link.welcome()
        assert await link.expect(Staged) == Staged(A, 1, digest)
        link.send(prepare_of(R1, V0, [A], None))
        assert (await link.expect(Prepared)).digest == digest
        client.close()


async def test_a_master_of_an_older_epoch_is_never_obeyed(tmp_path: Path) -> None:
    async with MasterForSlaves() as master, slave_here(slave_config(tmp_path / "s0", master.address)):
        link = await master.accept()
        await link.hello()
        await link.welcome(5)
        link.close()
        old = await master.accept()
        assert (await old.hello()).promised_epoch == 5
        old.send(Welcome(Hello(1, 1), master.settings), epoch=4)
        assert await old.next() is None
        again = await master.accept()
        assert (await again.hello()).promised_epoch == 5
        await again.welcome(5, 2)


async def ended_by(master: MasterForSlaves, config: SlaveConfig, play: Callable[[SlaveLink], Awaitable[None]]) -> Any:
    """What ends a slave in this process when its master plays this; None when it ends in peace."""
    slave = asyncio.create_task(serve(config, asyncio.Event()))
    link = await master.accept()
    await play(link)
    await asyncio.wait({slave})
    assert slave.done()
    return slave.exception()


@pytest.mark.parametrize("code", [RefusalCode.RUN_ID, RefusalCode.PROTOCOL_VERSION, RefusalCode.CONFIG])
async def test_a_refusal_for_good_ends_the_slave_with_its_sentence(tmp_path: Path, code: RefusalCode) -> None:
    async def refuse(link: SlaveLink) -> None:
        await link.hello()
        link.refuse(Refused(code, "this is why"))

    async with MasterForSlaves() as master:
        error = await ended_by(master, slave_config(tmp_path / "s0", master.address), refuse)
    assert isinstance(error, Refused)
    assert (error.code, error.sentence) == (code, "this is why")


async def test_a_master_that_speaks_another_protocol_ends_the_slave(tmp_path: Path) -> None:
    async def welcome(link: SlaveLink) -> None:
        await link.hello()
        link.send(Welcome(Hello(8, 9), Settings()), epoch=1, incarnation=A.incarnation)

    async with MasterForSlaves() as master:
        error = await ended_by(master, slave_config(tmp_path / "s0", master.address), welcome)
    assert isinstance(error, Refused)
    assert error.code is RefusalCode.PROTOCOL_VERSION
    assert "install the same release" in error.sentence


async def test_a_promise_that_cannot_be_written_ends_the_slave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def welcome(link: SlaveLink) -> None:
        await link.hello()
        monkeypatch.setattr(os, "fsync", broken)
        link.send(Welcome(Hello(1, 1), Settings()), epoch=1, incarnation=A.incarnation)

    async with MasterForSlaves() as master:
        error = await ended_by(master, slave_config(tmp_path / "s0", master.address), welcome)
    assert isinstance(error, FatalError)
    assert "epoch 1 cannot be promised" in str(error)


async def test_a_fenced_slave_comes_back_as_nobody(tmp_path: Path) -> None:
    async with MasterForSlaves() as master, slave_here(slave_config(tmp_path / "s0", master.address)):
        link = await master.accept()
        await link.hello()
        await link.welcome()
        link.refuse(Refused(RefusalCode.FENCED, "evicted"))
        link = await master.accept()
        await link.hello()
        assert link.callers[0].incarnation is None
        await link.welcome(1, 2)


async def test_a_full_disk_under_the_tape_ends_the_slave_instead_of_a_push_that_is_never_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def push(link: SlaveLink) -> None:
        hello = await link.hello()
        await link.welcome()
        link.send(configure_for(placement_over("s0")))
        await link.expect(Ready)
        link.send(open_staging(A, 0))
        client = DataClient(hello.data_endpoint, BLOCKS)
        monkeypatch.setattr(tape, "_append", full)
        await client.put_all(A, SEED)
        client.close()

    async with MasterForSlaves() as master:
        config = slave_config(tmp_path / "s0", master.address, tape=tmp_path / "s0.jsonl")
        error = await ended_by(master, config, push)
    assert isinstance(error, FatalError)
    assert "make room on its disk, then start again" in str(error)


async def test_a_bug_in_the_beats_ends_the_slave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(*args: object) -> None:
        raise RuntimeError("that is odd")

    async def beat(link: SlaveLink) -> None:
        await link.hello()
        monkeypatch.setattr(control, "with_resident_bytes", odd)
        await link.welcome()

    async with MasterForSlaves() as master:
        error = await ended_by(master, slave_config(tmp_path / "s0", master.address), beat)
    assert isinstance(error, LocalProtocolError)
    assert "RuntimeError: that is odd" in str(error)


async def test_any_other_refusal_is_dialled_through(tmp_path: Path) -> None:
    async with MasterForSlaves() as master, slave_here(slave_config(tmp_path / "s0", master.address)):
        for _ in range(2):
            link = await master.accept()
            await link.hello()
            link.refuse(Refused(RefusalCode.BUSY, "not now", 0.1))
        link = await master.accept()
        await link.hello()
        await link.welcome()


async def test_beats_go_on_while_a_round_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement that does not end delays no beat and no other command."""
    real, go_on = outer_numba.measure_pieces, threading.Event()

    def slow(*args: Any) -> Any:
        assert go_on.wait(NO_LIMIT_S)
        return real(*args)

    settings = Settings(heartbeat_s=0.05, chunk_bytes=1024)
    async with MasterForSlaves(settings=settings) as master, slave_here(slave_config(tmp_path / "s0", master.address)):
        link = await master.accept()
        hello = await link.configured(configure_for(placement_over("s0")))
        client = DataClient(hello.data_endpoint, BLOCKS)
        await seed(link, client)
        before = len(link.beats)
        monkeypatch.setattr(outer_numba, "measure_pieces", slow)
        link.send(Measure(R2, V0, (StagedPush(A, 1),)))
        link.send(open_staging(B, 1))
        chunk = client.chunks()[0]
        assert (await client.put_patiently(B, ONE, chunk)).refusal is None
        assert (await link.beat(before + 3)).resident_bytes > 0
        go_on.set()
        await link.expect(Measured)
        client.close()


async def test_a_full_disk_refuses_the_round_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with MasterForSlaves() as master, slave_here(slave_config(tmp_path / "s0", master.address)):
        link = await master.accept()
        hello = await link.configured(configure_for(placement_over("s0")))
        client = DataClient(hello.data_endpoint, BLOCKS)
        await seed(link, client)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            link.send(prepare_of(R2, V1, [A], V0, scale=0.5))
            refused = await link.expect(RoundRefused)
        assert (refused.round, refused.command, refused.refusal.code) == (R2, "prepare", RefusalCode.DISK)
        assert "No space left on device" in refused.refusal.sentence
        np.testing.assert_array_equal(await client.pull(V0), SEED)
        link.send(AbortRound(R2, "a slave's disk is full"))
        link.send(prepare_of(RoundId(1, 3), V1, [A], V0, scale=0.5))
        await link.expect(Prepared)
        client.close()


async def test_a_disk_that_fails_at_commit_is_tried_until_it_takes_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "DISK_RETRY_S", 0.05)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with MasterForSlaves() as master, slave_here(slave_config(tmp_path / "s0", master.address)):
        link = await master.accept()
        hello = await link.configured(configure_for(placement_over("s0")))
        client = DataClient(hello.data_endpoint, BLOCKS)
        await seed(link, client)
        link.send(prepare_of(R2, V1, [A], V0, scale=0.5))
        await link.expect(Prepared)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            link.send(Commit(R2, V1, b"h", b"{}"))
            for _ in range(3):
                refused = await link.expect(RoundRefused)
                assert (refused.command, refused.refusal.code) == ("commit", RefusalCode.DISK)
        while not isinstance(body := await link.any(), Flipped):
            assert isinstance(body, RoundRefused)
        assert body == Flipped(R2, V1)
        await client.pull(V1)
        client.close()


async def test_a_push_that_would_give_nan_is_refused_at_prepare(tmp_path: Path) -> None:
    bad = SEED.copy()
    bad[40] = np.nan
    async with MasterForSlaves() as master, slave_here(slave_config(tmp_path / "s0", master.address)):
        link = await master.accept()
        hello = await link.configured(configure_for(placement_over("s0")))
        client = DataClient(hello.data_endpoint, BLOCKS)
        await seed(link, client)
        link.send(open_staging(B, 1))
        await client.put_all(B, bad)
        await link.expect(Staged)
        link.send(Measure(R2, V0, (StagedPush(A, 1), StagedPush(B, 1))))
        measured = await link.expect(Measured)
        assert next(grams.nonfinite_elems for grams in measured.blocks) == (0, 1)
        link.send(prepare_of(R2, V1, [B], V0))
        refused = await link.expect(RoundRefused)
        assert refused.refusal.code is RefusalCode.NONFINITE
        np.testing.assert_array_equal(await client.pull(V0), SEED)
        client.close()


async def test_a_model_too_big_for_the_stated_memory_is_refused_and_the_slave_stays(tmp_path: Path) -> None:
    async with MasterForSlaves() as master:
        config = slave_config(tmp_path / "s0", master.address, memory_bytes=1577 * 36 - 1)
        async with slave_here(config):
            link = await master.accept()
            assert (await link.hello()).memory_bytes == 1577 * 36 - 1
            await link.welcome()
            link.send(configure_for(placement_over("s0"), slots=2))
            refused = await link.expect(ConfigureRefused)
            assert refused.refusal.code is RefusalCode.MEMORY
            link.send(configure_for(placement_over("s0"), slots=1))
            await link.expect(Ready)


async def test_a_master_and_a_data_host_elsewhere_are_refused(tmp_path: Path) -> None:
    good = slave_config(tmp_path / "s0", "127.0.0.1:1")
    for change in ({"master": "10.0.0.1:1"}, {"data_host": "0.0.0.0"}):
        with pytest.raises(ConfigError, match="not a loopback address"):
            await serve(good.model_copy(update=change), asyncio.Event())


async def test_only_a_stop_by_the_master_ends_the_process_with_zero(tmp_path: Path) -> None:
    async with MasterForSlaves() as master:
        process = await SlaveProcess.start(slave_config(tmp_path / "s0", master.address))
        link = await master.accept()
        await link.hello()
        await link.welcome()
        link.send(StopSlave("the run has reached its end"))
        code, said = await process.wait()
        assert code == 0
        assert "the run has reached its end" in said
        process = await SlaveProcess.start(slave_config(tmp_path / "s0", master.address))
        await (await master.accept()).hello()
        assert (await process.end())[0] == 143, "a supervisor that did not send SIGTERM starts it again"


async def test_a_second_slave_asks_again_while_told_to_and_then_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    async with MasterForSlaves() as master:
        config = slave_config(tmp_path / "s0", master.address)
        process = await SlaveProcess.start(config)
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


async def test_a_slave_of_another_run_ends_with_three(tmp_path: Path) -> None:
    async with MasterForSlaves() as master:
        process = await SlaveProcess.start(slave_config(tmp_path / "s0", master.address))
        link = await master.accept()
        await link.hello()
        link.refuse(Refused(RefusalCode.RUN_ID, "this master serves run 'x': check --run-id"))
        code, said = await process.wait()
        assert code == 3
        assert said.strip().endswith("dips slave s0: this master serves run 'x': check --run-id")
        assert "Traceback" not in said


async def test_a_bug_in_a_job_ends_the_slave_and_is_not_swallowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("a bug")

    async def measure(link: SlaveLink) -> None:
        hello = await link.hello()
        await link.welcome()
        link.send(configure_for(placement_over("s0")))
        await link.expect(Ready)
        client = DataClient(hello.data_endpoint, BLOCKS)
        await seed(link, client)
        client.close()
        monkeypatch.setattr(ShardMemory, "spans", broken)
        link.send(Measure(R2, V0, (StagedPush(A, 1),)))

    async with MasterForSlaves() as master:
        error = await ended_by(master, slave_config(tmp_path / "s0", master.address), measure)
    assert isinstance(error, LocalProtocolError)
    assert "ZeroDivisionError: a bug" in str(error)


async def rounds_on(tmp_path: Path, slaves: tuple[str, ...]) -> tuple[np.ndarray, dict[int, Any]]:
    """Three rounds over real sockets on these slaves: the last model and the first round's Gram matrices by block."""
    placement = placement_over(*slaves)
    grams: dict[int, Any] = {}
    async with asyncio.timeout(NO_LIMIT_S), MasterForSlaves() as master:
        stops, links, clients = [], {}, {}
        for slave in slaves:
            stop = slave_here(slave_config(tmp_path / f"{len(slaves)}-{slave}", master.address, slave))
            await stop.__aenter__()
            stops.append(stop)
            link = links[slave] = await master.accept()
            hello = await link.hello()
            await link.welcome()
            link.send(configure_for(placement))
            await link.expect(Ready)
            clients[slave] = DataClient(hello.data_endpoint, placement.blocks_of(SlaveId(slave), LAYOUT))
            await seed(link, clients[slave], shard_of(SEED, placement, slave))
        for n in range(3):
            for slave, link in links.items():
                for slot, (push, values) in enumerate(((push_id("a", n + 2), ONE), (push_id("b", n + 2), TWO))):
                    link.send(open_staging(push, slot))
                    await clients[slave].put_all(push, shard_of(values / np.float32(n + 1), placement, slave))
                    await link.expect(Staged)
                pushes = [push_id("a", n + 2), push_id("b", n + 2)]
                round_id, version = RoundId(1, n + 2), Version(1, n)
                link.send(Measure(round_id, version, tuple(StagedPush(push, 1) for push in pushes)))
                measured = await link.expect(Measured)
                grams |= {block.block: block for block in measured.blocks if n == 0}
                await link.publish(prepare_of(round_id, version.next(), pushes, version, weights=(0.3, 0.7), scale=0.4))
        model = np.empty(LAYOUT.n_elems, np.float32)
        for slave, client in clients.items():
            shard, start = await client.pull(Version(1, 3)), 0
            for block in client.blocks:
                model[block.start_elem : block.stop_elem] = shard[start : start + block.n_elems]
                start += block.n_elems
            client.close()
            assert slave in links
        for stop in stops:
            await stop.__aexit__(None, None, None)
    return model, grams


async def test_one_slave_and_two_give_the_same_bits(tmp_path: Path) -> None:
    one, grams_of_one = await rounds_on(tmp_path, ("s0",))
    two, grams_of_two = await rounds_on(tmp_path, ("s0", "s1"))
    assert one.tobytes() == two.tobytes()
    assert grams_of_one == grams_of_two


async def test_a_promise_is_on_disk_before_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real = os.fsync

    def seen(handle: int) -> None:
        order.append("fsync")
        real(handle)

    async with MasterForSlaves() as master, slave_here(slave_config(tmp_path / "s0", master.address)):
        link = await master.accept()
        await link.hello()
        monkeypatch.setattr(os, "fsync", seen)
        link.epoch = 3
        link.send(Welcome(Hello(1, 1), master.settings), incarnation=push_id("a").incarnation)
        assert await link.expect(Promised) == Promised(3)
        assert order
        assert '"promised_epoch": 3' in (tmp_path / "s0" / "promise.json").read_text()


async def test_a_large_configure_passes_the_stream(tmp_path: Path) -> None:
    """A layout of 20,000 parameters is megabytes of control message; grpc's own limit of 4 MB must not stop it."""
    names = [f"layers.{i}.{'x' * 200}" for i in range(20_000)]
    layout = Layout(tuple(Parameter(name, (1,), "float32", "all") for name in names))
    async with MasterForSlaves() as master, slave_here(slave_config(tmp_path / "s0", master.address)):
        link = await master.accept()
        await link.hello()
        await link.welcome()
        body: Configure = configure_for(placement_over("s0", layout=layout), layout=layout)
        link.send(body)
        await link.expect(Ready)
