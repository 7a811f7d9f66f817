"""A master and the standby that follows its journal, over real gRPC and on real disks; no slaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from support.journals import append
from support.ports import own_port

from dips.core.errors import ConfigError, FatalError, RefusalCode, Refused
from dips.core.messages import Caller, OperatorReply, OperatorRequest, ReplicaMessage, StatusReply, StatusRequest
from dips.core.net.addresses import MasterAddresses
from dips.core.net.codec_protobuf import from_message, to_message
from dips.core.net.grpc_calls import newer_master, open_channel_aio, refused_from
from dips.core.net.keys import read_revoked
from dips.core.net.security import INSECURE, Role
from dips.core.observe.failpoints import armed
from dips.core.protocol import OWN_HELLO
from dips.local.authority import Authority
from dips.master import replica, standby
from dips.master.config import MasterConfig
from dips.master.directory import MasterAddress
from dips.master.journal import Journal, JournalReader, Retention, read_content
from dips.master.process import serve
from dips.master.shell import MasterShell
from dips.master.standby import stand_by
from dips.master.state.effects import Halt, OperatorAction, OperatorCall, Pause, Resume
from dips.master.state.master import MasterMachine
from dips.master.state.reasons import AlarmKind
from dips.master.state.replication import TAKE_OVER_EPOCHS
from dips.master.state.shared import RunConfig
from dips.master.state.slaves import NEWER_EPOCH_EXIT
from dips.protos import replicas_pb2_grpc


def config_in(directory: Path, **knobs: object) -> MasterConfig:
    return MasterConfig.model_validate(
        {"run_id": "demo", "directory": directory, "insecure": True, "heartbeat_s": 0.2, **knobs}
    )


@pytest.fixture(autouse=True)
def _two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "PROCESS_ID", b"standby")


def _called(token: int, action: OperatorAction) -> OperatorCall:
    return OperatorCall(token, action)


class Served:
    """A master in this process's loop."""

    def __init__(self, config: MasterConfig) -> None:
        self.config = config
        self._started: asyncio.Future[tuple[MasterAddress, MasterShell]] = asyncio.get_running_loop().create_future()
        self.takes_over: list[bool] = []
        self.ended = asyncio.create_task(serve(config, self._make, started=self._tell))

    def _make(self, config: RunConfig, *rest: Any) -> MasterMachine:
        self.takes_over.append(config.takes_over)
        return MasterMachine(config, *rest)

    def _tell(self, here: MasterAddress, shell: MasterShell) -> None:
        if not self._started.done():
            self._started.set_result((here, shell))

    async def start(self) -> Served:
        waited: list[asyncio.Future[Any]] = [self._started, self.ended]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            self.ended.result()
        self.here, self.shell = self._started.result()
        return self

    async def decide(self, times: int = 1) -> None:
        """Has entries made durable, and waits for the answers."""
        for _ in range(times):
            for action in (Pause(OperatorRequest("demo", "a test")), Resume(OperatorRequest("demo", ""))):
                assert isinstance(await self.shell.call(partial(_called, action=action)), OperatorReply)

    async def status(self) -> StatusReply:
        reply = await self.shell.call(lambda token: OperatorCall(token, StatusRequest("demo")))
        assert isinstance(reply, StatusReply)
        return reply

    async def stop(self) -> None:
        self.shell.stop(Halt(0, "the test has seen what it wants"))
        await self.ended


@contextlib.asynccontextmanager
async def master(directory: Path, **knobs: object) -> AsyncIterator[Served]:
    served = await Served(config_in(directory, **knobs)).start()
    try:
        yield served
    finally:
        await served.stop()


@contextlib.asynccontextmanager
async def following(config: MasterConfig) -> AsyncIterator[asyncio.Task[int | None]]:
    assert config.standby is not None
    task = asyncio.create_task(stand_by(config, config.standby))
    try:
        yield task
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.gather(task, return_exceptions=True)


async def until(happened: Callable[[], bool | Awaitable[bool]]) -> None:
    while True:
        found = happened()
        if found if isinstance(found, bool) else await found:
            return
        await asyncio.sleep(0.01)


def records(directory: Path) -> list[Any]:
    with contextlib.suppress(ConfigError):
        return read_content(directory).records
    return []


async def is_followed(served: Served) -> bool:
    return not (await served.status()).alarms


async def test_replica_has_each_decision_before_its_answer_and_takes_over_with_all_of_them(tmp_path: Path) -> None:
    async with master(tmp_path / "a", journal_replicas=1) as first:
        await first.decide(3)
        config = config_in(tmp_path / "b", standby=first.here.address, journal_replicas=1)
        async with following(config) as task:
            await until(lambda: is_followed(first))
            for _ in range(5):
                await first.decide()
                assert records(tmp_path / "b") == records(tmp_path / "a")
            await first.shell.call(lambda token: OperatorCall(token, Pause(OperatorRequest("demo", "kept"))))
            os.kill(os.getpid(), standby.TAKE_OVER)
            assert await task is None
        async with master(tmp_path / "b", take_over=True) as second:
            assert (second.here.epoch, second.takes_over) == (1 + TAKE_OVER_EPOCHS, [True])
            assert (await second.status()).paused
            ended = await first.ended
            assert ended.exit_code == NEWER_EPOCH_EXIT
            assert "has taken over" in ended.sentence
    with pytest.raises(ConfigError, match="was replaced"):
        await serve(config_in(tmp_path / "a"), MasterMachine)


async def test_master_that_took_over_ends_where_a_later_one_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a, b takes over; from b, c, at the address that a had. Then b comes back with the settings that it had."""
    monkeypatch.setattr(standby, "REPLACED_PAUSE_S", 0.05)
    address = f"127.0.0.1:{own_port()}"
    async with master(tmp_path / "a", listen=address) as first:
        async with following(config_in(tmp_path / "b", standby=address)):
            await until(lambda: records(tmp_path / "b") == records(tmp_path / "a"))
    async with master(tmp_path / "b", take_over=True) as second:
        async with following(config_in(tmp_path / "c", standby=second.here.address)):
            await until(lambda: records(tmp_path / "c") == records(tmp_path / "b"))
        await second.decide()
    async with master(tmp_path / "c", take_over=True, listen=address) as third:
        again = await Served(config_in(tmp_path / "b")).start()
        assert (await again.ended).exit_code == NEWER_EPOCH_EXIT
        assert not third.shell.outcome.done()
    assert first.ended.done()


async def test_master_goes_on_while_no_standby_follows_and_says_so(tmp_path: Path) -> None:
    async with master(tmp_path / "a", journal_replicas=1) as served:
        await served.decide()
        (alarm,) = (await served.status()).alarms
        assert alarm.kind == AlarmKind.NO_REPLICA
        config = config_in(tmp_path / "b", standby=served.here.address)
        async with following(config):
            await until(lambda: is_followed(served))
        await until(lambda: _not(is_followed(served)))
        await served.decide()
        assert len(records(tmp_path / "a")) == len(records(tmp_path / "b")) + 2


async def _not(found: Awaitable[bool]) -> bool:
    return not await found


async def test_standby_that_no_longer_writes_holds_the_run_up_for_the_time_of_an_eviction(tmp_path: Path) -> None:
    async with master(tmp_path / "a", journal_replicas=1, evict_after_beats=3) as served:
        async with following(config_in(tmp_path / "b", standby=served.here.address)):
            await until(lambda: is_followed(served))
            with armed("master.replica.before_receive=1*sleep(1.5)"):
                await served.shell.call(partial(_called, action=Pause(OperatorRequest("demo", "once"))))
                assert [alarm.kind for alarm in (await served.status()).alarms] == [AlarmKind.NO_REPLICA]
            await until(lambda: is_followed(served))  # no further decision is needed: there may be none
            assert records(tmp_path / "b") == records(tmp_path / "a")


async def test_master_ends_at_once_while_a_decision_waits_for_its_standby(tmp_path: Path) -> None:
    """Which says that it has all, and then nothing more."""
    async with master(tmp_path / "a", journal_replicas=1, evict_after_beats=1000, heartbeat_s=2) as served:
        newest = records(tmp_path / "a")[-1]
        async with open_channel_aio(served.here.address, INSECURE) as channel:
            call = replicas_pb2_grpc.ReplicasStub(channel).Follow()
            hello = ReplicaMessage(OWN_HELLO, "demo", 0, b"mute", newest.number, newest.digest)
            await call.write(to_message(hello))
            await until(lambda: is_followed(served))
            asked = asyncio.create_task(served.decide())
            await call.read()
            assert not asked.done()
            await served.stop()
            with pytest.raises(Refused):
                await asked


async def test_standby_with_the_masters_keys_follows_and_one_with_others_is_refused(tmp_path: Path) -> None:
    keys = Authority.create(tmp_path / "keys")
    keys.add(Role.MASTER, "master")
    keys.add(Role.OPERATOR, "op")
    own = {"insecure": False, "keys": keys.identity("master")}
    async with master(tmp_path / "a", **own) as served:
        async with following(config_in(tmp_path / "b", standby=served.here.address, **own)):
            await until(lambda: records(tmp_path / "b") == records(tmp_path / "a") != [])
        others = {**own, "keys": keys.identity("op")}
        with pytest.raises(Refused, match="role master"):
            await stand_by(config_in(tmp_path / "c", standby=served.here.address, **others), served.here.address)


async def test_standby_has_the_certificates_that_the_master_revokes_at_once_and_after_it_was_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Authority.create(tmp_path / "keys")
    keys.add(Role.MASTER, "master")
    own = {"insecure": False, "keys": keys.identity("master")}
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"

    def revokes(*serials: str) -> None:
        ours.write_text(json.dumps({"revoked": [{"serial": serial} for serial in serials]}))

    def has(*serials: int) -> bool:
        return theirs.exists() and set(serials) <= set(read_revoked(theirs))

    revokes("1")
    async with master(tmp_path / "a", revoked=ours, **own) as served:
        config = config_in(tmp_path / "b", standby=served.here.address, revoked=theirs, **own)
        async with following(config):
            await until(lambda: has(1))
            revokes("1", "2")
            await until(lambda: has(1, 2))
        theirs.write_text("no list")
        async with following(config):
            await until(lambda: f"is not in {theirs}" in caplog.text)
            assert theirs.read_text() == "no list", "a person must see to it"
        revokes("3")
        theirs.unlink()
        async with following(config):
            await until(lambda: has(3))


async def test_replica_of_a_long_history_goes_on_after_it_lost_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of the history is in the archive; a batch has a few records; the replica is put back from an older copy."""
    few = {"journal_records": 16}
    monkeypatch.setattr(replica, "MAX_BATCH_BYTES", 300)
    async with master(tmp_path / "a", **few) as served:
        await served.decide(20)
        config = config_in(tmp_path / "b", standby=served.here.address, **few)
        async with following(config):
            await until(lambda: records(tmp_path / "b") == records(tmp_path / "a"))
        shutil.copytree(tmp_path / "b", tmp_path / "older")  # not while it is tidied
        async with following(config):
            await served.decide(20)
            await until(lambda: records(tmp_path / "b") == records(tmp_path / "a"))
        shutil.rmtree(tmp_path / "b")
        shutil.move(tmp_path / "older", tmp_path / "b")
        async with following(config):
            await until(lambda: records(tmp_path / "b") == records(tmp_path / "a"))


async def test_disk_error_of_the_standby_loses_nothing_there(tmp_path: Path) -> None:
    async with master(tmp_path / "a") as served:
        await served.decide(2)
        config = config_in(tmp_path / "b", standby=served.here.address)
        async with following(config):
            await until(lambda: records(tmp_path / "b") == records(tmp_path / "a"))
        before = records(tmp_path / "b")
        await served.decide()
        with armed("master.journal.before_commit=error(no space left)"), pytest.raises(FatalError, match="room"):
            await stand_by(config, served.here.address)
        assert records(tmp_path / "b") == before
        async with following(config):
            await until(lambda: records(tmp_path / "b") == records(tmp_path / "a"))


async def test_directory_that_is_no_replica_neither_follows_nor_takes_over(tmp_path: Path) -> None:
    own = tmp_path / "own"
    with contextlib.closing(Journal.open(own, "demo")) as journal:
        append(journal, journal.begin_epoch(), 1, "PAUSE", "{}", "{}")
    with pytest.raises(ConfigError, match="a master's own journal"):
        await stand_by(config_in(own, standby="127.0.0.1:1"), "127.0.0.1:1")
    for directory in (own, tmp_path / "empty"):
        with pytest.raises(ConfigError, match="holds no replica"):
            await serve(config_in(directory, take_over=True), MasterMachine)


async def test_replica_is_served_only_after_a_take_over(tmp_path: Path) -> None:
    async with master(tmp_path / "a") as served:
        config = config_in(tmp_path / "b", standby=served.here.address)
        async with following(config):
            await until(lambda: records(tmp_path / "b") == records(tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"--standby .* or --take-over"):
        await serve(config_in(tmp_path / "b"), MasterMachine)
    async with master(tmp_path / "b", take_over=True) as second:
        await second.decide()
    assert await stand_by(config, served.here.address) is None  # a unit that starts it as before
    async with master(tmp_path / "b") as third:
        assert third.here.epoch == 2 + TAKE_OVER_EPOCHS


@pytest.mark.parametrize("n_decisions", [0, 20])
async def test_replica_of_another_history_is_refused(tmp_path: Path, n_decisions: int) -> None:
    """A master whose directory is an older copy: it has begun another epoch, and its journal may be shorter."""
    async with master(tmp_path / "a") as served:
        await served.decide()
        shutil.copytree(tmp_path / "a", tmp_path / "older")
        await served.decide(5)
        config = config_in(tmp_path / "b", standby=served.here.address)
        async with following(config):
            await until(lambda: records(tmp_path / "b") == records(tmp_path / "a"))
    before = records(tmp_path / "b")
    async with master(tmp_path / "older") as other:
        await other.decide(n_decisions)
        with pytest.raises(Refused, match="empty directory"):
            await stand_by(config, other.here.address)
    assert records(tmp_path / "b") == before


async def refusal_of(address: str, message: ReplicaMessage) -> Refused:
    async with open_channel_aio(address, INSECURE) as channel:
        call = replicas_pb2_grpc.ReplicasStub(channel).Follow()
        await call.write(to_message(message))
        with pytest.raises(grpc.RpcError) as error:
            await call.read()
    refused = refused_from(error.value)
    assert isinstance(refused, Refused)
    return refused


async def test_strangers_to_this_journal_are_refused(tmp_path: Path) -> None:
    hello = ReplicaMessage(OWN_HELLO, "demo", 0, b"another", 0, "")
    async with master(tmp_path / "a") as served:
        await served.decide()
        config = config_in(tmp_path / "b", standby=served.here.address)
        async with following(config):
            await until(lambda: records(tmp_path / "b") == records(tmp_path / "a"))
            assert (await refusal_of(served.here.address, hello)).code is RefusalCode.NAME_TAKEN
        newest = len(records(tmp_path / "a"))
        for message, code in (
            (replace(hello, run_id="other"), RefusalCode.RUN_ID),
            (replace(hello, hello=replace(hello.hello, software="dips 9.9")), RefusalCode.CONFIG),
            (replace(hello, hello=replace(hello.hello, protocol_min=99)), RefusalCode.PROTOCOL_VERSION),
            (replace(hello, number=newest + 1, digest="0"), RefusalCode.CONFIG),
            (replace(hello, number=newest, digest="0" * 32), RefusalCode.CONFIG),
        ):
            await until(lambda: not served.shell.outcome.done())
            assert (await refusal_of(served.here.address, message)).code is code, message
        assert not served.shell.outcome.done()


@pytest.mark.parametrize("ends", [True, False])
async def test_a_take_over_ends_the_other_master_whatever_its_release_unless_that_one_is_newer(
    tmp_path: Path, ends: bool
) -> None:
    """Also while another standby follows."""
    upgraded = replace(OWN_HELLO, software="dips 9.9")
    async with master(tmp_path / "a") as served, master(tmp_path / "older") as again:
        await again.stop()
        async with master(tmp_path / "older") as newer:  # epoch 2
            where = served if ends else newer
            async with following(config_in(tmp_path / "b", standby=where.here.address)):
                await until(lambda: records(tmp_path / "b") == records(where.config.directory))
                told = await refusal_of(where.here.address, ReplicaMessage(upgraded, "demo", 1, b"another", 0, ""))
            assert where.shell.outcome.done() == ends
            assert told.code is (RefusalCode.STOPPING if ends else RefusalCode.FENCED)


async def test_a_newer_master_at_another_address_is_seen_and_used(tmp_path: Path) -> None:
    async with master(tmp_path / "older") as again, master(tmp_path / "a") as first:
        await again.stop()
        async with master(tmp_path / "older") as newer:  # epoch 2
            here, there = first.here.address, newer.here.address

            async def seen(used: str, other: str, run_id: str = "demo", epoch: int = 1) -> str:
                """The address in use after a look."""
                masters = MasterAddresses(f"{used},{other}")
                found = await asyncio.to_thread(newer_master, masters, INSECURE, Caller(run_id, epoch, "a"))
                assert found == (masters.now == other)
                return masters.now

            assert await seen(here, there) == there
            assert await seen(there, here, epoch=2) == there, "an older one, which does not know it yet"
            assert await seen(here, there, epoch=2) == here
            assert await seen(here, there, epoch=0) == here, "before it has met a master, a process takes its first one"
            assert await seen(here, there, run_id="other") == here
            assert await seen(here, "127.0.0.1:1") == here


@pytest.mark.parametrize("signs", [True, False])
async def test_standby_knows_of_silence_by_the_want_of_signs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signs: bool
) -> None:
    """The connection stands all the time."""
    n_heard = 0

    def heard(*message: Any) -> Any:
        nonlocal n_heard
        n_heard += 1
        return from_message(*message)

    class Watching:
        async def take(self, lost_s: Callable[[], float]) -> bool:
            await until(lambda: lost_s() == math.inf if signs else -math.inf < lost_s() < math.inf)
            so_far = n_heard
            await until(lambda: not signs or (n_heard > so_far + 3 and lost_s() == math.inf))
            return True

    monkeypatch.setattr(standby, "from_message", heard)
    monkeypatch.setattr(standby, "Lease", SimpleNamespace(of=lambda *config: Watching()))
    monkeypatch.setattr(replica, "SIGN_S", 0.01 if signs else 3600.0)
    monkeypatch.setattr(standby, "SIGN_S", 3600.0 if signs else 0.01)
    async with master(tmp_path / "a") as served:
        await served.decide()
        async with following(config_in(tmp_path / "b", standby=served.here.address)) as task:
            assert await task is None, "it takes over"
        assert records(tmp_path / "b") == records(tmp_path / "a")


async def test_replica_of_a_journal_whose_oldest_records_are_gone(tmp_path: Path) -> None:
    with contextlib.closing(Journal.open(tmp_path / "a", "demo", Retention(8, 1))) as journal:
        epoch = journal.begin_epoch()
        for number in range(1, 60):
            append(journal, epoch, number, "PAUSE", "{}", f"{{{number}}}")
            while journal.tidy():
                pass
    assert read_content(tmp_path / "a").pruned is not None
    with contextlib.closing(JournalReader(tmp_path / "a", "demo")) as reader:
        with contextlib.closing(Journal.open(tmp_path / "b", "demo")) as journal:
            assert journal.newest()[0] == 0
            is_whole = False
            while not is_whole:
                number, digest = journal.newest()
                is_whole = journal.receive(reader.after(number, digest, 300), "127.0.0.1:1")
    assert read_content(tmp_path / "b").records == read_content(tmp_path / "a").records
    assert read_content(tmp_path / "b").snapshot_json == read_content(tmp_path / "a").snapshot_json
