"""Processes for integration tests, with their log and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from dips.master.directory import MasterAddress, read_address

TESTS = Path(__file__).parents[1]
START_S = 90.0
"""Python starts and imports gRPC; two busy cores may need many times the usual second."""


class MasterProcess:
    """A master in its own process, with its log in `directory`.log."""

    def __init__(
        self,
        directory: Path,
        *knobs: str,
        module: str = "support.master_process",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.log_path = directory.with_suffix(".log")
        environment = {**os.environ, "PYTHONPATH": str(TESTS), **(variables or {})}
        with self.log_path.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module, str(directory), *knobs],
                stdout=log,
                stderr=log,
                env=environment,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def started(self) -> MasterAddress:
        """Wait until this very process has said where it serves."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            address = read_address(self.directory) if self.directory.is_dir() else None
            if address is not None and address.pid == self.popen.pid:
                return address
            assert self.popen.poll() is None, self.log
            time.sleep(0.02)
        raise AssertionError(f"the master did not start: {self.log}")

    def signal(self, number: signal.Signals) -> int:
        self.popen.send_signal(number)
        return self.popen.wait(START_S)
