"""The status page of a real master, asked over real sockets: what it shows of a run, and what it costs the run."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator

import pytest
from support.waiting import NO_LIMIT_S, until
from support.whole_run import WholeRun

from dips.core.net.addresses import parse_address
from dips.core.net.security import INSECURE
from dips.local.operator_client import OperatorClient
from dips.master.page.access import read_page_url
from dips.master.page.event_buffer import MAX_CONNECTIONS, MAX_STREAMS

ANSWER_S = 20.0


class Browser:
    """Asks one page."""

    def __init__(self, address: str) -> None:
        self.host, self.port = parse_address(address)

    def connected(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=NO_LIMIT_S)
        connection.sock = socket.create_connection((self.host, self.port), ANSWER_S)
        return connection

    def ask(self, path: str) -> tuple[int, bytes]:
        with contextlib.closing(self.connected()) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeRun]:
    """A run of two clusters that train, with a page."""
    folder = tmp_path_factory.mktemp("page")
    with WholeRun(folder / "run", n_slaves=1, page_listen="127.0.0.1:0") as whole:
        clusters = [whole.cluster(name, seed, step_s=0.05) for seed, name in enumerate("ab", 1)]
        whole.wait_for_version(1)
        yield whole
        for cluster in clusters:
            cluster.driver.request_stop("enough")
        for cluster in clusters:
            cluster.join()


@pytest.fixture(scope="module")
def browser(run: WholeRun) -> Browser:
    url = read_page_url(run.directory / "master")
    assert url is not None
    return Browser(url.partition("//")[2].partition("/")[0])


def test_many_readers_and_silent_connections_cost_the_control_flow_nothing(run: WholeRun, browser: Browser) -> None:
    with contextlib.ExitStack() as stack:
        until(lambda: _open_until_full(browser, stack) == MAX_STREAMS, "as many streams as there may be")
        assert browser.ask("/healthz")[0] == 200
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
            return browser.ask("/snapshot.json")[0] == 200
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
