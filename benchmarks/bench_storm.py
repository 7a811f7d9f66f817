"""Does the control plane answer whatever goes on around it? Three storms against real servers on this machine.

joins      100 clusters join at once, then beat: how long each Join took, and how long `status` took meanwhile
garbage    10,000 connections that send nonsense, or nothing, to the master and to the slave's data port: `status`
           meanwhile, memory and files of both, and whether they are given back
slow link  a cluster behind a link of 100 Mbit/s that is throttled to 1 %, with both planes in one line: the longest gap
           between its beats at the master, and evictions, while it pushes and pulls

Each `status` is a connection of its own out of another process, as the command makes it (without Python's start, which
takes longer). Targets: status in under a second at all times, no beat missed for want of room on the link.

    python benchmarks/bench_storm.py [--quick] [--secure] [--json] [--only joins|garbage|link]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from storm.link import SharedLink
from storm.servers import Servers

from dips.core.file_limit import raise_file_limit
from dips.core.layout import Layout, Parameter
from dips.core.messages import Caller, DataMode, DataPlan, HeartbeatRequest, Hello, JoinReply, JoinRequest
from dips.core.net.codec_protobuf import decode, encode
from dips.core.net.grpc_calls import open_channel_aio
from dips.core.protocol import PROTOCOL_MIN, PROTOCOL_VERSION
from dips.worker.config import ClientConfig
from dips.worker.shell import ClusterShell

SMALL = Layout((Parameter("w", (64,), "float32", "w"),))
QUIET_CALLS = 30
SLOW_BITS_PER_S = 1e6
"""1 % of 100 Mbit/s."""

ASKER_S = 60.0
"""For the asker's last call and its end."""

QUEUE_BYTES = 64 << 10
"""What waits before the link in each direction: half a second at this rate."""


@dataclass
class Row:
    """One storm. status_s: of each call while it lasted, next to those before it."""

    name: str
    quiet_s: list[float]
    status_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status_quiet_ms": _ms(self.quiet_s),
            "status_storm_ms": _ms(self.status_s),
            "calls": len(self.status_s),
            "failed_calls": len(self.failed),
            "first_failure": self.failed[0] if self.failed else "",
            **self.told,
        }


def _ms(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {
        "median": round(1000 * statistics.median(ordered), 1),
        "p99": round(1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1),
        "longest": round(1000 * ordered[-1], 1),
    }


@contextlib.contextmanager
def asked(servers: Servers, row: Row) -> Iterator[None]:
    """Ask for the status again and again while this lasts, in a process of its own."""
    asker = servers.start_asker()
    try:
        yield
    finally:
        told = json.loads(asker.communicate(timeout=ASKER_S)[0])
        row.status_s += told["status_s"]
        row.failed += told["failed"]


def quiet(servers: Servers) -> list[float]:
    return [servers.status_s() for _ in range(QUIET_CALLS)]


# ---- joins ----


def joins(folder: Path, options: argparse.Namespace) -> Row:
    n = 20 if options.quick else 100
    names = [f"c{i}" for i in range(n)]
    master = {"directory": folder / "master", "max_clusters": n, "heartbeat_s": 2.0}
    with Servers(folder, options.secure, names, master, {"memory_bytes": 1 << 30}) as servers:
        row = Row(f"{n} clusters join at once", quiet(servers))
        with asked(servers, row):
            took_s = asyncio.run(_join_all(servers, names, 2.0 if options.quick else 8.0))
        alive = sum(cluster.alive for cluster in servers.status().clusters)
        row.told = {"join_ms": _ms(took_s), "joined": len(took_s), "alive_at_the_end": alive}
        row.told["master_mib"] = servers.memory_bytes("master") >> 20
    return row


async def _join_all(servers: Servers, names: list[str], beat_s: float) -> list[float]:
    """Seconds of each Join, all begun at the same moment; then all beat."""
    start = asyncio.Event()

    async def one(name: str) -> float:
        hello = Hello(PROTOCOL_MIN, PROTOCOL_VERSION)
        async with open_channel_aio(servers.address, servers.security(name)) as channel:
            join: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/dips.v1.Clusters/Join")
            await start.wait()
            began_s = time.perf_counter()
            caller = Caller("storm", 0, name, None, "storm")
            curve = b"" if servers.who(name).get("insecure") else name.encode().ljust(32, b"k")
            request = JoinRequest(caller, hello, SMALL, SMALL.layout_hash, DataPlan(DataMode.OWN), curve_key=curve)
            reply = decode(await join(encode(request), timeout=60, wait_for_ready=True), JoinReply)
            took_s = time.perf_counter() - began_s
            caller = Caller("storm", reply.epoch, name, reply.incarnation, "storm")
            heartbeat: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
            heartbeat = channel.stream_stream("/dips.v1.Clusters/Heartbeat")
            beats = heartbeat(timeout=beat_s + 30)
            for _ in range(max(1, int(beat_s / 0.5))):
                await beats.write(encode(HeartbeatRequest(caller, steps_per_s=1.0)))
                await beats.read()
                await asyncio.sleep(0.5)
            return took_s

    tasks = [asyncio.create_task(one(name)) for name in names]
    await asyncio.sleep(0.2)
    start.set()
    return await asyncio.gather(*tasks)


# ---- garbage ----

NONSENSE = (
    *(b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\xff" + bytes(8)),
    *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", os.urandom(512)),
)


def garbage(folder: Path, options: argparse.Namespace) -> Row:
    wanted = 500 if options.quick else 10_000
    master = {"directory": folder / "master", "heartbeat_s": 2.0}
    with Servers(folder, options.secure, ["a"], master, {"memory_bytes": 256 << 20}) as servers:
        targets = {"master": servers.address, "slave": servers.status().slaves[0].data_endpoint.removeprefix("tcp://")}
        row = Row(f"{wanted} garbage connections to each port", quiet(servers))
        for name, address in targets.items():
            process = "master" if name == "master" else "s0"
            before = servers.memory_bytes(process)
            with asked(servers, row):
                peers, refused = _connect(address, wanted)
                time.sleep(3.0)
                peak, files = servers.memory_bytes(process), servers.n_files(process)
                for peer in peers:
                    peer.close()
                time.sleep(3.0)
            row.told[name] = {
                "connected": len(peers),
                "not_connected": refused,
                "memory_mib": [before >> 20, peak >> 20, servers.memory_bytes(process) >> 20],
                "files_at_peak": files,
                "files_afterwards": servers.n_files(process),
            }
        row.told["slave_counted"] = servers.status().slaves[0].refused_connections
        row.told["alive"] = all(process.poll() is None for process in servers.processes.values())
    return row


def _connect(address: str, wanted: int) -> tuple[list[socket.socket], int]:
    """As many as go: each sends something of NONSENSE, and stays."""
    host, port = address.rsplit(":", 1)
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200
    peers: list[socket.socket] = []
    refused = 0
    for number in range(wanted):
        if len(peers) >= room:
            refused += wanted - number
            break
        try:
            peer = socket.create_connection((host, int(port)), timeout=10)
            peer.setblocking(False)
            with contextlib.suppress(OSError):
                peer.send(NONSENSE[number % len(NONSENSE)])
            peers.append(peer)
        except OSError:
            refused += 1
    return peers, refused


# ---- a slow link ----


class Still:
    """Parameters that stay as they are."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.theta = np.random.default_rng(0).normal(size=layout.n_elems).astype(np.float32)

    def layout(self) -> Layout:
        return self._layout

    def snapshot(self, into: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        into[:] = self.theta

    def install(self, flat: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        self.theta[:] = flat

    def reset_inner_optimizer(self) -> None:
        """There is none."""


def slow_link(folder: Path, options: argparse.Namespace) -> Row:
    """A push takes many times the time after which a silent cluster is evicted."""
    n_elems = 150_000 if options.quick else 500_000
    layout = Layout(tuple(Parameter(f"{i}.w", (n_elems // 4,), "float32", f"{i}") for i in range(4)))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with SharedLink(SLOW_BITS_PER_S, QUEUE_BYTES) as link:
        advertised = link.add(f"127.0.0.1:{port}")
        master = {"directory": folder / "master", "heartbeat_s": 2.0, "sync_every": 4, "tk_max": 10**9}
        slave = {"memory_bytes": 256 << 20, "data_port": port, "advertise": advertised}
        with Servers(folder, options.secure, ["a"], master, slave) as servers:
            row = Row("a link of 100 Mbit/s at 1 %", quiet(servers))
            ages: list[float] = []
            with asked(servers, row):
                done = _train(link.add(servers.address), servers, layout, 1 if options.quick else 3, ages)
            found = next(cluster for cluster in servers.status().clusters if cluster.cluster_id == "a")
            row.told = {
                "push_bytes": 4 * layout.n_elems,
                "seconds": round(done, 1),
                "bytes_up_and_down": link.sent_bytes,
                "link_busy_share": round(max(link.sent_bytes) * 8 / SLOW_BITS_PER_S / done, 2),
                "longest_gap_between_beats_s": round(max(ages), 2),
                "evicted_after_s": 10.0,
                "incarnations": found.incarnations,
                "pushes_applied": found.pushes_applied,
            }
    return row


def _train(address: str, servers: Servers, layout: Layout, rounds: int, ages: list[float]) -> float:
    """Push and pull; notes how old the last beat is at the master. Returns seconds."""
    model, began_s = Still(layout), time.monotonic()
    config = ClientConfig(cluster_id="a", master=address, **servers.who("a"))
    with ClusterShell(config, model, layout, DataPlan(DataMode.OWN)) as driver:
        while driver.version is None or driver.version.v < rounds:
            time.sleep(0.25)
            model.theta += np.float32(0.001)
            driver.step(10, loss=1.0)
            for cluster in servers.status().clusters:
                ages.append(cluster.beat_age_s)
    return time.monotonic() - began_s


STORMS: dict[str, Callable[[Path, argparse.Namespace], Row]] = {"joins": joins, "garbage": garbage, "link": slow_link}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller storms")
    parser.add_argument("--secure", action="store_true", help="with keys: mutual TLS and CURVE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=sorted(STORMS), default=None)
    options = parser.parse_args()
    raise_file_limit()
    rows = []
    for name, storm in STORMS.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="dips-storm-") as folder:
                rows.append(storm(Path(folder), options).as_json())
            if not options.json:
                print(json.dumps(rows[-1], indent=1), flush=True)
    where = {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    if options.json:
        print(json.dumps({"machine": where, "results": rows}))
    else:
        print(where)
    return 0


if __name__ == "__main__":
    sys.exit(main())
