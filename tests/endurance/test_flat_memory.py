"""Many rounds in a row: no process holds more memory at the end than when it had warmed up."""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.cluster_process import command
from support.fork_server import ForkedProcess
from support.repository import TESTS
from support.waiting import until
from support.whole_run import WholeRun

from dips.slave.data_server import PAGE_BYTES

N_ELEMS = 1 << 18
"""A model of about 1 MiB: one vector of it forgotten in each round would be seen within a few rounds."""

MIB = 1 << 20
CLUSTERS = ("a", "b")
SAMPLES = 20


@contextmanager
def clusters(run: WholeRun) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DIPS_")}
    started = {}
    try:
        for name in CLUSTERS:
            with (run.directory / f"{name}.log").open("ab") as log:
                started[name] = subprocess.Popen(
                    command(name, run.address, elems=N_ELEMS, own_data=True),
                    stdout=log,
                    stderr=log,
                    env={**environment, "PYTHONPATH": str(TESTS)},
                )
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def wait_for_version(run: WholeRun, processes: Collection[subprocess.Popen[bytes] | ForkedProcess], v: int) -> None:
    def dead() -> bool:
        return any(process.poll() is not None for process in processes)

    until(lambda: run.version() >= v or dead(), f"version {v}")
    assert not dead(), "a process has ended: see its log"


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


@pytest.mark.parametrize(
    ("rounds", "durability"),
    [
        (60, "sync"),
        pytest.param(1000, "sync", marks=pytest.mark.long),
        pytest.param(1000, "async", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(3000)
def test_memory_is_flat(rounds: int, durability: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first third may grow: caches, buffers of frames and the interpreter's own pools."""
    knobs: dict[str, Any] = {"sync_every": 2, "grace_s": 20.0, "durability": durability, "chunk_bytes": 128 << 10}
    resident: dict[str, list[int]] = {}
    with WholeRun(tmp_path, 2, **knobs) as run, clusters(run) as trained:
        processes = {**run.processes, **trained}
        for sample in range(1, SAMPLES + 1):
            wait_for_version(run, processes.values(), rounds * sample // SAMPLES)
            for name, process in processes.items():
                resident.setdefault(name, []).append(resident_bytes(process.pid))
    third = SAMPLES // 3
    grown = {
        name: statistics.median(samples[-third:]) - statistics.median(samples[third : 2 * third])
        for name, samples in resident.items()
    }
    with capsys.disabled():
        print(" [" + ", ".join(f"{name} {by / MIB:+.1f} MiB" for name, by in grown.items()) + "] ", end="")
    assert max(grown.values()) < 8 * MIB, {name: [n // MIB for n in samples] for name, samples in resident.items()}
