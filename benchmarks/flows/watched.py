"""A slave end's metrics, served as slave/process.py serves them, and a scraper that asks for them.

The collector, the snapshot on an event loop, the server and the figures of the data port are the real ones; the state
machine is attached to no one.
"""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from pathlib import Path
from types import TracebackType

from dips.core.clock import SystemClock
from dips.core.net.security import INSECURE
from dips.core.observe.metrics import Families, disk_free_bytes
from dips.core.observe.metrics_server import PATH, LoopSnapshots, MetricsServer
from dips.slave.data_server import DataServer, resident_bytes
from dips.slave.memory import ShardMemory
from dips.slave.metrics import JOBS, Counts, completed, families_at
from dips.slave.state.slave import SlaveMachine

MEMORY_BYTES = 8 << 30
ANSWER_S = 10.0


class ServedMetrics:
    """Serves from when it is made until stop()."""

    def __init__(self, run_id: str, data: DataServer, memory: ShardMemory, chunk_bytes: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bench-loop", daemon=True)
        state = SlaveMachine(run_id, "s", data.endpoint, MEMORY_BYTES, chunk_bytes, 0, ())
        counts = Counts(SystemClock())
        for kind in JOBS:
            with counts.job(kind):
                """So that an answer has all histograms."""
        snapshots = LoopSnapshots(self._loop, lambda: families_at(counts, "s", state, memory))

        def collect() -> Families:
            gauges = {"resident_bytes": resident_bytes(), "disk_free_bytes": disk_free_bytes(Path.cwd())}
            return completed(snapshots.take(), counts, data.figures, gauges, 1e9)

        self._server = MetricsServer("127.0.0.1:0", collect, INSECURE)
        self.url = f"http://{self._server.address}{PATH}"
        self._thread.start()
        self._server.start()

    def stop(self) -> None:
        self._server.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Scraper:
    """Asks every every_s seconds while the block runs, as Prometheus does; the first time at once."""

    def __init__(self, url: str, every_s: float) -> None:
        self._url, self._every_s = url, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-scraper")
        self._error: Exception | None = None

    def __enter__(self) -> Scraper:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises what a scrape raised."""
        self._over.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def _run(self) -> None:
        try:
            scrape(self._url)
            while not self._over.wait(self._every_s):
                scrape(self._url)
        except Exception as error:
            self._error = error


def scrape(url: str) -> None:
    """Raises RuntimeError for an answer that is not a slave's metrics, OSError where there is none."""
    with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
        text = answer.read()
    if b"dips_slave_staged_bytes_total " not in text:
        raise RuntimeError(f"{url} answers, and not with a slave's metrics: {text[:200]!r}")
