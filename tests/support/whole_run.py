"""A whole run on loopback: master and slaves as real processes, clusters as threads that train with numpy.

The clusters' inner steps walk towards a target of their own, so that a run is fast, needs no torch, and what each
cluster pushed can be compared with what the slaves made of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from support import live
from support.fork_server import ForkedProcess, ForkServer
from support.waiting import until

from dips.core.errors import Refused, RetryLater
from dips.core.layout import Layout, Parameter
from dips.core.messages import DataMode, DataPlan, StatusReply, Verdict
from dips.core.net.keys import load_identity
from dips.core.net.security import INSECURE, Security
from dips.local.operator_client import OperatorClient
from dips.worker.config import ClientConfig
from dips.worker.shell import ClusterShell

F32 = NDArray[np.float32]
LAYOUT = Layout(
    tuple(Parameter(f"layers.{i}.w", (7, 11 + i), "float32", f"layers.{i}") for i in range(6)), block_elems=50
)
LEASED = DataPlan(DataMode.LEASED, b"numbers", 100_000, 1_000)


class NumpyModel:
    """
    Parameters that a step moves a tenth of the way to a target; remembers what was pushed and installed.

    Each step's target is a little off, as a batch's gradient is: at rest, a push would be zero, and so EXCLUDED.
    """

    def __init__(self, seed: int, layout: Layout = LAYOUT) -> None:
        self._layout = layout
        self.theta: F32 = np.random.default_rng(0).normal(size=layout.n_elems).astype(np.float32)
        self.target: F32 = np.random.default_rng(seed).normal(size=layout.n_elems).astype(np.float32)
        self._noise = np.random.default_rng(seed + 1)
        self.pushed: list[F32] = []
        self.installed: list[F32] = []
        self.resets = 0

    def layout(self) -> Layout:
        return self._layout

    def snapshot(self, into: F32) -> None:
        into[:] = self.theta
        self.pushed.append(self.theta.copy())

    def install(self, flat: F32) -> None:
        self.theta[:] = flat
        self.installed.append(self.theta.copy())

    def reset_inner_optimizer(self) -> None:
        self.resets += 1

    def step(self) -> float:
        self.theta += np.float32(0.1) * (self.target - self.theta + np.float32(0.01 * self._noise.standard_normal()))
        return float(np.mean((self.target - self.theta) ** 2))


class NumpyCluster:
    """One cluster in a thread of its own, until it is done, or has made `steps` steps and leaves."""

    def __init__(
        self, run: WholeRun, name: str, seed: int, step_s: float = 0.0, layout: Layout = LAYOUT, steps: int = 1 << 60
    ) -> None:
        self.name = name
        self.model = NumpyModel(seed, layout)
        knobs = {"cluster_id": name, "master": run.address, "tape": run.directory / f"{name}.jsonl", **run.of(name)}
        config = ClientConfig(**{**knobs, **run.client})  # pydantic checks them
        self.driver = ClusterShell(config, self.model, layout, run.plan)
        self.verdicts: list[Verdict] = []
        self.error: Exception | None = None
        self.steps_made = 0
        self._step_s, self._steps = step_s, steps
        self._run = run
        self._thread = threading.Thread(target=self._work, name=f"cluster-{name}", daemon=True)

    def start(self) -> NumpyCluster:
        self._thread.start()
        return self

    def join(self) -> None:
        until(lambda: not self._thread.is_alive(), f"the end of cluster {self.name}", lambda: self.driver.phase)
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        try:
            with self.driver:
                while not self.driver.done and self.steps_made < self._steps:
                    time.sleep(self._step_s)
                    loss = self.model.step()
                    self.steps_made += 1
                    self._count(loss)
                    last = self.driver.last_verdict
                    if last is not None and last not in self.verdicts[-1:]:
                        self.verdicts.append(last)
        except Exception as error:  # handed to the test by join()
            self.error = error

    def _count(self, loss: float) -> None:
        if self._run.plan.mode is DataMode.OWN:
            self.driver.step(10, loss=loss)
            return
        ranges = self.driver.lease(10)
        self.driver.step(sum(item.tokens for item in ranges), ranges, loss)


class WholeRun(live.Run):
    """Context manager: starts a master and slaves under `directory`; ends everything at the end.

    A test that has seen what it wants calls stop(), as an operator does.
    """

    def __init__(
        self,
        directory: Path,
        n_slaves: int = 2,
        plan: DataPlan | None = None,
        keys: Path | None = None,
        server: ForkServer | None = None,
        **master: object,
    ) -> None:
        """keys: the folder of an authority with an identity for each process and for `operator`; None: insecure.
        server: forks the processes; without, each is started from nothing."""
        self.directory = directory
        self.plan = plan or DataPlan(DataMode.OWN)
        self.n_slaves = n_slaves
        self.keys = keys
        self.processes: dict[str, subprocess.Popen[bytes] | ForkedProcess] = {}
        self._server = server
        # A round of few and equal steps: with the defaults clusters of such short steps would train on, hundreds in
        # each round, and a run of a few thousand tokens would be over in two or three of them.
        self._master = {
            "preset": "safe",
            "overlap": "none",
            "sync_every": 4,
            "heartbeat_s": 0.5,
            "grace_s": 0.5,
            "linger_s": 20.0,
            "verdict_wait_s": 30.0,
            **master,
        }
        self.address = ""
        self.slave: dict[str, object] = {}
        """More knobs of every slave."""
        self.client: dict[str, object] = {}
        """More knobs of every cluster."""
        self.environment: dict[str, str] = {}
        """More variables of each process that is started from now on."""

    def _begin(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.start_master()
        for i in range(self.n_slaves):
            self.start_slave(f"s{i}")

    def _end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def spawn_master(self) -> None:
        knobs = {"run_id": "test", "directory": self.directory / "master", "slaves": self.n_slaves}
        self._spawn("master", ["master", *option_words({**knobs, **self.of("master"), **self._master})])

    def start_master(self) -> None:
        self.spawn_master()
        where = self.directory / "master" / "master.json"

        def told() -> bool:
            assert self.processes["master"].poll() is None, self.log("master")
            return where.exists() and json.loads(where.read_text())["pid"] == self.processes["master"].pid

        until(told, "the master's address", lambda: self.log("master"))
        self.address = json.loads(where.read_text())["address"]

    def change_master(self, **knobs: object) -> None:
        """Other settings for the master's next start."""
        self._master |= knobs

    def start_slave(self, name: str, **more: object) -> None:
        directory = self.directory / name
        knobs = {"run_id": "test", "slave_id": name, "directory": directory, "master": self.address, **self.of(name)}
        self._spawn(name, ["slave", *option_words({**knobs, "tape": directory / "tape.jsonl", **self.slave, **more})])

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def cluster(self, name: str, seed: int, step_s: float = 0.0, layout: Layout = LAYOUT, **how: int) -> NumpyCluster:
        return NumpyCluster(self, name, seed, step_s, layout, **how).start()

    def status(self) -> StatusReply:
        with self.operator() as client:
            return client.status()

    def operator(self) -> OperatorClient:
        return OperatorClient(self.address, security=self.security("operator"))

    def stop(self, *clusters: NumpyCluster) -> None:
        def asked() -> bool:
            with contextlib.suppress(Refused, RetryLater), self.operator() as client:
                client.stop("the test has seen what it wants")
                return True
            return False

        until(asked, "the master takes the order to stop", lambda: self.log("master"))
        for cluster in clusters:
            cluster.join()

    def security(self, name: str) -> Security:
        return INSECURE if self.keys is None else load_identity(self.keys / name)

    def of(self, name: str) -> dict[str, object]:
        return {"insecure": True} if self.keys is None else {"keys": self.keys / name}

    def version(self) -> int:
        try:
            published = self.status().published
        except Exception:
            return -1
        return published.v if published else -1

    def wait_for_version(self, v: int) -> None:
        until(lambda: self.version() >= v, f"version {v}", lambda: f"{self.status()}\n{self.log('master')}")

    def log(self, name: str) -> str:
        path = self.directory / f"{name}.log"
        return path.read_text()[-2000:] if path.exists() else ""

    def _spawn(self, name: str, arguments: Sequence[str]) -> None:
        if self._server is not None:
            self.processes[name] = self._server.start(name, arguments, self.directory / f"{name}.log", {})
            return
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DIPS_")}
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "dips.cli", *arguments],
                stdout=log,
                stderr=log,
                env=environment | self.environment,
            )


def option_words(knobs: Mapping[str, object]) -> list[str]:
    words: list[str] = []
    for name, value in knobs.items():
        option = "--" + name.replace("_", "-")
        no = option.replace("--", "--no-", 1)
        words += [option if value else no] if isinstance(value, bool) else [option, str(value)]
    return words
