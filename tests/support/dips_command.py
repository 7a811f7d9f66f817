"""The `dips` command as a person types it: real processes, for integration tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dips.core.net.keys import load_identity
from dips.local.local_run import LAUNCH_TAPE
from dips.local.log_files import records, tape_path
from dips.local.operator_client import OperatorClient

ROOT = Path(__file__).parents[2]
_OURS = ("DIPS_MASTER", "DIPS_RUN", "DIPS_CLUSTER", "DIPS_KEYS", "DIPS_INSECURE")


def environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without a run that a person may have set, and with one thread a process."""
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    return {**kept, "COLUMNS": "160", "OMP_NUM_THREADS": "1", **(added or {})}


def dips(*arguments: object, timeout_s: float = 240.0, **added: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    command = [sys.executable, "-m", "dips.cli", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environment(added), check=False, cwd=ROOT
    )


@contextlib.contextmanager
def started(*command: object, log: Path, cwd: Path = ROOT, **added: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs on; what it says goes to `log`. Ended with SIGTERM, then SIGKILL, if it still runs."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=out, stderr=subprocess.STDOUT, env=environment(added), cwd=cwd
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        if process.poll() is None:
            process.kill()
        process.wait()


@contextlib.contextmanager
def dips_started(*arguments: object, log: Path, **added: str) -> Iterator[subprocess.Popen[bytes]]:
    with started(sys.executable, "-m", "dips.cli", *arguments, log=log, cwd=ROOT, **added) as process:
        yield process


def pid_of(run_dir: Path, name: str, start: int = 1) -> int:
    """The process that `dips up` started under this name for the nth time, by the launcher's tape."""
    wanted = {"kind": "child_started", "child": name, "life": start}
    return next(int(line["pid"]) for line in records(tape_path(run_dir, LAUNCH_TAPE)) if wanted.items() <= line.items())


PATIENCE = 4.0
"""Waits are stated for a quiet machine; a busy one gets so many times as long."""


def until(true: Callable[[], bool], what: str, within_s: float = 60.0, log: Path | None = None) -> None:
    """Wait until something is so; fails with the log's end when it does not come."""
    within_s *= PATIENCE
    deadline_s = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline_s:
            tail = log.read_text(errors="replace")[-3000:] if log is not None and log.exists() else ""
            raise AssertionError(f"not within {within_s} s: {what}\n{tail}")
        time.sleep(0.05)


def ended(process: subprocess.Popen[bytes], within_s: float, log: Path) -> int:
    """The exit code of a process that is to end by itself."""
    until(lambda: process.poll() is not None, "the end of the process", within_s, log)
    return int(process.returncode)


def master_file(run_dir: Path) -> dict[str, Any]:
    """The address file of a run's master; empty while there is none."""
    try:
        told: dict[str, Any] = json.loads((run_dir / "master" / "master.json").read_text())
        return told
    except (OSError, ValueError):
        return {}


def operator_of(run_dir: Path) -> OperatorClient:
    """A connection to the master of a run that is served, with the operator's keys that `dips up` made."""
    told = master_file(run_dir)
    return OperatorClient(told["address"], told["run_id"], 30.0, security=load_identity(run_dir / "keys" / "operator"))


def children(pid: int) -> set[int]:
    """The processes that this one started and that still run."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.add(int(stat.parent.name))
    return found


def is_running(pid: int) -> bool:
    """False for a process that is gone, or only waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
