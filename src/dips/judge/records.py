"""Finds and reads what a run's processes recorded: journal, tapes, manifests, snapshots. It must never write.

A run may be going on: tapes of the master and of clusters are read first, then the journal, then the slaves' tapes, so
that whatever the first ones say is covered by what is read after them. What was added to the first ones meanwhile is
read at the end: it covers what the journal says.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dips.core.errors import ConfigError, FatalError, RetryLater
from dips.core.observe.tape import CHAIN, HEAD, read_chained
from dips.judge.facts import Fact
from dips.master.archive import FILE_NAME, FOLDER, JournalRecord
from dips.master.journal import read_content, read_newest
from dips.slave import snapshot_files as manifests
from dips.slave.backup import FOLDER as BACKUP
from dips.slave.snapshot_files import HEADER_BYTES, SnapshotError, read_snapshot

T = TypeVar("T")

ROLES = ("master", "slave", "worker", "launch")
TRIES = 5
"""How often a record is read again that a live run replaced while it was read."""


@dataclass
class TapeRead:
    """What was read of one process's tape."""

    files: dict[Path, int] = field(default_factory=dict)  # each with its lines
    last_kind: str = ""  # of its last line
    lost: bool = False  # it lost lines to a full disk


@dataclass(frozen=True)
class StoredManifest:
    """A manifest, and how many elements of each tensor in its snapshot are not finite."""

    slave: str
    path: Path
    body: Mapping[str, Any]
    non_finite: Mapping[str, int]


@dataclass
class RunRecords:
    """Everything that was recorded of a run."""

    run_dir: Path
    run_id: str = ""
    journal: list[dict[str, Any]] = field(default_factory=list)  # the content of the records
    rows: list[JournalRecord] = field(default_factory=list)  # the same records as the journal's file has them
    # records of other journals of the run, by their folder: of a standby, or of a master that was taken over from
    others: dict[Path, list[JournalRecord]] = field(default_factory=dict)
    ledger: Mapping[str, Any] | None = None
    whole: bool = True
    lines: dict[str, list[Fact]] = field(default_factory=lambda: {role: [] for role in ROLES})
    manifests: list[StoredManifest] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # what is there and cannot be used
    unproven: list[str] = field(default_factory=list)  # what no digest or other record confirms
    notes: list[str] = field(default_factory=list)  # what is missing
    tapes: dict[tuple[str, str], TapeRead] = field(default_factory=dict)  # by the role and name of its process
    # lines of masters and clusters that were written while the rest was read
    later: list[Fact] = field(default_factory=list)

    def all_lines(self, role: str) -> list[Fact]:
        """The lines of a role's tapes, with those that live processes wrote while the journal was read."""
        return [*self.lines[role], *(line for line in self.later if line.source == role)]


def read_run(run_dir: Path, keep: Callable[[str, str], bool] | None = None, files: bool = True) -> RunRecords:
    """Read a run's directory, finished or live.

    keep: whether a tape's line is wanted, by role and kind. files: whether snapshots are read, too. Raises
    ConfigError when there is no journal or a record cannot be read, FatalError when the journal is damaged.
    """
    records = RunRecords(run_dir)
    tapes = find_tapes(run_dir)
    sizes_bytes = {path: path.stat().st_size for path in tapes}
    _read_tapes(records, tapes, ("master", "worker", "launch"), keep)
    _read_journal(records, master_directory(run_dir))
    _read_tapes(records, tapes, ("slave",), keep)
    grown = {path: role for path, role in find_tapes(run_dir).items() if path.stat().st_size != sizes_bytes.get(path)}
    _read_tapes(records, grown, ("master", "worker"), keep, later=True)
    _read_manifests(records, files)
    return records


def _read_manifests(records: RunRecords, files: bool) -> None:
    """Read all manifests. A live slave may replace a listed one by a newer one: then they are listed again."""
    for _ in range(TRIES):
        # What `dips backup` is sending is another name for a snapshot of the slave, whose file it has already.
        paths = sorted(path for path in records.run_dir.rglob("manifest-*.json") if path.parent.name != BACKUP)
        found = [(path, _stored(records, path, files)) for path in paths]
        records.manifests = [item for _, item in found if item is not None]
        if len(records.manifests) == len(found) or records.problems:
            return


# ---- tapes ----


def find_tapes(run_dir: Path) -> dict[Path, str]:
    """Find every tape below the directory, whatever its name, with its process's role; those of one process in the
    order in which they were begun."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a directory: give the directory of a run of `dips demo` or `dips up`")
    found: list[tuple[str, str, float, Path]] = []
    for path in run_dir.rglob("*.jsonl"):
        first = _first_line(path) if path.parent.name != FOLDER else None
        if first is not None:
            wall_s = first["wall_s"]
            found.append((first["role"], str(first["name"]), wall_s if isinstance(wall_s, float | int) else 0.0, path))
    return {path: role for role, _, _, path in sorted(found)}


def _first_line(path: Path) -> dict[str, Any] | None:
    """A tape's first event; None for no tape or an incomplete line. Raises ConfigError for a damaged tape."""
    begin = b""
    try:
        with path.open("rb") as file:
            begin = file.read(1 << 20)
        first = json.loads(begin.partition(b"\n")[0])
    except (OSError, ValueError):
        first = None
    if isinstance(first, dict) and all(name in first for name in HEAD) and first["role"] in ROLES:
        return first
    if f',"{CHAIN}":"'.encode() in begin:
        raise ConfigError(f"line 1 of tape {path} is not an event: the file was changed or damaged; restore it")
    return None


def _read_tapes(
    records: RunRecords,
    tapes: Mapping[Path, str],
    roles: Iterable[str],
    keep: Callable[[str, str], bool] | None,
    later: bool = False,
) -> None:
    """Read the tapes of these roles. later: only what was written on them since they were read."""
    seen = {path: n for tape in records.tapes.values() for path, n in tape.files.items()}
    for path in (path for role in roles for path, said in tapes.items() if said == role):
        bare = 0
        for event, vouched in itertools.islice(read_chained(path), seen.get(path, 0), None):
            line = _line(event, path)
            bare += not vouched
            tape = records.tapes.setdefault((line.source, line.who), TapeRead())
            tape.files[path] = tape.files.get(path, 0) + 1
            tape.last_kind = line.kind
            if line.kind == "gap":
                tape.lost = True
                lost = line.fields.get("lost")
                records.notes.append(f"the tape of {line} lost {lost} events: its disk was full")
            if keep is None or keep(line.source, line.kind):
                (records.later if later else records.lines.setdefault(line.source, [])).append(line)
        if bare and not seen.get(path):
            records.unproven.append(f"{bare} lines of tape {path} have no digests: an older release wrote them")


def _line(event: dict[str, Any], path: Path) -> Fact:
    try:
        wall_s, _, role, name, kind, cause = (event.pop(key) for key in HEAD)
        return Fact(str(role), str(name), str(kind), event, float(wall_s), str(cause))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"a line of tape {path} is not an event ({error!r}): the file was changed") from error


# ---- the master's directory ----


def master_directory(run_dir: Path) -> Path:
    """The folder of the run's journal: of several the one with the newest epoch, which is a take-over's, and of the
    same epoch the one in `master`. Raises ConfigError."""
    found = sorted(path.parent for path in run_dir.rglob(FILE_NAME))
    if not found:
        raise ConfigError(
            f"{run_dir} has no master's journal ({FILE_NAME}): give the directory of a run of `dips demo` or `dips up`"
        )
    usual = (run_dir / "master", run_dir)
    return found[0] if not found[1:] else max(found, key=lambda folder: (_epoch(folder), folder in usual))


def _epoch(master: Path) -> int:
    """The newest epoch of a journal; -1: it cannot be read."""
    try:
        return read_newest(master)[0]
    except FatalError:
        return -1


def _parsed(master: Path, text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"a record of the journal in {master} is not JSON ({error}): it was changed") from error
    if not isinstance(record, dict) or "kind" not in record:
        raise ConfigError(f"a record of the journal in {master} has no kind: it was changed")
    return record


def _read_journal(records: RunRecords, master: Path) -> None:
    content = _again(lambda: read_content(master))
    records.rows = content.records
    records.journal = [_parsed(master, row.record_json) for row in content.records]
    records.run_id = content.run_id
    for folder in sorted(path.parent for path in records.run_dir.rglob(FILE_NAME)):
        if folder != master:
            try:
                other = _again(partial(read_content, folder))
            except FatalError as error:
                records.problems.append(str(error))
                continue
            if other.run_id == content.run_id:
                records.others[folder] = other.records
    if content.pruned is not None:
        records.whole = False
        records.notes.append(str(content.pruned))
    first, last = content.missing
    if first <= last:
        records.whole = False
        records.unproven.append(
            f"records {first} to {last} of the journal in {master} are missing, and it does not say that they were "
            f"deleted to free disk space: restore the files of {FOLDER}/"
        )
    if not content.has_digests:
        records.unproven.append(
            f"the journal in {master} has no digests, because an older release wrote it: changes cannot be detected"
        )
    if content.snapshot_json is not None:
        path = master / FILE_NAME
        try:
            raw = json.loads(content.snapshot_json)
        except ValueError as error:
            raise ConfigError(f"the newest state in {path} is not JSON ({error}): it was changed") from error
        records.ledger = raw if isinstance(raw, dict) else {}


def _again(read: Callable[[], T]) -> T:
    """Read, and try again: a live master may move old records to its archive, or delete the oldest, meanwhile."""
    for _ in range(TRIES - 1):
        try:
            return read()
        except RetryLater as later:
            time.sleep(min(later.retry_after_s, 1.0))
    return read()


# ---- the slaves' directories ----


def _stored(records: RunRecords, path: Path, files: bool) -> StoredManifest | None:
    """Read a manifest; None when a live slave removed it meanwhile, or it is damaged."""
    for attempt in range(TRIES):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            records.problems.append(f"{path} cannot be read: {error.strerror}")
            return None
        try:
            found = manifests.decode(data, str(path))
            counts = non_finite(path.with_name(found.file), found) if files else {}
            return StoredManifest(found.slave_id, path, json.loads(data)["body"], counts)
        except (SnapshotError, OSError) as error:
            if attempt == TRIES - 1 or _unchanged(path, data):
                said = f"{error.filename} cannot be read: {error.strerror}" if isinstance(error, OSError) else error
                records.problems.append(str(said))
                return None
    return None


def _unchanged(path: Path, data: bytes) -> bool:
    """Whether the manifest is the same as before, so that the file that it names should have been complete."""
    try:
        return path.read_bytes() == data
    except OSError:
        return False


def non_finite(path: Path, manifest: manifests.SnapshotManifest) -> dict[str, int]:
    """Count the elements of theta and momentum that are NaN or infinite. Raises SnapshotError and OSError."""
    with path.open("rb") as file:
        head = read_snapshot(file, str(path), named_by=manifest)
    shape = (2, head.n_elems)
    if os.path.getsize(path) < HEADER_BYTES + 8 * head.n_elems:
        raise SnapshotError(f"{path} is shorter than its header says")
    values = np.memmap(path, np.float32, "r", HEADER_BYTES, shape) if head.n_elems else np.empty(shape, np.float32)
    return {name: count for name, count in zip(("theta", "momentum"), _counts(values), strict=True)}


def _counts(values: np.ndarray[Any, np.dtype[np.float32]]) -> Iterator[int]:
    step = 1 << 22
    for row in values:
        yield sum(int(np.count_nonzero(~np.isfinite(row[at : at + step]))) for at in range(0, len(row), step))
