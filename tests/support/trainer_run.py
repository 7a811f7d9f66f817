"""A run of real processes with the trainer that comes along: children with their logs, killed when the test ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.master_process import START_S

from dips.core.observe.tape import read_tape
from dips.local.options import command_line
from dips.trainer.config import TrainConfig

TRAIN = TrainConfig(max_bytes=1_500_000, heldout_max_bytes=8192, warmup_tokens=4000, log_every_steps=4)


class Processes:
    """`dips` commands as children, one log each. kill_all() ends them. `dips verify` reads the folder, where
    the master's is its "master".
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, arguments: Sequence[str], **environment: str) -> None:
        self.start_python(name, ["-m", "dips.cli", *arguments], environment)

    def start_train(self, name: str, train: TrainConfig, client: Sequence[str] = (), **environment: str) -> None:
        """`dips train`, under torchrun where train.parallel says so."""
        command, n_ranks = ["-m", "dips"], train.parallelism.n_ranks
        if n_ranks > 1:
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks), *command]
            environment = {"OMP_NUM_THREADS": "1", **environment}
        self.start_python(
            name, [*command, "train", *command_line(train), "--tape", str(self.tape(name)), *client], environment
        )

    def start_python(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Any program of Python, not of `dips` alone."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DIPS_")}
        with (self._folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, *arguments]
            self._running[name] = subprocess.Popen(command, stdout=log, stderr=log, env={**kept, **environment})

    def start_cluster(
        self, address: str, name: str, train: TrainConfig = TRAIN, client: Sequence[str] = (), **environment: str
    ) -> None:
        # The address is no option: torchrun takes --master for a short form of options of its own.
        knobs = ["--insecure", "--cluster-id", name, *client]
        self.start_train(name, train, knobs, DIPS_MASTER=address, **environment)

    def start_slaves(self, address: str, names: Sequence[str], *options: str) -> None:
        for slave in names:
            own = ["--run-id", "demo", "--slave-id", slave, "--directory", str(self._folder / slave)]
            self.start(
                slave, ["slave", "--insecure", "--master", address, "--tape", str(self.tape(slave)), *own, *options]
            )

    def exit_code(self, name: str) -> int:
        return self._running[name].wait(START_S)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait for the end."""
        self._running[name].kill()
        self._running[name].wait(START_S)

    def signal(self, name: str, number: signal.Signals) -> int:
        """Its exit code after this signal."""
        self._running[name].send_signal(number)
        return self.exit_code(name)

    def ranks(self, name: str) -> dict[int, int]:
        """Process number of each rank of a cluster that start_train() put under torchrun."""
        found: dict[int, int] = {}
        agent = self._running[name].pid
        for pid in map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split()):
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            variables = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
            if b"RANK" in variables:
                found[int(variables[b"RANK"])] = pid
        return found

    def runs(self, name: str) -> bool:
        return self._running[name].poll() is None

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def tape(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"

    def records(self, name: str, kind: str) -> list[dict[str, Any]]:
        """What a child has recorded of this kind up to now."""
        return records(self.tape(name), kind) if self.tape(name).exists() else []

    def wait_until(self, name: str, happened: Callable[[], bool], within_s: float = 3 * START_S) -> None:
        """Wait for something that a running child does; fails with its log when it ends or takes too long."""
        end_s = time.monotonic() + within_s
        while not happened():
            assert self.runs(name), f"{name} has ended: {self.log(name)[-3000:]}"
            assert time.monotonic() < end_s, f"not within {within_s} s: {self.log(name)[-3000:]}"
            time.sleep(0.02)

    def kill_all(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


def records(tape: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_tape(tape) if record["kind"] == kind]
