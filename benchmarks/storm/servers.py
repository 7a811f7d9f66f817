"""A master and a slave as processes, for storms: where they are, what they say, how much memory and how many files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from dips.core.messages import StatusReply
from dips.core.net.keys import load_identity
from dips.core.net.security import INSECURE, Security
from dips.local.authority import ensure_keys
from dips.local.operator_client import OperatorClient
from dips.master.directory import read_address

START_S = 120.0


class Servers:
    """Use as a context manager. secure: with keys for everybody, else without any."""

    def __init__(
        self, folder: Path, secure: bool, clusters: list[str], master: Mapping[str, object], slave: Mapping[str, object]
    ) -> None:
        self._folder = folder
        self._keys = folder / "keys" if secure else None
        if self._keys is not None:
            ensure_keys(self._keys, clusters, ["s0"])
        self._knobs = {"master": master, "slave": slave}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = ""

    def security(self, name: str) -> Security:
        return INSECURE if self._keys is None else load_identity(self._keys / name)

    def who(self, name: str) -> dict[str, object]:
        """The settings that say who a process is."""
        return {"insecure": True} if self._keys is None else {"keys": self._keys / name}

    def __enter__(self) -> Servers:
        directory = self._folder / "master"
        self._start("master", "master", {"directory": directory, "slaves": 1, **self._knobs["master"]})
        self._until(lambda: read_address(directory) is not None, "the master")
        found = read_address(directory)
        assert found is not None
        self.address = found.address
        knobs = {"slave_id": "s0", "directory": self._folder / "s0", "master": self.address, **self._knobs["slave"]}
        self._start("s0", "slave", knobs)
        self._until(lambda: any(slave.alive for slave in self.status().slaves), "the slave")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def status(self, call_s: float = 30.0) -> StatusReply:
        """As `dips status` does: a connection of its own, one call, and gone."""
        with OperatorClient(self.address, "", call_s, security=self.security("operator")) as client:
            return client.status()

    def status_s(self) -> float:
        """How long that took."""
        began_s = time.perf_counter()
        self.status()
        return time.perf_counter() - began_s

    def start_asker(self) -> subprocess.Popen[bytes]:
        """A process that asks for the status until its input ends (storm/asker.py); it is asking when this returns."""
        keys = [] if self._keys is None else [str(self._keys / "operator")]
        asker = subprocess.Popen(
            [sys.executable, "-m", "storm.asker", self.address, *keys],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert asker.stdout is not None
        asker.stdout.readline()
        return asker

    def memory_bytes(self, name: str) -> int:
        """Resident, without files that are mapped."""
        _, resident, shared, *_ = Path(f"/proc/{self.processes[name].pid}/statm").read_text().split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def n_files(self, name: str) -> int:
        return len(os.listdir(f"/proc/{self.processes[name].pid}/fd"))

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def _start(self, name: str, command: str, knobs: Mapping[str, object]) -> None:
        words = [sys.executable, "-m", "dips.cli", command]
        for knob, value in {"run_id": "storm", **self.who(name), **knobs}.items():
            option = "--" + knob.replace("_", "-")
            words += [option] if value is True else [option, str(value)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DIPS_")}
        with (self._folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(words, stdout=log, stderr=log, env=environment)

    def _until(self, happened: object, what: str) -> None:
        end_s = time.monotonic() + START_S
        while True:
            try:
                if happened():  # type: ignore[operator]
                    return
            except Exception:
                pass
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            if ended or time.monotonic() > end_s:
                raise SystemExit(f"{what} did not start: {''.join(map(self.log, self.processes))[-3000:]}")
            time.sleep(0.05)
