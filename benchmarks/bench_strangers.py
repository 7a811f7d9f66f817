"""Designs that keep strangers from filling a gRPC server's memory: what each holds, and whether others still get in.

`python benchmarks/bench_strangers.py` prints a table of decision 68: for each design the memory that bursts of
connections without a handshake cost, the connections that were open at most, and how long a client with keys and an
address of its own waited for the first answer on a new channel meanwhile. Each row is the median, with least and most,
of --repeats servers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.hostile import n_files
from support.strangers import Strangers

from dips.core.allocator import keep_one_heap
from dips.core.file_limit import raise_file_limit
from dips.core.net.grpc_calls import channel_options, open_channel
from dips.core.net.keys import load_identity
from dips.core.net.newcomers import AcceptFilter, Newcomers, files_of_process, origin_of
from dips.local.authority import ensure_keys
from dips.master.rpc import CallerWatch, most_connections, newcomer_bounds, server_credentials

PEERS = 25
METHOD = "/bench/Echo"
WAIT_S = 20.0

DESIGNS = {
    "none": "gRPC's time for a handshake (10 s) alone",
    "option": "and gRPC's own bound of connections",
    "option-heap": "and one heap for malloc",
    "watch": "and connections without a call closed below gRPC: what the master does",
    "relay": "an acceptor in front, whose thread copies bytes to gRPC on a unix socket",
    "kernel": "a filter on the listening socket drops new connections while there are too many",
}


# ---- the server of one design ----


def serve(design: str, keys: str) -> None:
    raise_file_limit()
    if design not in ("none", "option"):
        keep_one_heap()
    asyncio.run(_serve(design, Path(keys)))


async def _serve(design: str, keys: Path) -> None:
    options: list[tuple[str, Any]] = [*channel_options(1 << 26), ("grpc.server_handshake_timeout_ms", 10_000)]
    if design in ("option", "option-heap", "watch"):
        options.append(("grpc.max_allowed_incoming_connections", most_connections(PEERS)))
    server, watch = grpc.aio.server(options=options), list[CallerWatch]()

    async def echo(request: bytes, context: Any) -> bytes:
        for one in watch:
            one.admitted(context.peer())
        return request

    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    credentials = server_credentials(load_identity(keys / "master"))
    if design == "relay":
        inner = f"unix:{keys}/inner-{os.getpid()}"
        server.add_secure_port(inner, credentials)
        port = _relay(inner.removeprefix("unix:"))
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    if design == "watch":
        watch.append(CallerWatch(port, PEERS))
        watch[0].start()
    if design == "kernel":
        threading.Thread(target=_guard_by_filter, args=[port], daemon=True).start()
    print(port, flush=True)
    await asyncio.Event().wait()


def _guard_by_filter(port: int) -> None:
    """Shut while there are more connections than the option would take."""
    for fd in files_of_process() or ():
        try:
            listener = socket.socket(fileno=os.dup(fd))
            if listener.getsockname()[1] == port:
                break
        except (OSError, IndexError):
            continue
    accepts = AcceptFilter(listener)
    while True:
        n = len(files_of_process() or ())
        accepts.on() if n > most_connections(PEERS) else accepts.off()
        time.sleep(0.05)


def _relay(inner: str) -> int:
    """One thread that accepts, and passes on whoever has begun with a TLS handshake."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setblocking(False)
    threading.Thread(target=_pass_on, args=[listener, inner], daemon=True).start()
    return int(listener.getsockname()[1])


def _pass_on(listener: socket.socket, inner: str) -> None:
    poller, newcomers = select.epoll(), Newcomers[socket.socket](newcomer_bounds(PEERS))
    ends: dict[int, tuple[socket.socket, socket.socket | None]] = {}
    poller.register(listener.fileno(), select.EPOLLIN)

    def close(one: socket.socket) -> None:
        newcomers.settled(one)
        _, other = ends.pop(one.fileno(), (one, None))
        for end in (one, other):
            if end is not None and end.fileno() >= 0:
                poller.unregister(end.fileno())
                ends.pop(end.fileno(), None)
                end.close()

    while True:
        for late in newcomers.late(time.monotonic()):
            close(late)
        for fd, _ in poller.poll(0.05):
            if fd == listener.fileno():
                near, address = listener.accept()
                ends[near.fileno()] = near, None
                poller.register(near.fileno(), select.EPOLLIN)
                closed = newcomers.came(near, origin_of(address[0]), time.monotonic())
                if closed is not None:
                    close(closed)
                continue
            if fd not in ends:
                continue
            near, far = ends[fd]
            try:
                heard = near.recv(1 << 16)
                if not heard or (far is None and heard[:2] != b"\x16\x03"):
                    raise ConnectionError
                if far is None:
                    far = socket.socket(socket.AF_UNIX)
                    far.connect(inner)
                    ends[fd], ends[far.fileno()] = (near, far), (far, near)
                    poller.register(far.fileno(), select.EPOLLIN)
                elif near in set(newcomers) and len(heard) > 300:
                    newcomers.settled(near)  # a certificate came: nearly surely no stranger
                far.sendall(heard)
            except OSError:
                close(near)


# ---- the measurement ----


class Found(NamedTuple):
    grown_mib: float
    most_open: float
    first_answer_ms: float
    worst_answer_ms: float


def measured(design: str, kind: str, keys: Path, n: int, bursts: int) -> Found:
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", design, str(keys)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = f"127.0.0.1:{int(server.stdout.readline())}"
        first_answer_s(address, keys)
        before, most, waits = status(server.pid, "VmRSS"), 0, list[float]()
        with Strangers(address, kind, n, hold_s=2.0) as strangers:
            for _ in range(bursts):
                strangers.burst()
                most = max(most, n_files(server.pid))
                waits += [first_answer_s(address, keys) for _ in range(3)]
        grown = status(server.pid, "VmHWM") - before
        return Found(grown, most, 1000 * statistics.median(waits), 1000 * max(waits))
    finally:
        server.kill()


def first_answer_s(address: str, keys: Path) -> float:
    began_s = time.monotonic()
    with open_channel(address, load_identity(keys / "a")) as channel:
        try:
            call: Any = channel.unary_unary(METHOD)
            call(b"x", timeout=WAIT_S, wait_for_ready=True)
        except grpc.RpcError:
            return WAIT_S
    return time.monotonic() - began_s


def status(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def row(found: Sequence[Found]) -> str:
    columns = zip(*found, strict=True)
    return " | ".join(f"{statistics.median(one):.0f} ({min(one):.0f} to {max(one):.0f})" for one in columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--designs", nargs="+", default=list(DESIGNS), choices=list(DESIGNS))
    parser.add_argument("--kinds", nargs="+", default=["bare", "tls"])
    parser.add_argument("--connections", type=int, default=16_000)
    parser.add_argument("--bursts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all numbers here")
    given = parser.parse_args()
    everything: dict[str, list[Found]] = {}
    print(
        "| design | strangers | MiB more | files open | first answer, median ms | worst ms |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        ensure_keys(keys, ["a"], ["s0"])
        for design in given.designs:
            for kind in given.kinds:
                found = [measured(design, kind, keys, given.connections, given.bursts) for _ in range(given.repeats)]
                everything[f"{design} {kind}"] = found
                print(f"| {design} | {kind} | {row(found)} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps({key: [one._asdict() for one in value] for key, value in everything.items()}))


if __name__ == "__main__":
    serve(*sys.argv[2:]) if sys.argv[1:2] == ["--serve"] else main()
