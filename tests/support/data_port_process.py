"""A data port with its connection guard and a limit on open files: python -m support.data_port_process ROOM_BYTES
N_FILES LOOP.

It says its endpoint, then answers each line of its input with its counts, as JSON, and ends with its input.
`GuardedPort` is what a test sees.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import traceback
from typing import Any, Self, cast

from support import slave_wire
from support.repository import TESTS
from support.waiting import NO_LIMIT_S, until

from dips.core import allocator
from dips.core.math import landing_numba, outer_numba
from dips.slave import serve_numba
from dips.slave.connections import ConnectionGuard
from dips.slave.data_server import DataServer, LoopName
from dips.slave.state.staging import ShardMap, Slot

GUARDED_CHUNK_BYTES = 1024
GUARDED_SLOTS = 2


class GuardedPort:
    """Push "a" of support.slave_wire is open in it. limit_bytes: the guard's budget."""

    def __init__(self, room_bytes: int, n_files: int = 1024, loop: LoopName = "auto") -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "support.data_port_process", str(room_bytes), str(n_files), loop],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )
        self.pid = self._popen.pid
        first = self._answer()
        self.endpoint: str = first["endpoint"]
        self.limit_bytes: int = first["limit_bytes"]

    def count(self) -> dict[str, Any]:
        """chunks, connections: refused so far; why: what the guard said, and the last sentence of the port; looks: of
        the guard, so far."""
        assert self._popen.stdin is not None
        self._popen.stdin.write("count\n")
        self._popen.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert line, "the data port's process ended: see its error above"
        told: dict[str, Any] = json.loads(line)
        return told

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._popen.communicate(timeout=NO_LIMIT_S)
        finally:
            self._popen.kill()
            self._popen.wait()

    def wait_for_looks(self, n_looks: int = 2) -> None:
        """Until the guard has looked so many times more, however busy this machine is."""
        first = self.count()["looks"]
        until(lambda: self.count()["looks"] >= first + n_looks, f"{n_looks} looks of the guard")


def main(room_bytes: str, n_files: str, loop: LoopName) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(n_files), int(n_files)))
    allocator.keep_freed_memory()
    outer_numba.warm_up()
    serve_numba.warm_up()
    layout = slave_wire.LAYOUT
    server = DataServer("127.0.0.1", 0, slave_wire.RUN, GUARDED_CHUNK_BYTES, lambda staged: None, _crashed, loop=loop)
    cuts = list[str]()  # the port's last sentence may be of another connection a moment later
    refuse = server.port.refuse_connection

    def remember(sentence: str, n: int = 1) -> None:
        cuts.append(sentence)
        refuse(sentence, n)

    server.port.refuse_connection = remember  # type: ignore[method-assign]
    if server.is_compiled:
        serve_numba.warm_up()
        landing_numba.warm_up()  # so that nothing is loaded after the guard has looked at what there is
    ready = threading.Event()
    rows = allocator.zeros(GUARDED_SLOTS, layout.n_elems)
    server.start()
    server.do(server.port.set_epoch, 1)
    server.do(server.port.set_memory, ShardMap(layout.blocks, GUARDED_CHUNK_BYTES), rows)
    server.do(ready.set)
    server.do(server.port.hold, [Slot(slave_wire.push_id("a"), 1, 0, 1)])
    assert ready.wait(NO_LIMIT_S)
    guard = ConnectionGuard(server, rows.nbytes, int(room_bytes))
    guard.start()
    _say(endpoint=server.endpoint, limit_bytes=guard.limit_bytes)
    for _ in sys.stdin:
        beat = server.figures.beat
        why = "\n".join([*cuts, beat.refused_connection])
        _say(chunks=beat.refused_chunks, connections=beat.refused_connections, why=why, looks=guard._looks)
    guard.stop()
    server.stop()
    return 0


def _crashed(error: BaseException) -> None:
    traceback.print_exception(error)
    os._exit(1)


def _say(**told: object) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], cast(LoopName, sys.argv[3])))
