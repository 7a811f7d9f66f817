"""What each optimization of the data plane is worth, switched off in turn (Di-PS paper, Figures 6 and 13).

First table (Figure 6): one vector from a process to another over gRPC and over ZeroMQ, landed in one array, by size of
the vector and number of streams, each with a thread at both ends. Second table (Figure 13): whole rounds of real
processes as in bench_sync.py, with everything on, and with one thing switched off; where the time of a round goes comes
from the processes' own records. Rows alternate and repeat; nothing here judges a number.

The schedule of transfers over slaves is worth nothing on a machine whose links are all alike: bench_links.py has it.
Serialization has no row of its own: a frame is the vector's memory, and nothing is serialized on either side;
bench_transfer.py has what pickle and protobuf take instead.

    python benchmarks/bench_ablation.py [--params N] [--clusters K] [--slaves S] [--rounds R] [--cycles C] [--quick]

push, pull: a transfer, of the slowest cluster; measure, prepare: of the slowest slave; round: slowest cluster, whole.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from flows.baselines import GrpcReceiver, send_grpc
from flows.peer import Peer
from numpy.typing import NDArray
from peers.party import Failed, end_in_order
from peers.switches import ROWS
from peers.systems import Dips

F32 = NDArray[np.float32]
FRAME_BYTES = 1 << 20
WARM_UP = 2
ALL_ON = "all on"


# ---- Figure 6: gRPC, ZeroMQ, streams ----


@dataclass(frozen=True)
class Flow:
    """gbytes_per_s: median over the repeats; to_grpc: against gRPC with one stream and the same size."""

    way: str
    megabytes: int
    streams: int
    gbytes_per_s: float
    spread: float
    to_grpc: float


class ZmqReceiver:
    """Frames of FRAME_BYTES, landed one after the other, on one PULL socket."""

    def __init__(self, target: F32) -> None:
        self._target = target.view(np.uint8)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self.port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")

    def receive(self) -> None:
        at = 0
        while at < len(self._target):
            frame = np.frombuffer(self._socket.recv(copy=False).buffer, np.uint8)
            np.copyto(self._target[at : at + len(frame)], frame)
            at += len(frame)


class Receiving:
    """The other process: each stream lands in its own part of one vector."""

    def __init__(self, n_elems: int) -> None:
        self._target = np.zeros(n_elems, np.float32)
        self._receivers: list[ZmqReceiver | GrpcReceiver] = []

    def listen(self, way: str, n_elems: int, streams: int) -> tuple[int, ...]:
        parts = np.array_split(self._target[:n_elems], streams)
        self._receivers = [ZmqReceiver(part) if way == "ZeroMQ" else GrpcReceiver(part, True) for part in parts]
        return tuple(receiver.port for receiver in self._receivers)

    def receive(self) -> None:
        with ThreadPoolExecutor(len(self._receivers)) as pool:
            list(pool.map(lambda receiver: receiver.receive(), self._receivers))

    def close(self) -> None:
        """Nothing is under way; the process ends."""


def _send_zmq(source: F32, port: int) -> None:
    pushing: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    pushing.connect(f"tcp://127.0.0.1:{port}")
    data = source.view(np.uint8).data
    for begin in range(0, len(data), FRAME_BYTES):
        pushing.send(data[begin : begin + FRAME_BYTES], copy=False)
    pushing.close()


def flows(megabytes: list[int], streams: list[int], repeats: int) -> list[Flow]:
    """Every way once in each repeat; one more to warm up."""
    source = np.random.default_rng(0).standard_normal(max(megabytes) * 250_000, np.float32)
    peer = Peer(Receiving, len(source))
    keys = [(way, size, n) for size in megabytes for way in ("gRPC", "ZeroMQ") for n in streams]
    times: dict[tuple[str, int, int], list[float]] = {key: [] for key in keys}
    for repeat in range(repeats + 1):
        for key in keys:
            elapsed_s = _flow_s(peer, source[: key[1] * 250_000], key[0], key[2])
            if repeat:
                times[key].append(elapsed_s)
    peer.close()
    rates = {key: key[1] / 1e3 / statistics.median(times[key]) for key in keys}
    return [
        Flow(*key, rates[key], (max(t) - min(t)) / statistics.median(t), rates[key] / rates["gRPC", key[1], streams[0]])
        for key, t in times.items()
    ]


def _flow_s(peer: Peer, source: F32, way: str, streams: int) -> float:
    peer.begin("listen", way, len(source), streams)
    ports = peer.finish().value
    peer.begin("receive")
    send: Callable[[F32, int], None] = _send_zmq if way == "ZeroMQ" else lambda part, port: send_grpc(part, port, True)
    began_s = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(send, np.array_split(source, streams), ports))
    peer.finish()
    return time.perf_counter() - began_s


# ---- Figure 13: whole rounds ----


@dataclass(frozen=True)
class Row:
    """Seconds, medians over the counted rounds. times_all_on: round_s against the row with everything on."""

    off: str
    what_instead: str
    rounds: int
    push_s: float
    measure_s: float
    prepare_s: float
    pull_s: float
    round_s: float
    spread: float
    cpu_s: float
    times_all_on: float = 0.0


def variants(options: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> (what is done instead, the settings of that run)."""
    whole = 4 * options.params
    rows: dict[str, tuple[str, dict[str, Any]]] = {ALL_ON: ("", {})}
    rows["pipelining"] = (
        "a block is one message (up to 64 MiB), and one is on its way to each slave",
        {"master": {"chunk-bytes": min(64 << 20, whole), "window-chunks": 1}, "slave": {"max-chunk-bytes": 64 << 20}},
    )
    rows["window"] = ("one chunk on its way to each slave", {"master": {"window-chunks": 1}})
    rows["threads"] = ("one thread for landing and one for the outer step", {"slave": _ONE_THREAD})
    both = {**rows["pipelining"][1]["slave"], **_ONE_THREAD}
    rows["pipelining, threads"] = ("both of these", {"master": rows["pipelining"][1]["master"], "slave": both})
    rows["sharding"] = ("one slave", {"slaves": 1})
    rows["async snapshots"] = ("every version on disk before it is published", {"durability": "sync"})
    rows |= {name: (what, {"without": name}) for name, what in ROWS.items()}
    return {name: row for name, row in rows.items() if name == ALL_ON or name in (options.rows or rows)}


_ONE_THREAD = {"data-threads": 1, "compute-threads": 1}


class Rounds:
    """What was measured of one variant, over all cycles."""

    def __init__(self, name: str, what: str, settings: dict[str, Any]) -> None:
        self.name = name
        self._what = what
        self._settings = settings
        self._took: list[float] = []
        self._cpu: list[float] = []
        self._parts: dict[str, list[float]] = {}

    def cycle(self, directory: Path, options: argparse.Namespace) -> None:
        settings = {"slaves": options.slaves, **self._settings}
        with Dips(self.name, directory, options.clusters, options.params, **settings) as party:
            turns = [party.turn(number, options.pause) for number in range(WARM_UP + options.rounds)]
        for turn in turns[WARM_UP:]:
            self._took.append(max(turn.took_s))
            self._cpu.append(turn.cpu_s)
        clusters = [f"c{number}" for number in range(options.clusters)]
        slaves = [f"s{number}" for number in range(settings["slaves"])]
        for part, names, kind, key in (
            ("push", clusters, "push_sent", "transfer_s"),
            ("pull", clusters, "installed", "transfer_s"),
            ("measure", slaves, "measured", "took_s"),
            ("prepare", slaves, "prepared", "took_s"),
        ):
            of_each = [[r[key] for r in party.records(name) if r["kind"] == kind][-options.rounds :] for name in names]
            self._parts.setdefault(part, []).extend(max(together) for together in zip(*of_each, strict=True))

    def row(self) -> Row:
        parts = {part: statistics.median(times) for part, times in self._parts.items()}
        took_s = statistics.median(self._took)
        return Row(
            self.name, self._what, len(self._took), parts["push"], parts["measure"], parts["prepare"], parts["pull"],
            took_s, (max(self._took) - min(self._took)) / took_s, statistics.median(self._cpu),
        )  # fmt: skip


def rounds(options: argparse.Namespace) -> list[Row]:
    every = [Rounds(name, *rest) for name, rest in variants(options).items()]
    for cycle in range(options.cycles):
        for one in every:
            print(f"cycle {cycle + 1} of {options.cycles}: {one.name}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=options.directory) as folder:
                one.cycle(Path(folder) / "run", options)
    rows = [one.row() for one in every]
    return [Row(**{**asdict(row), "times_all_on": row.round_s / rows[0].round_s}) for row in rows]


# ---- the command ----


def _tables(flows_: list[Flow], rows: list[Row]) -> str:
    lines = [f"{'flow':<8}{'MB':>6}{'streams':>9}{'GB/s':>8}{'spread':>8}{'x gRPC':>8}"]
    lines += [
        f"{f.way:<8}{f.megabytes:>6}{f.streams:>9}{f.gbytes_per_s:>8.2f}{f.spread:>8.0%}{f.to_grpc:>8.2f}"
        for f in flows_
    ]
    head = f"{'switched off':<22}{'push s':>8}{'measure':>9}{'prepare':>9}{'pull s':>8}{'round s':>9}{'spread':>8}"
    lines += ["", f"{head}{'cpu s':>7}{'x all on':>10}   instead"]
    lines += [
        f"{r.off:<22}{r.push_s:>8.3f}{r.measure_s:>9.3f}{r.prepare_s:>9.3f}{r.pull_s:>8.3f}{r.round_s:>9.3f}"
        f"{r.spread:>8.0%}{r.cpu_s:>7.2f}{r.times_all_on:>10.2f}   {r.what_instead}"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> int:
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=100_000_000, help="parameters of the model, float32")
    parser.add_argument("--clusters", type=int, default=2)
    parser.add_argument("--slaves", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4, help="counted rounds in a cycle")
    parser.add_argument("--cycles", type=int, default=2, help="times that each row takes its turn")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two rounds")
    parser.add_argument("--rows", nargs="*", help="of the second table, by name; default: all")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 64, 256], help="sizes of the first table")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5, help="of the first table")
    parser.add_argument("--directory", type=Path, help="where servers keep their files; default: a temporary folder")
    parser.add_argument("--quick", action="store_true", help="small sizes: does everything run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.params, options.rounds, options.cycles, options.pause = 1_000_000, 2, 1, 0.1
        options.megabytes, options.repeats = [4], 2
    if min(options.params, options.clusters, options.slaves, options.rounds, options.cycles, *options.streams) < 1:
        parser.error("every count must be at least 1")
    flows_, rows = flows(options.megabytes, options.streams, options.repeats), rounds(options)
    setting = {
        "params": options.params, "clusters": options.clusters, "slaves": options.slaves, "cpus": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2), "machine": platform.machine(),
    }  # fmt: skip
    if options.json:
        found = {
            "setting": setting,
            "flows": [asdict(flow) for flow in flows_],
            "rounds": [asdict(row) for row in rows],
        }
        print(json.dumps(found, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in setting.items()))
        print(_tables(flows_, rows))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failed:
        sys.exit(str(failed))
