"""Processes at both ends of a data port, without a master: python -m support.data_port_process ROLE ARGUMENTS.

`bulk BULK`: a slave's port with one open push, for what support.bulk sends. `guarded ROOM_BYTES FILES LOOP`: a port
with its connection guard and a limit on open files. Both say their endpoint, then answer each line of their input with
a line of JSON, and end with their input; `BulkPort` and `GuardedPort` are what a test sees.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Self

from support import slave_wire
from support.bulk import EPOCH, PUSH, RUN, Bulk
from support.repository import TESTS
from support.waiting import NO_LIMIT_S, until

from dips.core import allocator
from dips.core.chunks import checksum, chunks_of, shard_digest
from dips.core.ids import Version
from dips.core.math import landing_numba, outer_numba
from dips.slave import serve_numba
from dips.slave.connections import ConnectionGuard
from dips.slave.data_port import Answer, DataPort
from dips.slave.data_server import DataServer, LoopName
from dips.slave.landing import LandingJob
from dips.slave.memory import ThetaBuffer, bytes_of
from dips.slave.serve_numba import N_SERVED, ServeLoop
from dips.slave.state.events import PushStaged
from dips.slave.state.staging import ShardMap, Slot

VERSION = Version(1, 0)
GUARDED_CHUNK_BYTES = 1024
GUARDED_SLOTS = 2


# ---- as a test sees them ----


class _PortProcess:
    def __init__(self, *arguments: str) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "support.data_port_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )
        self.pid = self._popen.pid
        self._first = self._answer()
        self.endpoint: str = self._first["endpoint"]

    def ask(self, word: str) -> Any:
        assert self._popen.stdin is not None
        self._popen.stdin.write(word + "\n")
        self._popen.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert line, "the data port's process ended: see its error above"
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._popen.communicate(timeout=NO_LIMIT_S)
        finally:
            self._popen.kill()
            self._popen.wait()


class BulkPort(_PortProcess):
    """ask("count"): what it has received; ask("serve"): what was pushed can be pulled as VERSION from then on."""

    def __init__(self, bulk: Bulk) -> None:
        super().__init__("bulk", bulk.to_json())


class GuardedPort(_PortProcess):
    """Push "a" of support.slave_wire is open in it. limit_bytes: the guard's budget."""

    def __init__(self, room_bytes: int, n_files: int = 1024, loop: LoopName = "auto") -> None:
        super().__init__("guarded", str(room_bytes), str(n_files), loop)
        self.limit_bytes: int = self._first["limit_bytes"]

    def count(self) -> dict[str, Any]:
        """chunks, connections: refused so far; why: what the guard said, and the last sentence of the port; looks: of
        the guard, so far."""
        told: dict[str, Any] = self.ask("count")
        return told

    def wait_for_looks(self, n_looks: int = 2) -> None:
        """Until the guard has looked so many times more, however busy this machine is."""
        first = self.count()["looks"]
        until(lambda: self.count()["looks"] >= first + n_looks, f"{n_looks} looks of the guard")


class _BulkSlave:
    """A data server for one push, which counts the chunks that came, whatever became of them."""

    def __init__(self, bulk: Bulk) -> None:
        self._bulk = bulk
        self._blocks = bulk.layout.blocks
        self._rows = allocator.zeros(1, bulk.n_elems)
        self._staged: queue.SimpleQueue[PushStaged] = queue.SimpleQueue()
        self._digest = ""
        self._received = 0
        self._count_messages()
        self.server = DataServer("127.0.0.1", 0, RUN, bulk.chunk_bytes, self._staged.put, _crashed)
        self.server.start()
        self.server.do(self.server.port.set_epoch, EPOCH)
        self.server.do(self.server.port.set_memory, ShardMap(self._blocks, bulk.chunk_bytes), self._rows)
        self.server.do(self.server.port.hold, [Slot(PUSH, 1, 0, 1)])

    def _count_messages(self) -> None:
        slave, begin_here, serve_compiled = self, DataPort.begin, ServeLoop.serve

        def begin(
            self: DataPort, frames: Sequence[memoryview], peer: bytes = b"", user: str = ""
        ) -> Answer | LandingJob | None:
            slave._received += len(frames) > 1
            return begin_here(self, frames, peer, user)

        def serve(self: ServeLoop, until_s: float, refresh_s: float) -> int:
            why = serve_compiled(self, until_s, refresh_s)
            slave._received += int(self._told[N_SERVED])
            return why

        DataPort.begin = begin  # type: ignore[method-assign]
        ServeLoop.serve = serve  # type: ignore[method-assign]

    def count(self) -> dict[str, Any]:
        while not self._staged.empty():
            self._digest = self._staged.get().digest.hex()
        return {"received": self._received, "refusal": self.server.port.last_refusal, "staged": self._digest}

    def serve(self) -> dict[str, Any]:
        data, sums = bytes_of(self._rows[0]), []
        for chunk in chunks_of(self._blocks, self._bulk.chunk_bytes):
            begin = 4 * self._blocks[chunk.block_id].start_elem + chunk.offset_bytes
            sums.append(checksum(data[begin : begin + chunk.length_bytes]))
        served = threading.Event()
        self.server.do(self.server.port.set_readable, {VERSION: ThetaBuffer(self._rows[0], None, sums)}, None)
        self.server.do(served.set)
        assert served.wait(NO_LIMIT_S)
        return {"digest": shard_digest(sums).hex()}


def _bulk(bulk: str) -> int:
    outer_numba.warm_up()
    serve_numba.warm_up()
    slave = _BulkSlave(Bulk.from_json(bulk))
    _say(endpoint=slave.server.endpoint)
    for line in sys.stdin:
        _say(**{"count": slave.count, "serve": slave.serve}[line.strip()]())
    slave.server.stop()
    return 0


def _guarded(room_bytes: str, n_files: str, loop: LoopName) -> int:
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


ROLES: dict[str, Callable[..., int]] = {"bulk": _bulk, "guarded": _guarded}

if __name__ == "__main__":
    sys.exit(ROLES[sys.argv[1]](*sys.argv[2:]))
