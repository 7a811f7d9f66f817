"""The master's durable memory: its epoch, its decisions, and the newest snapshot of its state.

A decision counts only once it stands here, so `append` returns only after the disk has it, and every append
asserts, inside its own transaction, that no newer epoch was begun. It must never decide anything, and never
let two masters write to one directory (docs/architecture.md, durable state; docs/protocol.md, fencing).

Every method blocks on the disk. Use a journal from one thread at a time.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dips.core.errors import ConfigError, FatalError, LocalProtocolError
from dips.master.directory import DirectoryLock, sync_directory

SCHEMA = 1
"""Raised when an older master could no longer read the tables."""

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

_PUT_SNAPSHOT = "INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?, ?)"

_RECORDS = """SELECT epoch, entry_id, kind, record_json FROM records
    WHERE ?1 IS NULL OR kind = ?1 ORDER BY number"""


@dataclass(frozen=True)
class Entry:
    """One decision to be made durable, with the state that follows from it."""

    entry_id: int
    kind: str
    record_json: str
    snapshot_json: str


@dataclass(frozen=True)
class JournalRecord:
    """One decision as it stands in the journal; entry 0 of each epoch is its EPOCH record."""

    epoch: int
    entry_id: int
    kind: str
    record_json: str


class Journal:
    """An open journal, locked for this process until close()."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: DirectoryLock) -> None:
        self._path = path
        self._connection = connection
        self._lock = lock

    @classmethod
    def open(cls, directory: Path, run_id: str) -> Journal:
        """Open or create the journal of `run_id` in `directory`.

        Raises ConfigError when another master holds the directory, when it belongs to another run or was
        written by another release, or when it cannot be written; FatalError when its content is damaged.
        """
        lock = DirectoryLock(directory)
        path = directory / FILE_NAME
        try:
            return cls(path, _connect(path, run_id), lock)
        except BaseException:
            lock.release()
            raise

    def begin_epoch(self) -> int:
        """Begin the next epoch, durably, and return its number: 1 for the first start of a run."""
        with self._transaction() as cursor:
            epoch = _epoch(cursor) + 1
            _set_meta(cursor, "epoch", str(epoch))
            _insert(cursor, epoch, Entry(0, "EPOCH", f'{{"epoch": {epoch}}}', ""))
        return epoch

    def latest_snapshot(self) -> str | None:
        """The state after the newest entry, or None when nothing was ever decided."""
        row = self._connection.execute("SELECT snapshot_json FROM snapshot").fetchone()
        return None if row is None else str(row[0])

    def append(self, epoch: int, entry_id: int, kind: str, record_json: str, snapshot_json: str) -> None:
        """Make one entry durable. Raises FatalError as append_all does."""
        self.append_all(epoch, [Entry(entry_id, kind, record_json, snapshot_json)])

    def append_all(self, epoch: int, entries: Sequence[Entry]) -> None:
        """Make entries durable, all or none, with one flush of the disk; only the last snapshot is kept.

        Raises FatalError when a newer epoch was begun or the disk fails, LocalProtocolError when an entry's
        number does not follow the ones before it; nothing was written then.
        """
        with self._transaction() as cursor:
            self._assert_newest(cursor, epoch)
            self._assert_order(cursor, epoch, entries)
            for entry in entries:
                _insert(cursor, epoch, entry)
            last = entries[-1]
            cursor.execute(_PUT_SNAPSHOT, (epoch, last.entry_id, last.snapshot_json))

    def records(self, kind: str | None = None) -> Iterator[JournalRecord]:
        """All records, oldest first; with `kind`, only those."""
        return _records(self._connection, kind)

    def last_port(self) -> int:
        """The port that the last master of this run served on; 0 when there was none."""
        return int(_meta(self._connection.cursor(), "port") or 0)

    def remember_port(self, port: int) -> None:
        """Note the port, so that a restarted master can be found where the last one was."""
        with self._transaction() as cursor:
            _set_meta(cursor, "port", str(port))

    def close(self) -> None:
        """Close the file and give up the lock. May be called twice."""
        self._connection.close()
        self._lock.release()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        """One write transaction, durable when the block ends; disk trouble becomes FatalError."""
        with _disk_errors_fatal(self._path), closing(self._connection.cursor()) as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            try:
                yield cursor
                cursor.execute("COMMIT")
            except BaseException:
                # sqlite rolls back by itself after some errors, a full disk among them.
                if self._connection.in_transaction:
                    cursor.execute("ROLLBACK")
                raise

    def _assert_newest(self, cursor: sqlite3.Cursor, epoch: int) -> None:
        newest = _epoch(cursor)
        if newest != epoch:
            raise FatalError(
                f"a newer master runs: {self._path} is at epoch {newest} and this process at epoch {epoch}; "
                "this one stops and has written nothing"
            )

    def _assert_order(self, cursor: sqlite3.Cursor, epoch: int, entries: Sequence[Entry]) -> None:
        row = cursor.execute("SELECT MAX(entry_id) FROM records WHERE epoch = ?", (epoch,)).fetchone()
        numbers = [int(row[0] or 0), *(entry.entry_id for entry in entries)]
        if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
            raise LocalProtocolError(
                f"{self._path}: entries have rising numbers, but {numbers[1:]} were to follow {numbers[0]}"
            )


def read_records(directory: Path, kind: str | None = None) -> Iterator[JournalRecord]:
    """Read a journal without locking it, for tools; a running master is not disturbed.

    Raises ConfigError when there is no journal in `directory`, FatalError when it is damaged.
    """
    path = directory / FILE_NAME
    if not path.is_file():
        raise ConfigError(f"no journal in {directory}: give the directory that a master was started with")
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with _disk_errors_fatal(path), closing(sqlite3.connect(uri, uri=True)) as connection:
        yield from _records(connection, kind)


def _connect(path: Path, run_id: str) -> sqlite3.Connection:
    with _disk_errors_fatal(path):
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


def _prepare(connection: sqlite3.Connection, path: Path, run_id: str) -> None:
    """Make the tables of a new journal; check those of an old one."""
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables:
        _check(connection, path, run_id, tables)
        return
    connection.execute("BEGIN IMMEDIATE")
    for statement in _TABLES.values():
        connection.execute(statement)
    meta = {"schema": str(SCHEMA), "run_id": run_id, "epoch": "0"}
    connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
    connection.execute("COMMIT")
    sync_directory(path.parent)


def _check(connection: sqlite3.Connection, path: Path, run_id: str, tables: set[str]) -> None:
    missing = sorted(set(_TABLES) - tables)
    if missing:
        raise FatalError(_damaged(path, f"tables {missing} are missing"))
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise FatalError(_damaged(path, found))
    cursor = connection.cursor()
    schema, owner = _meta(cursor, "schema"), _meta(cursor, "run_id")
    if schema != str(SCHEMA):
        raise ConfigError(
            f"{path} has schema {schema} and this release reads schema {SCHEMA}: start the release "
            "that wrote it"
        )
    if owner != run_id:
        raise ConfigError(
            f"{path} belongs to run {owner!r}, not {run_id!r}: give the directory of {run_id!r}, an empty "
            f"one, or run id {owner!r}"
        )


def _meta(cursor: sqlite3.Cursor, key: str) -> str | None:
    row = cursor.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def _set_meta(cursor: sqlite3.Cursor, key: str, value: str) -> None:
    cursor.execute(
        "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value)
    )


def _epoch(cursor: sqlite3.Cursor) -> int:
    return int(_meta(cursor, "epoch") or 0)


def _insert(cursor: sqlite3.Cursor, epoch: int, entry: Entry) -> None:
    cursor.execute(
        "INSERT INTO records (epoch, entry_id, kind, record_json) VALUES (?, ?, ?, ?)",
        (epoch, entry.entry_id, entry.kind, entry.record_json),
    )


def _records(connection: sqlite3.Connection, kind: str | None) -> Iterator[JournalRecord]:
    for row in connection.execute(_RECORDS, (kind,)):
        yield JournalRecord(*row)


@contextmanager
def _disk_errors_fatal(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise FatalError(
            f"the journal {path} cannot be read or written ({error}): check that the disk has room and "
            "works, then start the master again; it goes on from the last confirmed entry"
        ) from error
    except sqlite3.DatabaseError as error:
        raise FatalError(_damaged(path, str(error))) from error


def _damaged(path: Path, why: str) -> str:
    return (
        f"the journal {path} is damaged ({why}): restore it with its -wal file from a copy; with no copy, "
        "move it away and begin a new run"
    )
