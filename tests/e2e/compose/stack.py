"""The containers of one compose project, as a test sees and harms them. Must never touch another project's."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROJECT = "dips-compose-test"
ROLES = ("master", "slave-0", "slave-1", "cluster-a", "cluster-b", "cluster-c")
CLUSTERS = ROLES[3:]
RANKS_FILE = "deploy/compose/ranks.yml"
RANKS, NODES = "cluster-d", ("cluster-d-0", "cluster-d-1")
"""The cluster of two containers, each with a rank, that this file adds; the rank of the first leads."""

EVALUATOR = "heldout"
ASKERS = ("cluster-a", "slave-0", "slave-1")
LOOK_S = 0.5
LIMIT_S = 600.0
"""Of a command and of a wait, as for any test: it only ends what hangs."""

_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)\Z")


class StepFailed(Exception):
    """What did not happen, in a sentence."""


def command(*words: str, timeout_s: float | None = LIMIT_S, environment: Mapping[str, str] | None = None) -> str:
    """Standard output of a command. Raises StepFailed with the end of what it said when it fails."""
    try:
        done = subprocess.run(
            words,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise StepFailed(f"`{' '.join(words)}` took more than {timeout_s} s") from error
    if done.returncode != 0:
        said = " | ".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise StepFailed(f"`{' '.join(words)}` ended with {done.returncode}: {said}")
    return done.stdout


def wait(what: str, true: Callable[[], bool]) -> float:
    """Look until it is true; the seconds it took. Raises StepFailed. A look that fails counts as not yet."""
    begin_s, last = time.monotonic(), ""
    while True:
        try:
            if true():
                return time.monotonic() - begin_s
        except StepFailed as error:
            last = f" (at last: {error})"
        if time.monotonic() - begin_s > LIMIT_S:
            raise StepFailed(f"{what}: not within {LIMIT_S:g} s{last}")
        time.sleep(LOOK_S)


class Stack:
    """docker-compose.yml under a project's name of its own."""

    def __init__(self, compose: Sequence[str], files: Sequence[str], settings: Mapping[str, str]) -> None:
        self._command = [*compose, "-p", PROJECT]
        self._files = list(files)
        self._settings = settings

    def add(self, file: str) -> None:
        """From now on also what this file describes."""
        self._files.append(file)

    def compose(self, *words: str, timeout_s: float | None = LIMIT_S) -> str:
        return self._on(self._files, *words, timeout_s=timeout_s)

    def container(self, service: str) -> str:
        """The id of a service's container, running or not. Raises StepFailed when there is none."""
        labels = [f"label=com.docker.compose.project={PROJECT}", f"label=com.docker.compose.service={service}"]
        filters = [word for label in labels for word in ("--filter", label)]
        found = command("docker", "ps", "--all", "--quiet", *filters).split()
        if not found:
            raise StepFailed(f"service {service} has no container")
        return found[0]

    def state(self, service: str) -> dict[str, object]:
        """`docker inspect`'s State, with RestartCount."""
        [told] = json.loads(command("docker", "inspect", self.container(service)))
        return {**told["State"], "RestartCount": told["RestartCount"]}

    def has_ended(self, service: str) -> bool:
        return not self.state(service)["Running"]

    def is_healthy(self, service: str) -> bool:
        health = self.state(service).get("Health")
        return isinstance(health, dict) and health.get("Status") == "healthy"

    def ranks(self, service: str) -> set[str]:
        """Numbers of the processes that torchrun has started in a service's container. Raises StepFailed while it is
        not running.
        """
        lines = command("docker", "top", self.container(service), "-eo", "pid,args").splitlines()
        found = [line.split(maxsplit=1) for line in lines]
        return {pid for pid, line in found if " -m dips.cli train " in line and "dips.worker.torchrun" not in line}

    def execute(self, service: str, *words: str) -> str:
        return command("docker", "exec", self.container(service), *words)

    def metrics(self, prefix: str) -> dict[str, float]:
        """The master's samples whose lines begin with `prefix`, by name and labels as they are written.

        Asked for by whichever of the other processes can, with its own keys. Raises StepFailed when none can.
        """
        ask = ("python", "-I", "-S", "/opt/dips/health.py", "--at", "master:9400", "--show", prefix)
        for asker in ASKERS[:-1]:
            try:
                return samples(self.execute(asker, *ask))
            except StepFailed:
                continue
        return samples(self.execute(ASKERS[-1], *ask))

    def version(self) -> int:
        """The published version; -1 while there is none, or while the master is away."""
        try:
            return int(self.metrics("dips_master_version")["dips_master_version"])
        except (KeyError, StepFailed):
            return -1

    def is_member(self, cluster: str) -> bool:
        name = f'dips_master_cluster_up{{cluster="{cluster}"}}'
        return self.metrics("dips_master_cluster_up").get(name) == 1.0

    def applied(self, cluster: str) -> float:
        """How many of the cluster's pushes the master has merged in its present life."""
        found = self.metrics("dips_master_verdicts_total")
        return sum(
            value for name, value in found.items() if f'cluster="{cluster}"' in name and 'verdict="applied"' in name
        )

    def logs(self, service: str) -> str:
        done = subprocess.run(
            ["docker", "logs", self.container(service)], capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
        return done.stdout + done.stderr

    def left(self) -> list[str]:
        """Containers, networks and volumes of the project that are there."""
        label = f"label=com.docker.compose.project={PROJECT}"
        found = [f"container {name}" for name in _names("ps", "--all", "--filter", label, "--format", "{{.Names}}")]
        found += [f"network {name}" for name in _names("network", "ls", "--filter", label, "--format", "{{.Name}}")]
        found += [f"volume {name}" for name in _names("volume", "ls", "--filter", label, "--format", "{{.Name}}")]
        return found

    def remove(self) -> None:
        """Also what an earlier run left, which ended early."""
        files = dict.fromkeys([*self._files, RANKS_FILE])
        self._on(files, "down", "--volumes", "--remove-orphans", "--timeout", "10")

    def _on(self, files: Iterable[str], *words: str, timeout_s: float | None = LIMIT_S) -> str:
        options = [word for file in files for word in ("-f", file)]
        return command(*self._command, *options, *words, timeout_s=timeout_s, environment=self._settings)


def samples(text: str) -> dict[str, float]:
    """Lines of Prometheus' text form: name and labels as written -> value."""
    found = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and not line.startswith("#"):
            found[f"{match[1]}{{{match[2]}}}" if match[2] else match[1]] = float(match[3])
    return found


def copy_records(stack: Stack, to: Path) -> None:
    """What the processes left, out of their containers, laid out as the directory of a run."""
    shutil.rmtree(to, ignore_errors=True)
    places = {name: to / ("slaves" if name.startswith("slave") else "clusters") / name for name in ROLES[1:]}
    for service, place in {"master": to / "master", **places, NODES[0]: to / "clusters" / RANKS}.items():
        place.mkdir(parents=True)
        command("docker", "cp", f"{stack.container(service)}:/var/lib/dips/.", str(place))


def _names(*words: str) -> list[str]:
    return command("docker", *words).split()
