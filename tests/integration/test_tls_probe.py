"""Which connections that end say something of keys, and which only that the master or a link to it died."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from dips.core.net.keys import CA_FILE, load_identity
from dips.core.net.newcomers import reset
from dips.core.net.security import INSECURE, Identity, Role
from dips.core.net.tls_probe import TRIES, why_not_let_in
from dips.local.authority import Authority, ensure_keys

Behave = Callable[[int, socket.socket], None]
"""What a server does with its n-th connection, before it closes it."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys") / "of-a-run"
    ensure_keys(directory, ["a"], [])
    ensure_keys(directory.parent / "foreign", ["a"], [])
    return directory


@contextlib.contextmanager
def server(behave: Behave) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                for n in itertools.count():
                    end, _ = listener.accept()
                    with end, contextlib.suppress(OSError):
                        behave(n, end)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def hangs_up(keys: Path, times: int, close: Callable[[socket.socket], object] = socket.socket.close) -> Behave:
    """A master's TLS that closes so many connections after the handshake, and speaks on all later ones."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # nothing more is sent
    context.load_cert_chain(keys / "master" / "tls.crt", keys / "master" / "tls.key")

    def behave(n: int, end: socket.socket) -> None:
        with context.wrap_socket(end, server_side=True) as secure:
            secure.sendall(b"settings") if n >= times else close(secure)

    return behave


@pytest.fixture
def cluster(keys: Path) -> Identity:
    return load_identity(keys / "a")


def test_a_connection_that_ends_before_the_handshake_says_nothing_of_keys(cluster: Identity) -> None:
    """A relay or a balancer whose master is away closes what it accepted: the cluster must try again, not end."""
    with server(lambda n, end: None) as address:
        assert why_not_let_in(address, cluster) == ""


def test_a_master_that_dies_right_after_a_handshake_says_nothing_of_keys(keys: Path, cluster: Identity) -> None:
    with server(hangs_up(keys, TRIES - 1)) as address:
        assert why_not_let_in(address, cluster) == ""


def test_a_port_that_resets_connections_after_the_handshake_says_nothing_of_keys(keys: Path, cluster: Identity) -> None:
    """The bound of a port with too many strangers does that to those who come last."""
    with server(hangs_up(keys, 1000, reset)) as address:
        assert why_not_let_in(address, cluster) == ""


def test_a_certificate_that_grpc_does_not_accept_is_told(keys: Path, tmp_path: Path) -> None:
    """It ends the connection without a reset."""
    foreign = tmp_path / "a"
    shutil.copytree(keys.parent / "foreign" / "a", foreign)
    with (foreign / CA_FILE).open("a") as file:
        file.write((keys / "a" / CA_FILE).read_text())
    master = load_identity(keys / "master")
    with ThreadPoolExecutor(1) as pool:
        real = grpc.server(pool)
        pairs = [(master.key_pem, master.cert_pem)]
        port = real.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pairs, master.ca_pem, True))
        real.start()
        said = why_not_let_in(f"127.0.0.1:{port}", load_identity(foreign))
        real.stop(None).wait()
    assert "does not accept the certificate of cluster a" in said


@pytest.mark.parametrize("address", ["node1..example:29400", f"{'a' * 64}.example:29400"])
def test_a_name_that_no_machine_can_have_says_nothing_of_keys(cluster: Identity, address: str) -> None:
    """The call that follows says that there is no such machine, with the address."""
    assert why_not_let_in(address, cluster) == ""
    assert why_not_let_in(address, INSECURE) == ""


def test_a_master_that_hangs_up_after_every_handshake_does_not_accept_the_certificate(
    keys: Path, cluster: Identity
) -> None:
    with server(hangs_up(keys, 1000)) as address:
        assert "does not accept the certificate of cluster a" in why_not_let_in(address, cluster)


@pytest.mark.parametrize(("days", "words"), [(1, "does not hold yet"), (-1000, "has expired")])
def test_a_master_whose_certificate_is_out_of_its_time_is_told_with_the_clock(
    tmp_path: Path, days: int, words: str
) -> None:
    """The cluster's own certificate holds; the authority is older than both."""
    now = datetime.now(UTC)
    Authority.create(tmp_path / "keys", now - timedelta(days=1200))
    for role, name, when in ((Role.CLUSTER, "a", now), (Role.MASTER, "master", now + timedelta(days=days))):
        with Authority(tmp_path / "keys", when).locked() as authority:
            authority.add(role, name)
    with server(hangs_up(tmp_path / "keys", 0)) as address:
        said = why_not_let_in(address, load_identity(tmp_path / "keys" / "a"))
    assert f"the certificate of the master at {address} {words} by the clock of this machine" in said
    assert "set it if it is wrong" in said
