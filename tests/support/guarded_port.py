"""A slave's data port and its guard as a process of their own: python -m support.guarded_port ROOM_BYTES FILES.

It says its endpoint and its budget, then answers each line of its input with its counters, and ends with its input.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Any

from support.processes import TESTS
from support.slave_peers import LAYOUT, RUN, push_id

from dips.core import allocator, kernels_numba
from dips.slave.connections import ConnectionGuard
from dips.slave.data_server import DataServer
from dips.slave.state.staging import ShardMap

CHUNK_BYTES = 1024
SLOTS = 2
WAIT_S = 60.0


class GuardedPort:
    """The process, as a test sees it. `with` ends it. Push "a" is open in it."""

    def __init__(self, room_bytes: int, n_files: int = 1024) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "support.guarded_port", str(room_bytes), str(n_files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )
        told = self._heard()
        self.endpoint: str = told["endpoint"]
        self.limit_bytes: int = told["limit_bytes"]
        self.pid = self._popen.pid

    def wait_for_looks(self, n_looks: int = 2) -> None:
        """Until the guard has looked so many times more, however busy this machine is."""
        first, end_s = self.count()["looks"], time.monotonic() + WAIT_S
        while (now := self.count()["looks"]) < first + n_looks:
            assert time.monotonic() < end_s, f"the guard looked {now - first} times in {WAIT_S} s"
            time.sleep(0.01)

    def count(self) -> dict[str, Any]:
        """chunks, connections: refused so far; why: what the guard said, and the last sentence of the port; looks: of
        the guard, so far."""
        assert self._popen.stdin is not None
        self._popen.stdin.write("count\n")
        self._popen.stdin.flush()
        return self._heard()

    def _heard(self) -> dict[str, Any]:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert line, "the data port's process ended; its words stand above"
        told: dict[str, Any] = json.loads(line)
        return told

    def __enter__(self) -> GuardedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._popen.communicate(timeout=60)
        finally:
            self._popen.kill()
            self._popen.wait()


class _Remembering(DataServer):
    """Keeps why the guard cut connections; the port's last sentence may be of another connection a moment later."""

    cuts = ""

    def refuse_connection(self, sentence: str) -> None:
        self.cuts += f"{sentence}\n"
        super().refuse_connection(sentence)


def _say(**told: object) -> None:
    print(json.dumps(told), flush=True)


def main(room_bytes: int, n_files: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_files, n_files))
    allocator.keep_freed_memory()
    kernels_numba.warm_up()
    server = _Remembering("127.0.0.1", 0, RUN, CHUNK_BYTES, lambda staged: None, lambda error: os._exit(1))
    ready = threading.Event()
    rows = allocator.zeros(SLOTS, LAYOUT.n_elems)
    server.start()
    server.set_epoch(1)
    server.set_memory(ShardMap(LAYOUT.blocks, CHUNK_BYTES), rows, ready.set)
    server.open(push_id("a"), 1, 0, 1)
    assert ready.wait(WAIT_S)
    guard = ConnectionGuard(server, rows.nbytes, room_bytes)
    guard.start()
    _say(endpoint=server.endpoint, limit_bytes=guard.limit_bytes)
    for _ in sys.stdin:
        beat = server.beat()
        why = f"{server.cuts}{beat.refused_connection}"
        _say(chunks=beat.refused_chunks, connections=beat.refused_connections, why=why, looks=guard._looks)
    guard.stop()
    server.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
