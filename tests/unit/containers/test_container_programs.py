"""What runs inside containers beside the roles: the health check, the hand-out of keys, the link, the requirements."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import stat
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from support.repository import ROOT

from dips.core.net.keys import load_identity
from dips.core.net.security import Role


def program(path: str) -> ModuleType:
    """A program of deploy/, which is no package: it is copied into images, or runs before anything is installed."""
    file = ROOT / "deploy" / path
    spec = importlib.util.spec_from_file_location(f"deploy_{file.stem}", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


health = program("docker/health.py")
keys = program("docker/hand_out_keys.py")
link = program("docker/link.py")
requirements = program("docker/requirements.py")
up = program("compose/up.py")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_which_packages_an_image_holds() -> None:
    def names(*extras: str) -> set[str]:
        return {line.split(">")[0].split("[")[0] for line in requirements.requirements(PROJECT, extras)}

    assert "torch" in names("worker")
    assert "torch" not in names("slave") | names("master", "deploy")
    assert {"numba", "grpcio", "pyzmq"} <= names("slave")
    assert names("demo") >= names("master") | names("slave") | names("worker")  # extras that name one another
    with pytest.raises(KeyError):
        requirements.requirements(PROJECT, ["slaves"])


def test_what_the_dockerfile_pins_and_who_runs() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert not lines[0].startswith("# syntax")
    installs = [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if " install --" in line]
    assert installs
    for line in installs:
        if "apt-get" not in line and "useradd" not in line and "pip" in line:
            assert "--constraint constraints.txt" in line or "--no-deps /wheels" in line, line
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    for target in ("master", "keys", "slave", "worker"):
        [stage] = [text for text in stages if text.partition("\n")[0].endswith(f" AS {target}")]
        users = [line.split()[1] for line in stage.splitlines() if line.startswith("USER ")]
        assert users[-1] == "10001:10001"


def test_images_and_the_context_of_a_build() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert not allowed & {"tests", "runs", ".git", ".venv", "docs"}
    assert "src" in allowed
    compose = (ROOT / "docker-compose.yml").read_text()
    named = re.findall(r'^ +image: "?(?:\$\{(\w+):-)?([^\s"}]+)', compose, re.MULTILINE)
    base = re.search(r"^ARG BASE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert base is not None
    assert {key: name for key, name in named if key} | {"BASE": base[1]} == up.PULLED
    assert {name for key, name in named if not key} == {*up.BUILT}
    assert re.findall(r"args: {BASE: \"\${BASE:-([^}]+)}", compose) == [base[1]] * len(up.BUILT)


@pytest.mark.parametrize("name", ["python", "docker.io/python", "index.docker.io/library/python:latest"])
def test_an_image_of_docker_hub_is_asked_for_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "deploy" / "compose")
    assert program("compose/pin.py").place(name) == ("registry-1.docker.io", "library/python", "latest")


def test_digests_are_put_behind_images_of_the_same_registry_and_tag_only(tmp_path: Path) -> None:
    """Behind another tag the digest of before would be what runs: Kubernetes does not look at the tag then."""
    manifest = tmp_path / "servers" / "set.yaml"
    manifest.parent.mkdir()
    names = [f"r.example.org/dips/dips-{name}" for name in ("master:7", "slave:8", "worker:7@sha256:1")]
    names.append("other.example.org/dips-master:7")
    lines = [f"        image: {name}" for name in names]
    manifest.write_text("\n".join(lines))
    digests = ",".join(f"r.example.org/dips/dips-{role}:7@sha256:2" for role in ("master", "slave", "worker"))
    command = [sys.executable, str(ROOT / "deploy" / "compose" / "pin.py"), str(tmp_path)]
    for given, first in (("", lines[0]), (digests, f"{lines[0]}@sha256:2")):
        subprocess.run(command, env={**os.environ, "DIPS_DIGESTS": given}, check=True)
        assert manifest.read_text().splitlines() == [first, *lines[1:]]


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the process of the container answers."""
    answers: list[object] = []

    def ask(address: str, path: str, keys: str, anonymous: bool) -> tuple[int, str]:
        answer = answers[0]
        if isinstance(answer, OSError):
            raise answer
        assert isinstance(answer, tuple)
        return answer

    monkeypatch.setattr(health, "ask", ask)
    return answers


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ((200, "dips_master_version 3\n"), 0, "answers"),
        ((503, "this process's event loop did not answer for 2 s\n"), 1, "did not answer"),
        (ConnectionRefusedError(111, "Connection refused"), 1, "nothing answers at 127.0.0.1:9400"),
    ],
)
def test_a_process_is_healthy_when_it_answers(
    answered: list[object], answer: object, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answered.append(answer)
    assert health.main([]) == code
    assert said in capsys.readouterr().out


def test_metrics_can_be_shown(answered: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    answered.append((200, "# HELP x y\ndips_master_version 3\ndips_master_epoch 1\n"))
    assert health.main(["--show", "dips_master_version"]) == 0
    assert capsys.readouterr().out == "dips_master_version 3\n"


def volumes(folder: Path, *names: str) -> Path:
    for name in ("ca", "master", *names):
        (folder / name).mkdir(mode=0o700)
    return folder


WISH = ["--slave", "s0", "--cluster", "a", "--operator", "me", "--operator", "watcher", "--for-others", "watcher"]


def test_each_identity_is_handed_out_to_its_own_place(tmp_path: Path) -> None:
    place = volumes(tmp_path, "s0", "a", "me", "watcher")
    assert keys.main(WISH, place) == 0
    roles = {name: load_identity(place / name).role for name in ("master", "s0", "a", "me")}
    assert roles == {"master": Role.MASTER, "s0": Role.SLAVE, "a": Role.CLUSTER, "me": Role.OPERATOR}
    assert stat.S_IMODE((place / "a" / "tls.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((place / "watcher" / "tls.key").stat().st_mode) == 0o644
    assert sorted(path.name for path in (place / "a").iterdir()) == ["ca.crt", "tls.crt", "tls.key"]


def test_a_second_start_keeps_what_is_there(tmp_path: Path) -> None:
    place = volumes(tmp_path, "s0", "a", "me", "watcher", "b")
    assert keys.main(WISH, place) == 0
    before = (place / "a" / "tls.crt").read_bytes()
    (place / "s0" / "tls.crt").unlink()  # the first start was cut off
    assert keys.main([*WISH, "--cluster", "b"], place) == 0
    assert (place / "a" / "tls.crt").read_bytes() == before
    assert load_identity(place / "b").name == "b"
    assert load_identity(place / "s0").name == "s0"


def test_an_identity_without_a_volume_is_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = volumes(tmp_path, "s0", "me", "watcher")
    assert keys.main(WISH, place) == 2
    assert "name it in the build argument IDENTITIES" in capsys.readouterr().err


def test_rates_and_buckets() -> None:
    """A bucket holds what the kernel sends at once, and 10 ms of fast links."""
    rates = ("10mbit", "1gbit", "0.5mbit", "64kbit")
    assert [link.bits_per_s(rate) for rate in rates] == [1e7, 1e9, 5e5, 64e3]
    for rate in ("", "10", "0mbit", "10 mbit", "fast", "-1mbit", "10mbps"):
        with pytest.raises(ValueError, match="write a rate such as"):
            link.bits_per_s(rate)
    assert (link.burst_bytes("10mbit"), link.burst_bytes("10gbit")) == (128 << 10, 12_500_000)


def test_an_interface_is_limited_once_for_each_time_that_it_appears(monkeypatch: pytest.MonkeyPatch) -> None:
    limited: list[str] = []
    monkeypatch.setattr(link.Link, "limit", lambda self, interface: limited.append(interface))
    watch = link.Link("a", "10mbit")
    for now in (["eth0"], ["eth0"], [], ["eth0", "eth1"], ["eth1"]):
        watch.look(now)
    assert limited == ["eth0", "eth0", "eth1"]


def test_what_cannot_be_limited_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(commands: Sequence[Sequence[str]]) -> str:
        return "Error: TC classifier not found." if "filter" in commands[-1] else ""

    monkeypatch.setattr(link, "_run", run)
    link.Link("cluster-a", "10mbit").look(["eth0"])
    told = "link of cluster-a, eth0: pushes 10mbit, pulls NOT limited (Error: TC classifier not found.)\n"
    assert capsys.readouterr().out == told


def fake_docker(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """The only program that is found."""
    monkeypatch.setenv("PATH", str(folder))
    script = folder / "docker"
    script.write_text("\n".join([f"#!{sys.executable}", "import sys", *lines, ""]))
    script.chmod(0o755)


@pytest.mark.parametrize(
    ("program", "remedy"),
    [
        (None, "docker is not installed: install Docker Engine"),
        ("if sys.argv[1] == 'version': sys.exit('permission denied')", "add this user to the group docker"),
        ("if sys.argv[1] == 'compose': sys.exit(1)", "install the compose plugin"),
    ],
)
def test_a_machine_that_lacks_docker_or_a_part_of_it_is_told(
    program: str | None,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if program is not None:
        fake_docker(tmp_path, monkeypatch, program)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert up.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("compose: ")
    assert remedy in said
    assert said.count("\n") == 1


def test_a_taken_port_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_docker(tmp_path, monkeypatch, "")
    monkeypatch.setattr(up, "_is_free", lambda port: port != 9099)
    monkeypatch.setenv("PROMETHEUS_PORT", "9099")
    assert up.main([]) == 2
    said = capsys.readouterr().err
    assert "port 9099 of this machine is taken" in said
    assert "PROMETHEUS_PORT=10099" in said


MANIFESTS = """
import json, sys
if sys.argv[1:3] == ["image", "inspect"]:
    sys.exit("prom" not in sys.argv[3] and sys.argv[3] != "dips-keys")
if sys.argv[1:3] == ["manifest", "inspect"]:
    if "grafana" in sys.argv[4]:
        sys.exit("no connection")
    layers = {"layers": [{"size": 20000000}, {"size": 25000000}]}
    both = [("arm64", {"layers": []}), ("amd64", layers)]
    where = lambda name: {"platform": {"os": "linux", "architecture": name}}
    print(json.dumps([{"Descriptor": where(name), "OCIManifest": one} for name, one in both]))
"""


def test_what_is_pulled_and_built_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_docker(tmp_path, monkeypatch, MANIFESTS)
    monkeypatch.setattr(up.platform, "machine", lambda: "x86_64")
    pull, unknown, build = up.announcement({})
    assert pull == "to pull: python:3.11-slim, 45 MB"
    assert unknown == "to pull: grafana/grafana:11.6.0, whose size the registry does not tell"
    assert build.startswith("to build, which takes minutes: dips-master, dips-slave, dips-worker, with giga")
    pinned = "grafana/grafana:11.6.0@sha256:1"
    assert up.announcement({"GRAFANA_IMAGE": pinned})[1].startswith(f"to pull: {pinned}, ")
    assert "CUDA" not in up.announcement({"TORCH_INDEX": "https://download.pytorch.org/whl/cpu"})[-1]


STARTED = """
import json, sys
open("told", "a").write(" ".join(sys.argv[1:]) + chr(10))
if "exec" in sys.argv:
    print(json.dumps({"url": "https://0.0.0.0:8080/?token=t", "pid": 1}))
"""


def test_a_run_that_is_started_in_the_background_says_where_it_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_docker(tmp_path, monkeypatch, STARTED)
    monkeypatch.setenv("PAGE_PORT", "9080")
    monkeypatch.setattr(up, "ROOT", tmp_path)
    monkeypatch.setattr(up, "_is_free", lambda port: True)
    monkeypatch.chdir(tmp_path)
    assert up.main(["--build", "--detach"]) == 0
    assert "compose up --build --detach" in (tmp_path / "told").read_text().splitlines()
    said = capsys.readouterr().out
    assert "the run's page: https://127.0.0.1:9080/?token=t" in said
    assert "its status: docker compose run --rm operator status" in said
    fake_docker(tmp_path, monkeypatch, "sys.exit(1)")
    page, *_ = up.what_next("docker compose", {})
    assert "exec master cat /var/lib/dips/page.json prints its link" in page


ENDED = {"stopping": True, "stopped": True, "waiting_for": "the run has ended: asked to"}


@pytest.mark.parametrize(("told", "says"), [(ENDED, True), ({**ENDED, "stopping": False, "stopped": False}, False)])
def test_a_run_that_has_ended_says_so_when_it_is_started_again_and_how_to_go_on(
    told: dict[str, object], says: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_docker(tmp_path, monkeypatch, f"if 'status' in sys.argv: print({json.dumps(json.dumps(told))})")
    said = list(up.what_next("docker compose", {}))
    assert ("the run has ended (asked to)" in said[0]) is says
    extends = "docker compose up --detach master && docker compose run --rm operator extend && docker compose up"
    assert any(extends in line for line in said) is says
    assert any("the run's page" in line for line in said) is not says


def test_a_port_is_free_until_somebody_listens() -> None:
    with pytest.raises(up.Missing, match="GRAFANA_PORT is 'http': give a port"):
        up.taken_ports({"GRAFANA_PORT": "http"})
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f" {port} " in " ".join(map(str, up.taken_ports({"GRAFANA_PORT": str(port)})))


def test_settings_come_from_the_environment_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("# ports\nPAGE_PORT=1\nGRAFANA_PORT='2'\n")
    assert up.settings({"PAGE_PORT": "3"}, file) == {"PAGE_PORT": "3", "GRAFANA_PORT": "2"}


def test_the_ports_are_those_of_the_compose_file() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for name, port in up.PORTS.items():
        assert f"${{{name}:-{port}}}" in text
