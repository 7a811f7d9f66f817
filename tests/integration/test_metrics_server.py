"""The metrics server on real sockets: where it listens, who may read, and what slow or hostile clients can do."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import shutil
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from support.waiting import NO_LIMIT_S, until

from dips.core.errors import ConfigError, FatalError
from dips.core.net.addresses import parse_address
from dips.core.net.keys import CA_FILE, CERT_FILE, KEY_FILE, REVOKED_FILE, load_identity
from dips.core.net.newcomers import Bounds
from dips.core.net.security import INSECURE, Security
from dips.core.observe import metrics_server
from dips.core.observe.metrics_server import MOST_CONNECTIONS, LoopSnapshots, MetricsServer, NotNow
from dips.local.authority import Authority, ensure_keys

LOOPBACK = "127.0.0.1:0"
EVERYWHERE = "0.0.0.0:0"


def one() -> Iterable[Metric]:
    family = GaugeMetricFamily("one", "the number one")
    family.add_metric([], 1.0)
    return [family]


@contextlib.contextmanager
def serving(
    listen: str = LOOPBACK, collect: Callable[[], Iterable[Metric]] = one, security: Security = INSECURE
) -> Iterator[MetricsServer]:
    server = MetricsServer(listen, collect, security)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    ensure_keys(folder / "keys", ["a"], ["s0"], ["operator", "prometheus"])
    ensure_keys(folder / "foreign", [], [], ["prometheus"])
    return folder / "keys"


def read(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=NO_LIMIT_S) as answer:
        return str(answer.read().decode())


def can_read(address: str) -> bool:
    try:
        return "one 1.0" in read(address)
    except (OSError, http.client.HTTPException):
        return False


def read_tls(address: str, name: str, keys: Path | None, ca: Path) -> str:
    """As Prometheus does: the server must show this name, we show the certificate in `keys`."""
    context = ssl.create_default_context(cafile=str(ca))
    if keys is not None:
        context.load_cert_chain(keys / CERT_FILE, keys / KEY_FILE)
    with socket.create_connection(("127.0.0.1", parse_address(address)[1]), 10) as plain:
        with context.wrap_socket(plain, server_hostname=name) as secure:
            secure.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            answer = http.client.HTTPResponse(secure)
            answer.begin()
            return answer.read().decode()


def test_metrics_are_served_with_those_of_the_process(server: MetricsServer) -> None:
    text = read(server.address)
    assert "# TYPE one gauge\none 1.0" in text
    assert "process_resident_memory_bytes" in text


def test_other_paths_are_not_there(server: MetricsServer) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404") as told:
        read(server.address, "/")
    with told.value as answer:
        assert answer.headers.get_all("Server") == ["dips"], "no version is told"


def test_a_taken_port_is_told_with_its_remedy(server: MetricsServer) -> None:
    with pytest.raises(ConfigError, match=rf"{server.address} \(metrics_listen\): Address already in use; .*port 0"):
        MetricsServer(server.address, one, INSECURE)


def test_without_keys_only_loopback_is_served() -> None:
    with pytest.raises(ConfigError, match=r"metrics_listen is '0\.0\.0\.0:0', which is not a loopback address"):
        MetricsServer(EVERYWHERE, one, INSECURE)


def test_an_address_of_another_machine_cannot_be_bound(keys: Path) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:9400"):
        MetricsServer("192.0.2.1:9400", one, load_identity(keys / "s0"))


def test_the_address_is_told_in_the_form_that_prometheus_reads_and_taken_back(tmp_path: Path) -> None:
    server = MetricsServer(LOOPBACK, one, INSECURE)
    server.announce(tmp_path / "sub" / "metrics.json", "slave", "s0", "demo")
    said = json.loads((tmp_path / "sub" / "metrics.json").read_text())
    labels = {"role": "slave", "name": "s0", "run": "demo", "instance": "demo/s0"}
    assert said == [{"targets": [server.address], "labels": labels}]
    again = MetricsServer(LOOPBACK, one, INSECURE)  # with a port of its own
    again.announce(tmp_path / "again.json", "slave", "s0", "demo")
    (target,) = json.loads((tmp_path / "again.json").read_text())
    assert (target["targets"], target["labels"]) == ([again.address], labels), "the series go on"
    for each in (server, again):
        each.start()
        each.stop()
    assert not list((tmp_path / "sub").iterdir())
    server.stop()


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = MetricsServer(LOOPBACK, one, INSECURE)
    with pytest.raises(ConfigError, match=r"metrics.json \(metrics_file\) cannot be written"):
        server.announce(tmp_path / "file" / "metrics.json", "slave", "s0", "demo")
    with pytest.raises(FatalError, match="No space left on device"):  # a supervisor tries again
        server.announce(Path("/dev/full"), "slave", "s0", "demo")
    server.stop()


def test_a_loop_makes_its_snapshot_itself_and_one_that_stands_still_shows_as_503() -> None:
    loop, made_on = asyncio.new_event_loop(), []
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    release = threading.Event()
    snapshots = LoopSnapshots(loop, lambda: made_on.append(threading.current_thread()), deadline_s=0.2)

    def collect() -> Iterable[Metric]:
        snapshots.take()
        return one()

    with serving(collect=collect) as server, contextlib.ExitStack() as ends:
        for end in (loop.close, thread.join, lambda: loop.call_soon_threadsafe(loop.stop), release.set):
            ends.callback(end)  # the last one first
        assert "one 1.0" in read(server.address)
        assert made_on == [thread]
        loop.call_soon_threadsafe(release.wait)
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            read(server.address)
        assert b"event loop did not answer for 0.2 s" in refused.value.read()
        release.set()
        assert "one 1.0" in read(server.address)
        assert len(made_on) == 2  # the snapshot whose reader had gone was not made
    with pytest.raises(NotNow, match="ending"):
        snapshots.take()


def test_an_error_of_a_collector_is_an_answer_and_no_end() -> None:
    broken = [True]

    def collect() -> Iterable[Metric]:
        if broken:
            raise KeyError("a bug")
        return one()

    with serving(collect=collect) as server:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            read(server.address)
        broken.clear()
        assert "one 1.0" in read(server.address)


def test_clients_that_say_nothing_are_bounded_and_do_not_stop_the_server(server: MetricsServer) -> None:
    host, port = parse_address(server.address)
    silent = [socket.create_connection((host, port), 10) for _ in range(MOST_CONNECTIONS)]
    assert not can_read(server.address)  # no room: the connection is closed unread
    for connection in silent:
        connection.close()
    until(lambda: can_read(server.address), "the room of connections that were closed is free again")


def test_connections_that_come_together_wait_to_be_accepted() -> None:
    """The system drops what finds no place in its queue, and its peer tries again after a second, then two."""
    server = MetricsServer(LOOPBACK, one, INSECURE)  # it accepts none yet
    with contextlib.ExitStack() as ends:
        for _ in range(64):
            ends.enter_context(socket.create_connection(parse_address(server.address), NO_LIMIT_S))
    server.stop()


def test_who_has_not_shaken_hands_for_long_makes_room_for_a_scrape(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "Bounds", lambda *_: Bounds(1, 1, NO_LIMIT_S, patience_s=0.0))
    monkeypatch.setattr(metrics_server, "CONNECTION_S", NO_LIMIT_S)
    with serving(EVERYWHERE, security=load_identity(keys / "s0")) as server:
        with socket.create_connection(("127.0.0.1", parse_address(server.address)[1]), NO_LIMIT_S) as silent:
            assert "one 1.0" in read_tls(server.address, "dips-slave", keys / "prometheus", keys / "s0" / CA_FILE)
            assert silent.recv(1) == b""


def test_beyond_loopback_both_sides_show_certificates(keys: Path) -> None:
    ca = keys / "s0" / CA_FILE
    with serving(EVERYWHERE, security=load_identity(keys / "s0")) as server:
        assert "one 1.0" in read_tls(server.address, "dips-slave", keys / "prometheus", ca)
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            read_tls(server.address, "dips-master", keys / "prometheus", ca)
        foreign = keys.parent / "foreign" / "prometheus"
        for stranger in (None, foreign):
            with pytest.raises((OSError, http.client.HTTPException)):
                read_tls(server.address, "dips-slave", stranger, ca)
        with pytest.raises((OSError, http.client.HTTPException)):
            read(f"127.0.0.1:{parse_address(server.address)[1]}")  # in the clear


def test_a_revoked_certificate_reads_nothing_and_renewed_keys_count_at_once(keys: Path, tmp_path: Path) -> None:
    shutil.copytree(keys, tmp_path / "keys")
    authority, ca = Authority(tmp_path / "keys"), tmp_path / "keys" / "ca" / CA_FILE
    mine = authority.identity("prometheus")
    with serving(EVERYWHERE, security=load_identity(authority.identity("s0"))) as server:
        assert "one 1.0" in read_tls(server.address, "dips-slave", mine, ca)
        serial = authority.certificate("prometheus").serial_hex
        revoked = {"revoked": [{"serial": serial, "reason": "lost"}]}
        (authority.identity("s0") / REVOKED_FILE).write_text(json.dumps(revoked))
        with pytest.raises((OSError, http.client.HTTPException)):
            read_tls(server.address, "dips-slave", mine, ca)
        authority.renew("prometheus")
        authority.renew("s0")
        assert "one 1.0" in read_tls(server.address, "dips-slave", authority.identity("prometheus"), ca)


def test_loopback_is_plain_also_with_keys(keys: Path) -> None:
    with serving(security=load_identity(keys / "a")) as server:
        assert "one 1.0" in read(server.address)
