"""A small run of real processes for a browser to look at: kept alive in a thread of its own, harmed on request."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import live

from dips.core.clock import SystemClock
from dips.core.messages import StatusReply
from dips.core.net.keys import load_identity
from dips.local.local_run import LocalRun
from dips.local.operator_client import OperatorClient
from dips.local.processes import with_page
from dips.local.run_directory import UP, Mark, claim
from dips.local.run_file import read_run_file
from dips.local.supervisor import POLL_S
from dips.master.directory import read_address

RUN_FILE = """
[run]
id = "atlas"
directory = "{directory}"
slaves = 2
evaluate = true
[master]
sync_every = 8
preset = "dynamic"
min_clusters = 3
heartbeat_s = 0.5
evict_after_beats = 5
page_steer = true
[slave]
memory_bytes = "64 MiB"
[train]
threads = 1
log_every_steps = 4
[[clusters]]
id = "lyon"
gap = 0.4
[[clusters]]
id = "oslo"
gap = 0.5
[[clusters]]
id = "turin"
gap = 0.7
"""

KILLED_FOR_S = 4.0
"""A killed cluster stays away so long before it is started again; importing PyTorch takes some seconds more."""


class PageRun:
    def __init__(self, folder: Path) -> None:
        file = folder / "run.toml"
        file.write_text(RUN_FILE.format(directory=folder / "run"))
        plan = read_run_file(file)
        self.directory = plan.run.directory
        self._plan = with_page(plan)
        self._started = threading.Event()
        self._asked: queue.Queue[Callable[[LocalRun], None]] = queue.Queue()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="run")
        self._error: BaseException | None = None
        self.url, self.address = "", ""
        self.status: StatusReply | None = None

    def __enter__(self) -> PageRun:
        self._live = live.run(live.HEAVY)
        self._live.__enter__()
        self._thread.start()
        self._started.wait()
        self.check()
        return self

    def __exit__(self, *error: Any) -> None:
        self._end.set()
        self._thread.join()
        self._live.__exit__(*error)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def kill(self, name: str) -> None:
        self._asked.put(lambda local: _killed(local, name))

    def stop_master(self, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after a while: the master does not answer meanwhile."""
        pid = self._plan_pid()
        self._asked.put(lambda local: _stopped(pid, for_s))

    def operator(self) -> OperatorClient:
        return OperatorClient(self.address, security=load_identity(self.directory / "keys" / "operator"))

    def _plan_pid(self) -> int:
        found = read_address(self.directory / "master")
        assert found is not None
        return found.pid

    def _keep(self) -> None:
        try:
            with (
                claim(self.directory, Mark(self._plan.run.id, UP, "a test")) as directory,
                LocalRun(self._plan, directory, SystemClock(), lambda sentence: None) as local,
            ):
                self.address = local.start()
                self.url = local.page_url or ""
                self._started.set()
                while not self._end.is_set():
                    self.status = local.tick() or self.status
                    while not self._asked.empty():
                        self._asked.get()(local)
                    time.sleep(POLL_S)  # between two looks
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()


def _killed(local: LocalRun, name: str) -> None:
    assert local.supervisor.kill(name, KILLED_FOR_S) is not None, f"{name} does not run"


def _stopped(pid: int, for_s: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(for_s, os.kill, (pid, signal.SIGCONT)).start()
