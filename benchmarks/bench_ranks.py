"""A cluster of 1, 2 and 4 FSDP ranks, each behind a link of its own: push, pull, and what Di-PS adds to their memory.

    python benchmarks/bench_ranks.py [--ranks 1,2,4] [--params 100M] [--mbit N] [--slaves S] [--rounds R] [--gate S]
                                     [--quick] [--json]

A master, slaves and ranks (FSDP2, gloo) are real processes in network namespaces. Each rank's link to the slaves has
--mbit each way, a slave's link four times that. What ranks exchange among themselves goes over a second network without
limits. The job's steps cost nothing; each makes a round: a push, the slaves' update, a pull.

push, pull  medians of the rounds, in seconds, from the leader's event record: a push from its begin, the snapshot and
            the exchange among ranks included, until all bytes of all ranks have landed; a pull until it is installed.
faster      1 rank's time over this one's: with N ranks, N times as fast would be all that their links give.
added       the most memory that a rank had (resident), less that of the same rank of the same job without a master;
            the largest of the ranks. model: what `dips size` says for it, without checkpoints, as a cluster has it
            whose training waits for its pushes and pulls.
goal        the Nth part of what is added to one rank, 50 MB, and the rank's shard of the largest tensor
private     likewise, of the memory that is the rank's own alone: without pages of libraries and other files, which the
            ranks of a machine share; looked at every 20 ms. Its goal is by what is added to one rank's private memory.

Other work on the machine lengthens a round: each job waits up to --gate seconds for a moment with less than --foreign
processors of it. Nothing here judges a number. Needs root, for the namespaces; without, it says so and exits with
code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from quiet import Gate
from shaped import LAN, Cable, NotPossible, ShapedNet

from dips.local.sizing import SizeKnobs, SizeTable

JOB = Path(__file__).parent / "flows" / "rank_job.py"
MASTER, MASTER_PORT, STORE_PORT = "master", 29400, 29500
SLAVE_LINKS = 4.0
CONTROL_BITS_PER_S = 1e9
CHUNK_BYTES = 1 << 20
SLAVE_BYTES, SLAVE_LEAST_BYTES = 40, 256 << 20
"""What a slave may use: of each parameter, and in any case. One cluster needs 32 (`dips size`); blocks are not cut."""

CHECKPOINT_BYTES = 12
"""Of each parameter, in a cluster's copy for checkpoints, which this job has none of."""

CODE_BYTES = 50_000_000
"""Of each process, whatever its share; in a goal."""

LAYERS = 16
START_S, END_S = 180.0, 60.0
MIB = 1 << 20


class Failed(Exception):
    """A process of the run ended wrongly; says which, and what it said last."""


@dataclass(frozen=True)
class Row:
    """A cluster of so many ranks. bytes: see the top of this file. rounds: as many pushes and pulls were measured."""

    ranks: int
    params: int
    push_s: float
    pull_s: float
    rounds: int
    alone_bytes: int
    added_bytes: int
    model_bytes: int
    goal_bytes: int
    private_bytes: int
    private_goal_bytes: int
    push_faster: float
    pull_faster: float


class Memory(NamedTuple):
    """The most that a process had, in bytes: as flows/rank_job.py prints it."""

    resident: int
    private: int


# ---- processes ----


class Stage:
    """The sites of a run, and the processes there. What each says goes to a file of its own."""

    def __init__(self, net: ShapedNet, folder: Path) -> None:
        self.net = net
        self._folder = folder
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, site: str, *command: object, **variables: str) -> tuple[str, subprocess.Popen[bytes]]:
        """A process of Python at this site."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DIPS_")}
        name = f"{site}-{len(self._processes)}"
        with (self._folder / f"{name}.out").open("wb") as out, (self._folder / f"{name}.err").open("wb") as errors:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.net.namespace(site), sys.executable, *map(str, command)],
                env={**kept, "OMP_NUM_THREADS": "1", **variables},
                stdout=out,
                stderr=errors,
            )
        self._processes.append((name, process))
        return self._processes[-1]

    def said(self, name: str) -> str:
        return (self._folder / f"{name}.out").read_text()

    def end_of(self, started: tuple[str, subprocess.Popen[bytes]], within_s: float) -> str:
        """What the process printed, once it has ended by itself. Raises Failed."""
        name, process = started
        until_s = time.monotonic() + within_s
        while process.poll() is None and time.monotonic() < until_s:
            for other, each in self._processes:
                if each.poll():
                    raise Failed(f"{other} ended with {each.poll()}: {self._last_words(other)}")
            time.sleep(0.1)
        if process.poll() != 0:
            raise Failed(f"{name} did not end well ({process.poll()}): {self._last_words(name)}")
        return self.said(name)

    def _last_words(self, name: str) -> str:
        return (self._folder / f"{name}.err").read_text()[-1500:]

    def close(self) -> None:
        for _, process in self._processes:
            process.terminate()
        for _, process in self._processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def stage(n_ranks: int, n_slaves: int, bits_per_s: float) -> Iterator[tuple[Stage, Path]]:
    ranks, slaves = names("r", n_ranks), names("s", n_slaves)
    cables = {MASTER: Cable(CONTROL_BITS_PER_S, CONTROL_BITS_PER_S)}
    cables |= dict.fromkeys(slaves, Cable(SLAVE_LINKS * bits_per_s, SLAVE_LINKS * bits_per_s))
    cables |= dict.fromkeys(ranks, Cable(bits_per_s, bits_per_s))
    prefix = f"dips{os.getpid()}"
    with tempfile.TemporaryDirectory() as made, ShapedNet(cables, prefix, cluster=ranks) as net:
        here = Stage(net, Path(made))
        try:
            yield here, Path(made)
        finally:
            here.close()


def names(prefix: str, n: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(n)]


# ---- a job ----


def serve(here: Stage, folder: Path, n_slaves: int, n_params: int) -> str:
    """Starts a master and slaves; returns the master's address."""
    room = SLAVE_BYTES * n_params // n_slaves + SLAVE_LEAST_BYTES
    address = f"{here.net.address(MASTER)}:{MASTER_PORT}"
    rules = ["--sync-every", 1, "--overlap", "none", "--grace-s", 0.1, "--chunk-bytes", CHUNK_BYTES]
    # training waits as long for a push or pull
    rules += ["--durability", "async", "--max-clusters", 1, "--round-timeout-s", START_S]
    whose = ["--run-id", "bench", "--insecure"]
    where = ["--directory", folder / MASTER, "--slaves", n_slaves, "--listen", address]
    here.start(MASTER, "-m", "dips.cli", MASTER, *whose, *where, *rules)
    for name in names("s", n_slaves):
        where = ["--slave-id", name, "--directory", folder / name, "--data-host", here.net.address(name)]
        where += ["--memory-bytes", room]
        here.start(name, "-m", "dips.cli", "slave", *whose, *where, "--master", address)
    return address


def run_job(here: Stage, n_ranks: int, width: int, n_steps: int, within_s: float, **variables: str) -> list[Memory]:
    """The most memory that each rank of a job had."""
    store = f"tcp://{here.net.lan_address('r0')}:{STORE_PORT}"
    started = [
        here.start(name, JOB, rank, n_ranks, store, width, LAYERS, n_steps, GLOO_SOCKET_IFNAME=LAN, **variables)
        for rank, name in enumerate(names("r", n_ranks))
    ]
    return [Memory(**json.loads(here.end_of(each, within_s))) for each in started]


def rounds_of(tape: Path) -> tuple[list[float], list[float]]:
    """Seconds of each push and of each pull after the first version, by a cluster's event record."""
    records = [json.loads(line) for line in tape.read_text().splitlines()]
    pushes = [float(each["push_s"]) for each in records if each["kind"] == "push_sent" and each["base"] != "None"]
    pulls = [float(each["pull_s"]) for each in records if each["kind"] == "installed"]
    return pushes, pulls


def measure(n_ranks: int, options: argparse.Namespace) -> Row:
    """A row without what compared() adds."""
    bits_per_s, width = 1e6 * options.mbit, round((options.params / LAYERS) ** 0.5)
    n_params = LAYERS * width**2
    transfer_s = 32 * n_params / bits_per_s
    within_s = START_S + (3 * options.rounds + 4) * transfer_s
    gate = Gate(options.gate, options.foreign)
    with stage(n_ranks, options.slaves, bits_per_s) as (here, folder):
        gate.wait()
        alone = run_job(here, n_ranks, width, options.rounds, within_s)
        address, tape = serve(here, folder, options.slaves, n_params), folder / "a.jsonl"
        gate.wait()
        variables = {"DIPS_MASTER": address, "DIPS_CLUSTER": "a", "DIPS_INSECURE": "1", "DIPS_WORKER_TAPE": str(tape)}
        shared = run_job(here, n_ranks, width, options.rounds, within_s, **variables)
        pushes, pulls = rounds_of(tape)
    pairs = list(zip(shared, alone, strict=True))
    added = max(with_it.resident - without.resident for with_it, without in pairs)
    private = max(with_it.private - without.private for with_it, without in pairs)
    model = size_of_rank(n_params, n_ranks, options.slaves)
    push_s, pull_s = statistics.median(pushes), statistics.median(pulls)
    most_alone = max(each.resident for each in alone)
    return Row(n_ranks, n_params, push_s, pull_s, len(pushes), most_alone, added, model, 0, private, 0, 1.0, 1.0)


def size_of_rank(n_params: int, n_ranks: int, n_slaves: int) -> int:
    """What `dips size` says that is added to a rank, without the copy for checkpoints, in bytes."""
    knobs = SizeKnobs.model_validate(
        {"params": n_params, "clusters": 1, "slaves": n_slaves, "ranks": n_ranks, "link": "1gbps",
         "chunk_bytes": CHUNK_BYTES, "optimizer_bytes": 0}
    )  # fmt: skip
    table = SizeTable(knobs)
    if n_ranks > 1:
        return table.whole("rank_memory_bytes")
    return table.whole("cluster_memory_bytes") - CHECKPOINT_BYTES * n_params


def compared(rows: Sequence[Row]) -> list[Row]:
    """With what needs the first one: how much faster the others are, and the goals for what is added to them."""
    first = rows[0]
    found = []
    for row in rows:
        beside = CODE_BYTES + 4 * row.params // LAYERS // row.ranks
        goals = (first.ranks * of_first // row.ranks + beside for of_first in (first.added_bytes, first.private_bytes))
        goal, private_goal = goals
        faster = first.push_s / row.push_s, first.pull_s / row.pull_s
        found.append(
            replace(row, goal_bytes=goal, private_goal_bytes=private_goal, push_faster=faster[0], pull_faster=faster[1])
        )
    return found


# ---- the command ----


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="sizes of the cluster; ratios are to the first")
    parser.add_argument("--params", type=float, default=100e6, help="parameters of the model, about")
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of a rank's link, each way")
    parser.add_argument("--slaves", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="pushes and pulls of each cluster")
    parser.add_argument("--gate", type=float, default=30.0, help="seconds to wait for a quiet moment, at most")
    parser.add_argument(
        "--foreign", type=float, default=0.3, help="processors of other work in a quiet moment, at most"
    )
    parser.add_argument(
        "--quick", action="store_true", help="1 and 2 ranks, 2M parameters, 2 rounds: whether it works, not how well"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if given.quick:
        given.ranks, given.params, given.rounds, given.gate = "1,2", 2e6, 2, 0.0
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the namespaces go, too
    rows: list[Row] = []
    try:
        for n_ranks in map(int, options.ranks.split(",")):
            print(f"{n_ranks} ranks", file=sys.stderr, flush=True)
            rows.append(measure(n_ranks, options))
    except NotPossible as why:
        print(f"bench_ranks cannot run here: {why}", file=sys.stderr)
        return 2
    except Failed as why:
        print(f"bench_ranks: {why}", file=sys.stderr)
        return 1
    setting: Mapping[str, object] = {
        "mbit": options.mbit, "slaves": options.slaves, "cpus": os.cpu_count(), "machine": platform.machine(),
    }  # fmt: skip
    rows = compared(rows)
    if options.json:
        print(json.dumps({"setting": setting, "results": [asdict(row) for row in rows]}, indent=2))
    else:
        print(_table(setting, rows))
    return 0


def _table(setting: Mapping[str, object], rows: Sequence[Row]) -> str:
    lines = [", ".join(f"{key} {value}" for key, value in setting.items())]
    head = "ranks,params,push s,faster,pull s,faster,alone MiB,added MiB,model MiB,goal MiB,private,goal".split(",")
    lines.append("".join(f"{name:>11}" for name in head))
    for row in rows:
        times = f"{row.push_s:>11.2f}{row.push_faster:>11.2f}{row.pull_s:>11.2f}{row.pull_faster:>11.2f}"
        sizes = (
            *(row.alone_bytes, row.added_bytes, row.model_bytes, row.goal_bytes),
            *(row.private_bytes, row.private_goal_bytes),
        )
        lines.append(f"{row.ranks:>11}{row.params / 1e6:>10.1f}M{times}" + "".join(f"{n / MIB:>11.0f}" for n in sizes))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
