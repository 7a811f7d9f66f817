"""The archive of old journal records: files of JSON lines that never change once they have their final name.

A segment is flushed, renamed, and its name flushed before its records may leave the journal; after a kill in between
they are in both, and the reader takes them once. Above its size limit the archive deletes its oldest segments. It must
never hold half a segment under a segment's name, and never decide what is old (docs/architecture.md, durable state).

Every record carries a digest that covers the digest of the record before it, here as in the journal's file, so that a
changed, missing or moved record is found wherever the history is read.

Every function blocks on the disk; only the master that holds the directory's lock may call those that write.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from dips.core.errors import ConfigError, FatalError
from dips.core.observe.failpoints import failpoint
from dips.master.directory import sync_directory

FOLDER = "archive"

SEGMENT_RECORDS = 512
SEGMENT_BYTES = 4 << 20
"""A segment ends at whichever comes first. One append may have to wait until 4 MiB are written and flushed:
about 10 ms on a disk that writes 400 MB/s, in addition to its own flush."""

_NAME = re.compile(r"(\d{10,})-(\d{10,})\.jsonl\Z")


@dataclass(frozen=True)
class JournalRecord:
    """One record of the journal; entry 0 of each epoch is its EPOCH record.

    number: counts all records of the run, from 1. digest: of all other fields and of the previous record's digest;
    empty in records of a release that kept none.
    """

    epoch: int
    entry_id: int
    kind: str
    record_json: str
    number: int = 0
    digest: str = ""

    def digest_after(self, previous: str) -> str:
        """Its digest after a record with the digest `previous`: 32 hex digits."""
        text = f"{previous}\n{self.number}\n{self.epoch}\n{self.entry_id}\n{self.kind!r}\n{self.record_json}"
        return xxhash.xxh3_128_hexdigest(text.encode())

    def after(self, previous: str) -> JournalRecord:
        """The same record with its digest."""
        return replace(self, digest=self.digest_after(previous))


@dataclass(frozen=True)
class Pruned:
    """The newest record that was deleted to keep the archive's size limit: it and all before it are gone."""

    number: int

    def __str__(self) -> str:
        return f"the history begins after record {self.number}; older ones were deleted to keep the archive in its room"


@dataclass(frozen=True)
class Segment:
    """A file of the archive: records `first` to `last`, by number."""

    path: Path
    first: int
    last: int

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def records(self) -> Iterator[JournalRecord]:
        """Its records, oldest first. Raises FatalError when the file is damaged, FileNotFoundError when it is gone."""
        with self.path.open("rb") as file:
            for line in file:
                yield _record(self.path, line)


def first_digest(run_id: str) -> str:
    """The digest before the first record; it depends on the run, so that another run's history does not fit."""
    return xxhash.xxh3_128_hexdigest(f"dips journal of run {run_id}".encode())


def chained(records: Iterable[JournalRecord], previous: str, where: Path) -> Iterator[JournalRecord]:
    """The records, each checked against its digest and the one before. Raises FatalError at the first that differs."""
    for record in records:
        if record.digest != record.digest_after(previous):
            raise FatalError(
                f"{where} is damaged (record {record.number}, {record.kind!r:.40}, or the one before it is not what "
                f"was written: its digest differs): {REMEDY}"
            )
        previous = record.digest
        yield record


REMEDY = (
    "restore the master's directory from a copy; with no copy, move it away and begin a new run, or one with --rebuild "
    "if the slaves still hold a version"
)


def digest_segments(directory: Path, after: int, previous: str) -> tuple[int, str]:
    """Adds digests to the records of an older release's archive, file by file, from record `after` on.

    Every file is replaced as a whole, and a repetition gives the same digests. Returns number and digest of the last
    record. Raises OSError, and FatalError when a file is damaged.
    """
    for segment in segments(directory):
        if segment.last <= after:
            continue
        records: list[JournalRecord] = []
        for record in segment.records():
            records.append(record.after(previous))
            previous = records[-1].digest
        after = segment.last
        temporary = segment.path.with_suffix(".tmp")
        _write(temporary, records)
        _name_durably(temporary, segment.path)
    return after, previous


def segments(directory: Path) -> list[Segment]:
    """The archive of the master's `directory`, oldest first."""
    folder = directory / FOLDER
    if not folder.is_dir():
        return []
    named = ((path, _NAME.match(path.name)) for path in folder.iterdir())
    found = [Segment(path, int(match[1]), int(match[2])) for path, match in named if match]
    return sorted(found, key=lambda segment: segment.first)


def write_segment(directory: Path, records: Sequence[JournalRecord]) -> Segment:
    """Makes records durable as the next segment, which gets its name only when it is whole. Raises OSError."""
    folder = directory / FOLDER
    if not folder.is_dir():
        folder.mkdir()
        sync_directory(directory)
    for left in folder.glob("*.tmp"):  # of a master that was killed
        left.unlink()
    failpoint("master.archive.before_write")
    first, last = records[0].number, records[-1].number
    segment = Segment(folder / f"{first:010d}-{last:010d}.jsonl", first, last)
    temporary = segment.path.with_suffix(".tmp")
    _write(temporary, records)
    _name_durably(temporary, segment.path)
    return segment


def drop_segment(segment: Segment) -> None:
    """Deletes one segment; the journal must have recorded that already. Raises OSError."""
    segment.path.unlink(missing_ok=True)
    sync_directory(segment.path.parent)


def _write(path: Path, records: Sequence[JournalRecord]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(_line(record) for record in records)
        file.flush()
        failpoint("master.archive.before_fsync")
        os.fsync(file.fileno())


def _name_durably(temporary: Path, path: Path) -> None:
    failpoint("master.archive.before_rename")
    os.replace(temporary, path)
    failpoint("master.archive.after_rename")
    sync_directory(path.parent)


def _line(record: JournalRecord) -> str:
    line = {"n": record.number, "epoch": record.epoch, "entry": record.entry_id, "kind": record.kind}
    return json.dumps({**line, "record": record.record_json, "digest": record.digest}, separators=(",", ":")) + "\n"


def _record(path: Path, line: bytes) -> JournalRecord:
    try:
        row = json.loads(line.decode())
        kind, text, digest = str(row["kind"]), str(row["record"]), str(row.get("digest", ""))
        return JournalRecord(int(row["epoch"]), int(row["entry"]), kind, text, int(row["n"]), digest)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise FatalError(
            f"the archive's file {path} is damaged ({error}): restore it from a copy, or move it away to go without "
            "the decisions that it holds; the run itself does not need them"
        ) from error


# ---- journal file ----------------------------------------------------------------------------------------------------
#
# Opens, checks and upgrades the journal's SQLite file, and converts its errors.
#
# SQLite detects an invalid page, but not a changed byte within a page. So each record has a digest of the record
# and the previous digest, from `base` in the table meta on (the last record that left the file, or the beginning). The
# newest snapshot has a digest that also covers its record, and the table meta has one of all its rows.
#
# Must never make a decision, and never repair what is damaged: the damaged file is kept as it is.


SCHEMA = 3
"""Increased when an older master could no longer read the journal. 2: old records are in the archive. 3: digests."""

SCHEMAS_WITHOUT_DIGESTS = (1, 2)

FILE_NAME = "journal.sqlite3"

RECORDS = """SELECT epoch, entry_id, kind, record_json, number, digest FROM records
    WHERE (?1 IS NULL OR kind = ?1) AND number >= ?2 ORDER BY number"""

RECORDS_WITHOUT_DIGESTS = RECORDS.replace(", digest FROM", " FROM")

_TABLES = {
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "records": """CREATE TABLE records (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        epoch INTEGER NOT NULL,
        entry_id INTEGER NOT NULL,
        kind TEXT NOT NULL,
        record_json TEXT NOT NULL,
        digest TEXT NOT NULL,
        UNIQUE (epoch, entry_id)
    )""",
    "snapshot": """CREATE TABLE snapshot (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
        epoch INTEGER NOT NULL,
        entry_id INTEGER NOT NULL,
        snapshot_json TEXT NOT NULL,
        record_digest TEXT NOT NULL,
        digest TEXT NOT NULL
    )""",
}

TABLES_WITHOUT_DIGESTS = {
    "meta": _TABLES["meta"],
    "records": _TABLES["records"].replace("        digest TEXT NOT NULL,\n", ""),
    "snapshot": _TABLES["snapshot"].replace(
        ",\n        record_digest TEXT NOT NULL,\n        digest TEXT NOT NULL\n", "\n"
    ),
}
"""The statements of an older release, letter for letter as SQLite keeps them."""


def connect(path: Path, run_id: str) -> sqlite3.Connection:
    """Opens or makes the file for writing. Raises ConfigError and FatalError as Journal.open does."""
    with disk_errors_fatal(path):
        # The thread that opens and the journal's own thread use the connection in turn, never both at once.
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            _prepare(connection, path, run_id)
        except BaseException:
            connection.close()
            raise
    return connection


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Opens the file for tools, as it is now: nothing is locked or changed, and all later reads see one state.

    Raises ConfigError when a newer release wrote it, FatalError when it is damaged.
    """
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    try:
        connection.execute("BEGIN")
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        _check(connection, path, tables)
        if has_digests(connection):
            _check_content(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def has_digests(connection: sqlite3.Connection) -> bool:
    """Whether the file was written, or opened once, by a release that keeps digests."""
    return get_meta(connection.cursor(), "schema") == str(SCHEMA)


def get_meta(cursor: sqlite3.Cursor, key: str) -> str | None:
    row = cursor.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def set_meta(cursor: sqlite3.Cursor, key: str, value: str) -> None:
    _put_meta(cursor, key, value)
    _put_meta(cursor, "digest", _digest_of_meta(cursor))


def _put_meta(cursor: sqlite3.Cursor, key: str, value: str) -> None:
    cursor.execute(
        "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value)
    )


def _digest_of_meta(cursor: sqlite3.Cursor) -> str:
    rows = cursor.execute("SELECT key, value FROM meta WHERE key <> 'digest' ORDER BY key").fetchall()
    return xxhash.xxh3_128_hexdigest(repr(rows).encode())


def set_base(cursor: sqlite3.Cursor, number: int, digest: str) -> None:
    """Stores the last record before those in the file."""
    set_meta(cursor, "base", f"{number} {digest}")


def base(cursor: sqlite3.Cursor) -> tuple[int, str]:
    """Number and digest of the last record that left the file; 0 and the run's first digest when none did."""
    text = get_meta(cursor, "base")
    number, _, digest = (text or "").partition(" ")
    return whole(number), digest


def newest(cursor: sqlite3.Cursor) -> tuple[int, str]:
    """Number and digest of the newest record, in the file or in the archive."""
    row = cursor.execute("SELECT number, digest FROM records ORDER BY number DESC LIMIT 1").fetchone()
    return base(cursor) if row is None else (whole(row[0]), str(row[1]))


def put_snapshot(cursor: sqlite3.Cursor, epoch: int, entry_id: int, snapshot_json: str, record_digest: str) -> None:
    """Replaces the newest snapshot by the state after the record with this digest."""
    digest = _digest_of_snapshot(epoch, entry_id, snapshot_json, record_digest)
    row = (epoch, entry_id, snapshot_json, record_digest, digest)
    cursor.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?, ?, ?, ?)", row)


def get_snapshot(connection: sqlite3.Connection, path: Path) -> str | None:
    """The newest snapshot; None when nothing was ever decided. Raises FatalError when it is damaged."""
    if not has_digests(connection):
        row = connection.execute("SELECT snapshot_json FROM snapshot").fetchone()
        return None if row is None else str(row[0])
    row = connection.execute("SELECT * FROM snapshot").fetchone()
    if row is None:
        return None
    only_row, *fields, digest = row
    if only_row != 1 or digest != _digest_of_snapshot(*fields):
        raise FatalError(damaged(path, "the newest state is not what was written: its digest differs"))
    return str(fields[2])


def _digest_of_snapshot(epoch: int, entry_id: int, snapshot_json: str, record_digest: str) -> str:
    return xxhash.xxh3_128_hexdigest(f"{record_digest}\n{epoch}\n{entry_id}\n{snapshot_json}".encode())


def whole(value: object) -> int:
    """Reads a number. Raises sqlite3.DatabaseError for a text that is none."""
    try:
        return int(str(value))
    except ValueError:
        raise sqlite3.DatabaseError(f"{str(value)[:80]!r} is in the place of a number") from None


@contextmanager
def disk_errors_fatal(path: Path) -> Iterator[None]:
    """Turns the errors of SQLite and of the disk into FatalError with a remedy."""
    try:
        yield
    except (sqlite3.OperationalError, OSError) as error:
        raise FatalError(
            f"the journal {path} cannot be read or written ({error}): check that the disk has room and "
            "works, then start the master again; it continues from the last confirmed entry"
        ) from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter when SQLite quotes what it cannot read
        raise FatalError(damaged(path, str(error))) from error


def _prepare(connection: sqlite3.Connection, path: Path, run_id: str) -> None:
    """Makes the tables of a new journal; checks those of an old one."""
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        _create(connection, path, run_id)
        return
    _check(connection, path, tables)
    owner = get_meta(connection.cursor(), "run_id")
    if has_digests(connection):
        _check_meta(connection, path)
    if owner != run_id:
        raise ConfigError(
            f"{path} belongs to run {owner!r}, not {run_id!r}: give the directory of {run_id!r}, an empty "
            f"one, or run id {owner!r}"
        )
    if not has_digests(connection):
        _upgrade(connection, path, run_id)
    _check_content(connection, path)


def _create(connection: sqlite3.Connection, path: Path, run_id: str) -> None:
    if segments(path.parent):
        raise ConfigError(
            f"{path} is not there, but {path.parent / FOLDER} holds decisions of a journal: put the journal back, "
            "or move that folder away to begin a new one"
        )
    connection.execute("BEGIN IMMEDIATE")
    for statement in _TABLES.values():
        connection.execute(statement)
    cursor = connection.cursor()
    for key, value in {"schema": str(SCHEMA), "run_id": run_id, "epoch": "0"}.items():
        _put_meta(cursor, key, value)
    set_base(cursor, 0, first_digest(run_id))
    failpoint("master.journal.before_create")
    connection.execute("COMMIT")
    failpoint("master.journal.after_create")
    sync_directory(path.parent)


def _upgrade(connection: sqlite3.Connection, path: Path, run_id: str) -> None:
    """Adds digests to a file of an older release, which must not open it from then on.

    The archive comes first, file by file; the journal's file follows in one transaction. After a kill it is done again.
    """
    cursor = connection.cursor()
    pruned = get_meta(cursor, "pruned")
    start = whole(pruned or 0), first_digest(run_id)
    number, digest = digest_segments(path.parent, *start)
    cursor.execute("BEGIN IMMEDIATE")
    try:
        rows = cursor.execute(RECORDS_WITHOUT_DIGESTS, (None, 0)).fetchall()
        snapshot = cursor.execute("SELECT epoch, entry_id, snapshot_json FROM snapshot").fetchone()
        _assert_archived_alike(path, [JournalRecord(*row) for row in rows])
        cursor.execute("DROP TABLE records")
        cursor.execute("DROP TABLE snapshot")
        cursor.execute(_TABLES["records"])
        cursor.execute(_TABLES["snapshot"])
        _put_meta(cursor, "schema", str(SCHEMA))
        if pruned is not None:
            set_meta(cursor, "pruned_digest", start[1])
        set_base(cursor, number, digest)
        record_digest = digest
        for row in rows:
            record = JournalRecord(*row)
            if record.number > number:
                record = record.after(digest)
                insert_record(cursor, record)
                digest = record.digest
                record_digest = digest if record.kind != EPOCH else record_digest
        if snapshot is not None:
            epoch, entry_id, snapshot_json = snapshot
            put_snapshot(cursor, epoch, entry_id, snapshot_json, record_digest)
        failpoint("master.journal.before_commit")
        cursor.execute("COMMIT")
        failpoint("master.journal.after_commit")
    except BaseException:
        if connection.in_transaction:
            cursor.execute("ROLLBACK")
        raise


def _assert_archived_alike(path: Path, held: list[JournalRecord]) -> None:
    """Deletes from the file the records that a killed master left in both places, if they are equal."""
    kept = segments(path.parent)
    if kept and held and kept[-1].last >= held[0].number:
        archived = {record.number: replace(record, digest="") for record in kept[-1].records()}
        if any(archived.get(record.number, record) != record for record in held):
            raise FatalError(foreign(path))


def foreign(path: Path) -> str:
    """The sentence for an archive and a journal that hold different records under one number."""
    return (
        f"the archive next to {path} holds other decisions under the same numbers, so one of the two "
        "came from elsewhere: put back the two that belong together, or move the archive away"
    )


EPOCH = "EPOCH"
"""The kind of the record that begins an epoch; the only kind without its own snapshot."""


def insert_record(cursor: sqlite3.Cursor, record: JournalRecord) -> None:
    """Writes one record, with its number and digest."""
    cursor.execute(
        "INSERT INTO records (number, epoch, entry_id, kind, record_json, digest) VALUES (?, ?, ?, ?, ?, ?)",
        (record.number, record.epoch, record.entry_id, record.kind, record.record_json, record.digest),
    )


def _check(connection: sqlite3.Connection, path: Path, tables: set[str]) -> None:
    """Checks that the file is a journal of a known release, and that SQLite finds no fault in it."""
    missing = sorted(set(_TABLES) - tables)
    if missing:
        raise FatalError(damaged(path, f"tables {missing} are missing"))
    found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise FatalError(damaged(path, found))
    schema = get_meta(connection.cursor(), "schema")
    if schema not in [str(known) for known in (*SCHEMAS_WITHOUT_DIGESTS, SCHEMA)]:
        raise ConfigError(
            f"{path} has schema {schema} and this release reads schemas {SCHEMAS_WITHOUT_DIGESTS[0]} to {SCHEMA}: use "
            "the release that wrote it"
        )
    expected = _TABLES if schema == str(SCHEMA) else TABLES_WITHOUT_DIGESTS
    for name, text in expected.items():
        (sql,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).fetchone()
        if sql != text:
            raise FatalError(damaged(path, f"table {name} is not the one of schema {schema}"))


def _check_meta(connection: sqlite3.Connection, path: Path) -> None:
    cursor = connection.cursor()
    if get_meta(cursor, "digest") != _digest_of_meta(cursor):
        raise FatalError(damaged(path, "the table meta (run id, epoch, port) is not what was written"))


def _check_content(connection: sqlite3.Connection, path: Path) -> None:
    """Checks every digest in the file. Raises FatalError that names the difference."""
    _check_meta(connection, path)
    cursor = connection.cursor()
    decided: JournalRecord | None = None
    last: JournalRecord | None = None
    _, previous = base(cursor)
    for last in chained((JournalRecord(*row) for row in connection.execute(RECORDS, (None, 0))), previous, path):
        decided = last if last.kind != EPOCH else decided
    if last is not None and last.epoch != whole(get_meta(cursor, "epoch") or 0):
        raise FatalError(damaged(path, f"its newest record is of epoch {last.epoch}, the table meta says another"))
    get_snapshot(connection, path)
    row = connection.execute("SELECT epoch, entry_id, record_digest FROM snapshot").fetchone()
    if decided is not None and row != (decided.epoch, decided.entry_id, decided.digest):
        raise FatalError(damaged(path, f"its newest state is not the one after record {decided.number}"))


def damaged(path: Path, why: str) -> str:
    """The sentence for a file that is not what a master wrote."""
    return f"the journal {path} is damaged ({why}): with its -wal file, {REMEDY}"
