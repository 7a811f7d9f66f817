"""A master in this process, on loopback, with a scripted state machine for each epoch: its calls, its page, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import grpc
import grpc.aio
import pytest
from support.journals import records_of
from support.manual_clock import ManualClock
from support.master_bench import Bench
from support.recorded_run import unpacked
from support.run_status import run_status
from support.scripted_master_state import ScriptedMachine, caller, leave, refusal

from dips.core import messages as m
from dips.core.config import load
from dips.core.errors import INTERRUPTED, TERMINATED, ConfigError, LocalProtocolError, RefusalCode, Refused
from dips.core.net.addresses import parse_address
from dips.core.net.codec_protobuf import decode, encode
from dips.core.net.grpc_calls import refused_from
from dips.core.net.keys import MASTER_DNS_NAME
from dips.core.observe.tape import read_tape
from dips.local.authority import Authority, ensure_keys
from dips.master import rpc
from dips.master.config import MasterConfig
from dips.master.directory import TAPE_NAME, MasterAddress, read_address
from dips.master.journal import Journal
from dips.master.page.access import read_page_url
from dips.master.process import serve
from dips.master.shell import MasterShell
from dips.master.state.effects import (
    BeginAgain,
    ClusterCall,
    Effect,
    Event,
    Halt,
    OperatorCall,
    Pause,
    Refuse,
    Reply,
    Resume,
    Revoked,
    Tick,
    WriteJournal,
)
from dips.master.state.master import MasterMachine
from dips.master.state.shared import RunConfig
from dips.master.state.tape import EpochBegun

BEAT = m.HeartbeatReply(1, None, 0, 16, False, "idle")


class Shown(ScriptedMachine):
    """Answers calls, and has a run to look at."""

    def __init__(self) -> None:
        super().__init__(self.answer)
        self.bench = Bench().running("a")
        self.shared = self.bench.state.shared
        self.first = [EpochBegun("-", epoch=1, version=None, tokens=0, durability="sync")]

    @staticmethod
    def answer(event: Event) -> list[Effect]:
        match event:
            case ClusterCall(token, m.HeartbeatRequest()):
                return [Reply(token, BEAT)]
            case ClusterCall(token):
                return [Reply(token, m.LeaveReply())]
            case OperatorCall(token, m.StatusRequest()):
                return [Reply(token, run_status())]
            case OperatorCall(token, action):
                return [Reply(token, m.OperatorReply(type(action).__name__))]
        return []


class Served:
    """start() may be called again: another process on the same directory."""

    def __init__(self, folder: Path, keys: Path | None = None, **knobs: object) -> None:
        self.folder, self.keys = folder / "run", keys
        given = {"run_id": "demo", "directory": self.folder, "listen": "127.0.0.1:0", "page_listen": "127.0.0.1:0"}
        given |= {"insecure": True} if keys is None else {"keys": keys / "master"}
        self.config = load(MasterConfig, "master", environment={}, overrides=given | knobs).value
        self.machines: list[Shown] = []
        self.made: list[tuple[RunConfig, int, str | None, float]] = []
        self._started: asyncio.Queue[tuple[MasterAddress, MasterShell]] = asyncio.Queue()

    def _make(self, *given: Any) -> Shown:
        self.made.append(given)
        self.machines.append(Shown())
        return self.machines[-1]

    @property
    def machine(self) -> Shown:
        return self.machines[-1]

    async def start(self) -> None:
        clock = ManualClock(50.0, 1050.0)
        self.task = asyncio.create_task(serve(self.config, self._make, clock, lambda *it: self._started.put_nowait(it)))
        await self.begun()

    async def begun(self) -> None:
        """The next epoch answers."""
        waiting = asyncio.create_task(self._started.get())
        await asyncio.wait([waiting, self.task], return_when=asyncio.FIRST_COMPLETED)
        self.here, self.shell = await waiting if waiting.done() else await self.task  # type: ignore[misc]

    async def end(self, code: int = 0) -> Halt:
        self.shell.stop(Halt(code, "the test is over"))
        return await self.task

    def tape(self, kind: str) -> list[dict[str, Any]]:
        return [dict(line) for line in read_tape(self.folder / TAPE_NAME) if line["kind"] == kind]

    # ---- calls ----

    def channel(self, name: str = "") -> grpc.aio.Channel:
        if self.keys is None:
            return grpc.aio.insecure_channel(self.here.address)
        read = {file: (self.keys / name / file).read_bytes() for file in ("ca.crt", "tls.key", "tls.crt")}
        credentials = grpc.ssl_channel_credentials(*read.values())
        options = [("grpc.ssl_target_name_override", MASTER_DNS_NAME)]
        return grpc.aio.secure_channel(self.here.address, credentials, options)

    async def ask(self, method: str, body: Any, name: str = "") -> bytes:
        async with self.channel(name) as channel:
            call: Any = channel.unary_unary(f"/dips.v1.{method}")
            answer: bytes = await call(body if isinstance(body, bytes) else encode(body), timeout=60)
            return answer

    async def refused(self, method: str, body: Any, name: str = "") -> Refused:
        with pytest.raises(grpc.RpcError) as caught:
            await self.ask(method, body, name)
        error = refused_from(caught.value)
        assert isinstance(error, Refused)
        return error


Make = Callable[..., Awaitable[Served]]


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Make]:
    masters: list[Served] = []

    async def make(start: bool = True, **knobs: Any) -> Served:
        masters.append(Served(tmp_path, **knobs))
        if start:
            await masters[-1].start()
        return masters[-1]

    yield make
    for master in masters:
        master.task.cancel()
        await asyncio.gather(master.task, return_exceptions=True)


# ---- from start to end ----


async def test_epochs_follow_each_other_at_one_address_and_the_end_is_said(made: Make) -> None:
    master = await made()
    assert read_address(master.folder) == master.here == MasterAddress(master.here.address, "demo", os.getpid(), 1)
    assert [given[3] for given in master.made] == [1000.0]
    first, page = master.here.address, read_page_url(master.folder)
    assert page is not None
    kept = WriteJournal(1, "LEAVE", '{"n": 1}', '"kept"')
    master.machine.react = lambda event: [kept, BeginAgain(7, "promised")] if isinstance(event, Tick) else []
    master.shell.dispatch(Tick())
    await master.begun()
    assert (master.here.address, master.here.epoch) == (first, 7)
    run = master.config.to_run_config()
    assert [given[:3] for given in master.made] == [(run, 1, None), (run, 7, '"kept"')]
    await master.ask("Clusters/Leave", leave())
    assert len(master.machines[1].of(ClusterCall)) == 1
    master.machine.react = lambda event: []
    held = asyncio.create_task(master.refused("Clusters/Leave", leave()))
    await master.machine.until(ClusterCall, 2)
    assert await master.end(3) == Halt(3, "the test is over")
    assert (await held).retry_after_s > 0
    assert (read_address(master.folder), read_page_url(master.folder)) == (None, None)
    assert [line["epoch"] for line in master.tape("master-started")] == [1, 7]
    assert [line["exit_code"] for line in master.tape("master-ended")] == [3]
    numbers = [record.number for record in records_of(master.folder)]
    assert [line["number"] for line in master.tape("journaled")] == numbers == [1, 2, 3]
    again = await made()
    assert again.here.epoch == 8
    for address in (first, page.removeprefix("http://").removesuffix("/")):
        with pytest.raises(OSError, match="in use"):  # held again, so that peers and browsers find it
            socket.create_server(parse_address(address))
    with pytest.raises(ConfigError, match="another master"):
        await made()
    await again.end()


async def test_a_master_on_the_journal_of_an_older_release_keeps_the_outer_step_of_its_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The recorded run is of a release whose default was rate 0.7 and momentum 0.8, and that did not note presets."""
    folder = unpacked(tmp_path) / "master"
    config = MasterConfig(run_id="recorded", directory=folder, slaves=2, listen="127.0.0.1:0", insecure=True)
    started: asyncio.Queue[MasterShell] = asyncio.Queue()
    caplog.set_level("INFO")
    task = asyncio.create_task(serve(config, MasterMachine, ManualClock(), lambda _, shell: started.put_nowait(shell)))
    try:
        waiting = asyncio.create_task(started.get())
        await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
        assert waiting.done(), task
        shell = waiting.result()
        told = shell.machine.shared.settings()
        shell.stop(Halt(0, "the test is over"))
        assert await task == Halt(0, "the test is over")
    finally:
        task.cancel()
    assert (told.preset, told.outer_lr, told.outer_momentum) == ("dynamic", 0.7, 0.8)
    lines = [line for line in read_tape(folder / TAPE_NAME) if line["kind"] == "master-started"]
    assert lines[-1]["settings"]["outer_momentum"] == 0.8
    assert "version 1:11" in caplog.text
    assert "preset dynamic, outer rate 0.7 and momentum 0.8" in caplog.text


async def test_a_taken_port_is_an_error_unless_of_the_last_start(made: Make, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for knob, words in (("listen", f"port {port} is in use"), ("page_listen", "page cannot listen")):
            with pytest.raises(ConfigError, match=words):
                await made(**{knob: f"127.0.0.1:{port}"})
        master = await made(start=False)
        with contextlib.closing(Journal.open(master.folder, "demo")) as journal:
            journal.remember_port(port)
        await master.start()
        assert (parse_address(master.here.address)[1] != port, master.here.epoch) == (True, 1)
        assert f"port {port} of the last start is taken" in caplog.text
        assert await master.end() == Halt(0, "the test is over")
    assert read_address(master.folder) is None


@pytest.mark.parametrize(
    ("number", "over", "code"),
    [(signal.SIGTERM, False, TERMINATED), (signal.SIGINT, False, INTERRUPTED), (signal.SIGTERM, True, 0)],
)
async def test_a_signal_ends_the_master(made: Make, number: signal.Signals, over: bool, code: int) -> None:
    master = await made(page_listen=None)
    master.machine.shared.stopped_s = 1.0 if over else None
    os.kill(os.getpid(), number)
    assert await master.task == Halt(code, f"stopped by {number.name}")


# ---- calls ----


async def test_calls_reach_the_state_and_what_makes_no_sense_is_refused_counted_and_on_the_tape(made: Make) -> None:
    master = await made()
    assert decode(await master.ask("Clusters/Leave", leave()), m.LeaveReply) == m.LeaveReply()
    assert master.machine.of(ClusterCall)[0].request == leave()
    error = await master.refused("Clusters/Join", b"\xff\xff")
    assert (error.code, "Join" in error.sentence) == (RefusalCode.MALFORMED, True)
    assert [(line["method"], line["code"]) for line in master.tape("refused")] == [("Join", "MALFORMED")]
    assert (await master.refused("Clusters/Seed", b"")).code is RefusalCode.PROTOCOL_VERSION
    master.machine.react = lambda event: [Refuse(event.token, refusal())] if isinstance(event, ClusterCall) else []
    error = await master.refused("Clusters/Leave", leave())
    assert (error.code, error.sentence, error.retry_after_s) == (RefusalCode.FENCED, "because of a test", 2.5)
    counted = {(sample.labels["method"], sample.labels.get("code", "")): sample.value for sample in _calls(master)}
    assert counted == {("Join", ""): 1, ("Leave", ""): 2, ("Join", "MALFORMED"): 1, ("Leave", "FENCED"): 1}


def _calls(master: Served) -> list[Any]:
    made = master.shell.counts.collect()
    return [
        sample
        for name in ("calls_total", "refused_calls_total")
        for sample in made[name].samples
        if sample.value and not sample.name.endswith("_created")
    ]


# ---- keys ----


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    ensure_keys(folder, ["a", "b"], ["s0"], ["me"])
    return folder


def tls_of(keys: Path, name: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(keys / "master" / "ca.crt"))
    if name is not None:
        context.load_cert_chain(keys / name / "tls.crt", keys / name / "tls.key")
    return context


async def test_certificates_say_who_may_call_and_one_that_is_revoked_ends_open_calls(made: Make, keys: Path) -> None:
    master = await made(keys=keys)
    await master.ask("Clusters/Leave", leave(), "a")
    error = await master.refused("Clusters/Leave", leave(), "b")
    assert (error.code, "says it comes from 'a'" in error.sentence) == (RefusalCode.IDENTITY, True)
    error = await master.refused("Operator/Stop", m.OperatorRequest("demo"), "a")
    assert (error.code, "may not call" in error.sentence) == (RefusalCode.IDENTITY, True)
    status = decode(await master.ask("Operator/Status", m.StatusRequest("demo"), "me"), m.StatusReply)
    assert (status.refused_calls, "may not call" in status.refused_call) == (1, True)
    assert [line["code"] for line in master.tape("refused")] == ["IDENTITY"] * 2
    async with master.channel("b") as channel:
        beats: Any = channel.stream_stream("/dips.v1.Clusters/Heartbeat")(timeout=60)
        await beats.write(encode(m.HeartbeatRequest(caller("b"))))
        assert decode(await beats.read(), m.HeartbeatReply) == BEAT
        Authority(keys).revoke("b", "stolen")
        assert await master.machine.until(Revoked) == Revoked("cluster", "b", "stolen")
        with pytest.raises(grpc.RpcError) as caught:
            await beats.read()
        assert "was revoked (stolen)" in str(refused_from(caught.value))
    Authority(keys).renew("b", new_key=True)
    Authority(keys).renew("master")
    await master.ask("Clusters/Leave", encode(m.LeaveRequest(caller("b"), "with its new key")), "b")


async def test_the_end_of_the_thread_that_bounds_connections_ends_the_master(
    made: Make, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = await made(keys=keys, page_listen=None)
    monkeypatch.setattr(rpc, "files_of_process", lambda: 1 / 0)
    ended = await master.task
    assert (ended.exit_code, "ZeroDivisionError" in ended.sentence) == (LocalProtocolError.exit_code, True)


async def test_a_master_has_the_keys_of_a_master(made: Make, keys: Path) -> None:
    master = await made(start=False, keys=keys)
    master.config = master.config.model_copy(update={"keys": keys / "a"})
    with pytest.raises(ConfigError, match="of role master"):
        await master.start()


# ---- the page ----


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    text: str


class Browser:
    """Asks the page of a master. `answer` is of the last question that was not asked for its whole answer."""

    def __init__(self, master: Served, name: str | None = None) -> None:
        url = read_page_url(master.folder)
        assert url is not None
        self.base, _, self.link = url.rpartition("/")
        self.tls = {"ssl": tls_of(master.keys, name), "server_hostname": MASTER_DNS_NAME} if master.keys else {}

    @contextlib.asynccontextmanager
    async def asked(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        jar, limit = aiohttp.DummyCookieJar(), aiohttp.ClientTimeout(60)
        more: dict[str, Any] = {"data": body, "headers": named, "allow_redirects": False, **self.tls}
        async with aiohttp.ClientSession(cookie_jar=jar, timeout=limit) as session:
            async with session.request(method, self.base + path, **more) as answer:
                yield answer

    async def ask(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
        async with self.asked(path, method, body, **headers) as answer:
            return Answer(answer.status, answer.headers, await answer.text())

    @contextlib.asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[tuple[str, str]]]:
        """(kind, data) of each, after the first, with which the master has looked at the run."""

        async def lines(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str]]:
            kind = ""
            async for line in answer.content:
                name, _, value = line.decode().strip().partition(": ")
                kind = value if name == "event" else kind
                if name == "data":
                    yield kind, value

        async with self.asked("/events") as answer:
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            events = lines(answer)
            kind, data = await anext(events)
            assert (kind, json.loads(data)["full"]) == ("run", True)
            yield events


async def test_the_page_shows_the_run_and_nothing_else_and_to_its_own_names_only(made: Make) -> None:
    master = await made(page_hosts=("status.example",))
    browser = Browser(master)
    async with browser.events():
        pass
    index = await browser.ask("/")
    assert (index.status, "<title>Di-PS</title>" in index.text) == (200, True)
    assert index.headers["Server"] == "dips", "no version is told"
    policy = index.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self' 'sha256-")
    assert ("unsafe" in policy, "frame-ancestors 'none'" in policy) == (False, True)
    assert (index.headers["X-Content-Type-Options"], index.headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    script = await browser.ask("/static/page.js")
    assert (script.status, script.headers["Content-Type"]) == (200, "text/javascript; charset=utf-8")
    same = await browser.ask("/static/page.js", If_None_Match=script.headers["Etag"])
    assert (same.status, same.text) == (304, "")
    assert (await browser.ask("/favicon.ico")).headers["Content-Type"].startswith("image/svg")
    for method, path, status in (
        ("GET", "/static/../page.py", 404),
        ("GET", "/static/nothing.js", 404),
        ("GET", "/master.json", 404),
        ("GET", "/static//etc/passwd", 404),
        ("PUT", "/snapshot.json", 405),
        ("DELETE", "/events", 405),
        ("POST", "/steer", 404),
        ("POST", "/", 405),
    ):
        answer = await browser.ask(path, method)
        assert (answer.status, path in answer.text) == (status, False)
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    for host, status in (("evil.example", 421), ("localhost", 200), ("status.example", 200)):
        for path in ("/", "/snapshot.json", "/events", "/static/page.js")[: 4 if status == 421 else 2]:
            assert (await browser.ask(path, Host=host)).status == status, (host, path)
    assert (await browser.ask("/healthz", Host="evil.example")).text == "ok\n"
    shown = json.loads((await browser.ask("/snapshot.json")).text)
    assert [cluster["id"] for cluster in shown["state"]["clusters"]] == ["a"]
    assert {event["who"] for event in shown["events"]} == {"master"}
    async with browser.events() as events:
        await master.end()
        assert [event async for event in events][-1] == ("ended", "the master has ended")


async def test_a_page_that_may_steer_is_asked_by_its_script(made: Make, caplog: pytest.LogCaptureFixture) -> None:
    master = await made(page_steer=True)
    browser = Browser(master)
    pause = json.dumps({"action": "pause", "reason": "a look" + 300 * "k"})

    async def steer(body: str, **headers: str) -> Answer:
        own = {"Content_Type": "application/json", "Origin": browser.base} | headers
        return await browser.ask("/steer", "POST", body, **own)

    for bad in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Content_Type": "text/plain"}):
        assert (await steer(pause, **bad)).status == 403
    assert [(await steer(body)).status for body in ("{", "[]", '{"action": "stop"}', "[" * 1000, "x" * 2000)] == [
        *(400, 409, 409, 400, 413)
    ]
    assert (await steer(pause, Host="evil.example")).status == 421
    assert not master.machine.of(OperatorCall)
    told = await steer(pause)
    assert "pause was asked for on the status page by this machine" in caplog.text
    assert (told.status, json.loads(told.text)) == (200, {"sentence": "Pause"})
    asked = master.machine.of(OperatorCall)[-1].action
    assert isinstance(asked, Pause)
    assert (asked.request.run_id, asked.request.reason[:8], len(asked.request.reason)) == ("demo", "a lookkk", 200)
    await steer('{"action": "resume"}')
    assert master.machine.of(OperatorCall)[-1].action == Resume(m.OperatorRequest("demo", ""))
    master.machine.react = lambda event: [Refuse(event.token, refusal())] if isinstance(event, OperatorCall) else []
    told = await steer(pause)
    assert (told.status, json.loads(told.text)) == (409, {"sentence": "because of a test"})


async def test_a_page_with_keys_is_opened_by_an_operator(
    made: Make, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    master = await made(keys=keys)
    browser = Browser(master)
    async with Browser(master, "me").events():
        locked = await browser.ask("/")
    assert (locked.status, "This page is for operators" in locked.text) == (401, True)
    for path in ("/snapshot.json", "/events", "/?link=wrong", f"/snapshot.json{browser.link}"):
        assert (await browser.ask(path)).status == 401, path
    said = [line for line in caplog.messages if "the status page was not shown" in line]
    assert said
    assert not any("127.0.0.1" in line for line in said), "each address would be a line of its own"
    assert browser.link.rpartition("=")[2] not in caplog.text
    assert (await browser.ask("/healthz")).text == "ok\n"
    let_in = await browser.ask(f"/{browser.link}")
    assert (let_in.status, let_in.headers["Location"]) == (303, "/")
    cookie, *flags = let_in.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "Secure", "SameSite=Strict", "Path=/"} <= set(flags)
    assert (await browser.ask("/snapshot.json", Cookie=cookie)).status == 200
    assert (await browser.ask("/snapshot.json", Cookie=cookie[:-1])).status == 401
    for name, status in (("me", 200), ("a", 401), ("s0", 401)):
        assert (await Browser(master, name).ask("/snapshot.json")).status == status
    async with Browser(master, "me").events() as events:
        Authority(keys).revoke("me", "left the team")
        assert [kind async for kind, _ in events].count("ended") == 0, "the stream is cut"
    assert (await Browser(master, "me").ask("/snapshot.json")).status == 401
    browser.base, browser.tls = browser.base.replace("https", "http"), {}
    with pytest.raises(aiohttp.ClientError):
        await browser.ask("/healthz")
