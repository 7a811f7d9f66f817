"""The journal's SQLite file: how it is opened, checked and brought up to date, and what its errors mean.

Must never make a decision, and never repair what is damaged: the evidence stays as it was.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dips.core.errors import ConfigError, FatalError
from dips.core.failpoints import failpoint
from dips.master.archive import FOLDER, segments
from dips.master.directory import sync_directory

SCHEMA = 2
"""Raised when an older master could no longer read the journal. 2: old records stand in the archive."""

SCHEMA_WITHOUT_ARCHIVE = 1

FILE_NAME = "journal.sqlite3"

_TABLES = {
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "records": """CREATE TABLE records (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        epoch INTEGER NOT NULL,
        entry_id INTEGER NOT NULL,
        kind TEXT NOT NULL,
        record_json TEXT NOT NULL,
        UNIQUE (epoch, entry_id)
    )""",
    "snapshot": """CREATE TABLE snapshot (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
        epoch INTEGER NOT NULL,
        entry_id INTEGER NOT NULL,
        snapshot_json TEXT NOT NULL
    )""",
}


def connect(path: Path, run_id: str) -> sqlite3.Connection:
    """Open or make the file for writing. Raises ConfigError and FatalError as Journal.open says."""
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
    """Open the file for tools: nothing is locked or changed. Raises ConfigError when a newer release wrote it."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    try:
        _check_schema(path, get_meta(connection.cursor(), "schema"))
    except BaseException:
        connection.close()
        raise
    return connection


def get_meta(cursor: sqlite3.Cursor, key: str) -> str | None:
    row = cursor.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def set_meta(cursor: sqlite3.Cursor, key: str, value: str) -> None:
    cursor.execute(
        "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value)
    )


def whole(value: object) -> int:
    """A number as it was written. Raises sqlite3.DatabaseError for what is none."""
    try:
        return int(str(value))
    except ValueError:
        raise sqlite3.DatabaseError(f"{str(value)[:80]!r} stands where a number should") from None


@contextmanager
def disk_errors_fatal(path: Path) -> Iterator[None]:
    """Turn the errors of SQLite and of the disk into FatalError with a remedy."""
    try:
        yield
    except (sqlite3.OperationalError, OSError) as error:
        raise FatalError(
            f"the journal {path} cannot be read or written ({error}): check that the disk has room and "
            "works, then start the master again; it goes on from the last confirmed entry"
        ) from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter when SQLite quotes what it cannot read
        raise FatalError(_damaged(path, str(error))) from error


def _prepare(connection: sqlite3.Connection, path: Path, run_id: str) -> None:
    """Make the tables of a new journal; check those of an old one."""
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables:
        _check(connection, path, run_id, tables)
        _upgrade(connection)
    else:
        _create(connection, path, run_id)


def _create(connection: sqlite3.Connection, path: Path, run_id: str) -> None:
    if segments(path.parent):
        raise ConfigError(
            f"{path} is not there, but {path.parent / FOLDER} holds decisions of a journal: put the journal back, "
            "or move that folder away to begin a new one"
        )
    connection.execute("BEGIN IMMEDIATE")
    for statement in _TABLES.values():
        connection.execute(statement)
    meta = {"schema": str(SCHEMA), "run_id": run_id, "epoch": "0"}
    connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
    failpoint("master.journal.before_create")
    connection.execute("COMMIT")
    failpoint("master.journal.after_create")
    sync_directory(path.parent)


def _upgrade(connection: sqlite3.Connection) -> None:
    """Schema 1 has the same tables and no archive: from here on an older release must not open the file."""
    connection.execute(
        "UPDATE meta SET value = ? WHERE key = 'schema' AND value = ?", (str(SCHEMA), str(SCHEMA_WITHOUT_ARCHIVE))
    )


def _check(connection: sqlite3.Connection, path: Path, run_id: str, tables: set[str]) -> None:
    missing = sorted(set(_TABLES) - tables)
    if missing:
        raise FatalError(_damaged(path, f"tables {missing} are missing"))
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise FatalError(_damaged(path, found))
    cursor = connection.cursor()
    _check_schema(path, get_meta(cursor, "schema"))
    owner = get_meta(cursor, "run_id")
    if owner != run_id:
        raise ConfigError(
            f"{path} belongs to run {owner!r}, not {run_id!r}: give the directory of {run_id!r}, an empty "
            f"one, or run id {owner!r}"
        )


def _check_schema(path: Path, schema: str | None) -> None:
    if schema not in (str(SCHEMA), str(SCHEMA_WITHOUT_ARCHIVE)):
        raise ConfigError(
            f"{path} has schema {schema} and this release reads schemas {SCHEMA_WITHOUT_ARCHIVE} and {SCHEMA}: use "
            "the release that wrote it"
        )


def _damaged(path: Path, why: str) -> str:
    return (
        f"the journal {path} is damaged ({why}): restore it with its -wal file from a copy; with no copy, "
        "move it away and begin a new run, or one with --rebuild if the slaves still hold a version"
    )
