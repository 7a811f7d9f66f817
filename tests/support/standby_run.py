"""A run with a standby on another address than its master's, in real processes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.judged_run import JudgedRun, replayed
from support.ports import own_port
from support.waiting import until
from support.whole_run import NumpyCluster, option_words

from dips.core.errors import RetryLater
from dips.core.observe.failpoints import SPEC_VARIABLE
from dips.master.directory import read_address


class WithStandby(JudgedRun):
    """Clusters and slaves know both addresses. of_standby: more settings of the standby, also other ones than the
    master's; `standby`: where it finds the master."""

    def __init__(self, directory: Path, **master: Any) -> None:
        addresses = [f"127.0.0.1:{own_port()}" for _ in range(2)]
        super().__init__(directory, journal_replicas=1, failpoints=True, listen=addresses[0], **master)
        self.listens = addresses[1]
        self.of_standby: dict[str, object] = {}

    def start_master(self) -> None:
        super().start_master()
        self.first = self.address
        self.address = f"{self.first},{self.listens}"

    def standby_options(self) -> dict[str, object]:
        where = {"run_id": "test", "directory": self.directory / "standby", "slaves": self.n_slaves}
        return {**where, **self.of("standby"), **self._master, "listen": self.listens, **self.of_standby}

    def start_standby(self, failpoints: str = "") -> None:
        self.environment = {SPEC_VARIABLE: failpoints} if failpoints else {}
        self._spawn("standby", ["master", *option_words({"standby": self.first, **self.standby_options()})])
        self.environment = {}

    def is_followed(self) -> bool:
        with contextlib.suppress(RetryLater):  # a master that has just come back
            return not self.status().alarms
        return False

    def until_followed(self) -> None:
        until(self.is_followed, "a standby that has all decisions", lambda: self.log("standby"))

    def take_over(self) -> None:
        words = ["master", "--take-over", *option_words(self.standby_options())]
        done = subprocess.run([sys.executable, "-m", "dips.cli", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        here = read_address(self.directory / "standby")
        assert here is not None
        assert here.address == self.listens

    def ends_at_the_standby(self, cluster: NumpyCluster) -> None:
        """The master's host is lost, and the run goes on for two versions."""
        self.kill("master")
        self.take_over()
        self.wait_for_version(self.version() + 2)
        self.finish(cluster)

    def finish(self, *clusters: NumpyCluster, may_skip: bool = False) -> None:
        """Stops the run of the standby, and judges it by both journals. may_skip: the standby's lacks versions that the
        other master published."""
        self.stop(*clusters)
        self.processes["standby"].wait()
        if may_skip:
            assert replayed(self.directory, may_skip=True) > 0
        else:
            self.judge()
