"""python tests/pushed_block.py: the modules that a pushed block passes, in worker, master and slave.

A run of one cluster and one slave on loopback; its Python calls are noted (sys.setprofile) over some exchanges, so that
what is done once in a while is among them. tests/golden/pushed_block.txt has what was found: a merge shows as a
difference. Exit code 1 where it is another; --write writes it. Modules that only watch, or are tables, are not counted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

from support.repository import ROOT
from support.waiting import until
from support.whole_run import NumpyCluster, WholeRun

GOLDEN = ROOT / "tests" / "golden" / "pushed_block.txt"
LOG = "PUSHED_BLOCK_LOG"
"""A folder: a process that finds it notes modules from SIGUSR1 to SIGUSR2 (tests/sitecustomize.py)."""

NOT_COUNTED = ("core.observe.", "core.clock", "core.ids", "core.machine", "metrics", "tape", "protos.")
EXCHANGES = 20


class Notes:
    """The modules of dips of which a function is called while it is on; made before any other thread."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.is_on = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        if self.is_on and event == "call":
            name = str(frame.f_globals.get("__name__", ""))
            if name.startswith("dips."):
                self.seen.add(name.removeprefix("dips."))

    def begin(self, *of_signal: object) -> None:
        self.is_on = True

    def write(self, *of_signal: object) -> None:
        self.is_on = False
        place = Path(os.environ[LOG], f"{os.getpid()}.txt")
        place.with_suffix(".new").write_text("\n".join(sorted(self.seen)))
        place.with_suffix(".new").rename(place)


def in_this_process() -> None:
    notes = Notes()
    signal.signal(signal.SIGUSR1, notes.begin)
    signal.signal(signal.SIGUSR2, notes.write)


def record(folder: Path) -> dict[str, list[str]]:
    """The modules of each process."""
    path = os.pathsep.join(str(ROOT / part) for part in ("src", "tests"))
    os.environ |= {LOG: str(folder), "PYTHONPATH": path}
    notes = Notes()
    with WholeRun(folder / "run", n_slaves=1, min_clusters=1) as run:
        cluster: NumpyCluster = run.cluster("a", 1, step_s=0.02)
        until(lambda: len(cluster.verdicts) > 3, "first exchanges")
        pids = {name: process.pid for name, process in run.processes.items()}
        notes.begin()
        for pid in pids.values():
            os.kill(pid, signal.SIGUSR1)
        until(lambda: len(cluster.verdicts) > 3 + EXCHANGES, "more exchanges")
        for pid in pids.values():
            os.kill(pid, signal.SIGUSR2)
        notes.write()
        found = {"worker": os.getpid(), "master": pids["master"], "slave": pids["s0"]}
        files = {role: folder / f"{pid}.txt" for role, pid in found.items()}
        until(lambda: all(file.exists() for file in files.values()), "the notes of all processes")
        run.stop(cluster)
        return {role: file.read_text().split() for role, file in files.items()}


def text_of(found: dict[str, list[str]]) -> str:
    counted = {name for names in found.values() for name in names if not any(part in name for part in NOT_COUNTED)}
    every = {name for names in found.values() for name in names}
    lines = [f"{len(counted)} modules; {len(every)} with log, tape, metrics, clock, ids and tables"]
    for role, names in found.items():
        lines += ["", f"{role}:", *(f"  {name}" if name in counted else f"  ({name})" for name in names)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/pushed_block.py", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory() as folder:
        text = text_of(record(Path(folder)))
    if write:
        GOLDEN.write_text(text)
    print(text, end="")
    return int(text != GOLDEN.read_text())


if __name__ == "__main__":
    sys.exit(main())
