"""The systems that bench_sync.py measures, each as the processes that make it up."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dips.core.observe.tape import read_tape
from peers.environments import interpreter
from peers.party import HERE, START_S, Failed, Party, Turn, python
from peers.stages import Stage, cuts_of, stages_of
from peers.work import OUTER_LR, OUTER_MOMENTUM

FLOAT32_BYTES = 4
LEAD_S = 0.5
BUFFERS = 8
"""Room of a slave in its share's size: theta three times, momentum twice, and pins; staging comes on top."""


@dataclass
class Dips(Party):
    """A master, slaves, and clusters that run the user's loop. master, slave: more of their options."""

    slaves: int = 2
    durability: str = "async"
    wire_dtype: str = "float32"
    threads: int = 1
    master: Mapping[str, object] = field(default_factory=dict)
    slave: Mapping[str, object] = field(default_factory=dict)
    without: str = ""
    """What is switched off in the slaves (switches.py)."""

    def start(self) -> None:
        knobs: dict[str, object] = {
            "run-id": "bench", "directory": self.directory / "master", "slaves": self.slaves, "sync-every": 1,
            "preset": "safe", "overlap": "none",
            "verdict-wait-s": 60,  # a round is timed to its end, however long the ones before took
            "min-clusters": self.clusters, "max-clusters": self.clusters, "outer-lr": OUTER_LR,
            "outer-momentum": OUTER_MOMENTUM, "durability": self.durability,
        }  # fmt: skip
        role = [python(), "-m", "dips.cli", "master", "--insecure"]
        self.spawn("master", [*role, *_options({**knobs, **self.master})])
        where = self.directory / "master" / "master.json"
        self._until(where.exists, "master")
        address = json.loads(where.read_text())["address"]
        share = FLOAT32_BYTES * self.params // self.slaves
        for number in range(self.slaves):
            name = f"s{number}"
            own = {
                "run-id": "bench", "slave-id": name, "directory": self.directory / name, "master": address,
                "memory-bytes": share * (BUFFERS + 2 * self.clusters) + (64 << 20),
                "tape": self.directory / f"{name}.jsonl",
            }  # fmt: skip
            dips = [HERE / "switches.py", self.without] if self.without else ["-m", "dips.cli"]
            self.spawn(name, [python(), *dips, "slave", "--insecure", *_options({**own, **self.slave})])
        for number in range(self.clusters):
            self.start_cluster(number, address)

    def start_cluster(self, number: int, address: str) -> None:
        tape = self.directory / f"c{number}.jsonl"
        more = ("--wire-dtype", self.wire_dtype, "--tape", tape, "--threads", self.threads)
        self.spawn_cluster(number, "dips_worker.py", python(), *more, variables=_there(address))

    def _until(self, happened: Callable[[], bool], name: str) -> None:
        end_s = time.monotonic() + START_S
        while not happened():
            if self.processes[name].poll() is not None or time.monotonic() > end_s:
                raise Failed(f"{self.name}: {name} did not start; its log ends:\n{self.log(name)}")
            time.sleep(0.05)

    def records(self, *names: str) -> list[dict[str, Any]]:
        """What these clusters or slaves wrote on their tapes."""
        return [record for name in names for record in read_tape(self.directory / f"{name}.jsonl")]

    def stages(self, turn: Turn) -> list[Stage]:
        """From the tapes of all processes; call it once the master has told the verdicts of the turn."""
        names = (*(f"c{number}" for number in range(self.clusters)), *(f"s{number}" for number in range(self.slaves)))
        events = [*self.records(*names), *read_tape(self.directory / "master" / "master.tape.jsonl")]
        began_s, ended_s = turn.spans[turn.slowest]
        return stages_of(began_s, cuts_of(f"c{turn.slowest}", began_s, ended_s, events), turn.clocks)


def _there(address: str) -> dict[str, str]:
    """Without keys, as the other systems run: what is compared is the way of the parameters."""
    return {"DIPS_MASTER": address, "DIPS_INSECURE": "1"}


@dataclass
class TimedDips(Dips):
    """Clusters whose inner steps are timed stand-ins, in milliseconds for each cluster; they need no torch."""

    step_ms: Sequence[float] = ()

    def start_cluster(self, number: int, address: str) -> None:
        more = ("--step-ms", self.step_ms[number], "--tape", self.directory / f"c{number}.jsonl")
        self.spawn_cluster(number, "timed_worker.py", python(), *more, variables=_there(address))

    def run(self, seconds: float) -> list[dict[str, float]]:
        """All clusters at once for so long; what each did (timed_worker.py)."""
        at_s = time.monotonic() + LEAD_S
        self.tell(at_s=at_s, until_s=at_s + seconds)
        wait_s = LEAD_S + seconds + START_S
        return [json.loads(self.read(f"c{number}", wait_s)) for number in range(self.clusters)]


@dataclass
class Torchft(Party):
    """torchft's DiLoCo over gloo, with its lighthouse."""

    environments: Path = Path()
    threads: int = 1
    bucket_mb: str = ""

    def start(self) -> None:
        own = interpreter("torchft", self.environments)
        port = _free_port()
        lighthouse = [own.parent / "torchft_lighthouse", "--bind", f"127.0.0.1:{port}", "--min_replicas", self.clusters]
        # A quorum is looked for once a tick: the usual 100 ms would be a part of every round.
        self.spawn("lighthouse", [*lighthouse, "--quorum_tick_ms", 10])
        variables = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "OMP_NUM_THREADS": str(self.threads)}
        for number in range(self.clusters):
            more = ("--threads", self.threads, "--bucket-mb", self.bucket_mb)
            self.spawn_cluster(number, "torchft_worker.py", own, *more, variables=variables)


@dataclass
class Hivemind(Party):
    """DiLoCo on hivemind's averager, float32, without compression."""

    environments: Path = Path()
    threads: int = 1
    part_bytes: str = ""

    def start(self) -> None:
        own = interpreter("hivemind", self.environments)
        variables = {"OMP_NUM_THREADS": str(self.threads)}
        for number in range(self.clusters):
            more = ("--threads", self.threads, "--address", self.directory / "address", "--part-bytes", self.part_bytes)
            self.spawn_cluster(number, "hivemind_worker.py", own, *more, variables=variables)


@dataclass
class Plain(Party):
    """The straightforward parameter server: torch.save over ZeroMQ, torch's SGD."""

    slaves: int = 2
    threads: int = 1

    def start(self) -> None:
        names = [f"s{number}" for number in range(self.slaves)]
        for name in names:
            command = [python(), HERE / "plain_server.py", "--clusters", self.clusters, "--threads", self.threads]
            self.spawn(name, command)
        ports = ",".join(self.read(name, START_S).strip() for name in names)
        for number in range(self.clusters):
            self.spawn_cluster(number, "plain_worker.py", python(), "--ports", ports, "--threads", self.threads)


@dataclass
class Tcp(Party):
    """The floor: the same bytes over raw TCP, landed, with one copy out of the model and one into it."""

    slaves: int = 2

    def start(self) -> None:
        edges = [self.params * n // self.slaves for n in range(self.slaves + 1)]
        names = [f"s{number}" for number in range(self.slaves)]
        for name, begin, end in zip(names, edges, edges[1:], strict=False):
            size = FLOAT32_BYTES * (end - begin)
            self.spawn(name, [python(), HERE / "tcp_sink.py", "--clusters", self.clusters, "--bytes", size])
        ports = ",".join(self.read(name, START_S).strip() for name in names)
        for number in range(self.clusters):
            self.spawn_cluster(number, "tcp_worker.py", python(), "--ports", ports)


def _options(knobs: Mapping[str, object]) -> list[object]:
    return [word for name, value in knobs.items() for word in (f"--{name}", value)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
