"""The slave's stream to its master, over a channel that a test plays: what is sent, and what ends stream or slave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from support.failed_call import FailedCall
from support.slave_bench import SlaveBench

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Incarnation
from dips.core.messages import (
    Caller,
    Hello,
    Promised,
    Settings,
    SlaveBeat,
    SlaveCommand,
    SlaveHello,
    SlaveMessage,
    Welcome,
)
from dips.core.net.addresses import MasterAddresses
from dips.core.net.codec_protobuf import from_message, to_message
from dips.core.net.grpc_calls import STATUS_OF_CODE, to_refusal
from dips.core.net.security import INSECURE
from dips.protos import slaves_pb2, slaves_pb2_grpc
from dips.slave import control as module
from dips.slave.control import Control
from dips.slave.data_port import Figures
from dips.slave.data_server import DataServer
from dips.slave.shell import SlaveShell
from dips.slave.state import effects
from dips.slave.state.slave import SlaveMachine

SETTINGS = Settings(heartbeat_s=0.01)
WELCOME = SlaveCommand("run", 1, None, "cause", Welcome(Hello(1, 1), SETTINGS))


def welcome(epoch: int) -> SlaveCommand:
    return replace(WELCOME, epoch=epoch, incarnation=Incarnation(epoch, 1))


def refused(code: RefusalCode, retry_after_s: float = 0.0) -> FailedCall:
    return FailedCall.refused(STATUS_OF_CODE[code], to_refusal(Refused(code, "no", retry_after_s)))


class Stream:
    def __init__(self) -> None:
        self.heard: asyncio.Queue[SlaveMessage] = asyncio.Queue()
        self._said: asyncio.Queue[object] = asyncio.Queue()
        self.cancelled = False

    def say(self, what: object) -> None:
        self._said.put_nowait(to_message(what) if isinstance(what, SlaveCommand) else what)

    async def hear(self, kind: type[object]) -> Any:
        async with asyncio.timeout(60):
            while not isinstance((message := await self.heard.get()).body, kind):
                pass
        return message.body

    async def read(self) -> object:
        said = await self._said.get()
        if isinstance(said, BaseException):
            raise said
        return said

    async def write(self, message: slaves_pb2.SlaveMessage) -> None:
        self.heard.put_nowait(from_message(message, SlaveMessage))

    def cancel(self) -> None:
        self.cancelled = True


class Shell:
    def __init__(self) -> None:
        self.state = SlaveBench().state
        self.seen: list[effects.Event] = []
        self.failed: list[BaseException | None] = []
        self.n_beats = 0
        self.send: Any = None
        self.close_link: Any = None
        self.saved: Any = None
        self.starts = "compiles kernels, 12 of 60"

    def handle(self, event: effects.Event) -> None:
        self.seen.append(event)
        for effect in self.state.handle(event, 0.0):
            match effect:
                case effects.SendUp(body):
                    self.send(SlaveMessage(self.state.caller(), body))
                case effects.CloseLink(sentence):
                    self.close_link(sentence)
                case effects.SavePromise(epoch):
                    self.handle(effects.PromiseSaved(epoch))

    def reap(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.failed.append(task.exception())

    def note_refusals(self) -> None:
        self.n_beats += 1

    def ends(self) -> list[str]:
        return [event.why for event in self.seen if isinstance(event, effects.Unlinked)]


class Data:
    figures = Figures()


class Master:
    def __init__(self) -> None:
        self.shell, self.data = Shell(), Data()
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.running: asyncio.Task[None] | None = None
        self.address, self.dialled = "m:1", list[str]()

    async def stream(self) -> Stream:
        """The next one that the slave begins; it runs from the first on that is asked for."""
        if self.running is None:
            control = Control(self.address, INSECURE, cast(SlaveShell, self.shell), cast(DataServer, self.data))
            self.running = asyncio.create_task(control.run())
        return await asyncio.wait_for(self.streams.get(), 60)

    def attach(self) -> Stream:
        stream = Stream()
        self.streams.put_nowait(stream)
        return stream

    async def ends_with(self) -> Refused:
        assert self.running is not None
        with pytest.raises(Refused) as caught:
            await asyncio.wait_for(asyncio.shield(self.running), 60)
        return caught.value


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 0.001)
    monkeypatch.setattr(module, "check_let_in", lambda *of: None)
    monkeypatch.setattr(module, "why_not_let_in", lambda *of: "")


@pytest.fixture
async def played(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Master]:
    master = Master()

    @asynccontextmanager
    async def channel(address: str, security: object) -> AsyncIterator[None]:
        master.dialled.append(address)
        yield

    monkeypatch.setattr(module, "open_channel_aio", channel)
    monkeypatch.setattr(slaves_pb2_grpc, "SlavesStub", lambda channel: SimpleNamespace(Attach=master.attach))
    yield master
    if master.running is not None:
        master.running.cancel()
        await asyncio.gather(master.running, return_exceptions=True)


async def test_a_stream_is_hello_promise_and_beats_and_its_end_is_told_and_another_follows(played: Master) -> None:
    first = await played.stream()
    await first.hear(SlaveHello)
    first.say(welcome(1))
    assert await first.hear(Promised) == Promised(1)
    beat = await first.hear(SlaveBeat)
    assert (beat.durable, beat.resident_bytes > 0) == (None, True)
    assert beat.note == played.shell.starts
    assert played.shell.n_beats > 0
    played.data.figures = Figures(SlaveBeat(refused_connections=3))
    while (await first.hear(SlaveBeat)).refused_connections != 3:
        pass
    first.say(grpc.aio.EOF)
    second = await played.stream()
    assert first.cancelled
    assert played.shell.ends() == ["the master ended it"]
    await second.hear(SlaveHello)
    second.say(FailedCall(grpc.StatusCode.UNAVAILABLE, "gone"))
    await played.stream()
    assert "UNAVAILABLE: gone" in played.shell.ends()[1]
    assert played.shell.failed == []


async def test_a_saved_version_is_in_the_next_beat_without_waiting_for_it(played: Master) -> None:
    stream = await played.stream()
    stream.say(replace(welcome(1), body=Welcome(Hello(1, 1), Settings(heartbeat_s=3600.0))))
    await stream.hear(Promised)
    played.shell.saved()
    await stream.hear(SlaveBeat)


async def test_a_stream_that_the_machine_closes_ends_with_its_reason(played: Master) -> None:
    stream = await played.stream()
    stream.say(WELCOME)  # without an incarnation
    await played.stream()
    assert "incarnation" in played.shell.ends()[0]


async def test_a_silent_master_is_left_as_soon_as_a_standby_has_taken_over(
    played: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_taken_over = threading.Event()

    def look(masters: MasterAddresses, security: object, caller: Caller) -> bool:
        if caller.epoch != 1 or masters.now != "m:1" or not has_taken_over.is_set():
            return False
        masters.take("m:2", "it has taken over")
        return True

    monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(module, "newer_master", look)
    played.address = "m:1,m:2"
    first = await played.stream()
    first.say(welcome(1))
    await first.hear(SlaveBeat)
    assert played.dialled == ["m:1"]
    has_taken_over.set()
    second = await played.stream()
    second.say(welcome(2))
    assert await second.hear(Promised) == Promised(2)
    assert played.dialled == ["m:1", "m:2"]


async def test_a_master_that_sends_nothing_is_left_after_a_while(
    played: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_COMMAND_S", 0.001)
    await played.stream()
    await played.stream()
    assert played.shell.ends()[0] == "no command was received for 0.001 s after hello"


async def test_a_master_that_is_away_is_tried_ever_less_often_until_it_has_answered(
    played: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s, at_once = list[float](), asyncio.sleep

    async def note_pause(wait_s: float) -> None:
        waits_s.append(wait_s)
        await at_once(0)

    monkeypatch.setattr(module, "FIRST_WAIT_S", 1.0)
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 4.0)
    monkeypatch.setattr("dips.slave.control.random.uniform", lambda least, most: most)
    monkeypatch.setattr("dips.slave.control.asyncio.sleep", note_pause)
    for _ in range(3):
        (await played.stream()).say(FailedCall(grpc.StatusCode.UNAVAILABLE, "gone"))
    answered = await played.stream()
    answered.say(welcome(1))
    await answered.hear(Promised)
    answered.say(grpc.aio.EOF)
    (await played.stream()).say(FailedCall(grpc.StatusCode.UNAVAILABLE, "gone"))
    await played.stream()
    assert waits_s == [2.0, 4.0, 4.0, 1.0, 2.0]


FOR_GOOD = (
    *(RefusalCode.PROTOCOL_VERSION, RefusalCode.RUN_ID, RefusalCode.NOT_LOOPBACK, RefusalCode.IDENTITY),
    *(RefusalCode.KEY, RefusalCode.CONFIG, RefusalCode.UNKNOWN_NAME, RefusalCode.NAME_TAKEN),
)


@pytest.mark.parametrize("code", FOR_GOOD)
async def test_a_refusal_for_good_ends_the_slave_unless_it_names_a_time(played: Master, code: RefusalCode) -> None:
    (await played.stream()).say(refused(code, retry_after_s=1.0))
    (await played.stream()).say(refused(code))
    ended = await played.ends_with()
    assert (ended.code, ended.sentence) == (code, "no")
    assert played.shell.ends()[0] == "no"


async def test_a_fenced_slave_attaches_again_as_a_new_one(played: Master) -> None:
    first = await played.stream()
    first.say(welcome(1))
    await first.hear(Promised)
    first.say(refused(RefusalCode.FENCED))
    second = await played.stream()
    assert effects.Fenced() in played.shell.seen
    assert (await second.heard.get()).caller.incarnation is None


async def test_keys_that_were_renewed_meanwhile_are_tried_before_the_slave_ends(
    played: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = [True, False]  # of each stream's keys, the first ones being those of the start
    used = iter([SimpleNamespace(renewed=False), *(SimpleNamespace(renewed=each) for each in renewed)])
    monkeypatch.setattr(module, "UsedKeys", lambda security: next(used))
    (await played.stream()).say(refused(RefusalCode.IDENTITY))
    (await played.stream()).say(refused(RefusalCode.IDENTITY))
    assert (await played.ends_with()).code is RefusalCode.IDENTITY
    assert played.shell.ends()[0] == "no (they were renewed meanwhile)"


async def test_a_slave_attaches_with_renewed_keys_before_the_old_ones_are_refused_and_between_rounds(
    played: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter([SimpleNamespace(renewed=False), SimpleNamespace(renewed=True)])
    monkeypatch.setattr(module, "UsedKeys", lambda security: next(used, SimpleNamespace(renewed=False)))
    monkeypatch.setattr(SlaveMachine, "between_rounds", False)
    first = await played.stream()
    first.say(welcome(1))
    for _ in range(3):
        await first.hear(SlaveBeat)
    assert played.shell.ends() == []
    monkeypatch.setattr(SlaveMachine, "between_rounds", True)
    await played.stream()
    assert played.shell.ends() == [module.RENEWED]


@pytest.mark.parametrize(
    "refuses",
    [FailedCall(grpc.StatusCode.UNAVAILABLE, "gone"), refused(RefusalCode.STALE_EPOCH), grpc.aio.EOF, welcome(1)],
    ids=["away", "older", "silent", "older welcome"],
)
async def test_a_slave_tries_its_masters_addresses_in_turn_and_keeps_to_the_one_where_it_attached(
    played: Master, refuses: object
) -> None:
    played.address = "m:1,m:2"
    played.shell.handle(effects.PromiseSaved(2))  # as a start finds it on the disk
    (await played.stream()).say(refuses)
    attached = await played.stream()
    attached.say(welcome(2))
    await attached.hear(Promised)
    attached.say(grpc.aio.EOF)
    again = await played.stream()
    again.say(FailedCall(grpc.StatusCode.UNAVAILABLE, "gone"))
    await played.stream()
    assert played.dialled == ["m:1", "m:2", "m:2", "m:1"]
