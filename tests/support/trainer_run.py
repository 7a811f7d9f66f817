"""A run of real processes with the trainer that comes along: children with their logs, killed when the test ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support import live
from support.dips_command import published
from support.waiting import until
from support.whole_run import option_words

from dips.core.net.security import INSECURE
from dips.core.observe.tape import read_tape
from dips.local.operator_client import OperatorClient
from dips.local.options import command_line
from dips.master.directory import read_address
from dips.trainer.config import TrainConfig

TRAIN = TrainConfig(max_bytes=1_500_000, heldout_max_bytes=8192, warmup_tokens=4000, log_every_steps=4)


class Processes(live.Run):
    """Context manager: `dips` commands as children, one log each. `dips verify` reads the folder."""

    weight = live.HEAVY

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.address = ""
        """Of the master that start_master() started."""

    def start_master(self, *knobs: str) -> str:
        directory = self._folder / "master"
        given: dict[str, object] = {"run_id": "demo", "directory": directory, "grace_s": 0.2, "linger_s": 600}
        given |= dict(knob.split("=", 1) for knob in knobs)
        self.start("master", ["master", "--insecure", *option_words(given)])
        self.until("master", lambda: directory.is_dir() and read_address(directory) is not None, "its address")
        here = read_address(directory)
        assert here is not None
        self.address = here.address
        return self.address

    def until_version(self, v: int) -> None:
        """Wait for a version of the master that start_master() started; fails where a child ends before."""

        def look() -> bool:
            for name in self._running:
                self._check(name)
            return published(self._folder) >= v

        until(look, f"version {v}", lambda: "\n".join(self.log(name)[-1500:] for name in self._running))

    def stop_run(self, *clusters: str) -> None:
        """Stop the run, and wait for these clusters, once each has a verdict: the others may have made all versions."""
        for name in clusters:
            self.until(name, lambda name=name: bool(self.records(name, "verdict")), "a verdict")  # type: ignore[misc]
        with OperatorClient(self.address, security=INSECURE) as client:
            client.stop("the test has seen what it wants")
        for name in clusters:
            assert self.exit_code(name) == 0, self.log(name)[-3000:]
            assert "Traceback" not in self.log(name)

    def start(self, name: str, arguments: Sequence[str], **environment: str) -> None:
        self.start_python(name, ["-m", "dips.cli", *arguments], environment)

    def start_train(self, name: str, train: TrainConfig, client: Sequence[str] = (), **environment: str) -> None:
        command, n_ranks = ["-m", "dips"], train.parallelism.n_ranks
        if n_ranks > 1:
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks), *command]
            environment = {"OMP_NUM_THREADS": "1", **environment}
        self.start_python(
            name, [*command, "train", *command_line(train), "--tape", str(self.tape(name)), *client], environment
        )

    def start_python(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
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
        return self._running[name].wait()

    def kill(self, name: str) -> None:
        self._running[name].kill()
        self._running[name].wait()

    def signal(self, name: str, number: signal.Signals) -> int:
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

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def tape(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"

    def records(self, name: str, kind: str) -> list[dict[str, Any]]:
        return records(self.tape(name), kind) if self.tape(name).exists() else []

    def until(self, name: str, happened: Callable[[], bool], what: str = "what the test wants") -> None:
        def look() -> bool:
            if not happened():
                self._check(name)
                return False
            return True

        until(look, what, lambda: self.log(name)[-3000:])

    def _check(self, name: str) -> None:
        assert self._running[name].poll() is None, f"{name} has ended: {self.log(name)[-3000:]}"

    def _end(self) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()


def records(tape: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_tape(tape) if record["kind"] == kind]
