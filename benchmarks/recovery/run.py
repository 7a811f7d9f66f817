"""The run that is watched: `dips up`'s own processes and supervisor, and what they write down while it goes on.

Times are of the machine's monotonic clock, which all processes share. Everything is at its default but what the
measurement is of: nothing here tunes a time-out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dips.core.clock import SystemClock
from dips.core.config import load
from dips.local.local_run import LocalRun
from dips.local.log_files import tape_path
from dips.local.processes import OwnCluster, RunKnobs, RunPlan, numbered
from dips.local.run_directory import UP, Mark, claim
from dips.local.run_file import make_slaves
from dips.local.supervisor import POLL_S
from dips.master.config import MasterConfig
from dips.master.directory import TAPE_NAME

RUN_ID = "recovery"
CLUSTER_PROGRAM = Path(__file__).with_name("cluster.py")
WAIT_S = 120.0

Record = dict[str, Any]


class TooLong(Exception):
    """Something that had to happen did not, within WAIT_S."""


@dataclass(frozen=True)
class Shape:
    """What is run. steps_s: seconds of a step, for each cluster. data: own, or leased."""

    n_elems: int = 4_000_000
    slaves: int = 2
    steps_s: Sequence[float] = (0.020, 0.023, 0.027)
    data: str = "own"
    master: dict[str, object] = field(default_factory=dict)

    @property
    def clusters(self) -> list[str]:
        return [chr(ord("a") + i) for i in range(len(self.steps_s))]


class Tail:
    """The records of a tape that is being written, in their order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self.records: list[Record] = []

    def read(self) -> list[Record]:
        """All records until now."""
        if self._path.is_file():
            with self._path.open("rb") as file:
                file.seek(self._at)
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._at += len(whole) + 1
                self.records += [json.loads(line) for line in whole.splitlines() if line]
        return self.records

    def of(self, *kinds: str, since_s: float = 0.0) -> Iterator[Record]:
        """Those of these kinds, no older than since_s."""
        return (r for r in self.read() if r["kind"] in kinds and r["monotonic_s"] >= since_s)


class Watched:
    """Use as a context manager: leaving it ends every process."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        self.shape = shape
        self.directory = directory
        self._claim = claim(directory, Mark(RUN_ID, UP, " ".join(sys.argv)))
        self._local: LocalRun | None = None
        self.master = Tail(directory / "master" / TAPE_NAME)
        self.tapes = {name: Tail(tape_path(directory, name)) for name in (f"s{i}" for i in range(shape.slaves))}
        self.tapes |= {name: Tail(self._steps_file(name).with_suffix(".tape.jsonl")) for name in shape.clusters}

    def __enter__(self) -> Watched:
        shape = self.shape
        knobs = {
            "run_id": RUN_ID, "directory": self.directory / "master", "slaves": shape.slaves, "preset": "safe",
            "overlap": "none", **shape.master,
        }  # fmt: skip
        plan = RunPlan(
            RunKnobs(id=RUN_ID, directory=self.directory, slaves=shape.slaves),
            load(MasterConfig, "master", overrides=knobs).value,
            make_slaves(self.directory, RUN_ID, numbered(shape.slaves)),
            tuple(OwnCluster(name, tuple(self._command(name))) for name in shape.clusters),
        )
        try:
            self._local = LocalRun(plan, self._claim, SystemClock(), lambda sentence: None)
            self._local.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._local is not None:
            self._local.close()
        self._claim.__exit__(kind, error, trace)  # gives the directory free

    def pid(self, name: str) -> int | None:
        return self.local.supervisor.pid(name)

    @property
    def local(self) -> LocalRun:
        assert self._local is not None, "inside the context"
        return self._local

    def watch(self, until: Callable[[], bool], what: str) -> None:
        """Look after the processes until it has happened. Raises TooLong."""
        end_s = time.monotonic() + WAIT_S
        while not until():
            if time.monotonic() > end_s:
                raise TooLong(f"{what}, within {WAIT_S:g} s: see {self.directory}")
            self.local.supervisor.poll()
            time.sleep(POLL_S)

    def rest(self, seconds: float) -> None:
        """Let it run."""
        end_s = time.monotonic() + seconds
        self.watch(lambda: time.monotonic() >= end_s, "time passes")

    def published(self) -> list[tuple[float, str]]:
        """(when, version) of each publication; after a master's restart a version may come again, and is left out."""
        seen: set[str] = set()
        found = [(r["monotonic_s"], r["version"]) for r in self.master.of("publish")]
        return [item for item in found if not (item[1] in seen or seen.add(item[1]))]  # type: ignore[func-returns-value]

    def steps(self, cluster: str) -> NDArray[np.float64]:
        """When its steps ended."""
        path = self._steps_file(cluster)
        if not path.is_file():
            return np.empty(0)
        data = path.read_bytes()
        return np.frombuffer(data[: len(data) // 8 * 8], np.float64)

    def gap_s(self, cluster: str, begin_s: float, end_s: float) -> float:
        """The longest time without a step of a cluster, of those that overlap this span of time."""
        ends = self.steps(cluster)
        gaps = np.diff(ends)
        within = (ends[1:] > begin_s) & (ends[:-1] < end_s)
        return float(gaps[within].max(initial=0.0))

    def _steps_file(self, cluster: str) -> Path:
        return self.directory / "tapes" / f"{cluster}.steps"

    def _command(self, name: str) -> list[str]:
        step_s = self.shape.steps_s[self.shape.clusters.index(name)]
        (self.directory / "tapes").mkdir(parents=True, exist_ok=True)
        return [
            sys.executable, str(CLUSTER_PROGRAM), str(self._steps_file(name)), str(self.shape.n_elems), str(step_s),
            self.shape.data,
        ]  # fmt: skip
