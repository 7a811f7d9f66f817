"""Runs a script of tests/support once for each rank of a torch.distributed world."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support import live
from support.dips_command import environment
from support.repository import ROOT

PATHS = os.pathsep.join(str(ROOT / folder) for folder in ("tests", "src"))


def run_ranks(script: str, n_ranks: int, folder: Path, *kinds: str, device: str = "cpu") -> list[tuple[int, list[str]]]:
    """Exit code and lines of each rank of `python -m support.SCRIPT RANK N_RANKS FOLDER KIND...`. device: of the
    models of support.parallel_models.
    """
    added = {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "TEST_DEVICE": device}
    with live.run(live.HEAVY):
        started = [
            subprocess.Popen(
                [sys.executable, "-m", f"support.{script}", str(rank), str(n_ranks), str(folder), *kinds],
                cwd=ROOT / "tests", env=environment(added),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(n_ranks)
        ]  # fmt: skip
        try:
            outputs = [process.communicate()[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    return [(process.returncode, output.splitlines()) for process, output in zip(started, outputs, strict=True)]
