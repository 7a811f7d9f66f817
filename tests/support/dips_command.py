"""The `dips` command as a person types it: real processes, for integration tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support import live
from support.waiting import until

from dips.core.errors import Refused
from dips.core.ids import parse_version
from dips.core.net.keys import load_identity
from dips.local.local_run import LAUNCH_TAPE
from dips.local.log_files import records, tape_path
from dips.local.operator_client import OperatorClient
from dips.master.directory import TAPE_NAME

ROOT = Path(__file__).parents[2]
_OURS = ("DIPS_MASTER", "DIPS_RUN", "DIPS_CLUSTER", "DIPS_KEYS", "DIPS_INSECURE")


def environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without a run that a person may have set, and with one thread a process."""
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    return {**kept, "COLUMNS": "160", "OMP_NUM_THREADS": "1", **(added or {})}


WHOLE_RUNS = ("up", "demo", "compare")
"""Commands that start many processes, or compute for long."""


def dips(*arguments: object, **added: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "dips.cli", *arguments, **added)


def run_python(*arguments: object, **added: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, *map(str, arguments)], environment(added)
    with live.run(live.HEAVY) if {*WHOLE_RUNS} & {*command[:4]} else contextlib.nullcontext():
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False, cwd=ROOT)


@contextlib.contextmanager
def started(*command: object, log: Path, cwd: Path = ROOT, **added: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs on; what it says goes to `log`. Ended with SIGTERM, then SIGKILL, if it still runs."""
    words, env = [str(word) for word in command], environment(added)
    with live.run(live.HEAVY), log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=cwd)
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


@contextlib.contextmanager
def dips_started(*arguments: object, log: Path, **added: str) -> Iterator[subprocess.Popen[bytes]]:
    with started(sys.executable, "-m", "dips.cli", *arguments, log=log, cwd=ROOT, **added) as process:
        yield process


def pid_of(run_dir: Path, name: str, start: int = 1) -> int:
    wanted = {"kind": "child_started", "child": name, "life": start}
    return next(int(line["pid"]) for line in records(tape_path(run_dir, LAUNCH_TAPE)) if wanted.items() <= line.items())


def published(run_dir: Path) -> int:
    lines = records(run_dir / "master" / TAPE_NAME)
    return max((parse_version(line["version"]).v for line in lines if line["kind"] == "publish"), default=-1)


def ended(process: subprocess.Popen[bytes], log: Path) -> int:
    until(lambda: process.poll() is not None, "the end of the process", log)
    return int(process.returncode)


def assert_verified(run: Path) -> None:
    """Assert that the records prove every promise, and that every version comes out again from recorded pushes."""
    told = dips("verify", run, "--replay")
    assert told.returncode == 0, told.stdout + told.stderr


def master_file(run_dir: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads((run_dir / "master" / "master.json").read_text())
        return told
    except (OSError, ValueError):
        return {}


def operator_of(run_dir: Path) -> OperatorClient:
    told = master_file(run_dir)
    return OperatorClient(told["address"], told["run_id"], 30.0, security=load_identity(run_dir / "keys" / "operator"))


def end_at_a_limit(run_dir: Path) -> None:
    """The run ends with its next round: it gets a limit of tokens that is reached then."""

    def is_set() -> bool:
        with contextlib.suppress(Refused), operator_of(run_dir) as operator:  # refused: it has more already
            operator.extend(operator.status().tokens + 1, False, "the test has seen what it wants")
            return True
        return False

    until(is_set, "the limit is set")


def children(pid: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.add(int(stat.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
