"""The systems that bench_goodput.py measures: what each is made of, and which steps of its clusters count.

Each cluster is at a site with a shaped link of its own, and so is each server; servers are near the middle of the net
(no delay), and their links together carry what all clusters' links do, as if these were equal. The outer step is SGD
with Nesterov momentum in all, with the same constants.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from peers.environments import REQUIREMENTS, interpreter, versions
from peers.party import Party, python
from peers.work import OUTER_LR, OUTER_MOMENTUM
from recovery.run import Tail
from shaped import Cable, ShapedNet

from dips.master.directory import TAPE_NAME
from goodput.conditions import Condition, Setting
from goodput.score import Counted, Step, twice

HERE = Path(__file__).parent
PEERS = HERE.parent / "peers"
PORT = 29400
SLAVES = 2
BUFFERS = 8
"""Room of a slave in its share's size: theta three times, momentum twice, and pins; stagings come on top."""

TORCHFT_TIMEOUT_S = 10.0
HEALED_MODELS = 3
"""What a replica of torchft gets when it heals, in models: parameters, those of the last sync, and the momentum. At the
first sync all others get it from one, and where that took longer than the time-out they would heal for ever."""

FRAGMENTS, DELAY_PART = 2, 0.5
"""Of torchft's streaming DiLoCo: its example sends a fragment every 10 inner steps, and uses it 5 steps later."""


@dataclass(kw_only=True)
class System(Party):
    """A party at sites of a net. condition: what the links and clusters are like."""

    net: ShapedNet
    setting: Setting
    condition: Condition
    environments: Path
    settings: ClassVar[str] = ""
    """What differs from, or is chosen beyond, the system's defaults."""

    servers: ClassVar[tuple[str, ...]] = ()
    package: ClassVar[str] = ""
    """Of REQUIREMENTS: the system has an environment of its own; none: it has this interpreter's."""

    kills: ClassVar[str] = ""
    """The server process that is killed in condition e; none: there is none."""

    _commands: dict[str, tuple[Sequence[object], Mapping[str, str]]] = field(default_factory=dict)
    _tails: dict[Path, Tail] = field(default_factory=dict)

    @classmethod
    def cannot(cls, condition: Condition) -> str:
        """Why a condition cannot be measured; empty: it can."""
        return "it has no server process" if condition.kills_server and not cls.kills else ""

    @classmethod
    def software(cls, environments: Path) -> dict[str, str]:
        """What is measured: packages and their versions. Raises NotInstallable."""
        if cls.package:
            return versions(interpreter(cls.package, environments), REQUIREMENTS[cls.package], "torch")
        return versions(python(), "dips-training", "torch")

    @classmethod
    def sites(cls, setting: Setting, condition: Condition) -> dict[str, Cable]:
        each = setting.clusters * setting.bits_per_s / max(1, len(cls.servers))
        clusters = {f"c{number}": cable for number, cable in enumerate(setting.cables(condition))}
        return clusters | dict.fromkeys(cls.servers, Cable(each, each))

    # ---- processes ----

    def spawn(self, name: str, command: Sequence[object], variables: Mapping[str, str] | None = None) -> None:
        """At the site of this name."""
        self._commands[name] = command, variables or {}
        path = os.pathsep.join([str(PEERS), os.environ.get("PYTHONPATH", "")])
        more = {"GLOO_SOCKET_IFNAME": "wan0", "PYTHONPATH": path, **(variables or {})}
        super().spawn(name, ["ip", "netns", "exec", self.net.namespace(name), *command], more)

    def spawn_timed(
        self, number: int, script: str, own: Path | str, *more: object, variables: Mapping[str, str] | None = None
    ) -> None:
        setting, step_s = self.setting, self.setting.steps_s(self.condition)[number]
        command = [
            own, HERE / script, "--cluster", number, "--clusters", setting.clusters, "--params", setting.params,
            "--inner-steps", setting.inner_steps, "--step-s", step_s, "--records", self._records(number),
        ]  # fmt: skip
        self.spawn(f"c{number}", [*command, *more], variables)

    def kill(self, name: str) -> None:
        """SIGKILL to a process and its descendants, at once."""
        for pid in self.pids()[name]:
            os.kill(pid, signal.SIGKILL)
        self.processes[name].wait()

    def start_again(self, name: str) -> None:
        """A cluster begins as soon as it has joined."""
        self.spawn(name, *self._commands[name])
        pipe = self.processes[name].stdin
        if name not in self.servers and pipe is not None:
            print(json.dumps({"at_s": 0.0}), file=pipe, flush=True)

    def end(self) -> None:
        """No one leaves in order: a system may wait long for who has left."""
        for name, process in self.processes.items():
            if process.poll() is None:
                self.kill(name)

    # ---- what was done ----

    def steps(self) -> list[Step]:
        """Of all clusters so far, each cluster's in their order."""
        return [
            Step(f"c{number}", line["life"], line["n"], line["monotonic_s"], line["cpu_s"])
            for number in range(self.clusters)
            for line in self.lines(number, "step")
        ]

    def counted(self) -> list[Counted]:
        """The steps that are in the model, as this system tells it."""
        return [
            Counted(f"c{number}", *(line[key] for key in ("life", "first", "last", "part", "parts", "monotonic_s")))
            for number in range(self.clusters)
            for line in self.lines(number, "counted")
        ]

    def own_count(self) -> float | None:
        """How many steps the system itself says are in the model; None where it keeps no count."""
        return None

    def twice(self) -> float:
        """How many steps are in the model more than once."""
        return twice(self.counted())

    def notes(self) -> list[str]:
        """What else must be said of what it did."""
        return []

    def lines(self, number: int, *kinds: str) -> list[dict[str, Any]]:
        return list(self.tail(self._records(number)).of(*kinds))

    def tail(self, path: Path) -> Tail:
        return self._tails.setdefault(path, Tail(path))

    def _records(self, number: int) -> Path:
        return self.directory / f"c{number}.records.jsonl"


class Alone(System):
    """Clusters that never exchange: the floor."""

    settings = "no exchange"

    def start(self) -> None:
        for number in range(self.clusters):
            self.spawn_timed(number, "training.py", python())

    def counted(self) -> list[Counted]:
        """As if each inner loop were counted at its end."""
        every = self.setting.inner_steps
        return [
            Counted(step.cluster, step.life, step.n - every + 1, step.n, 0, 1, step.ended_s)
            for step in self.steps()
            if step.n % every == 0
        ]


class Dips(System):
    """A master, slaves, and clusters that run the user's loop."""

    servers = ("master", "s0", "s1")
    kills = "s1"
    rules: Mapping[str, object] = {"preset": "dynamic", "overlap": "full"}
    settings = "preset dynamic, overlap full with overlap_share 0.5, durability sync; 2 slaves"

    @classmethod
    def sites(cls, setting: Setting, condition: Condition) -> dict[str, Cable]:
        """The slaves carry the parameters; the master has a link like a cluster's."""
        each = setting.clusters * setting.bits_per_s / SLAVES
        control = Cable(setting.bits_per_s, setting.bits_per_s)
        slaves = dict.fromkeys(cls.servers[1:], Cable(each, each))
        return super().sites(setting, condition) | slaves | {"master": control}

    def start(self) -> None:
        setting, address = self.setting, f"{self.net.address('master')}:{PORT}"
        master = {
            "run-id": "bench", "directory": self.directory / "master", "listen": address, "slaves": SLAVES,
            "sync-every": setting.inner_steps, "min-clusters": self.clusters, "outer-lr": OUTER_LR,
            "outer-momentum": OUTER_MOMENTUM, **self.rules,
        }  # fmt: skip
        self._role("master", "master", master)
        room = setting.model_bytes // SLAVES * (BUFFERS + 2 * self.clusters) + (256 << 20)
        for name in self.servers[1:]:
            slave = {
                "run-id": "bench", "slave-id": name, "directory": self.directory / name, "master": address,
                "data-host": self.net.address(name), "memory-bytes": room,
            }  # fmt: skip
            self._role(name, "slave", slave)
        for number in range(self.clusters):
            variables = {"DIPS_MASTER": address, "DIPS_INSECURE": "1"}
            self.spawn_timed(number, "dips_worker.py", python(), "--tape", self._tape(number), variables=variables)

    def counted(self) -> list[Counted]:
        """The pushes that the master applied, each with the steps before it was begun."""
        applied = {line["push"]: line for line in self._master().of("verdict") if line["verdict"] == "APPLIED"}
        found = []
        for number in range(self.clusters):
            steps = self.lines(number, "step")
            for begun in self.tail(self._tape(number)).of("push_begun"):
                if begun["push"] in applied and begun["steps"]:
                    step = [step for step in steps if step["monotonic_s"] <= begun["monotonic_s"]][-1]
                    life, last, at_s = step["life"], step["n"], applied[begun["push"]]["monotonic_s"]
                    found.append(Counted(f"c{number}", life, last - begun["steps"] + 1, last, 0, 1, at_s))
        return found

    def own_count(self) -> float:
        """The newest version's tokens, of which a step has one."""
        return float(max(line["tokens"] for line in self._master().of("publish")))

    def _role(self, name: str, role: str, knobs: Mapping[str, object]) -> None:
        words = [word for knob, value in knobs.items() for word in (f"--{knob}", value)]
        self.spawn(name, [python(), "-m", "dips.cli", role, "--insecure", *words])

    def _master(self) -> Tail:
        return self.tail(self.directory / "master" / TAPE_NAME)

    def _tape(self, number: int) -> Path:
        return self.directory / f"c{number}.tape.jsonl"


class DipsWaiting(Dips):
    rules: Mapping[str, object] = {"preset": "safe", "overlap": "none"}
    settings = "preset safe, overlap none: clusters wait for each push, verdict and pull; durability sync; 2 slaves"


class Torchft(System):
    """torchft's DiLoCo, with its lighthouse."""

    package = "torchft"
    servers = ("lighthouse",)
    kills = "lighthouse"
    fragments, delay_part, alpha = 1, 0.0, 0.0
    settings = (
        "as in its train_diloco.py, and with use_bucketization: gloo, one fragment, min_replica_size 1, time-outs of "
        "10 s, 30 s and 60 s, or where that is longer twice, twice and four times what healing of all others takes a "
        "link; lighthouse with ticks of 100 ms and "
        "join_timeout 10 s; not quantised: its kernels need a GPU"
    )

    def start(self) -> None:
        own, setting = interpreter("torchft", self.environments), self.setting
        address = f"{self.net.address('lighthouse')}:{PORT}"
        lighthouse = [own.parent / "torchft_lighthouse", "--bind", address, "--min_replicas", 1]
        self.spawn("lighthouse", [*lighthouse, "--quorum_tick_ms", 100, "--join_timeout_ms", 10_000])
        slowest = min(cable.up_bits_per_s for cable in setting.cables(self.condition))
        heal_s = 8 * HEALED_MODELS * (setting.clusters - 1) * setting.model_bytes / slowest
        timeout_s = max(TORCHFT_TIMEOUT_S, 2 * heal_s)
        delay = int(self.delay_part * setting.inner_steps / self.fragments)
        variables = {"TORCHFT_LIGHTHOUSE": f"http://{address}"}
        for number in range(self.clusters):
            self.spawn_timed(
                number, "torchft_worker.py", own, "--host", self.net.address(f"c{number}"), "--alpha", self.alpha,
                "--fragments", self.fragments, "--delay", delay, "--timeout-s", timeout_s, variables=variables,
            )  # fmt: skip

    def own_count(self) -> float | None:
        """Steps behind what it calls committed batches, one for each replica and sync: with one fragment."""
        lines = [line["own"] for number in range(self.clusters) for line in self.lines(number, "counted")]
        return max(lines) * self.setting.inner_steps if lines and self.fragments == 1 else None

    def twice(self) -> float:
        """Also what a replica that heals sends: the inner steps of the one that it got everything from."""
        return super().twice() + self._times("healed") * self.setting.inner_steps / self.fragments

    def notes(self) -> list[str]:
        return [
            f"{self._times('healed')} replicas healed, most at the first sync; {self._times('discarded')} discarded"
        ]

    def _times(self, kind: str) -> int:
        return sum(len(self.lines(number, kind)) for number in range(self.clusters))


class TorchftStreaming(Torchft):
    fragments, delay_part, alpha = FRAGMENTS, DELAY_PART, 0.5
    settings = (
        "as torchft, with 2 fragments in turn, each used half of its inner steps after it was sent "
        "(its example: 5 of 10); fragment_update_alpha 0.5"
    )


class Hivemind(System):
    """DiLoCo around hivemind's averager."""

    package = "hivemind"
    delayed = "no"
    settings = (
        "float32; groups of all clusters, of 2 at least, looked for from 5 s before the inner loop's end until the "
        "slowest cluster's; averaging_timeout 60 s, next_chunk_timeout 10 s; bandwidth: each its own link's"
    )

    def start(self) -> None:
        own, setting = interpreter("hivemind", self.environments), self.setting
        steps_s, cables = setting.steps_s(self.condition), setting.cables(self.condition)
        for number in range(self.clusters):
            slack_s = setting.inner_steps * (max(steps_s) - steps_s[number])
            self.spawn_timed(
                number, "hivemind_worker.py", own, "--host", self.net.address(f"c{number}"), "--peers",
                self.directory / "peers", "--delayed", self.delayed, "--bandwidth", cables[number].up_bits_per_s,
                "--slack-s", slack_s,
            )  # fmt: skip

    def notes(self) -> list[str]:
        failed = sum(len(self.lines(number, "failed")) for number in range(self.clusters))
        groups = [line["group"] for number in range(self.clusters) for line in self.lines(number, "counted")]
        return [f"{failed} averagings failed; groups of {min(groups, default=0)} to {max(groups, default=0)}"]


class HivemindDelayed(Hivemind):
    delayed = "yes"
    settings = "as hivemind; the next inner loop runs during the exchange, and its steps are kept in full"


class Plain(System):
    """A plain synchronous parameter server."""

    servers = ("server",)
    kills = "server"
    settings = "one server: torch.save over ZeroMQ, waits for all clusters, saves each version"

    def start(self) -> None:
        address = f"tcp://{self.net.address('server')}:{PORT}"
        server = [python(), HERE / "synchronous_server.py", "--clusters", self.clusters, "--params", self.params]
        self.spawn("server", [*server, "--directory", self.directory / "server", "--address", address])
        for number in range(self.clusters):
            self.spawn_timed(number, "synchronous_worker.py", python(), "--address", address)

    def counted(self) -> list[Counted]:
        return [
            Counted(cluster, push["life"], push["first"], push["last"], 0, 1, line["monotonic_s"])
            for line in self._merges()
            for cluster, push in line["pushes"].items()
        ]

    def own_count(self) -> float | None:
        return max((float(line["counted"]) for line in self._merges()), default=None)

    def _merges(self) -> list[dict[str, Any]]:
        return list(self.tail(self.directory / "server" / "records.jsonl").of("merged"))


SYSTEMS: dict[str, type[System]] = {
    "alone": Alone,
    "dips": Dips,
    "dips-waiting": DipsWaiting,
    "torchft": Torchft,
    "torchft-streaming": TorchftStreaming,
    "hivemind": Hivemind,
    "hivemind-delayed": HivemindDelayed,
    "plain": Plain,
}
