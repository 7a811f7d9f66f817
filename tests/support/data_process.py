"""A slave's data port as a process of its own, with one open push and no master: python -m support.data_process BULK.

It says its endpoint, then answers each line of its input with a line of JSON: `count`, what it has received; `serve`,
and what was pushed can be pulled as VERSION; `plain`, and it takes as many bytes by a TCP connection, for comparison.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from support.bulk import EPOCH, PUSH, RUN, Bulk
from support.processes import TESTS

from dips.core import allocator, kernels_numba
from dips.core.chunks import checksum, chunks_of, shard_digest
from dips.core.ids import Version
from dips.slave.data_port import Answer, DataPort
from dips.slave.data_server import DataServer
from dips.slave.landing import Job
from dips.slave.memory import Buffer, bytes_of
from dips.slave.state.events import PushStaged
from dips.slave.state.staging import ShardMap

VERSION = Version(1, 0)
PLAIN_PIECE_BYTES = 4 << 20
WAIT_S = 120.0


class DataProcess:
    """The process, as a test sees it. `with` ends it."""

    def __init__(self, bulk: Bulk) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "support.data_process", bulk.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )
        self.endpoint: str = self._heard()["endpoint"]

    def ask(self, word: str) -> Any:
        """The answer to one of the words above; for `plain` the port, and a second answer once all has come."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(word + "\n")
        self._popen.stdin.flush()
        return self._heard()

    def _heard(self) -> Any:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert line, "the data process ended; its words stand above"
        return json.loads(line)

    def send_plain(self, data: memoryview) -> None:
        """By TCP; returns when all has landed there."""
        with socket.create_connection(("127.0.0.1", self.ask("plain")["port"])) as connection:
            for begin in range(0, len(data), PLAIN_PIECE_BYTES):
                connection.sendall(data[begin : begin + PLAIN_PIECE_BYTES])
            self._heard()

    def __enter__(self) -> DataProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._popen.communicate(timeout=WAIT_S)
        finally:
            self._popen.kill()
            self._popen.wait()


class _Counted:
    """Payload bytes of all messages that came, whatever became of them."""

    def __init__(self) -> None:
        self.n_bytes = 0
        counted, real = self, DataPort.begin

        def begin(
            self: DataPort, frames: Sequence[memoryview], peer: bytes = b"", user: str = ""
        ) -> Answer | Job | None:
            counted.n_bytes += sum(len(frame) for frame in frames[1:])
            return real(self, frames, peer, user)

        DataPort.begin = begin  # type: ignore[method-assign]


class _Slave:
    """What the process is."""

    def __init__(self, bulk: Bulk) -> None:
        self._bulk = bulk
        self._blocks = bulk.layout.blocks
        self._rows = allocator.zeros(1, bulk.n_elems)
        self._staged: queue.SimpleQueue[PushStaged] = queue.SimpleQueue()
        self._digest = ""
        self._counted = _Counted()
        self.server = DataServer("127.0.0.1", 0, RUN, bulk.chunk_bytes, self._staged.put, _crashed)
        self.server.start()
        self.server.set_epoch(EPOCH)
        self.server.set_memory(ShardMap(self._blocks, bulk.chunk_bytes), self._rows, lambda: None)
        self.server.open(PUSH, 1, 0, 1)

    def count(self) -> dict[str, Any]:
        while not self._staged.empty():
            self._digest = self._staged.get().digest.hex()
        return {"received": self._counted.n_bytes, "refusal": self.server.last_refusal, "staged": self._digest}

    def serve(self) -> dict[str, Any]:
        data, sums = bytes_of(self._rows[0]), []
        for chunk in chunks_of(self._blocks, self._bulk.chunk_bytes):
            begin = 4 * self._blocks[chunk.block_id].start_elem + chunk.offset_bytes
            sums.append(checksum(data[begin : begin + chunk.length_bytes]))
        served = threading.Event()
        self.server.set_readable({VERSION: Buffer(self._rows[0], None, sums)}, served.set)
        assert served.wait(WAIT_S)
        return {"digest": shard_digest(sums).hex()}

    def plain(self) -> dict[str, Any]:
        data = bytes_of(self._rows[0])
        with socket.create_server(("127.0.0.1", 0)) as server:
            _say({"port": server.getsockname()[1]})
            with server.accept()[0] as connection:
                while data:
                    data = data[connection.recv_into(data[:PLAIN_PIECE_BYTES]) :]
        return {}


def _crashed(error: BaseException) -> None:
    traceback.print_exception(error)
    os._exit(1)


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main(bulk: Bulk) -> None:
    kernels_numba.warm_up()
    slave = _Slave(bulk)
    _say({"endpoint": slave.server.endpoint})
    for line in sys.stdin:
        _say({"count": slave.count, "serve": slave.serve, "plain": slave.plain}[line.strip()]())
    slave.server.stop()


if __name__ == "__main__":
    main(Bulk.from_json(sys.argv[1]))
