"""The journal: stores durably the master's epoch, its decisions, and the newest snapshot of its state.

A decision counts only once it is durable here, so `append` returns only after the disk has it, and every append
asserts, inside its own transaction, that no newer epoch was begun. Old records move to the archive, so that neither
the file nor the time of an append grows with the run. It must never decide anything, and never let two masters write
to one directory (docs/storage.md, directory of the master; docs/protocol.md, fencing).

Every method blocks on the disk. Use a journal from one thread at a time.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import xxhash

from dips.core.errors import ConfigError, FatalError, LocalProtocolError, RefusalCode, Refused, RetryLater
from dips.core.files import FolderLock, closed, settle, sync_folder
from dips.core.messages import JournalBatch
from dips.core.observe.failpoints import failpoint
from dips.master.archive import (
    EPOCH,
    FILE_NAME,
    FOLDER,
    REMEDY,
    SEGMENT_BYTES,
    SEGMENT_RECORDS,
    JournalRecord,
    Pruned,
    chained,
    digest_segments,
    drop_segment,
    first_digest,
    line_of,
    record_of,
    segments,
    write_segment,
)
from dips.master.directory import lock_directory
from dips.master.state.effects import WriteJournal
from dips.master.state.replication import TAKE_OVER_EPOCHS

_PRUNED_AT_ONCE = 4
"""More than the one segment that each step adds, so that the archive shrinks to a limit that was lowered."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """The number of records that stay in the journal, and the size limit of the archive for older ones."""

    records: int = 20_000
    archive_bytes: int = 1 << 30

    @property
    def segment_records(self) -> int:
        """The number of records that move at once: small enough that the journal stays near its bound."""
        return max(1, min(SEGMENT_RECORDS, self.records // 8))


class Journal:
    """An open journal, locked for this process until close()."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: FolderLock, retention: Retention) -> None:
        self._path = path
        self._connection = connection
        self._lock = lock
        self._retention = retention
        self._archive_again_at = 0

    @classmethod
    def open(cls, directory: Path, run_id: str, retention: Retention | None = None) -> Journal:
        """Opens or creates the journal of `run_id` in `directory`.

        Raises ConfigError when another master holds the directory, when it belongs to another run or was
        written by another release, or when it cannot be written; FatalError when its content is damaged.
        """
        lock = lock_directory(directory)
        path = directory / FILE_NAME
        try:
            journal = cls(path, connect(path, run_id), lock, retention or Retention())
        except BaseException:
            lock.release()
            raise
        try:
            journal._finish_archiving()
        except BaseException:
            journal.close()
            raise
        return journal

    def begin_epoch(self, at_least: int = 0) -> int:
        """Begins the next epoch, durably, and returns its number: 1 for the first start of a run.

        With `at_least` it is that number or a higher one: slaves may have promised an epoch that is not in this file.
        From a replica it takes over: its number is one that no restart of the other master has.
        """
        with self._transaction() as cursor:
            master = get_meta(cursor, "replica_of") or ""
            epoch = max(_epoch(cursor) + (TAKE_OVER_EPOCHS if master else 1), at_least)
            set_meta(cursor, "epoch", str(epoch))
            digest = _insert(cursor, epoch, [WriteJournal(0, EPOCH, json.dumps({"kind": EPOCH, "epoch": epoch}), "")])
            if master:
                number, _ = newest(cursor)
                set_meta(cursor, "took_over", f"{number} {digest} {master}")
            for mark in ("replica_of", "replaced"):
                if get_meta(cursor, mark):
                    set_meta(cursor, mark, "")
        return epoch

    def latest_snapshot(self) -> str | None:
        """The state after the newest entry, or None when nothing was ever decided."""
        with disk_errors_fatal(self._path):
            return get_snapshot(self._connection, self._path)

    def newest(self) -> tuple[int, str]:
        """Number and digest of the newest record, which identify the whole history up to it."""
        with disk_errors_fatal(self._path):
            return newest(self._connection.cursor())

    def append_all(self, epoch: int, entries: Sequence[WriteJournal]) -> None:
        """Makes entries durable, all or none, with one flush of the disk; only the last snapshot is kept.

        Raises FatalError when a newer epoch was begun or the disk fails, LocalProtocolError when an entry's
        number does not follow the ones before it; in these cases nothing was written.
        """
        with self._transaction() as cursor:
            newest = _epoch(cursor)
            if newest != epoch:
                raise FatalError(
                    f"a newer master runs: {self._path} is at epoch {newest} and this process at epoch {epoch}; "
                    "this one stops and has written nothing"
                )
            row = cursor.execute("SELECT MAX(entry_id) FROM records WHERE epoch = ?", (epoch,)).fetchone()
            numbers = [int(row[0] or 0), *(entry.entry_id for entry in entries)]
            if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
                raise LocalProtocolError(
                    f"{self._path}: entries have rising numbers, but {numbers[1:]} were to follow {numbers[0]}"
                )
            digest = _insert(cursor, epoch, entries)
            put_snapshot(cursor, epoch, entries[-1].entry_id, entries[-1].snapshot_json, digest)

    def tidy(self) -> bool:
        """Moves some old records to the archive if there are too many; returns whether there are more to move.

        One call takes as long as writing and flushing one segment. When the archive cannot be written this is
        logged as an error and tried again after as many records as a segment has; the journal grows until then.
        Raises FatalError as append_all does.
        """
        first, last = self._held()
        room = self._retention.records + self._retention.segment_records
        if last - first + 1 <= room or last < self._archive_again_at:
            return False
        try:
            # Moves the oldest records, one segment of them. Raises OSError where the archive cannot be written; the
            # records then stay where they were. Raises FatalError as append_all does.
            end = min(first + self._retention.segment_records, last)  # the newest record always stays
            with disk_errors_fatal(self._path):
                # Records from `first` to before `end`: as many as a segment's bytes allow, and at least one.
                connection = self._connection
                old: list[JournalRecord] = []
                size_bytes = 0
                for record in _records_from(connection, first):
                    size_bytes += len(record.record_json)
                    if record.number >= end or (old and size_bytes > SEGMENT_BYTES):
                        break
                    old.append(record)
            write_segment(self._path.parent, old)
            failpoint("master.archive.before_delete")
            self._delete_to(old[-1])
            self._prune()
        except OSError as error:
            self._archive_again_at = last + self._retention.segment_records
            _logger.error(
                "old decisions cannot be moved to the archive in %s (%s): make room on its disk; the journal grows "
                "until then",
                *(self._path.parent, error),
            )
            return False
        first, last = self._held()
        return last - first + 1 > room

    def pruned(self) -> Pruned | None:
        """The newest record that was deleted to keep the archive's size limit; None when the history is whole."""
        with disk_errors_fatal(self._path):
            return _pruned(self._connection.cursor())

    def last_port(self) -> int:
        """The port of the last master of this run; 0 when there was none."""
        with disk_errors_fatal(self._path):
            return whole(get_meta(self._connection.cursor(), "port") or 0)

    def remember_port(self, port: int) -> None:
        """Stores the port, so that a restarted master can use the same one."""
        with self._transaction() as cursor:
            set_meta(cursor, "port", str(port))

    def close(self) -> None:
        """Closes the file and releases the lock. May be called twice."""
        self._connection.close()
        self._lock.release()

    # ---- replica ----

    @property
    def replica_of(self) -> str:
        """The address of the master that this replica follows; empty for a master's own, and after a take-over."""
        return self._mark("replica_of")

    @property
    def took_over(self) -> TookOver | None:
        """How this master took over from another one; None: it did not."""
        number, _, rest = self._mark("took_over").partition(" ")
        return TookOver(whole(number), *rest.split(" ", 1)) if number else None

    @property
    def replaced(self) -> str:
        """Who said that it has taken over from this master; empty: no one."""
        return self._mark("replaced")

    def note_replaced(self, by: str) -> None:
        with self._transaction() as cursor:
            set_meta(cursor, "replaced", by)

    def _mark(self, name: str) -> str:
        with disk_errors_fatal(self._path):
            return get_meta(self._connection.cursor(), name) or ""

    def receive(self, batch: JournalBatch, master: str) -> bool:
        """Takes what comes next in the journal of the master at this address, of which this one is a replica.

        Returns whether all of it is durable: that is at a batch that is whole. An error, and forget_part(), undo what
        came since the last such one. Raises Refused when the batch does not follow, FatalError when the disk fails.
        """
        failpoint("master.replica.before_receive")
        connection = self._connection
        with disk_errors_fatal(self._path), closing(connection.cursor()) as cursor:
            if not connection.in_transaction:
                cursor.execute("BEGIN IMMEDIATE")
            try:
                self._take(cursor, batch)
                if batch.is_whole:
                    set_meta(cursor, "replica_of", master)
                    failpoint("master.journal.before_commit")
                    cursor.execute("COMMIT")
                    failpoint("master.journal.after_commit")
            except OverflowError:  # a number that SQLite cannot hold
                self.forget_part()
                raise _does_not_follow("a number that is none", newest(cursor)[0]) from None
            except BaseException:
                self.forget_part()
                raise
        return batch.is_whole

    def forget_part(self) -> None:
        """Undoes what was received since the last whole batch."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _take(self, cursor: sqlite3.Cursor, batch: JournalBatch) -> None:
        number, digest = newest(cursor)
        if number == 0 and batch.after > 0:  # what came before was deleted there to keep the archive's size limit
            number, digest = batch.after, batch.after_digest
            set_base(cursor, number, digest)
            set_meta(cursor, "pruned", str(number))
            set_meta(cursor, "pruned_digest", digest)
        if (batch.after, batch.after_digest) != (number, digest):
            raise _does_not_follow(f"what comes after record {batch.after}", number)
        for line in batch.records:
            record = record_of(self._path, line)
            if record.number != number + 1 or record.digest != record.digest_after(digest):
                raise _does_not_follow(f"record {record.number}", number)
            insert_record(cursor, record)
            number, digest, epoch = record.number, record.digest, record.epoch
        if batch.records:
            set_meta(cursor, "epoch", str(epoch))
        decided = cursor.execute(NEWEST_DECIDED, (EPOCH,)).fetchone()
        if batch.is_whole and decided is None and batch.snapshot_json:
            raise _does_not_follow("a state without its record", number)
        if batch.is_whole and decided is not None:
            epoch, entry_id, record_digest = decided
            if batch.snapshot_digest != _digest_of_snapshot(epoch, entry_id, batch.snapshot_json, record_digest):
                raise _does_not_follow(f"the state after record {number}", number)
            put_snapshot(cursor, epoch, entry_id, batch.snapshot_json, record_digest)

    # ---- the archive ----

    def _held(self) -> tuple[int, int]:
        """The numbers of the oldest and the newest record in the file."""
        with disk_errors_fatal(self._path):
            return _bounds(self._connection)

    def _delete_to(self, last: JournalRecord) -> None:
        """Deletes records up to `last`, which are in the archive; the following ones are chained to it."""
        with self._transaction() as cursor:
            cursor.execute("DELETE FROM records WHERE number <= ?", (last.number,))
            set_base(cursor, last.number, last.digest)

    def _prune(self) -> None:
        """Deletes the oldest segments above the archive's size limit; the journal records that first."""
        kept = segments(self._path.parent)
        over_bytes = sum(segment.size_bytes for segment in kept) - self._retention.archive_bytes
        for segment in kept[: min(len(kept) - 1, _PRUNED_AT_ONCE)]:
            if over_bytes <= 0:
                break
            over_bytes -= segment.size_bytes
            *_, last = segment.records()
            with self._transaction() as cursor:
                set_meta(cursor, "pruned", str(segment.last))
                set_meta(cursor, "pruned_digest", last.digest)
            failpoint("master.archive.before_prune")
            drop_segment(segment)
            _logger.info("%s: %s", self._path.parent / FOLDER, Pruned(segment.last))

    def _finish_archiving(self) -> None:
        """Finishes what a killed master left: deletes pruned segments, and from the journal what is in the archive."""
        with disk_errors_fatal(self._path):
            kept = segments(self._path.parent)
            pruned = self.pruned()
            for segment in kept:
                if pruned is not None and segment.last <= pruned.number:
                    drop_segment(segment)
            first, _ = _bounds(self._connection)
            if kept and kept[-1].last >= first:
                archived = list(kept[-1].records())
                # Raises FatalError when the archive belongs to another journal: records in both must be equal.
                held = {record.number: record for record in _records_from(self._connection, archived[0].number)}
                if any(held.get(record.number, record) != record for record in archived):
                    raise FatalError(foreign(self._path))
                sync_folder(kept[-1].path.parent, "master")
                self._delete_to(archived[-1])

    # ---- transactions ----

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        """One write transaction, durable when the block ends; disk errors become FatalError."""
        with disk_errors_fatal(self._path), closing(self._connection.cursor()) as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            try:
                yield cursor
                failpoint("master.journal.before_commit")
                cursor.execute("COMMIT")
                failpoint("master.journal.after_commit")
            except BaseException:
                # sqlite rolls back by itself after some errors, a full disk among them.
                if self._connection.in_transaction:
                    cursor.execute("ROLLBACK")
                raise


class TookOver(NamedTuple):
    """The record of the epoch that a take-over began, and the address of the master before."""

    number: int
    digest: str
    master: str


NEWEST_DECIDED = "SELECT epoch, entry_id, digest FROM records WHERE kind <> ? ORDER BY number DESC LIMIT 1"


def _does_not_follow(what: str, number: int) -> Refused:
    return Refused(
        RefusalCode.DIGEST,
        f"the master sent {what}, which does not follow record {number} of this replica: give the standby an empty "
        "directory",
    )


class JournalReader:
    """Reads a journal for its replica, while the master writes it. Every method blocks on the disk; use a reader
    from one thread at a time."""

    def __init__(self, directory: Path, run_id: str) -> None:
        self._directory = directory
        self._run_id = run_id
        uri = f"{(directory / FILE_NAME).absolute().as_uri()}?mode=ro"
        with disk_errors_fatal(directory / FILE_NAME):
            self._connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)

    def close(self) -> None:
        self._connection.close()

    def check_place(self, number: int, digest: str) -> None:
        """Raises Refused unless a replica whose newest record this is can go on from there."""
        with self._view() as cursor:
            last, _ = newest(cursor)
            if number == 0:
                return
            where = f"the replica holds record {number}"
            if number > last:
                raise Refused(
                    RefusalCode.CONFIG,
                    f"{where}, and this master's journal ends at record {last}: the replica is of a newer master, or "
                    "this one's directory is an old copy; if this one is right, give the standby an empty directory",
                )
            pruned = _pruned(cursor)
            if pruned is not None and number < pruned.number:
                raise Refused(
                    RefusalCode.CONFIG,
                    f"{where}, and {pruned}: give the standby an empty directory",
                )
            if digest != self._digest_of(cursor, number):
                raise Refused(
                    RefusalCode.CONFIG,
                    f"{where}, and this master's record {number} is another one: the two histories differ; give the "
                    "standby an empty directory, and keep the other for `dips verify`",
                )

    def holds(self, number: int, digest: str) -> bool:
        """Whether this record is in the journal or in its archive."""
        with self._view() as cursor:
            return number > 0 and digest == self._digest_of(cursor, number)

    def after(self, number: int, digest: str, most_bytes: int) -> JournalBatch:
        """What follows record `number`, which a replica holds: at most about so many bytes, and at least one record.

        Raises RetryLater when it was pruned meanwhile, FatalError when the journal is damaged.
        """
        with self._view() as cursor:
            last, _ = newest(cursor)
            first, _ = _bounds(self._connection)
            pruned = _pruned(cursor)
            if number == 0:
                digest = first_digest(self._run_id)
            if number == 0 and pruned is not None:
                number, digest = pruned.number, get_meta(cursor, "pruned_digest") or ""
            lines: list[bytes] = []
            at, size_bytes = number, 0
            archived = _archived(self._directory, number + 1, first)
            for record in itertools.chain(archived, _records_from(self._connection, max(first, number + 1))):
                if record.number != at + 1:
                    raise RetryLater(f"records from {at + 1} on were deleted while they were read: read them again")
                line = line_of(record).encode()
                size_bytes += len(line)
                if lines and size_bytes > most_bytes:
                    break
                lines.append(line)
                at = record.number
            row = self._connection.execute("SELECT snapshot_json, digest FROM snapshot").fetchone() or ("", "")
            is_whole = at == last
            state, of_state = row if is_whole else ("", "")
            return JournalBatch(number, digest, tuple(lines), is_whole, state, of_state, b"")

    def _digest_of(self, cursor: sqlite3.Cursor, number: int) -> str:
        row = cursor.execute("SELECT digest FROM records WHERE number = ?", (number,)).fetchone()
        if row is not None:
            return str(row[0])
        found = next(_archived(self._directory, number, number + 1), None)
        if found is not None:
            return found.digest
        return get_meta(cursor, "pruned_digest") or "" if _pruned(cursor) == Pruned(number) else ""

    @contextmanager
    def _view(self) -> Iterator[sqlite3.Cursor]:
        """One view of the file for all reads of the block; records that left it before are in a segment."""
        with disk_errors_fatal(self._directory / FILE_NAME), closing(self._connection.cursor()) as cursor:
            cursor.execute("BEGIN")
            try:
                yield cursor
            finally:
                cursor.execute("ROLLBACK")


@dataclass(frozen=True)
class JournalContent:
    """The content of a master's directory at one moment."""

    records: list[JournalRecord]
    snapshot_json: str | None
    run_id: str
    pruned: Pruned | None  # the newest record that was deleted to keep the size limit
    # first and last number of records that are not here without a note of their deletion; (1, 0) when there are none
    missing: tuple[int, int]
    has_digests: bool  # False when an older release wrote it


def read_content(directory: Path) -> JournalContent:
    """Reads archive and journal at one moment without locking them, so that a running master is not disturbed; with all
    digests checked.

    Raises ConfigError when there is no journal in `directory`, FatalError when it is damaged, RetryLater when it was
    pruned while it was read.
    """
    with _reading(directory) as connection:
        cursor = connection.cursor()
        records = list(_records(directory, connection))
        pruned = _pruned(cursor)
        begin = pruned.number + 1 if pruned else 1
        first = records[0].number if records else begin
        return JournalContent(
            records,
            get_snapshot(connection, directory / FILE_NAME),
            str(get_meta(cursor, "run_id")),
            pruned,
            (begin, first - 1),
            has_digests(connection),
        )


def read_newest(directory: Path) -> tuple[int, str | None]:
    """The epoch, and the newest ledger (None: nothing was decided yet). Raises as read_content does."""
    with _reading(directory) as connection:
        return _epoch(connection.cursor()), get_snapshot(connection, directory / FILE_NAME)


def replica_of(directory: Path) -> str:
    """Journal.replica_of, of a directory that a process may have. Raises as read_content does."""
    with _reading(directory) as connection:
        return get_meta(connection.cursor(), "replica_of") or ""


@contextmanager
def _reading(directory: Path) -> Iterator[sqlite3.Connection]:
    path = directory / FILE_NAME
    if not path.is_file():
        raise ConfigError(f"no journal in {directory}: give the directory that a master was started with")
    with disk_errors_fatal(path), closing(connect_to_read(path)) as connection:
        # One view of the file for all that follows. Records that left the file before this moment are in a segment.
        yield connection


def _records(directory: Path, connection: sqlite3.Connection) -> Iterator[JournalRecord]:
    """The archive's records, checked by their digests, then the file's, which were checked when it was opened."""
    first, _ = _bounds(connection)
    cursor = connection.cursor()
    pruned = _pruned(cursor)
    begin, checked = pruned.number + 1 if pruned else 1, has_digests(connection)
    archived = _archived(directory, begin, first)
    yield from _joined(directory, cursor, archived) if checked else archived
    yield from _records_from(connection, first)


def _joined(directory: Path, cursor: sqlite3.Cursor, archived: Iterator[JournalRecord]) -> Iterator[JournalRecord]:
    """The archive's records, checked, up to the one that precedes the journal's file. Without any record the archive
    was moved away. Raises FatalError when one is damaged or missing."""
    run_id = str(get_meta(cursor, "run_id"))
    number, digest = base(cursor)
    last = JournalRecord(0, 0, "", "", number, digest)
    for last in chained(archived, get_meta(cursor, "pruned_digest") or first_digest(run_id), directory / FOLDER):
        yield last
    if (last.number, last.digest) != (number, digest):
        raise FatalError(
            f"the archive {directory / FOLDER} ends at record {last.number}, and the journal continues after record "
            f"{number}: put the missing files back, or move the whole archive away to go without the decisions in it"
        )


def _archived(directory: Path, begin: int, end: int) -> Iterator[JournalRecord]:
    """The archive's records from number `begin` to before `end`."""
    for segment in segments(directory):
        if segment.first >= end or segment.last < begin:
            continue
        try:
            yield from (record for record in segment.records() if begin <= record.number < end)
        except FileNotFoundError:
            raise RetryLater(f"the master deleted {segment.path} while it was read: read the journal again") from None


def _records_from(connection: sqlite3.Connection, first: int) -> Iterator[JournalRecord]:
    rows = RECORDS if has_digests(connection) else RECORDS_WITHOUT_DIGESTS
    for row in connection.execute(rows, (first,)):
        yield JournalRecord(*row)


def _bounds(connection: sqlite3.Connection) -> tuple[int, int]:
    """The numbers of the oldest and the newest record in the file; (1, 0) when there is none."""
    row = connection.execute("SELECT (SELECT MIN(number) FROM records), (SELECT MAX(number) FROM records)").fetchone()
    return whole(row[0] or 1), whole(row[1] or 0)


def _pruned(cursor: sqlite3.Cursor) -> Pruned | None:
    text = get_meta(cursor, "pruned")
    return None if text is None else Pruned(whole(text))


def _epoch(cursor: sqlite3.Cursor) -> int:
    return whole(get_meta(cursor, "epoch") or 0)


def _insert(cursor: sqlite3.Cursor, epoch: int, entries: Sequence[WriteJournal]) -> str:
    """Add records after the newest one; returns the last one's digest."""
    number, digest = newest(cursor)
    for entry in entries:
        number += 1
        record = JournalRecord(epoch, entry.entry_id, entry.kind, entry.record_json, number).after(digest)
        insert_record(cursor, record)
        digest = record.digest
    return digest


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

RECORDS = """SELECT epoch, entry_id, kind, record_json, number, digest FROM records
    WHERE number >= ? ORDER BY number"""

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
        settle(path)
        if not path.exists():  # SQLite makes its other files as this one is
            os.close(closed(path, os.O_WRONLY | os.O_CREAT))
        # The thread that opens and the journal's own thread use the connection in turn, never both at once.
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            _prepare(connection, path, run_id)
            for other in ("-wal", "-shm"):  # of an earlier release, or of a folder that is not the group's
                settle(path.with_name(path.name + other))
        except BaseException:
            connection.close()
            raise
    return connection


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Opens the file for tools, as it is now: nothing is locked or changed, and all later reads see one state.

    Raises ConfigError when a newer release wrote it, FatalError when it is damaged.
    """
    # Who reads makes the file that SQLite locks. Where this user may not, and a master has not, no one writes either.
    is_alone = not path.with_name(f"{path.name}-wal").exists() and not os.access(path.parent, os.W_OK)
    how = "mode=ro&immutable=1" if is_alone else "mode=ro"
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None)
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
        sync_folder(path.parent, "master")
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
        rows = cursor.execute(RECORDS_WITHOUT_DIGESTS, (0,)).fetchall()
        snapshot = cursor.execute("SELECT epoch, entry_id, snapshot_json FROM snapshot").fetchone()
        # A killed master may have left records in both places: they must be equal.
        held = [JournalRecord(*row) for row in rows]
        kept = segments(path.parent)
        if kept and held and kept[-1].last >= held[0].number:
            archived = {record.number: replace(record, digest="") for record in kept[-1].records()}
            if any(archived.get(record.number, record) != record for record in held):
                raise FatalError(foreign(path))
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


def foreign(path: Path) -> str:
    """The sentence for an archive and a journal that hold different records under one number."""
    return (
        f"the archive next to {path} holds other decisions under the same numbers, so one of the two "
        "came from elsewhere: put back the two that belong together, or move the archive away"
    )


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
    for last in chained((JournalRecord(*row) for row in connection.execute(RECORDS, (0,))), previous, path):
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
