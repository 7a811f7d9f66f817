"""Links are measured over real sockets; who answers takes no harm from a peer that speaks something else."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.repository import ROOT
from support.waiting import NO_LIMIT_S

from dips.cli import main
from dips.core.errors import ConfigError, FatalError
from dips.planner.profile import read_profile
from dips.planner.run.link_probe import ANSWER, GIVE, PROTOCOL, REQUEST, TAKE, LinkTimes, fit, listening, probe, serve

AT = datetime(2026, 3, 1, tzinfo=UTC)
SITES = str(ROOT / "examples/04-plan-a-schedule/sites.toml")


@pytest.fixture
def port() -> Iterator[int]:
    ended = threading.Event()
    server = listening("127.0.0.1", 0)
    number: int = server.getsockname()[1]
    thread = threading.Thread(target=serve, args=(server, NO_LIMIT_S, lambda: NO_LIMIT_S * ended.is_set()))
    thread.start()
    yield number
    ended.set()
    socket.create_connection(("127.0.0.1", number)).close()  # so that it looks at the clock
    thread.join()
    server.close()


def test_the_command_writes_and_completes_a_profile(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.toml"
    peer = f"stockholm=127.0.0.1:{port}"
    command = ["profile", "links", SITES, "--from", "amsterdam", "--to", peer, "--out", str(out), "--json"]
    assert main.run(command) == 0
    told = json.loads(capsys.readouterr().out)
    ends = [("amsterdam", "stockholm"), ("stockholm", "amsterdam")]
    assert [(link["sender"], link["receiver"]) for link in told["links"]] == ends
    assert main.run(command) == 0  # measured again: replaced
    assert [(link.sender, link.receiver) for link in read_profile(out).links] == ends


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", REQUEST.pack(PROTOCOL, 9, 1), REQUEST.pack(PROTOCOL, TAKE, 1 << 40), b"dips"],
)
def test_a_peer_that_speaks_something_else_is_left_and_the_next_one_answered(port: int, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=NO_LIMIT_S) as peer:
        peer.sendall(said)
        with contextlib.suppress(OSError):  # closed by the other end already, with bytes that were not read
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(len(ANSWER)) == b""
    assert len(probe("127.0.0.1", port, 1000, rounds=1, warm_up=0)[0].small_ns) == 1


def test_a_peer_that_asks_on_and_on_is_left_when_the_time_is_over() -> None:
    over = threading.Event()
    with listening("127.0.0.1", 0) as server:
        thread = threading.Thread(target=serve, args=(server, NO_LIMIT_S, lambda: NO_LIMIT_S * over.is_set()))
        thread.start()
        with socket.create_connection(("127.0.0.1", server.getsockname()[1]), timeout=NO_LIMIT_S) as peer:
            asked = REQUEST.pack(PROTOCOL, TAKE, 1) + b"\0"
            peer.sendall(asked)
            assert peer.recv(len(ANSWER), socket.MSG_WAITALL) == ANSWER
            over.set()
            with contextlib.suppress(ConnectionError):
                for _ in range(3):
                    peer.sendall(asked)
                    if not peer.recv(len(ANSWER)):
                        break
            thread.join()


def test_a_payload_takes_until_its_answer_and_only_what_follows_the_warm_up_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that only the serving end moves: by 3 when it has a payload, by 5 before it sends one."""
    now, asked = [100], list[tuple[int, int]]()
    monkeypatch.setattr("dips.planner.run.link_probe.time", SimpleNamespace(perf_counter_ns=lambda: now[0]))

    def answer(server: socket.socket) -> None:
        with server.accept()[0] as link:
            for _ in range(12):
                name, what, size = REQUEST.unpack(link.recv(REQUEST.size, socket.MSG_WAITALL))
                asked.append((what, size))
                if what == TAKE:
                    assert (name, len(link.recv(size, socket.MSG_WAITALL))) == (PROTOCOL, size)
                    now[0] += 3
                    link.sendall(ANSWER)
                else:
                    now[0] += 5
                    link.sendall(bytes(size))

    with listening("127.0.0.1", 0) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        found = probe("127.0.0.1", server.getsockname()[1], 3_000_000, rounds=2, warm_up=1)
        thread.join()
    assert found == (([3, 3], [3, 3]), ([5, 5], [5, 5]))
    assert asked == [(TAKE, 40), (GIVE, 40), (TAKE, 3_000_000), (GIVE, 3_000_000)] * 3


def test_a_silent_peer_is_left_and_only_those_that_end_well_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dips.planner.run.link_probe.IDLE_S", 0.01)
    ended, served = threading.Event(), list[int]()
    with listening("127.0.0.1", 0) as server:
        ends = lambda: NO_LIMIT_S * ended.is_set()  # noqa: E731
        thread = threading.Thread(target=lambda: served.append(serve(server, NO_LIMIT_S, ends)))
        thread.start()
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(server.getsockname()) as peer:
                peer.sendall(said)
                with contextlib.suppress(ConnectionError):
                    assert peer.recv(1) == b""
        monkeypatch.setattr("dips.planner.run.link_probe.IDLE_S", NO_LIMIT_S)
        with socket.create_connection(server.getsockname()) as peer:
            peer.shutdown(socket.SHUT_WR)  # has said all that it wanted
            assert peer.recv(1) == b"", "it is served to its end"
        ended.set()
        socket.create_connection(server.getsockname()).close()
        thread.join()
    assert served == [1]


def test_latency_and_bandwidth_are_those_of_the_line_through_both_payloads() -> None:
    """1 Gbit/s and 2 ms each way: 40 bytes take 4.00032 ms with the answer, a megabyte 12 ms."""
    times = LinkTimes([4_000_320] * 3, [11_000_000, 12_000_000, 13_000_000])
    found = fit(times, 1_000_000, "a", "b", AT)
    assert found.bandwidth_gbps == pytest.approx(1.0)
    assert found.latency_ms == pytest.approx(2.0)
    assert found.spread == pytest.approx(1 / 12)


def test_a_payload_that_is_too_small_to_tell_the_bandwidth() -> None:
    with pytest.raises(FatalError, match="1000 bytes took no longer than 40: give a larger --payload-mb"):
        fit(LinkTimes([5, 5], [5, 5]), 1000, "a", "b", AT)


def test_an_end_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listening("127.0.0.1", 0) as server:
        number = server.getsockname()[1]
    with pytest.raises(FatalError, match=f"127.0.0.1:{number} cannot be measured: .*: run dips profile serve --listen"):
        probe("127.0.0.1", number, 1000, 1, 0)
    with pytest.raises(FatalError, match=r"the link to node1\.\.example:1 cannot be measured"):
        probe("node1..example", 1, 1000, 1, 0)
    with pytest.raises(ConfigError, match=r"--listen 192.0.2.1:1 cannot be used: .*: give an address of this machine"):
        listening("192.0.2.1", 1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--from", "amsterdam", "--to", "stockholm"], "--to stockholm has no address: write SITE=HOST:PORT"),
        (["--from", "oslo", "--to", "stockholm=h:1"], "'oslo' is no site; "),
        (["--from", "stockholm", "--to", "stockholm=h:1"], "--to stockholm is where this runs: name another site"),
        (["--from", "amsterdam", "--to", "stockholm=h:1", "--rounds", "1"], "--rounds 1 cannot be: give 3 to"),
        (["--from", "amsterdam", "--to", "stockholm=h:1", "--payload-mb", "-1"], "--payload-mb -1 cannot be sent"),
    ],
)
def test_a_mistake_is_one_sentence(
    options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["profile", "links", SITES, *options, "--out", str(tmp_path / "p.toml")]) == ConfigError.exit_code
    told = capsys.readouterr().err.strip()
    assert sentence in told
    assert "\n" not in told
