"""A run of a cluster of several ranks and one of one process, whose ranks are killed one after the other.

The ranks that are left must end by themselves; all of them are started again, as torchrun does, and the run goes on.
"""

from __future__ import annotations

import functools
import itertools
import signal
from pathlib import Path
from typing import Any

from support.fork_server import ForkServer
from support.judged_run import JudgedRun
from support.parallel_process import TOKENS
from support.parallel_run import RankedCluster
from support.waiting import until
from support.whole_run import NumpyCluster

from dips.core.errors import FatalError, Refused, RetryLater
from dips.core.ids import Incarnation
from dips.local.log_files import tape_path

STEP_S = 0.01
LONG = 1_000_000
"""Steps of a loop that the run ends."""

PHASES: tuple[tuple[str, str], ...] = (
    ("before the push's copy", "worker.push.before_copy=kill"),
    ("in the middle of a push", "worker.push.before_chunk=1*off->kill"),
    ("after a push", "worker.push.after_last_chunk=kill"),
    ("in the middle of a pull", "worker.pull.before_chunk=1*off->kill"),
    ("after a pull", "worker.pull.after_last_chunk=kill"),
    ("before the swap", "worker.install.before_swap=kill"),
    ("after the swap", "worker.install.after_swap=kill"),
)
"""What a rank can be killed at, and the failpoint that does it."""

LEADERS_PHASES: tuple[tuple[str, str], ...] = (
    ("as the ticket comes", "session.BEGINNING_PUSH.ticket=kill"),
    ("before the master knows that a push is complete", "worker.rpc.before_FinishPush=kill"),
    ("after the master knows, before the leader does", "worker.rpc.after_FinishPush=kill"),
    ("as the verdict comes", "session.AWAITING.verdict=kill"),
)
"""What only the leader passes, which alone talks to the master."""


class RankKillRun(JudgedRun):
    def __init__(self, directory: Path, server: ForkServer, kind: str) -> None:
        super().__init__(
            directory, 2, server=server, chunk_bytes=4096, grace_s=0.2, linger_s=2.0, round_timeout_s=4.0,
            heartbeat_s=0.4, evict_after_beats=4, verdict_wait_s=10.0,
        )  # fmt: skip
        self._forks = server
        self._kind = kind
        self._lives = itertools.count()
        self.folders: list[Path] = []
        self._started: list[RankedCluster] = []

    def _begin(self) -> None:
        super()._begin()
        self.ranked = self._start_ranked()
        self.other = self._start("one", "b", 1)
        until(functools.partial(self._published_after, 0), "nothing was published")

    def _end(self) -> None:
        for cluster in self._started:
            for process in cluster.ranks:
                process.kill()
        super()._end()

    def kill_at(self, rank: int, phase: str, failpoint: str) -> None:
        """Kill a rank at a failpoint; returns once the ranks, started again, have had a part in a published version."""
        before, victims = self._incarnation(), self.ranked
        log = victims.folder / "failpoints"
        why_not = self._forks.arm(victims.ranks[rank], failpoint, log)
        # It may have died of it before it could answer.
        assert not why_not or log.exists(), f"rank {rank} cannot be armed: {why_not}\n{victims.logs()}"
        what = f"rank {rank} of {self._kind} did not die {phase}"
        until(lambda: victims.ranks[rank].poll() is not None, what)
        assert log.exists(), f"rank {rank} ended by itself: {victims.logs()}"
        codes = victims.codes()  # which raises where a rank waits for ever
        death = f"rank {rank} died {phase}: {codes}"
        expected = [-signal.SIGKILL if other == rank else FatalError.exit_code for other in range(len(codes))]
        assert codes == expected, f"{death}: {victims.logs()}"
        for other in {*range(len(codes))} - {rank}:
            said = victims.log(other)
            assert sum(line.startswith("FatalError: ") for line in said.splitlines()) == 1, f"{death}: {victims.logs()}"
            assert "Traceback" not in said, f"{death}: {victims.logs()}"
        self.ranked = self._start_ranked()
        until(functools.partial(self._is_back, before), f"the ranks did not come back after {death}")
        applied = self.applied_tokens("a")
        until(lambda: self.applied_tokens("a") > applied, f"nothing was applied after {death}")

    def _is_back(self, before: Incarnation | None) -> bool:
        ended = [process.poll() for process in (*self.ranked.ranks, *self.other.ranks)]
        assert not any(code is not None for code in ended), f"{ended}: {self.ranked.logs()}\n{self.other.logs()}"
        now = self._incarnation()
        return now is not None and now != before

    def _incarnation(self) -> Incarnation | None:
        try:
            found = [each for each in self.status().clusters if each.cluster_id == "a" and each.alive]
        except (Refused, RetryLater):
            return None
        return found[0].incarnation if found else None

    def judge(self) -> None:
        super().judge()
        assert 0 < self.applied_tokens("a") <= TOKENS * self.steps_made(), "more tokens were counted than trained"

    def stop(self, *clusters: NumpyCluster) -> None:
        super().stop()
        for cluster in (self.ranked, self.other):
            codes = cluster.codes()
            assert set(codes) == {0}, f"{codes}: {cluster.logs()}"
        for name, process in self.processes.items():
            assert process.wait() == 0, f"{name}: {self.log(name)}"

    def steps_made(self) -> int:
        """Of cluster a in all its lives; a step that only some ranks began counts."""
        return sum(max(path.stat().st_size for path in folder.glob("steps-*")) for folder in self.folders)

    def _start_ranked(self) -> RankedCluster:
        return self._start(self._kind, "a", 0)

    def _start(self, kind: str, name: str, number: int) -> RankedCluster:
        folder = self.directory / "ranks" / f"{name}-{next(self._lives)}"
        if name == "a":
            self.folders.append(folder)
        environment = {
            "DIPS_MASTER": self.address, "DIPS_RUN": "test", "DIPS_CLUSTER": name, "DIPS_INSECURE": "1",
            "DIPS_WORKER_TAPE": str(tape_path(self.directory, name)),
        }  # fmt: skip
        options: dict[str, Any] = {"number": number, "steps": LONG, "step_s": STEP_S, "unrecorded": True}
        self._started.append(RankedCluster.start(self._forks, kind, folder, environment, **options))
        return self._started[-1]

    def _published_after(self, v: int) -> bool:
        return self.version() > v
