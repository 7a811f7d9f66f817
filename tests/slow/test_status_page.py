"""The status page of real masters, asked over real sockets: what it answers, to whom, and what it costs the run."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import signal
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.master_process import MasterProcess
from support.waiting import NO_LIMIT_S, until
from support.whole_run import WholeRun

from dips.cli import main
from dips.core.errors import TERMINATED
from dips.core.net.addresses import parse_address
from dips.core.net.keys import MASTER_DNS_NAME
from dips.core.net.security import INSECURE
from dips.local.authority import Authority, ensure_keys
from dips.local.operator_client import OperatorClient
from dips.master.page.access import read_page_url
from dips.master.page.event_buffer import MAX_CONNECTIONS, MAX_STREAMS

ANSWER_S = 20.0


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body


class Browser:
    """Asks one page. Connections are closed with the test."""

    def __init__(self, address: str, tls: ssl.SSLContext | None = None) -> None:
        self.host, self.port = parse_address(address)
        self._tls = tls

    def connected(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=NO_LIMIT_S)
        connection.sock = socket.create_connection((self.host, self.port), ANSWER_S)
        if self._tls is not None:
            connection.sock = self._tls.wrap_socket(connection.sock, server_hostname=MASTER_DNS_NAME)
        return connection

    def ask(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
        connection = self.connected()
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    @contextlib.contextmanager
    def stream(self, **headers: str) -> Iterator[Iterator[tuple[str, str]]]:
        """(kind, data) of the server-sent events."""
        connection = self.connected()
        try:
            connection.request("GET", "/events", headers=headers)
            yield _events(connection.getresponse())
        finally:
            connection.close()


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, str]]:
    assert answer.status == 200, answer.read()
    assert answer.getheader("Content-Type", "").startswith("text/event-stream")
    kind = ""
    for line in answer:
        name, _, value = line.decode().strip().partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, value


def page_of(directory: Path) -> str:
    url = read_page_url(directory)
    assert url is not None
    return url


def address_of(url: str) -> str:
    return url.partition("//")[2].partition("/")[0]


def token_of(url: str) -> str:
    return url.rpartition("link=")[2]


def tls_of(keys: Path, name: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(keys / "master" / "ca.crt"))
    if name is not None:
        context.load_cert_chain(keys / name / "tls.crt", keys / name / "tls.key")
    return context


# ---- without keys ----


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeRun]:
    """A run of two clusters that train, with a page."""
    folder = tmp_path_factory.mktemp("page")
    with WholeRun(folder / "run", n_slaves=1, page_listen="127.0.0.1:0", page_hosts="status.example") as whole:
        clusters = [whole.cluster(name, seed, step_s=0.05) for seed, name in enumerate("ab", 1)]
        whole.wait_for_version(1)
        yield whole
        for cluster in clusters:
            cluster.driver.request_stop("enough")
        for cluster in clusters:
            cluster.join()


@pytest.fixture(scope="module")
def browser(run: WholeRun) -> Browser:
    return Browser(address_of(page_of(run.directory / "master")))


def test_the_page_and_its_parts_are_served_with_strict_headers(browser: Browser) -> None:
    index = browser.ask("/")
    assert (index.status, b"<title>Di-PS</title>" in index.body) == (200, True)
    policy = index.headers["content-security-policy"]
    assert re.match(r"default-src 'none'; script-src 'self' 'sha256-[^' ]+'; style-src 'self';", policy)
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert index.headers["x-content-type-options"] == "nosniff"
    assert index.headers["referrer-policy"] == "no-referrer"
    script = browser.ask("/static/page.js")
    assert (script.status, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    again = browser.ask("/static/page.js", If_None_Match=script.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    assert browser.ask("/static/vendor/uplot/LICENSE").status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/static/../page.py", 404),
        ("GET", "/static/%2e%2e/page.py", 404),
        ("GET", "/static//etc/passwd", 404),
        ("GET", "/master.json", 404),
        ("GET", "/page.secret.json", 404),
        ("POST", "/steer", 404),
        ("POST", "/", 405),
        ("PUT", "/snapshot.json", 405),
        ("DELETE", "/events", 405),
        ("GET", "/nothing", 404),
    ],
)
def test_nothing_else_can_be_asked_for(browser: Browser, method: str, path: str, status: int) -> None:
    answer = browser.ask(path, method)
    assert answer.status == status
    assert "content-security-policy" in answer.headers
    assert path.encode() not in answer.body


def test_a_name_that_is_not_this_masters_is_refused(browser: Browser) -> None:
    for host in ("evil.example", f"evil.example:{browser.port}", "10.0.0.1", ""):
        for path in ("/", "/snapshot.json", "/events", "/static/page.js"):
            assert browser.ask(path, Host=host).status == 421, (host, path)
    for host in ("localhost", "status.example", f"127.0.0.1:{browser.port}"):
        assert browser.ask("/snapshot.json", Host=host).status == 200, host
    assert browser.ask("/healthz", Host="evil.example").body == b"ok\n"


def test_the_snapshot_is_the_run(run: WholeRun, browser: Browser) -> None:
    def told() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(browser.ask("/snapshot.json").body)
        return found

    def measured() -> bool:
        links = told()["state"]["links"]
        return len(links) == 2 and all(link["push"] and link["pull"] for link in links)

    until(measured, "rates of both links")
    message = told()
    state = message["state"]
    assert state["run"]["id"] == "test"
    assert [(c["id"], c["level"]) for c in state["clusters"]] == [("a", "good"), ("b", "good")]
    assert [(x["id"], x["sign"]) for x in state["slaves"]] == [("s0", "ready")]
    assert {(link["cluster"], link["slave"]) for link in state["links"]} == {("a", "s0"), ("b", "s0")}
    assert {"cluster a", "cluster b", "slave s0", "master"} <= {event["who"] for event in message["events"]}
    assert message["rounds"][-1]["version"] is not None
    until(lambda: any(told()["history"]["loss"]["a"]), "a loss of cluster a")


def test_the_stream_goes_on_and_sends_only_what_is_new(browser: Browser) -> None:
    with browser.stream() as events:
        first, second = (json.loads(data) for kind, data in (next(events), next(events)) if kind == "run")
    assert (first["full"], second["full"]) == (True, False)
    assert second["number"] > first["number"]
    assert len(second["history"]["at"]) <= 1
    assert second["now"] > first["now"]


def test_many_readers_and_silent_connections_are_bounded_and_cost_the_control_flow_nothing(
    run: WholeRun, browser: Browser
) -> None:
    with contextlib.ExitStack() as stack:
        until(lambda: _open_until_full(browser, stack) == MAX_STREAMS, "as many streams as there may be")
        assert browser.ask("/healthz").status == 200
        silent = [stack.enter_context(socket.create_connection((browser.host, browser.port))) for _ in range(300)]
        turned_away = 0
        for one in reversed(silent):  # the last ones come when there are too many
            one.settimeout(0.2 if turned_away else ANSWER_S)
            with contextlib.suppress(TimeoutError, ConnectionError):
                turned_away += one.recv(1) == b""
            if turned_away > 300 - MAX_CONNECTIONS:
                break
        assert turned_away
        before = run.version()
        with OperatorClient(run.address, security=INSECURE) as operator:
            for _ in range(20):
                operator.status()
        run.wait_for_version(before + 2)

    def answers() -> bool:
        with contextlib.suppress(ConnectionError):  # while the last of them are being closed
            return browser.ask("/snapshot.json").status == 200
        return False

    until(answers, "the page answers again")


def _open_until_full(browser: Browser, stack: contextlib.ExitStack) -> int:
    """How many streams were opened until one was refused; closed again when it was not all."""
    opened = 0
    with contextlib.ExitStack() as mine:
        while opened <= MAX_STREAMS:
            connection = browser.connected()
            mine.callback(connection.close)
            connection.request("GET", "/events")
            if connection.getresponse().status == 503:
                break
            opened += 1
        if opened == MAX_STREAMS:
            stack.push(mine.pop_all())
    return opened


def test_a_page_that_may_steer_is_asked_by_its_own_scripts_only(tmp_path: Path) -> None:
    master = MasterProcess(tmp_path / "master", "page_listen=127.0.0.1:0", "page_steer=true", "slaves=1")
    try:
        address = master.started().address
        browser = Browser(address_of(page_of(tmp_path / "master")))
        own = f"http://{browser.host}:{browser.port}"
        pause = json.dumps({"action": "pause", "reason": "a look"})

        def steer(body: str, **headers: str) -> Answer:
            return browser.ask("/steer", "POST", body, **{"Content_Type": "application/json", "Origin": own, **headers})

        def paused() -> bool:
            with OperatorClient(address, security=INSECURE) as operator:
                return operator.status().paused

        assert steer(pause, Origin="https://evil.example").status == 403
        assert steer(pause, Origin="null").status == 403
        assert steer(pause, Content_Type="text/plain").status == 403  # what a form of another site could send
        assert steer(pause, Host="evil.example").status == 421
        assert steer("{").status == 400
        assert steer("[]").status == steer(json.dumps({"action": "stop"})).status == 409
        assert steer(json.dumps({"action": "pause", "reason": "x" * 2000})).status == 413
        assert not paused()
        told = steer(pause)
        assert (told.status, json.loads(told.body)["sentence"].startswith("no new round begins")) == (200, True)
        assert paused()
        assert "pause was asked for on the status page by this machine" in master.log
        assert steer(json.dumps({"action": "resume"})).status == 200
        assert not paused()
    finally:
        master.signal(signal.SIGTERM)


# ---- with keys ----


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, MasterProcess]]:
    """The folder of keys, and a master with a page that uses them."""
    folder = tmp_path_factory.mktemp("keyed")
    ensure_keys(folder / "keys", ["a"], ["s0"], ["me", "gone"])
    master = MasterProcess(folder / "master", *keyed_knobs(folder))
    master.started()
    yield folder, master
    if master.popen.poll() is None:
        master.signal(signal.SIGTERM)


def keyed_knobs(folder: Path) -> list[str]:
    return ["insecure=false", f"keys={folder / 'keys' / 'master'}", "page_listen=127.0.0.1:0", "slaves=1"]


def test_the_link_is_for_its_owner_alone_and_becomes_a_cookie(keyed: tuple[Path, MasterProcess]) -> None:
    folder, master = keyed
    url = page_of(folder / "master")
    browser = Browser(address_of(url), tls_of(folder / "keys", None))
    for name in ("page.json", "page.secret.json"):
        assert stat.S_IMODE((folder / "master" / name).stat().st_mode) == 0o600
    assert token_of(url) not in master.log
    locked = browser.ask("/")
    assert (locked.status, b"This page is for operators" in locked.body) == (401, True)
    assert browser.ask("/snapshot.json").status == browser.ask("/events").status == 401
    assert browser.ask("/?link=wrong").status == 401
    assert browser.ask(f"/snapshot.json?link={token_of(url)}").status == 401  # the token is for the door only
    let_in = browser.ask(f"/?link={token_of(url)}")
    assert (let_in.status, let_in.headers["location"]) == (303, "/")
    cookie = let_in.headers["set-cookie"]
    assert {"HttpOnly", "Secure", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    pair = cookie.partition(";")[0]
    assert browser.ask("/", Cookie=pair).status == 200
    assert json.loads(browser.ask("/snapshot.json", Cookie=pair).body)["state"]["say"]["level"] == "wait"
    assert browser.ask("/snapshot.json", Cookie=pair[:-1]).status == 401
    assert browser.ask("/healthz").body == b"ok\n"
    assert "the status page was not shown to 127.0.0.1" in master.log


def test_certificates_let_in_operators_only_until_they_are_revoked(keyed: tuple[Path, MasterProcess]) -> None:
    folder, _ = keyed
    keys, address = folder / "keys", address_of(page_of(folder / "master"))
    for name, status in (("me", 200), ("gone", 200), ("a", 401), ("s0", 401)):
        assert Browser(address, tls_of(keys, name)).ask("/snapshot.json").status == status, name
    gone = Browser(address, tls_of(keys, "gone"))
    with gone.stream() as events:
        next(events)
        Authority(keys).revoke("gone", "left the team")
        assert len(list(itertools.islice(events, 30))) < 30  # the open stream ends too
    assert gone.ask("/snapshot.json").status == 401


def test_plain_text_is_not_answered_where_there_are_keys(keyed: tuple[Path, MasterProcess]) -> None:
    folder, _ = keyed
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        Browser(address_of(page_of(folder / "master"))).ask("/healthz")


def test_link_and_port_survive_a_restart_and_the_stream_says_good_bye(keyed: tuple[Path, MasterProcess]) -> None:
    folder, master = keyed
    url = page_of(folder / "master")
    browser = Browser(address_of(url), tls_of(folder / "keys", "me"))
    with browser.stream() as events:
        next(events)
        assert master.signal(signal.SIGTERM) == TERMINATED
        assert list(events)[-1] == ("ended", "the master has ended")
    assert read_page_url(folder / "master") is None
    again = MasterProcess(folder / "master", *keyed_knobs(folder))
    try:
        again.started()
        assert page_of(folder / "master") == url
        until(lambda: browser.ask("/snapshot.json").status == 200, "the first look")
        told = [event["text"] for event in json.loads(browser.ask("/snapshot.json").body)["events"]]
        assert any(text.startswith("the master ended: stopped by SIGTERM") for text in told), told
    finally:
        again.signal(signal.SIGTERM)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("0.0.0.0:0", "page_listen is '0.0.0.0:0', which is not a loopback address"),
        ("nonsense", "page_listen 'nonsense' is not an address"),
    ],
)
def test_an_address_that_cannot_be_is_one_sentence(
    listen: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _master(tmp_path, listen, capsys)
    assert words in told
    assert not (tmp_path / "master").exists()


def test_a_port_that_is_taken_is_one_sentence_and_nothing_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = _master(tmp_path, f"127.0.0.1:{port}", capsys)
    assert f"the status page cannot listen on 127.0.0.1:{port}" in told
    assert "choose another one with --page-listen" in told
    assert not (tmp_path / "master" / "master.json").exists()


def _master(folder: Path, listen: str, capsys: pytest.CaptureFixture[str]) -> str:
    words = ["--run-id", "x", "--directory", str(folder / "master"), "--insecure", "--page-listen", listen]
    assert main.run(["master", *words]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.strip().splitlines()[-1]
