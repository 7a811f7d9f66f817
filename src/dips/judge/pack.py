"""Copies what proves a run's versions into one folder, which `dips verify --replay` judges anywhere (`dips pack`).

Only files of known names and forms are copied: journal and archive, tapes, what each slave says of itself, its newest
snapshot, and recorded pushes. No key, token, log, checkpoint or text of the training data is among them. A run may be
going on: what does not agree yet is copied once more.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sqlite3
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

from dips.core.errors import ConfigError, of_disk
from dips.core.files import by_umask, make_folder
from dips.judge.facts import Pair, pair
from dips.judge.records import TRIES, find_tapes, master_directory
from dips.judge.replay import FOLDER as PUSHES
from dips.judge.verify import VerifyReport, verify_run
from dips.master.archive import FILE_NAME
from dips.master.archive import FOLDER as ARCHIVE
from dips.master.journal import connect_to_read
from dips.slave.disk import IDENTITY

SUMS = "SHA256SUMS"
"""Of all other files, in the form of sha256sum."""


def pack_run(run_dir: Path, to: Path, until: str = "", without: Collection[str] = ()) -> VerifyReport:
    """Copy, and verify the copy, with a replay. until: no pushes of later rounds. without: as verify_run().

    Raises ConfigError when the folder is not empty or inside of the run's, or the run recorded no pushes.
    """
    last = _round(until) if until else None
    if to.resolve().is_relative_to(run_dir.resolve()):
        raise ConfigError(f"{to} is inside of the run's directory, where it would be read as a part of the run")
    if to.is_file() or (to.is_dir() and any(to.iterdir())):
        raise ConfigError(f"{to} is not empty: give a new folder")
    if not _rounds(run_dir, last):
        raise ConfigError(
            f"{run_dir} has no recorded pushes{f' up to round {until}' if until else ''}: start the slaves with "
            "--record-pushes (record_pushes = true in a run's file)"
        )
    try:
        for left in reversed(range(TRIES)):
            try:
                _copy_snapshots(run_dir, to)
                _copy_records(run_dir, to)
            except FileNotFoundError:  # a live run has replaced it
                if not left:
                    raise
            else:
                if verify_run(to, without=without).ok:
                    break
        for path in _rounds(run_dir, last):
            _copy(run_dir, path, to)
            for item in json.loads(path.read_bytes())["accepted"]:
                _copy(run_dir, _named(path, item["file"]), to)
        report = verify_run(to, replay=True, allow_skipped=last is not None, without=without)
        _write_sums(to)
    except OSError as error:
        raise of_disk(error, f"{error.filename or to}: {error.strerror}; {to} is not complete") from error
    except sqlite3.Error as error:
        raise ConfigError(f"the journal cannot be copied to {to} ({error}): it is not complete") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"a record of a slave in {run_dir} cannot be read ({error!r}): it was changed") from error
    return report


def _round(name: str) -> Pair:
    match = re.fullmatch(r"r(\d+)\.(\d+)", name)
    if match is None:
        raise ConfigError(f"{name!r} is not a round: write it as r1.7")
    return int(match[1]), int(match[2])


def _rounds(run_dir: Path, last: Pair | None) -> list[Path]:
    """The slaves' records of rounds, up to the last one that is wanted."""
    found = run_dir.rglob(f"{PUSHES}/round-*.json")
    return [path for path in found if last is None or _round(path.stem.removeprefix("round-")) <= last]


def _named(record: Path, name: str) -> Path:
    """The file that a record names, which is beside it. Raises ValueError for any other name than a slave gives."""
    if not re.fullmatch(r"[\w.-]+\.safetensors", name):
        raise ValueError(f"{record} names the file {name!r}")
    return record.with_name(name)


def _copy_snapshots(run_dir: Path, to: Path) -> None:
    """What each slave says of itself, and its newest snapshot: all that it has of older ones proves no more."""
    for identity in run_dir.rglob(IDENTITY):
        folder = identity.parent
        for old in to.joinpath(folder.relative_to(run_dir)).glob("manifest-*.json"):
            old.unlink()  # of an earlier try
        for name in (IDENTITY, "promise.json"):
            if (folder / name).is_file():
                _copy(run_dir, folder / name, to)
        bodies = {path: json.loads(path.read_bytes())["body"] for path in folder.glob("manifest-*.json")}
        newest = max(bodies, key=lambda path: pair(str(bodies[path]["version"])) or (0, 0), default=None)
        if newest is not None:
            _copy(run_dir, newest, to)
            _copy(run_dir, _named(newest, bodies[newest]["file"]), to)


def _copy_records(run_dir: Path, to: Path) -> None:
    """In the order in which read_run() reads a live run, and nothing large between them."""
    master, tapes = master_directory(run_dir), find_tapes(run_dir)
    for path in (path for path, role in tapes.items() if role != "slave"):
        _copy(run_dir, path, to)
    with (
        closing(connect_to_read(master / FILE_NAME)) as source,
        closing(sqlite3.connect(_target(run_dir, master / FILE_NAME, to))) as target,
    ):
        source.backup(target)
        target.execute("PRAGMA journal_mode=DELETE")  # one file, which reading does not change
    for path in (master / ARCHIVE).glob("*.jsonl"):
        _copy(run_dir, path, to)
    for path in (path for path, role in tapes.items() if role == "slave"):
        _copy(run_dir, path, to)


def _copy(run_dir: Path, path: Path, to: Path) -> None:
    with path.open("rb") as source, open(_target(run_dir, path, to), "wb", opener=by_umask) as target:
        shutil.copyfileobj(source, target)


def _target(run_dir: Path, path: Path, to: Path) -> Path:
    if not path.resolve().is_relative_to(run_dir.resolve()):
        raise ConfigError(f"{path} leads out of {run_dir}, to what may be no record: pack a copy made by cp -rL")
    target = to / path.relative_to(run_dir)
    make_folder(target.parent)
    return target


def _write_sums(to: Path) -> None:
    lines = []
    for path in sorted(path for path in to.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.relative_to(to)}\n")
    with open(to / SUMS, "w", opener=by_umask) as sums:
        sums.writelines(lines)
