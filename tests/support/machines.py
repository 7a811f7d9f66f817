"""The machines of a run, on one: each has folders of its own at the paths that the documents print, all share a network
with the documents' addresses, and `ssh`, `scp` and `systemctl` are stand-ins that do what a run needs of them.

They live in namespaces of one process. It ends with the test's, however that ends, and all that runs in them with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from support.dips_command import children, environment

OWN, SHARED = "/var/lib/dips /etc/dips", "/backup"
"""What each machine has of its own, and the network volume that all mount."""

HOLDER = f"""
for at in {OWN} {SHARED}; do [ -d $at ] || {{ mkdir $at; made="$made $at"; }}; done
ip link set lo up; for at; do ip addr add $at/32 dev lo; done
echo up; cat; [ -z "$made" ] || rmdir $made
"""
"""The first process of the namespaces, until its input ends."""

ON = f"""
export HOST="$1" && shift && cd -P "$MACHINES/$HOST" && exec unshare --mount sh -ec '
for at in {OWN}; do mount --bind "$PWD$at" "$at"; done; mount --bind "$MACHINES{SHARED}" {SHARED}; exec "$@"' sh "$@"
"""

SYSTEMCTL = r"""
# start, stop or restart UNIT; kill --signal SIGNAL UNIT; off UNIT, as where the machine is lost
unit="$(realpath "$MACHINES/$HOST")/${!#}"
of() { sed -n "s,^$1=\(/opt/dips/bin/\)\?,,p" "$unit.service"; }
keep() {
    exec 9>"$unit.lock" && flock 9
    until [ -e "$unit.stopped" ]; do
        eval "exec $(of ExecStart)" &
        echo $! >"$unit.pid"
        code=0 && wait $! || code=$?
        echo $code >>"$unit.codes"
        [[ " 0 $(of RestartPreventExitStatus) " != *" $code "* ]] || break
        sleep "$(of RestartSec)"
    done
}
end() {
    touch "$unit.stopped"
    until flock --nonblock "$unit.lock" true; do kill "-$1" "$(cat "$unit.pid")" || true; sleep 0.05; done
}
case "$1" in
kill) kill -s "${3#SIG}" "$(cat "$unit.pid")" ;;
off) end KILL ;;
stop | restart) end TERM ;;
esac
case "$1" in
start | restart)
    rm -f "$unit.stopped" "$unit.pid"
    keep </dev/null >>"$unit.log" 2>&1 &
    until [ -s "$unit.pid" ]; do sleep 0.02; done
    ;;
esac
"""

STAND_INS = {
    "on": ON,
    "ssh": 'host="$1" && shift && exec env -u DIPS_MASTER -u DIPS_KEYS on "$host" sh -c "$*"',
    "scp": """exec cp $(printf '%s\\n' "$@" | sed -E "s,^([a-z0-9-]+):,$MACHINES/\\1,")""",
    "systemctl": SYSTEMCTL,
}


class Machines:
    """Use as a context manager."""

    def __init__(
        self, folder: Path, hosts: Iterable[str], addresses: Iterable[str], variables: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self._addresses = tuple(addresses)
        for made in (folder / "bin", folder / SHARED[1:]):
            made.mkdir()
        for host in hosts:
            self.new_machine(host)
        for name, script in STAND_INS.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
            (folder / "bin" / name).chmod(0o755)
        path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        self._environment = environment({"PATH": path, "MACHINES": str(folder), **variables})

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

    def type(self, host: str, text: str) -> str:
        """What a person sees who types this at that machine. Raises AssertionError unless all goes well."""
        command = [*self._enter, str(self.folder / "bin" / "on"), host, "bash", "-euc", text]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{text}\nended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def new_machine(self, host: str) -> None:
        """An empty one gets this name."""
        number = len([*self.folder.glob("machine-*")])
        for at in OWN.split():
            (self.folder / f"machine-{number}{at}").mkdir(parents=True)
        self.name(host, f"machine-{number}")

    def name(self, host: str, machine: str) -> None:
        """From now on this name means that machine."""
        (self.folder / host).unlink(missing_ok=True)
        (self.folder / host).symlink_to((self.folder / machine).resolve())

    def log(self, host: str, unit: str) -> str:
        return (self.folder / host / f"{unit}.log").read_text()

    def codes(self, host: str, unit: str) -> list[str]:
        """Exit codes of the unit's processes so far."""
        said = self.folder / host / f"{unit}.codes"
        return said.read_text().split() if said.exists() else []

    def last_words(self) -> str:
        logs = sorted(self.folder.glob("machine-*/*.log"))
        return "".join(f"{log.parent.name} {log.name}:\n{log.read_text()[-700:]}\n" for log in logs)
