"""The machines of a run, on one: each has folders of its own at the paths that the documents print, all share a network
with the documents' addresses, and `ssh`, `scp` and `systemctl` are stand-ins that do what a run needs of them.

They live in namespaces of one process. It ends with the test's, however that ends, and all that runs in them with it.
"""

from __future__ import annotations

import configparser
import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from support.dips_command import children, environment
from support.waiting import until

OWN, SHARED = ("/var/lib/dips", "/etc/dips"), "/backup"
"""What each machine has of its own, and the network volume that all mount."""

STAND_INS = {
    "on": 'export HOST="$1" && shift && cd -P "{folder}/$HOST" && exec unshare --mount sh -ec \'for at in '
    + " ".join(OWN)
    + """; do mount --bind "$PWD$at" "$at"; done; mount --bind {folder}/backup /backup; exec "$@"' sh "$@\"""",
    "ssh": 'host="$1" && shift && exec env -u DIPS_MASTER -u DIPS_KEYS on "$host" sh -c "$*"',
    "scp": """exec cp $(printf '%s\\n' "$@" | sed -E 's,^([a-z0-9-]+):,{folder}/\\1,')""",
    "systemctl": 'exec {python} -m support.machines "{folder}/$HOST" "$@"',
}

HOLDER = f"""
for at in {" ".join((*OWN, SHARED))}; do [ -d $at ] || {{ mkdir $at; made="$made $at"; }}; done
ip link set lo up; for at; do ip addr add $at/32 dev lo; done
echo up; cat; [ -z "$made" ] || rmdir $made
"""
"""The first process of the namespaces. It holds them until its input ends."""


class Machines:
    """Use as a context manager. `log(host, unit)` is what a unit's process has said."""

    def __init__(
        self, folder: Path, hosts: Iterable[str], addresses: Iterable[str], variables: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self._bin = folder / "bin"
        self._bin.mkdir(parents=True)
        (folder / "backup").mkdir()
        for host in hosts:
            self.new_machine(host)
        for name, line in STAND_INS.items():
            line = line.format(folder=folder, python=sys.executable)
            (self._bin / name).write_text(f"#!/bin/bash\n{line}\n")
            (self._bin / name).chmod(0o755)
        path = os.pathsep.join([str(self._bin), str(Path(sys.executable).parent), os.environ["PATH"]])
        self._environment = environment({"PATH": path, **variables})
        self._addresses = tuple(addresses)

    def __enter__(self) -> Machines:
        namespaces = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
        holder = [*namespaces, "sh", "-ec", HOLDER, "sh", *self._addresses]
        self._holder = subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n"
        [inside] = children(self._holder.pid)
        self._enter = ["nsenter", "--target", str(inside), "--mount", "--net", "--pid"]
        return self

    def __exit__(self, *error: object) -> None:
        self._holder.communicate()

    def type(self, host: str, text: str, code: int = 0) -> str:
        """What a person sees who types this at that machine. Raises AssertionError unless it ends with this code."""
        command = [*self._enter, self._bin / "on", host, "bash", "-euc", text]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, f"{text}\nended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def new_machine(self, host: str) -> None:
        """An empty one gets this name."""
        number = len([*self.folder.glob("machine-*")])
        for at in OWN:
            (self.folder / f"machine-{number}{at}").mkdir(parents=True)
        self.name(host, f"machine-{number}")

    def name(self, host: str, machine: str) -> None:
        """From now on this name means that machine."""
        (self.folder / host).unlink(missing_ok=True)
        (self.folder / host).symlink_to((self.folder / machine).resolve())

    def write_unit(self, host: str, name: str, unit: str) -> None:
        (self.folder / host / f"{name}.service").write_text(unit)

    def units(self, host: str) -> list[str]:
        return sorted(unit.stem for unit in (self.folder / host).glob("*.service"))

    def log(self, host: str, unit: str) -> str:
        log = self.folder / host / f"{unit}.log"
        return log.read_text() if log.exists() else ""

    def codes(self, host: str, unit: str) -> list[int]:
        """Exit codes of the unit's processes so far."""
        said = self.folder / host / f"{unit}.codes"
        return [int(line) for line in said.read_text().split()] if said.exists() else []

    def last_words(self) -> str:
        logs = sorted(self.folder.glob("machine-*/*.log"))
        return "".join(f"{log.parent.name} {log.name}:\n{log.read_text()[-700:]}\n" for log in logs)


class Unit:
    """One service of a machine. A process of its own keeps it, and holds a lock as long as it does."""

    def __init__(self, machine: Path, name: str) -> None:
        self._at = machine / name
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read(self._file("service"))
        self._service = parser["Service"]

    def _file(self, what: str) -> Path:
        return self._at.with_name(f"{self._at.name}.{what}")

    def start(self) -> None:
        self._file("stopped").unlink(missing_ok=True)
        self._file("pid").unlink(missing_ok=True)
        if os.fork() == 0:
            os.setsid()
            self._keep()
            os._exit(0)
        until(self._file("pid").exists, "the unit's process")

    def stop(self, number: int = signal.SIGTERM) -> None:
        self._file("stopped").touch()
        while self._is_kept():
            self.kill(number)
            time.sleep(0.02)  # between two looks

    def kill(self, number: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(self._file("pid").read_text()), number)

    def _keep(self) -> None:
        final = set(map(int, self._service["RestartPreventExitStatus"].split()))
        command = shlex.split(self._service["ExecStart"])
        with self._file("lock").open("w") as lock, self._file("log").open("ab") as log:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            while True:
                process = subprocess.Popen([Path(command[0]).name, *command[1:]])
                self._file("pid").write_text(str(process.pid))
                code = process.wait()
                with self._file("codes").open("a") as codes:
                    codes.write(f"{code}\n")
                if code in {0, *final} or self._file("stopped").exists():
                    return
                time.sleep(float(self._service["RestartSec"]))  # as a unit does

    def _is_kept(self) -> bool:
        with self._file("lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


def main(machine: str, what: str, *words: str) -> None:
    """systemctl start|stop|restart UNIT; systemctl kill --signal SIGKILL UNIT; off UNIT: as when the machine is lost"""
    unit = Unit(Path(machine).resolve(), words[-1])
    if what == "kill":
        unit.kill(signal.Signals[words[1]])
    if what == "off":
        unit.stop(signal.SIGKILL)
    if what in ("stop", "restart"):
        unit.stop()
    if what in ("start", "restart"):
        unit.start()


if __name__ == "__main__":
    main(*sys.argv[1:])
