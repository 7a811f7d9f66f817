"""Disks that are full, slow or failing, that lie, that are lost, and that come back from an old backup.

Each harm has to be felt (a process says so); when it is over, a version is published in the first or second round, and
`dips verify --replay` of the run so far has nothing to say. A full disk is a small tmpfs, which only root can mount.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.dips_command import ROOT, assert_verified, dips, pid_of, published
from support.fault_run import CLUSTERS, SLAVES, FaultRun
from support.fork_server import ForkServer
from support.judged_run import replayed
from support.up_run import UpRun, endless
from support.waiting import NO_LIMIT_S, until

from dips.core.errors import RetryLater
from dips.core.ids import Incarnation
from dips.master.directory import ADDRESS_NAME, LOCK_NAME, TAPE_NAME
from dips.slave.push_evidence import DIRECTORY

FULL_S = 1.5
"""How long a disk stays full after a process noticed it."""

BAD_S = 2.5
"""How long a disk fails or is slow; a round's time-out is 4 s."""

OLD_VERSIONS = 6
"""A backup is so many versions old when it is put back: nothing of it is in a ring any more."""

RING_FILES = 4
"""Of a slave that keeps three snapshots."""

ROOM_MIB = 24

EVIDENCE = frozenset({TAPE_NAME, DIRECTORY, ADDRESS_NAME, LOCK_NAME})
"""What a backup and a loss leave alone: what the run is judged by, and what belongs to a living process."""


@contextmanager
def small_disk(where: Path) -> Iterator[Path]:
    """A disk of its own that can be filled. A shell unmounts it when this process has ended, also by a kill."""
    where.mkdir(parents=True)
    holds = f'mount -t tmpfs -o size={ROOM_MIB}m tmpfs "$0" && echo there && cat; umount -l "$0"'
    command, pipe = ["sh", "-c", holds, str(where)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == b"there\n", "the small disk cannot be mounted"
        yield where
    assert shell.returncode == 0


def fill(disk: Path) -> Path:
    """Take all room that is left, to the last page."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for piece in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(piece)) == piece:
                    pass
            except OSError:
                continue
    return ballast


Away = Mapping[str, Incarnation | None]


def healed(run: FaultRun, *, versions: int = 0, may_skip: bool = False, away: Away | None = None) -> None:
    """versions: so many are waited for, until what was spoilt on a disk is overwritten, before the run is judged. away:
    clusters that are to come back, with the incarnations before."""
    run.recovered(away)
    run.healed()
    run.until_versions(versions)
    replayed(run.directory, may_skip)


class NewLines:
    """The lines of a process's log from now on."""

    def __init__(self, run: FaultRun, name: str) -> None:
        self._log = run.log_path(name)
        self._from = self._log.stat().st_size

    def have(self, *words: str) -> bool:
        """Whether one of these words is in them. Fails on a stack trace."""
        text = self._log.read_bytes()[self._from :].decode(errors="replace")
        assert "Traceback" not in text, f"a stack trace for a disk that fails: {text[-3000:]}"
        return any(word in text for word in words)


NO_ROOM = ("No space left", "make room", "is full")


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount the small disk that is to be filled")
def test_a_run_survives_full_disks_of_every_role(fork_server: ForkServer, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    places = {"s0": directory / "slaves" / "s0", "master": directory / "master", "a": directory / "checkpoints" / "a"}
    with ExitStack() as stack:
        for place in places.values():
            stack.enter_context(small_disk(place))
        with FaultRun(directory, fork_server) as run:
            run.began()
            for name, place in places.items():
                lines = NewLines(run, name)
                run.may_die.add(name)
                ballast = fill(place)
                run.until(partial(lines.have, *NO_ROOM), f"{name} did not notice its full disk")
                run.wait(FULL_S)
                ballast.unlink()
                healed(run)
                lines.have()
            run.stop()
        assert_verified(directory)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount the small disk that is to be filled")
def test_dips_up_goes_on_when_the_only_disk_has_room_again(tmp_path: Path) -> None:
    """Logs, tapes and all that a run keeps are on it, and a master and a slave die meanwhile. The status page is
    there again when there is room."""
    with small_disk(tmp_path / "disk") as disk:
        program = (sys.executable, endless(ROOT / "examples" / "own_loop.py", disk, "steps=200"))
        with UpRun(disk, dict.fromkeys("ab", program)) as run:
            run.until_version(2)
            children = Path(f"/proc/{run.launcher}/task/{run.launcher}/children")
            before = set(children.read_text().split())
            ballast = fill(disk)
            for name in ("s0", "master"):
                os.kill(pid_of(run.directory, name), signal.SIGKILL)
            until(lambda: set(children.read_text().split()) - before, "the launcher starts one again")
            told = dips("page", run.directory)
            assert told.returncode in (0, RetryLater.exit_code), told.stderr  # a master that cannot write may be gone
            time.sleep(FULL_S)
            ballast.unlink()
            run.until_version(published(run.directory) + 3)
            assert page_of(run.directory)["state"]["run"]["id"] == "mine"
            run.stop()
            assert "Traceback" not in "".join(log.read_text() for log in (run.log, *run.logs.values()))


def page_of(run_directory: Path) -> Mapping[str, Any]:
    """What the status page shows now to a person who opens the link that `dips page` prints."""
    link = dips("page", run_directory)
    assert link.returncode == 0, link.stderr
    (url,) = [word for word in link.stdout.split() if word.startswith("http")]
    https = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())  # the run's own authority
    browser = urllib.request.build_opener(https, urllib.request.HTTPCookieProcessor())
    assert b"<html" in browser.open(url, timeout=NO_LIMIT_S).read()
    shown: Mapping[str, Any] = json.load(browser.open(url.partition("?")[0] + "snapshot.json", timeout=NO_LIMIT_S))
    return shown


# ---- disks that fail or are slow for a while ----


@dataclass(frozen=True)
class Bad:
    """A disk of `process` that does `action` at these failpoints, each time, for a while. goes_on: versions are
    published all the same."""

    process: str
    points: tuple[str, ...]
    action: str
    goes_on: bool


BAD: tuple[Bad, ...] = (
    Bad("s0", ("slave.ring.before_fsync",), "error", False),
    Bad("s1", ("slave.manifest.before_fsync", "slave.directory.before_fsync"), "error", False),
    Bad("s0", ("slave.round.before_fsync",), "error", False),
    Bad("a", ("worker.checkpoint.before_fsync",), "error", True),
    Bad("b", ("worker.push_record.before_write",), "error", True),
    Bad("master", ("master.archive.before_fsync",), "error", True),
    Bad("s0", ("slave.ring.before_fsync", "slave.manifest.before_fsync"), "sleep(0.3)", True),
    Bad("s1", ("slave.directory.before_fsync",), "sleep(0.3)", True),
    Bad("master", ("master.journal.before_commit",), "sleep(0.15)", True),
    Bad("c", ("worker.checkpoint.before_fsync",), "sleep(0.5)", True),
)


def felt(run: FaultRun, process: str) -> bool:
    return bool(run.fired(process))


@pytest.mark.long
def test_a_run_survives_disks_that_fail_or_are_slow_for_a_while(fork_server: ForkServer, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with FaultRun(directory, fork_server) as run:
        run.began()
        for bad in BAD:
            run.may_die.add(bad.process)
            run.mark(bad.process)
            run.arm(bad.process, "; ".join(f"{point}={bad.action}" for point in bad.points))
            run.until(partial(felt, run, bad.process), f"{bad} was not felt")
            began_s = time.time()
            run.wait(BAD_S)
            if bad.goes_on:
                run.until(partial(run.published_since, began_s), f"{bad}: nothing was published meanwhile")
            run.arm(bad.process, "")
            healed(run)
        run.stop()
    assert_verified(directory)
    shutil.rmtree(directory)


# ---- disks that lie, are lost, or are put back ----


def newest_snapshot(place: Path) -> tuple[Path, Path]:
    """(manifest, ring file) of the version that a slave's directory holds last."""
    manifest = max(place.glob("manifest-*.json"), key=lambda path: path.stat().st_mtime_ns)
    return manifest, place / manifest.name.replace("manifest", "ring").replace(".json", ".safetensors")


def flip(path: Path, at: float = 0.75) -> None:
    """One bit is another one, at this share of the file."""
    with path.open("r+b") as file:
        place = int(path.stat().st_size * at)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x20]))


def flip_newest_snapshot(run: FaultRun, name: str) -> None:
    flip(newest_snapshot(run.place(name))[1])


def tear_newest_snapshot(run: FaultRun, name: str) -> None:
    """The last block never reached the disk."""
    ring = newest_snapshot(run.place(name))[1]
    with ring.open("r+b") as file:
        file.truncate(ring.stat().st_size - 512)


def flip_newest_manifest(run: FaultRun, name: str) -> None:
    flip(newest_snapshot(run.place(name))[0], 0.5)


def flip_every_snapshot(run: FaultRun, name: str) -> None:
    for ring in run.place(name).glob("ring-*.safetensors"):
        flip(ring)


def lose_everything(run: FaultRun, name: str) -> None:
    clear(run.place(name))


def flip_newest_checkpoint(run: FaultRun, name: str) -> None:
    flip(max(run.place(name).glob("checkpoint-*.safetensors"), key=lambda path: path.stat().st_mtime_ns))


def tear_newest_checkpoint(run: FaultRun, name: str) -> None:
    newest = max(run.place(name).glob("checkpoint-*.json"), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:-40])


def clear(place: Path) -> None:
    for entry in place.iterdir():
        if entry.name not in EVIDENCE:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


Harm = Callable[[FaultRun, str], None]

LIES: tuple[tuple[str, Harm], ...] = (
    ("s0", flip_newest_snapshot),
    ("s1", tear_newest_snapshot),
    ("s0", flip_newest_manifest),
    ("s1", flip_every_snapshot),
    ("s0", lose_everything),
    ("a", flip_newest_checkpoint),
    ("b", tear_newest_checkpoint),
    ("c", lose_everything),
)


@pytest.mark.long
def test_a_run_survives_disks_that_lie_or_are_lost(fork_server: ForkServer, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with FaultRun(directory, fork_server) as run:
        run.began()
        for name, harm in LIES:
            run.until_versions(3)
            run.hold(name)
            harm(run, name)
            run.release(name)
            healed(run, versions=RING_FILES)
        run.stop()
    assert_verified(directory)
    shutil.rmtree(directory)


def backup(run: FaultRun, names: Sequence[str], where: Path) -> None:
    """A copy of directories, taken while their processes are dead, so that it is one that a crash could leave."""
    for name in names:
        run.hold(name)
    for name in names:
        shutil.copytree(run.place(name), where / name, ignore=lambda _, files: EVIDENCE & set(files))
    for name in names:
        run.release(name)
    run.until(lambda: run.everyone_is_back({}), "not every process came back after the backup")
    run.healed()


def apart(run: FaultRun, name: str, where: Path) -> None:
    """Move a dead process's directory away, evidence excepted."""
    shutil.copytree(run.place(name), where, ignore=lambda _, files: EVIDENCE & set(files))
    clear(run.place(name))


def put_back(run: FaultRun, names: Sequence[str], where: Path) -> Away:
    """The clusters among them, with their incarnations."""
    before = run.incarnations()
    for name in names:
        run.hold(name)
    for name in names:
        clear(run.place(name))
        shutil.copytree(where / name, run.place(name), dirs_exist_ok=True)
    for name in names:
        run.release(name)
    return {name: before[name] for name in names if name in CLUSTERS}


@pytest.mark.long
@pytest.mark.parametrize("names", [("s1",), ("master",), ("b",), SLAVES, CLUSTERS], ids="-".join)
def test_an_old_backup_is_put_back(names: tuple[str, ...], fork_server: ForkServer, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with FaultRun(directory, fork_server) as run:
        run.began()
        run.until_versions(2)
        backup(run, names, tmp_path / "backup")
        run.until_versions(OLD_VERSIONS)
        away = put_back(run, names, tmp_path / "backup")
        healed(run, may_skip="master" in names, away=away)
        run.stop()
    assert_verified(directory)
    shutil.rmtree(directory)


@pytest.mark.long
def test_master_and_slave_put_back_at_once_wait_for_the_slaves_own_disk(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """More than the promise covers: no version is on every slave, and the journal knows the digest of none that is."""
    directory, names = tmp_path / "run", ("master", "s0")
    with FaultRun(directory, fork_server) as run:
        run.began()
        run.until_versions(2)
        backup(run, names, tmp_path / "backup")
        run.until_versions(OLD_VERSIONS)
        for name in names:
            run.hold(name)
            apart(run, name, tmp_path / "own" / name)
            shutil.copytree(tmp_path / "backup" / name, run.place(name), dirs_exist_ok=True)
            run.release(name)
        run.until(lambda: says(run, "restore a slave's directory"), "the master does not say what is missing")
        run.hold("s0")
        clear(run.place("s0"))
        shutil.copytree(tmp_path / "own" / "s0", run.place("s0"), dirs_exist_ok=True)
        run.release("s0")
        healed(run, may_skip=True)
        run.stop()
    assert_verified(directory)
    shutil.rmtree(directory)


def says(run: FaultRun, words: str) -> bool:
    status = run.status()
    return status is not None and words in status.recovery
