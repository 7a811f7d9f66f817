"""python deploy/compose/up.py [OPTIONS]: says what is missing for docker-compose.yml in a sentence, else runs its `up`.

Docker's own messages for a missing engine or a taken port come late, among others, after some containers were made.
This looks first, and changes nothing before all is well. OPTIONS are those of `docker compose up`. Needs Python alone.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
PORTS = {"PAGE_PORT": 8080, "PROMETHEUS_PORT": 9090, "GRAFANA_PORT": 3000}
"""The ports of this machine that docker-compose.yml asks for, and what moves them."""

PULLED = {
    "BASE": "python:3.11-slim",
    "PROMETHEUS_IMAGE": "prom/prometheus:v2.55.1",
    "GRAFANA_IMAGE": "grafana/grafana:11.6.0",
}
"""What comes from a registry, by the setting that names another: the base of what is built here, and two images."""

BUILT = ("dips-keys", "dips-master", "dips-slave", "dips-worker")

LEAST_COMPOSE = "1.29"
ANSWER_S = 30.0
MISSING = 2
INTERRUPTED = 130


class Missing(Exception):
    """What a person has to do before containers can be started, in one sentence."""


def compose_command() -> list[str]:
    """`docker compose` or `docker-compose`, whichever is here. Raises Missing."""
    if shutil.which("docker") is None:
        raise Missing(
            "docker is not installed: install Docker Engine with its compose plugin (Debian: docker.io docker-compose)"
        )
    if _says(["docker", "compose", "version"]) is not None:
        return ["docker", "compose"]
    if _says(["docker-compose", "version"]) is not None:
        return ["docker-compose"]
    raise Missing(
        f"docker is here, and neither `docker compose` nor `docker-compose` is: install the compose plugin, or "
        f"docker-compose from {LEAST_COMPOSE} (Debian: docker-compose)"
    )


def require_engine() -> None:
    """Raises Missing when no engine answers this user."""
    why = _says(["docker", "version", "--format", "{{.Server.Version}}"], wants_error=True)
    if why is None:
        return
    remedy = "start it (systemctl start docker)"
    if "permission denied" in why.lower():
        remedy = "add this user to the group docker, or run this as root"
    raise Missing(f"the docker engine does not answer ({why}): {remedy}")


def taken_ports(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each port that is not free. Raises Missing for what is no port."""
    sentences = []
    for name, default in PORTS.items():
        text = environment.get(name) or str(default)
        if not (text.isascii() and text.isdecimal() and 0 < int(text) < 65536):
            raise Missing(f"{name} is {text!r}: give a port from 1 to 65535")
        if not _is_free(int(text)):
            sentences.append(
                f"port {text} of this machine is taken: end the process that holds it, or choose another one, as in "
                f"{name}={int(text) % 65000 + 1000}"
            )
    return sentences


def announcement(environment: Mapping[str, str]) -> list[str]:
    """What `up` will pull and build, with the bytes that the registry says; empty where every image is here."""
    pulled = [environment.get(key) or name for key, name in PULLED.items()]
    absent = [name for name in (*pulled, *BUILT) if _says(["docker", "image", "inspect", name]) is None]
    lines = [f"to pull: {name}, {_size_at_registry(name)}" for name in pulled if name in absent]
    build = [name for name in BUILT if name in absent]
    if build:
        whole = "dips-worker" in build and not environment.get("TORCH_INDEX")
        cuda = ", with gigabytes of CUDA packages unless .env has TORCH_INDEX" if whole else ""
        lines.append(f"to build, which takes minutes: {', '.join(build)}{cuda}")
    return lines


def _size_at_registry(name: str) -> str:
    """How much is downloaded for this machine's processor, in words."""
    try:
        told = json.loads(_says(["docker", "manifest", "inspect", "--verbose", name], wants_output=True) or "[]")
        ours = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        for one in told if isinstance(told, list) else [told]:
            where = one["Descriptor"]["platform"]
            if (where["os"], where["architecture"]) == ("linux", ours):
                manifest = one.get("OCIManifest") or one["SchemaV2Manifest"]
                return f"{sum(layer['size'] for layer in manifest['layers']) / 1e6:.0f} MB"
    except (ValueError, KeyError, TypeError):
        pass
    return "whose size the registry does not tell"


def settings(environment: Mapping[str, str], file: Path = ROOT / ".env") -> dict[str, str]:
    """What compose sees: the environment, before the file .env."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.lstrip().startswith("#"))
    return {**{name.strip(): value.strip().strip("'\"") for name, value in pairs}, **environment}


def main(arguments: Sequence[str]) -> int:
    try:
        compose = compose_command()
        require_engine()
        running = _says([*compose, "-f", str(ROOT / "docker-compose.yml"), "ps", "-q"], wants_output=True)
        found = settings(os.environ)
        taken = [] if running else taken_ports(found)  # ours hold them already
        if taken:
            raise Missing("; ".join(taken))
        for line in announcement(found):
            print(f"compose: {line}")
    except Missing as missing:
        print(f"compose: {missing}", file=sys.stderr)
        return MISSING
    os.chdir(ROOT)
    sys.stdout.flush()
    if "--detach" not in arguments:
        os.execvp(compose[0], [*compose, "up", *arguments])
    try:
        code = subprocess.run([*compose, "up", *arguments], check=False).returncode
    except KeyboardInterrupt:
        return INTERRUPTED
    if code == 0:
        for line in what_next(" ".join(compose), found):
            print(f"compose: {line}")
    return code


def what_next(compose: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Where the run is seen, and the next commands. compose: how it is called here."""
    if why := _why_it_has_ended(compose):
        yield f"the run has ended ({why}), and nothing trains: its containers end again"
        yield f"to go on: {compose} up --detach master && {compose} run --rm operator extend && {compose} up --detach"
        yield "after its limit of tokens: extend --tokens 100M; where no master answers yet, type it again"
        yield f"a new run: {compose} down -v, then up"
        return
    page, dashboards = (environment.get(name) or PORTS[name] for name in ("PAGE_PORT", "GRAFANA_PORT"))
    link = _says([*compose.split(), "exec", "-T", "master", "cat", "/var/lib/dips/page.json"], wants_output=True)
    try:
        url = urlsplit(str(json.loads(link or "")["url"]))._replace(netloc=f"127.0.0.1:{page}").geturl()
        yield f"the run's page: {url} (the run signs its certificate: the browser asks whether you trust it)"
    except (ValueError, KeyError, TypeError):
        yield f"the run's page: {compose} exec master cat /var/lib/dips/page.json prints its link once the master is up"
    yield f"dashboards: http://127.0.0.1:{dashboards}"
    yield f"its status: {compose} run --rm operator status"
    yield f"end it: {compose} run --rm operator stop"
    yield f"remove all of it: {compose} down -v"


def _why_it_has_ended(compose: str) -> str:
    """What the master's journal says; empty while the run goes on."""
    look = [*compose.split(), "run", "--rm", "--no-deps", "-T", "operator", "status", "--json", "/run-of-compose"]
    try:
        told = json.loads((_says(look, wants_output=True) or "").splitlines()[-1])
        why = str(told["waiting_for"])
        return why.partition(": ")[2] or why if told["stopping"] or told["stopped"] else ""
    except (ValueError, KeyError, TypeError, IndexError):
        return ""


def _says(command: Sequence[str], *, wants_error: bool = False, wants_output: bool = False) -> str | None:
    """None when the command cannot be run or fails; with wants_error the other way round: None when it succeeds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error) if wants_error else None
    if wants_error:
        return None if done.returncode == 0 else " ".join(done.stderr.split())[:300] or "it says nothing"
    return (done.stdout if wants_output else "yes") if done.returncode == 0 else None


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
