"""Makes tests/frozen/recorded_run.tar.xz again: `PYTHONPATH=tests python -m support.recorded_run`.

The archive is a short run of real processes, as `dips up` ran them: a tiny model, two clusters with a loop of their
own, two slaves that record pushes; a slave and a cluster are killed on the way. `dips verify --replay` of it shows that
records of an earlier version stay readable. Make it again only where a format changed, and only after the program can
read the old one or a document says how to bring it over.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.dips_command import dips, dips_started, ended, pid_of, published
from support.waiting import until

from dips.judge.verify import verify_run
from dips.local.log_files import records

ARCHIVE = Path(__file__).parents[1] / "frozen" / "recorded_run.tar.xz"
NUMBERS = ARCHIVE.with_name("recorded_run.json")

LOOP = """
import os
import time
import torch
import dips

torch.manual_seed(ord(os.environ["DIPS_CLUSTER"]))
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with dips.DiLoCo(model, optimizer, tokens_per_step=10) as sync:
    while not sync.done:
        time.sleep(0.1)
        numbers = torch.randn(8, 16)
        loss = ((model(numbers) - numbers.flip(1)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        sync.report(loss)
        optimizer.step()
"""

RUN = """
[run]
id = "recorded"
directory = {directory}
slaves = 2
insecure = true
page = false

[master]
sync_every = 10
min_clusters = 2
heartbeat_s = 0.5

[slave]
memory_bytes = "64 MiB"
record_pushes = true

[[clusters]]
id = "a"
command = {command}

[[clusters]]
id = "b"
command = {command}
"""


def record(folder: Path) -> Path:
    loop, file, run_dir, log = folder / "loop.py", folder / "run.toml", folder / "run", folder / "up.log"
    loop.write_text(LOOP)
    command = json.dumps([sys.executable, str(loop)])
    file.write_text(RUN.format(directory=json.dumps(str(run_dir)), command=command))
    with dips_started("up", file, log=log) as up:
        for name, version in (("s0", 2), ("a", 5)):
            until(lambda v=version: published(run_dir) >= v, f"version {version}", log)  # type: ignore[misc]
            os.kill(pid_of(run_dir, name), signal.SIGKILL)
        until(lambda: joins(run_dir, "a") == 2, "a joins again", log)
        last = published(run_dir) + 3
        until(lambda: published(run_dir) >= last, "versions after that", log)
        stopped = dips("stop", run_dir, "--insecure")
        if stopped.returncode != 0 or ended(up, log) != 0:
            raise RuntimeError(stopped.stderr + log.read_text())
    return run_dir


def joins(run_dir: Path, cluster: str) -> int:
    return sum(line["kind"] == "join" and line["cluster"] == cluster for line in tape_of_master(run_dir))


def tape_of_master(run_dir: Path) -> list[Mapping[str, Any]]:
    return list(records(run_dir / "master" / "master.tape.jsonl"))


def numbers_of(run_dir: Path) -> dict[str, object]:
    """What `dips verify --replay` says of the run, without its directory and without sentences."""
    report = verify_run(run_dir, replay=True)
    assert report.replayed is not None, "it was asked for"
    return {
        "exit_code": report.exit_code,
        "records": {row.name: [row.result, row.records] for row in report.rows},
        "violations": len(report.violations),
        "problems": len(report.problems),
        "unproven": len(report.unproven),
        "replayed": report.replayed.to_json(),
        "last_version": last_version(run_dir),
    }


def last_version(run_dir: Path) -> dict[str, object]:
    found = []
    for path in run_dir.rglob("manifest-*.json"):
        body = json.loads(path.read_text())["body"]
        found.append((tuple(map(int, body["version"].split(":"))), path.parent.name, body["digest"]))
    newest = max(version for version, _, _ in found)
    return {
        "version": ":".join(map(str, newest)),
        "digests": {slave: digest for version, slave, digest in sorted(found) if version == newest},
    }


def unpacked(folder: Path) -> Path:
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(folder, filter="data")
    run = folder / "run"
    for slave in list((run / "slaves").iterdir()):
        slave.rename(run / slave.name)
        (run / "tapes" / f"{slave.name}.tape.jsonl").rename(run / slave.name / "tape.jsonl")
    for cluster in "ab":
        (run / "tapes" / f"{cluster}.tape.jsonl").rename(run / f"{cluster}.jsonl")
    return run


def pack(run_dir: Path, archive: Path) -> None:
    if (run_dir / "keys").exists():
        raise RuntimeError(f"{run_dir / 'keys'}: keys must not be published")

    def plain(item: tarfile.TarInfo) -> tarfile.TarInfo:
        item.uid = item.gid = 0
        item.uname = item.gname = ""
        return item

    with tarfile.open(archive, "w:xz", preset=9) as tar:
        tar.add(run_dir, "run", filter=plain)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        made = record(Path(scratch))
        pack(made, ARCHIVE)
        NUMBERS.write_text(json.dumps(numbers_of(made), indent=1) + "\n")
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size / 1000:.0f} kB")
