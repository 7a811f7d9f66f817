"""`dips up` of a run whose clusters `a` and `b` are programs of their own, and an operator's stop at its end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from support.dips_command import dips, dips_started, ended, master_file, published, started
from support.waiting import until

RUN = """
[run]
id = "mine"
directory = "{directory}"
slaves = {slaves}
evaluate = false
keys_for = ["a", "b"]

[slave]
memory_bytes = "128 MiB"
record_pushes = true

[master]
sync_every = 8
min_clusters = {clusters}
{master}
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)


def endless(example: Path, folder: Path, its_steps: str) -> Path:
    """The example without a limit on its own steps: who is faster decides nothing."""
    text = example.read_text()
    assert its_steps in text
    copy = folder / example.name
    copy.write_text(text.replace(its_steps, its_steps.replace("200", "100_000_000")))
    return copy


class UpRun:
    """Context manager: a launcher, and a program for each cluster; logs lie in `folder`."""

    def __init__(
        self,
        folder: Path,
        programs: Mapping[str, Sequence[object]],
        *,
        slaves: int = 1,
        master: str = "",
        clusters: int = 2,
    ) -> None:
        self.directory, self.log = folder / "run", folder / "up.log"
        self.logs: dict[str, Path] = {}
        self._entered = contextlib.ExitStack()
        self._programs, self._folder = programs, folder
        self._running: dict[Path, subprocess.Popen[bytes]] = {}
        self._file = folder / "run.toml"
        self._file.write_text(RUN.format(directory=self.directory, slaves=slaves, clusters=clusters, master=master))

    def __enter__(self) -> Self:
        with self._entered:
            self._running[self.log] = self._entered.enter_context(dips_started("up", self._file, log=self.log))
            until(lambda: "address" in master_file(self.directory), "the master's address", self.log)
            for name, command in self._programs.items():
                self.begin(name, command)
            self._entered = self._entered.pop_all()
        return self

    def begin(self, name: str, command: Sequence[object]) -> subprocess.Popen[bytes]:
        """Start a cluster's program."""
        there = {
            "DIPS_MASTER": master_file(self.directory)["address"], "DIPS_CLUSTER": name,
            "DIPS_KEYS": str(self.directory / "keys" / name),
            "DIPS_WORKER_TAPE": str(self.directory / "tapes" / f"{name}.tape.jsonl"),
        }  # fmt: skip
        log = self.logs[name] = self._folder / f"{name}.log"
        process = self._entered.enter_context(started(*command, log=log, cwd=self._folder, **there))
        self._running[log] = process
        return process

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    @property
    def launcher(self) -> int:
        return self._running[self.log].pid

    def until_version(self, v: int) -> None:
        def is_there() -> bool:
            gone = [log for log, process in self._running.items() if process.poll() is not None]
            assert not gone, f"{gone[0].name}: {gone[0].read_text()[-3000:]}"
            return published(self.directory) >= v

        until(is_there, f"version {v}", self.log)

    def stop(self) -> None:
        told = dips("stop", self.directory)
        assert told.returncode == 0, told.stderr
        self.until_end()

    def until_end(self) -> None:
        """Until the run has ended, by an order or at its limit of tokens, and every process with exit code 0."""
        for log, process in reversed(self._running.items()):
            assert ended(process, log) == 0, log.read_text()[-3000:]
        assert all("the run has ended" in log.read_text() for log in self.logs.values())
