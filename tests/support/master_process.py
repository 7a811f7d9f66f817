"""A master in a process of its own, with its log.

`MasterProcess` is what a test sees. The process: python -m support.master_process DIRECTORY [KNOB=VALUE ...].
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from support.repository import TESTS
from support.waiting import until

from dips.core.config import load
from dips.core.errors import DipsError
from dips.master.config import MasterConfig
from dips.master.directory import MasterAddress, read_address
from dips.master.process import run


class MasterProcess:
    def __init__(self, directory: Path, *knobs: str) -> None:
        self.directory = directory
        self.log_path = directory.with_suffix(".log")
        with self.log_path.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "support.master_process", str(directory), *knobs],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(TESTS)},
            )

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


def main(directory: str, *knobs: str) -> int:
    overrides = {"run_id": "demo", "directory": directory, "insecure": True, **dict(k.split("=", 1) for k in knobs)}
    try:
        loaded = load(MasterConfig, "master", environment={}, overrides=overrides)
        return run(loaded.value, loaded)
    except DipsError as error:
        logging.critical("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
