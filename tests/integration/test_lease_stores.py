"""A lease in Kubernetes, and what etcd may answer, over real HTTPS: a server that checks what is written."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.published_schemas import check

from dips.core.errors import RetryLater
from dips.master import lease
from dips.master.lease import Held, Store, store_of

LEASES = "/apis/coordination.k8s.io/v1/namespaces/runs/leases"
TOKEN, LIMIT_S, NEVER = "a-token", 1.0, b"a body that does not come"


class Server:
    """Keeps one Lease, with the rules of Kubernetes; `answer`: says this to everyone instead."""

    def __init__(self, folder: Path) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.answer: tuple[int, bytes] | None = None
        self.over = threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*_certificate(folder))
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        self.port = self.http.server_address[1]

    def serve(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        if self.answer is not None:
            return self.answer
        name = path.removeprefix(LEASES).strip("/")
        if not path.startswith(LEASES) or name != ("" if method == "POST" else "demo"):
            return 404, b"another path"
        if method == "GET" and self.lease is None:
            return 404, b"not found"
        if method != "GET":
            assert body is not None
            check(body, "1.31")
            given = body["metadata"].get("resourceVersion")
            if (method == "PATCH") != (self.lease is not None) or (method == "PATCH" and given != str(self.version)):
                return 409, b"conflict"
            self.version += 1
            labels = (self.lease or {"metadata": {}})["metadata"]
            self.lease = {**body, "metadata": {**labels, **body["metadata"], "resourceVersion": str(self.version)}}
        return 200, json.dumps(self.lease).encode()


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            assert ("merge-patch+json" in self.headers.get("Content-Type", "")) is (self.command == "PATCH")
            if self.path.startswith("/apis") and self.headers["Authorization"] != f"Bearer {TOKEN}":
                code, said = 401, b"who are you?"
            else:
                code, said = server.serve(self.command, self.path, json.loads(body) if body else None)
            self.send_response(code)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            if said == NEVER:
                server.over.wait()
            self.wfile.write(said)

        do_GET = do_POST = do_PATCH = _serve

        def log_message(self, *args: object) -> None:
            pass

    return Handler


def _certificate(folder: Path) -> tuple[Path, Path]:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(days=1), now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert, key_file = folder / "ca.crt", folder / "key"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return cert, key_file


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server(tmp_path)
    monkeypatch.setattr(lease, "ACCOUNT", tmp_path)
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT_HTTPS", str(made.port))
    monkeypatch.setenv("ETCDCTL_CACERT", str(tmp_path / "ca.crt"))
    thread = threading.Thread(target=made.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.over.set()
    made.http.shutdown()
    thread.join()
    made.http.server_close()


def in_kubernetes() -> Store:
    return store_of("kubernetes:runs/demo", "demo", LIMIT_S)


def in_etcd(server: Server) -> Store:
    return store_of(f"etcd:https://127.0.0.1:{server.port}", "demo", LIMIT_S)


def test_lease_of_kubernetes_is_made_renewed_and_taken_by_one_alone(server: Server) -> None:
    here, there = in_kubernetes(), in_kubernetes()
    assert here.read() is None
    made = here.write("a", None)
    assert made == there.read() == Held("a", "1")
    assert there.write("b", None) is None
    renewed = here.write("a", made)
    assert renewed is not None
    assert there.write("b", made) is None, "it was renewed since"
    assert there.write("b", renewed) == here.read() == Held("b", "3", transitions=1)
    server.lease = {"metadata": {"resourceVersion": "3", "labels": {"made": "by hand"}}}  # without a spec
    assert here.read() == Held("", "3")
    assert here.write("a", here.read()) == Held("a", "4", transitions=1)
    assert server.lease["metadata"]["labels"] == {"made": "by hand"}
    server.lease = None
    assert here.write("a", renewed) is None


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (403, b"leases is forbidden"),
        (500, b"\xff"),
        (500, NEVER),
        (200, b"no JSON"),
        (200, b"[]"),
        (200, b'{"succeeded": true, "header": {"revision": "x"}, "kvs": [{"mod_revision": "x"}], "spec": null}'),
        (200, b'{"succeeded": true, "header": {}, "kvs": [{}], "spec": {}}'),
    ],
)
def test_answer_that_cannot_be_used_is_trouble_that_may_pass(server: Server, code: int, answer: bytes) -> None:
    server.answer = code, answer
    for there in (in_kubernetes(), in_etcd(server)):
        for call in (there.read, partial(there.write, "a", Held("a", "1"))):
            with pytest.raises(RetryLater, match=r"read|answers|used"):
                call()


def test_store_that_is_away_or_shows_another_certificate_is_trouble_that_may_pass(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("ETCDCTL_CACERT", str(_certificate(tmp_path / "other")[0]))
    for there in (in_etcd(server), store_of("etcd:https://127.0.0.1:1,https://127.0.0.1:2", "demo", LIMIT_S)):
        with pytest.raises(RetryLater, match=r"certificate|refused"):
            there.read()
