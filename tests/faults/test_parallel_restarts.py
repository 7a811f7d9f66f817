"""torchrun --max-restarts with checkpoints: a rank is killed, all are started again, and go on from where they were.

The smoke form runs always: one kill. The long tier (`pytest --long`) kills each rank in turn.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from os import kill
from pathlib import Path
from typing import Any

import pytest
from support.dips_command import ROOT, children, ended, started
from support.judged_run import JudgedRun
from support.waiting import until

from dips.core.net.security import INSECURE
from dips.core.observe.tape import read_tape
from dips.local.log_files import tape_path
from dips.local.operator_client import OperatorClient

TOKENS = 8 * 32
"""Of one batch of the examples."""

STEPS = 200
"""Of the examples' loops, whatever happens to them."""

COUNTED = """
import os, runpy, sys
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_post_hook

made = Path(sys.argv[1], "steps-" + os.environ["RANK"]).open("ab", buffering=0)
register_optimizer_step_post_hook(lambda *_: made.write(b"."))
sys.path.insert(0, str(Path(sys.argv[2]).parent))
runpy.run_path(sys.argv[2], run_name="__main__")
"""
"""Runs an example, and adds a byte to a file for each step that a rank makes, in all of its lives."""


def pid_of_rank(torchrun: int, rank: int) -> int:
    """Of its present life. Raises StopIteration while there is none."""
    words = f"RANK={rank}".encode()
    return next(pid for pid in children(torchrun) if words in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def events(run: JudgedRun, kind: str) -> list[dict[str, Any]]:
    path = tape_path(run.directory, "a")
    return [event for event in read_tape(path) if event["kind"] == kind] if path.exists() else []


def wait(torchrun: subprocess.Popen[bytes], log: Path, run: JudgedRun, kind: str, n: int) -> None:
    """Until there are n events of this kind."""

    def are_there() -> bool:
        assert torchrun.poll() is None, log.read_text()
        return len(events(run, kind)) >= n

    until(are_there, f"{n} events {kind!r}", log)


def play(directory: Path, example: str, killed: Sequence[int], coordinates: int) -> None:
    """coordinates: how many of the ranks have data of their own."""
    with JudgedRun(directory / "run", chunk_bytes=4096, grace_s=0.2, heartbeat_s=0.4) as run:
        script, log = directory / "counted.py", directory / "torchrun.log"
        script.write_text(COUNTED)
        torchrun = ("-m", "dips.worker.torchrun", "--standalone", "--nproc_per_node", 2, "--max-restarts", len(killed))
        given = {
            "DIPS_MASTER": run.address, "DIPS_RUN": "test", "DIPS_CLUSTER": "a", "DIPS_INSECURE": "1",
            "DIPS_WORKER_CHECKPOINT_DIR": str(directory / "checkpoints"), "DIPS_WORKER_CHECKPOINT_EVERY_S": "0",
            "DIPS_WORKER_RESUME": "1", "DIPS_WORKER_TAPE": str(tape_path(run.directory, "a")),
        }  # fmt: skip
        command = (sys.executable, *torchrun, script, directory, ROOT / "examples" / example)
        with started(*command, log=log, cwd=directory, **given) as ranks:
            for life, rank in enumerate(killed):
                wait(ranks, log, run, "installed", len(events(run, "installed")) + 3)
                wait(ranks, log, run, "checkpoint", 1)
                kill(pid_of_rank(ranks.pid, rank), signal.SIGKILL)
                wait(ranks, log, run, "resumed", life + 1)
            assert ended(ranks, log) == 0, log.read_text()
        with OperatorClient(run.address, security=INSECURE) as operator:
            operator.stop("the test is over")
        assert [process.wait() for process in run.processes.values()] == [0] * len(run.processes)
        run.judge()
        applied, made = run.applied_tokens("a"), [(directory / f"steps-{rank}").stat().st_size for rank in range(2)]
        assert STEPS < max(made), "steps after a checkpoint were made again"
        assert STEPS * TOKENS * coordinates <= applied <= max(made) * TOKENS * coordinates, (applied, made)
        assert "step 200: " in log.read_text(), "the loop counted on"
        assert len(events(run, "joined")) == len(killed) + 1


def test_smoke_torchrun_starts_ranks_again_from_their_checkpoint(tmp_path: Path) -> None:
    play(tmp_path, "fsdp_loop.py", [1], 2)


@pytest.mark.long
@pytest.mark.parametrize(("example", "coordinates"), [("fsdp_loop.py", 2), ("pipeline_loop.py", 1)])
def test_each_rank_in_turn(tmp_path: Path, example: str, coordinates: int) -> None:
    play(tmp_path, example, [1, 0, 1], coordinates)
