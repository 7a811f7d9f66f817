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
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path

from dips.core.errors import ConfigError, of_disk
from dips.core.files import by_umask, make_folder
from dips.judge.facts import Pair
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
    pushes = [path for path in run_dir.rglob(f"{PUSHES}/round-*.json") if _is_wanted(path, last)]
    if not pushes:
        raise ConfigError(
            f"{run_dir} has no recorded pushes{f' up to round {until}' if until else ''}: start the slaves with "
            "--record-pushes (record_pushes = true in a run's file)"
        )
    try:
        for path in pushes:
            named = [str(item["file"]) for item in json.loads(path.read_bytes())["accepted"]]
            for name in [path.name, *named]:
                _copy(run_dir, path.with_name(Path(name).name), to)
        for _ in range(TRIES):
            _copy_records(run_dir, to)
            report = verify_run(to, replay=True, allow_skipped=last is not None, without=without)
            if report.ok:
                break
        _write_sums(to)
    except OSError as error:
        raise of_disk(error, f"{error.filename}: {error.strerror}; {to} is not complete") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"a record of pushes in {run_dir} cannot be read ({error!r}): it was changed") from error
    return report


def _round(name: str) -> Pair:
    match = re.fullmatch(r"r(\d+)\.(\d+)", name)
    if match is None:
        raise ConfigError(f"{name!r} is not a round: write it as r1.7")
    return int(match[1]), int(match[2])


def _is_wanted(path: Path, last: Pair | None) -> bool:
    return last is None or _round(path.stem.removeprefix("round-")) <= last


def _copy_records(run_dir: Path, to: Path) -> None:
    master = master_directory(run_dir)
    for path in find_tapes(run_dir):
        text = path.read_bytes()
        with open(_target(run_dir, path, to), "wb", opener=by_umask) as file:
            file.write(text[: text.rfind(b"\n") + 1])
    with (
        closing(connect_to_read(master / FILE_NAME)) as source,
        closing(sqlite3.connect(_target(run_dir, master / FILE_NAME, to))) as target,
    ):
        source.backup(target)
        target.execute("PRAGMA journal_mode=DELETE")  # one file, which reading does not change
    for path in (master / ARCHIVE).glob("*.jsonl"):
        _copy(run_dir, path, to)
    for identity in run_dir.rglob(IDENTITY):
        for path in _of_slave(identity.parent):
            _copy(run_dir, path, to)


def _of_slave(folder: Path) -> Iterator[Path]:
    """What a slave says of itself, and its newest snapshot: all that its directory has of older ones proves no more."""
    yield from (path for name in (IDENTITY, "promise.json") if (path := folder / name).is_file())
    newest = max(folder.glob("manifest-*.json"), key=_version, default=None)
    if newest is not None:
        yield newest
        yield folder / Path(str(json.loads(newest.read_bytes())["body"]["file"])).name


def _version(manifest: Path) -> tuple[int, int]:
    timeline, _, v = str(json.loads(manifest.read_bytes())["body"]["version"]).partition(":")
    return int(timeline), int(v)


def _copy(run_dir: Path, path: Path, to: Path) -> None:
    with path.open("rb") as source, open(_target(run_dir, path, to), "wb", opener=by_umask) as target:
        shutil.copyfileobj(source, target)


def _target(run_dir: Path, path: Path, to: Path) -> Path:
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
