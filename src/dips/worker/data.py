"""Runs a worker's transfers on one thread. Never touches live parameters."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import zmq

from dips.core.allocator import keep_freed_memory
from dips.core.errors import DipsError

_logger = logging.getLogger("dips.worker.data")

SWITCH_INTERVAL_S = 0.0002
"""The switch interval during transfers. With Python's default each chunk would wait 5 ms while the training thread
computes in Python."""

DataTask = Callable[[zmq.Context[zmq.Socket[bytes]], threading.Event], None]
"""A transfer, called with the context and the event that cancels it."""


class _SwitchInterval:
    """The interpreter's switch interval, shortened while at least one transfer of this process runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._usual_s = 0.0

    @contextlib.contextmanager
    def shortened(self) -> Iterator[None]:
        with self._lock:
            if not self._running:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._usual_s))
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    sys.setswitchinterval(self._usual_s)


_switch_interval = _SwitchInterval()


class DataThread:
    """Runs transfers one after the other; only one is needed at a time, so a new one cancels the one before."""

    def __init__(self) -> None:
        keep_freed_memory()  # for the frames of a pull
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._executor = ThreadPoolExecutor(1, "dips-data")
        self._current: tuple[int, threading.Event] | None = None
        self._running: Future[None] | None = None

    def run(self, transfer_id: int, job: DataTask, failed: Callable[[str], None]) -> None:
        """Call job(context, cancelled) on the data thread; `failed` gets a sentence if it raises."""
        if self._current is not None:
            self.cancel(self._current[0])
        cancelled = threading.Event()
        self._current = (transfer_id, cancelled)
        self._running = self._executor.submit(self._guarded, job, cancelled, failed)

    def cancel(self, transfer_id: int) -> None:
        if self._current is not None and self._current[0] == transfer_id:
            self._current[1].set()

    def settle(self) -> None:
        """Cancel the running transfer, if any, and return once no transfer reads or writes a vector."""
        if self._current is not None and self._running is not None:
            self._current[1].set()
            self._running.result()
            self._current = self._running = None

    def close(self) -> None:
        """Stop the running transfer, wait for it, and close the sockets."""
        if self._current is not None:
            self._current[1].set()
        self._executor.shutdown(wait=True)
        self._context.destroy(linger=0)

    def _guarded(self, job: DataTask, cancelled: threading.Event, failed: Callable[[str], None]) -> None:
        try:
            if not cancelled.is_set():
                with _switch_interval.shortened():
                    job(self._context, cancelled)
        except (DipsError, OSError) as error:
            failed(str(error))
        except Exception as error:
            _logger.exception("a transfer failed unexpectedly")
            failed(f"{type(error).__name__}: {error}")
