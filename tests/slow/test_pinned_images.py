"""`deploy/images.sh --pin` against Debian's docker-registry, a real registry."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.dips_command import environment
from support.ports import own_port, release
from support.repository import ROOT
from support.waiting import until

PULLED = ("python:3.11-slim", "prom/prometheus:v2.55.1", "grafana/grafana:11.6.0")
ROLES = ("master", "slave", "worker")
INDEX, MANIFEST = "application/vnd.oci.image.index.v1+json", "application/vnd.oci.image.manifest.v1+json"


class Registry:
    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "application/octet-stream") -> str:
        url = path if path.startswith("http") else f"http://{self.address}{path}"
        request = urllib.request.Request(url, body, {"Content-Type": kind}, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.headers.get("Location"))

    def put_image(self, name: str) -> str:
        """An image for two processors below one tag; the digest of all of it."""
        path, _, tag = name.rpartition(":")
        listed = []
        for architecture in ("amd64", "arm64"):
            config = json.dumps({"architecture": architecture, "of": name}).encode()
            where = self.ask("POST", f"/v2/{path}/blobs/uploads/", b"")
            self.ask("PUT", f"{where}&digest={sha256(config)}", config)
            of_config = described(config, "application/vnd.oci.image.config.v1+json")
            manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": of_config, "layers": []}
            body = json.dumps(manifest).encode()
            self.ask("PUT", f"/v2/{path}/manifests/{sha256(body)}", body, MANIFEST)
            listed.append({**described(body, MANIFEST), "platform": {"os": "linux", "architecture": architecture}})
        index = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed}).encode()
        self.ask("PUT", f"/v2/{path}/manifests/{tag}", index, INDEX)
        return sha256(index)


def sha256(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def described(body: bytes, kind: str) -> dict[str, object]:
    return {"mediaType": kind, "digest": sha256(body), "size": len(body)}


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    program = shutil.which("docker-registry")
    assert program, "docker-registry is not installed: make system"
    found = Registry(own_port())
    config = {
        "version": "0.1", "http": {"addr": found.address},
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
    }  # fmt: skip
    (tmp_path / "registry.yml").write_text(json.dumps(config))
    log = tmp_path / "registry.log"
    with log.open("wb") as out:
        process = subprocess.Popen([program, "serve", tmp_path / "registry.yml"], stdout=out, stderr=out)
        try:
            until(lambda: answers(found), "the registry answers", log)
            yield found
        finally:
            process.kill()
            process.wait()
            release(int(found.address.rpartition(":")[2]))


def answers(registry: Registry) -> bool:
    try:
        registry.ask("GET", "/v2/")
    except urllib.error.URLError:
        return False
    return True


@pytest.fixture
def pin(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    for name in ("deploy/images.sh", "deploy/compose/up.py", "deploy/compose/pin.py", "src/dips/core/release.py"):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / "checkout" / name)

    def run(**added: str) -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / "checkout" / "deploy" / "images.sh"), "--pin"]
        # make exports these, and they would win over the file's.
        here = {name: value for name, value in environment().items() if name not in ("BASE", "IMAGES", "TAG")}
        return subprocess.run(command, env=here | added, capture_output=True, text=True, check=False)

    return run


def test_the_digests_of_a_registry_are_pinned_and_what_is_not_there_changes_nothing(
    registry: Registry, pin: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    of = {name: f"{registry.address}/{name}" for name in PULLED}
    digests = {name: registry.put_image(name) for name in PULLED}
    own = {role: registry.put_image(f"dips/dips-{role}:7") for role in ROLES}
    file = tmp_path / "checkout" / ".env"
    keys = ("BASE", "PROMETHEUS_IMAGE", "GRAFANA_IMAGE")
    before = "PAGE_PORT=9\n" + "".join(f"{key}={of[name]}\n" for key, name in zip(keys, PULLED, strict=True))
    file.write_text(before)
    file.chmod(0o600)
    ours = {"IMAGES": f"{registry.address}/dips", "TAG": "8"}
    refused = pin(**ours)
    assert refused.returncode == 2
    assert f"{registry.address} answers 404 for dips/dips-master:8" in refused.stderr
    assert file.read_text() == before
    done = pin(**ours | {"TAG": "7"})
    assert done.returncode == 0, done.stderr
    pinned = [f"{key}={of[name]}@{digests[name]}" for key, name in zip(keys, PULLED, strict=True)]
    images = ",".join(f"{registry.address}/dips/dips-{role}:7@{digest}" for role, digest in own.items())
    pinned.append(f"DIPS_DIGESTS={images}")
    assert json.dumps([f"{role}={digest}" for role, digest in own.items()]) in done.stdout
    assert file.read_text().splitlines() == ["PAGE_PORT=9", *pinned]
    assert file.stat().st_mode & 0o777 == 0o600


class Redirecting(BaseHTTPRequestHandler):
    """A registry that keeps manifests on another server, `localhost` in place of `127.0.0.1`."""

    logins: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        host, _, port = str(self.headers["Host"]).partition(":")
        self.logins.append((host, self.headers["Authorization"]))
        self.send_response(307 if host == "127.0.0.1" else 200)
        self.send_header("Location", f"http://localhost:{port}{self.path}")
        self.end_headers()
        self.wfile.write(b"{}" if host == "localhost" else b"")

    def log_message(self, format: str, *args: Any) -> None: ...


def test_a_login_is_not_given_to_where_a_registry_redirects(
    pin: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        registry = f"127.0.0.1:{server.server_port}"
        (tmp_path / "config.json").write_text(json.dumps({"auths": {registry: {"auth": "bWU6c2VjcmV0"}}}))
        image = f"{registry}/one:1"
        done = pin(BASE=image, PROMETHEUS_IMAGE=image, GRAFANA_IMAGE=image, DOCKER_CONFIG=str(tmp_path))
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert f"BASE={image}@{sha256(b'{}')}" in done.stdout
    assert set(Redirecting.logins) == {("127.0.0.1", "Basic bWU6c2VjcmV0"), ("localhost", None)}


def test_a_registry_that_cannot_be_reached_is_named(
    pin: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    port = own_port()
    done = pin(BASE=f"127.0.0.1:{port}/python:3.11-slim")
    release(port)
    assert done.returncode == 2
    assert f"registry 127.0.0.1:{port} does not give the digest of python:3.11-slim" in done.stderr
    assert "nothing was written" in done.stderr
    assert not (tmp_path / "checkout" / ".env").exists()
