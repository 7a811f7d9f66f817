"""`dips master` of the run "demo", without keys, with its log."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from support.dips_command import environment
from support.waiting import until
from support.whole_run import option_words

from dips.master.directory import MasterAddress, read_address


class MasterProcess:
    def __init__(self, directory: Path, *knobs: str) -> None:
        """knobs: settings, each as NAME=VALUE."""
        given: dict[str, object] = {"run_id": "demo", "directory": directory, "insecure": True}
        given |= dict(knob.split("=", 1) for knob in knobs)
        self.directory = directory
        self.log_path = directory.with_suffix(".log")
        with self.log_path.open("ab") as log:
            command = [sys.executable, "-m", "dips.cli", "master", *option_words(given)]
            self.popen = subprocess.Popen(command, stdout=log, stderr=log, env=environment())

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def started(self) -> MasterAddress:
        until(lambda: self._told() is not None, "the master's address", self.log_path)
        address = self._told()
        assert address is not None
        return address

    def _told(self) -> MasterAddress | None:
        assert self.popen.poll() is None, self.log
        address = read_address(self.directory) if self.directory.is_dir() else None
        return address if address is not None and address.pid == self.popen.pid else None

    def signal(self, number: signal.Signals) -> int:
        self.popen.send_signal(number)
        return self.popen.wait()
