"""The journal: stores durably the master's epoch, its decisions, and the newest snapshot of its state.

A decision counts only once it is durable here, so `append` returns only after the disk has it, and every append
asserts, inside its own transaction, that no newer epoch was begun. Old records move to the archive, so that neither
the file nor the time of an append grows with the run. It must never decide anything, and never let two masters write
to one directory (docs/architecture.md, durable state; docs/protocol.md, fencing).

Every method blocks on the disk. Use a journal from one thread at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dips.core.errors import ConfigError, FatalError, LocalProtocolError, RetryLater
from dips.core.observe.failpoints import failpoint
from dips.master.archive import (
    EPOCH,
    FILE_NAME,
    FOLDER,
    RECORDS,
    RECORDS_WITHOUT_DIGESTS,
    SEGMENT_BYTES,
    SEGMENT_RECORDS,
    JournalRecord,
    Pruned,
    base,
    chained,
    connect,
    connect_to_read,
    disk_errors_fatal,
    drop_segment,
    first_digest,
    foreign,
    get_meta,
    get_snapshot,
    has_digests,
    insert_record,
    newest,
    put_snapshot,
    segments,
    set_base,
    set_meta,
    whole,
    write_segment,
)
from dips.master.directory import DirectoryLock, sync_directory
from dips.master.state.effects import WriteJournal

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

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: DirectoryLock, retention: Retention) -> None:
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
        lock = DirectoryLock(directory)
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
        """
        with self._transaction() as cursor:
            epoch = max(_epoch(cursor) + 1, at_least)
            set_meta(cursor, "epoch", str(epoch))
            _insert(cursor, epoch, [WriteJournal(0, EPOCH, json.dumps({"kind": EPOCH, "epoch": epoch}), "")])
        return epoch

    def latest_snapshot(self) -> str | None:
        """The state after the newest entry, or None when nothing was ever decided."""
        with disk_errors_fatal(self._path):
            return get_snapshot(self._connection, self._path)

    def newest(self) -> tuple[int, str]:
        """Number and digest of the newest record, which identify the whole history up to it."""
        with disk_errors_fatal(self._path):
            return newest(self._connection.cursor())

    def append(self, epoch: int, entry_id: int, kind: str, record_json: str, snapshot_json: str) -> None:
        """Makes one entry durable. Raises FatalError as append_all does."""
        self.append_all(epoch, [WriteJournal(entry_id, kind, record_json, snapshot_json)])

    def append_all(self, epoch: int, entries: Sequence[WriteJournal]) -> None:
        """Makes entries durable, all or none, with one flush of the disk; only the last snapshot is kept.

        Raises FatalError when a newer epoch was begun or the disk fails, LocalProtocolError when an entry's
        number does not follow the ones before it; in these cases nothing was written.
        """
        with self._transaction() as cursor:
            self._assert_newest(cursor, epoch)
            self._assert_order(cursor, epoch, entries)
            digest = _insert(cursor, epoch, entries)
            put_snapshot(cursor, epoch, entries[-1].entry_id, entries[-1].snapshot_json, digest)

    def tidy(self) -> bool:
        """Moves some old records to the archive if there are too many; returns whether there are more to move.

        One call takes as long as writing and flushing one segment. When the archive cannot be written this is
        logged as an error and tried again after as many records as a segment has; the journal grows until then.
        Raises FatalError as append_all does.
        """
        first, last = _bounds(self._connection)
        room = self._retention.records + self._retention.segment_records
        if last - first + 1 <= room or last < self._archive_again_at:
            return False
        try:
            self._archive(first, last)
        except OSError as error:
            self._archive_again_at = last + self._retention.segment_records
            _logger.error(
                "old decisions cannot be moved to the archive in %s (%s): make room on its disk; the journal grows "
                "until then",
                *(self._path.parent, error),
            )
            return False
        first, last = _bounds(self._connection)
        return last - first + 1 > room

    def records(self, kind: str | None = None) -> Iterator[JournalRecord]:
        """All records that were not deleted, oldest first; with `kind`, only those."""
        with disk_errors_fatal(self._path):
            yield from _records(self._path.parent, self._connection, kind)

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

    # ---- the archive ----

    def _archive(self, first: int, last: int) -> None:
        """Moves the oldest records, one segment of them. Raises OSError; the records then stay where they were."""
        end = min(first + self._retention.segment_records, last)  # the newest record always stays
        old = _of_one_segment(self._connection, first, end)
        write_segment(self._path.parent, old)
        failpoint("master.archive.before_delete")
        self._delete_to(old[-1])
        self._prune()

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
                self._assert_same(archived)
                sync_directory(kept[-1].path.parent)
                self._delete_to(archived[-1])

    def _assert_same(self, archived: Sequence[JournalRecord]) -> None:
        """Raises FatalError when the archive belongs to another journal: records in both must be equal."""
        held = {record.number: record for record in _records_from(self._connection, None, archived[0].number)}
        if any(held.get(record.number, record) != record for record in archived):
            raise FatalError(foreign(self._path))

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

    def _assert_newest(self, cursor: sqlite3.Cursor, epoch: int) -> None:
        newest = _epoch(cursor)
        if newest != epoch:
            raise FatalError(
                f"a newer master runs: {self._path} is at epoch {newest} and this process at epoch {epoch}; "
                "this one stops and has written nothing"
            )

    def _assert_order(self, cursor: sqlite3.Cursor, epoch: int, entries: Sequence[WriteJournal]) -> None:
        row = cursor.execute("SELECT MAX(entry_id) FROM records WHERE epoch = ?", (epoch,)).fetchone()
        numbers = [int(row[0] or 0), *(entry.entry_id for entry in entries)]
        if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
            raise LocalProtocolError(
                f"{self._path}: entries have rising numbers, but {numbers[1:]} were to follow {numbers[0]}"
            )


@dataclass(frozen=True)
class JournalContent:
    """The content of a master's directory at one moment.

    pruned: the newest record that was deleted to keep the size limit. missing: first and last number of records that
    are not here without a note of their deletion; (1, 0) when there are none. has_digests: False when an older release
    wrote it.
    """

    records: list[JournalRecord]
    snapshot_json: str | None
    run_id: str
    pruned: Pruned | None
    missing: tuple[int, int]
    has_digests: bool


def read_content(directory: Path) -> JournalContent:
    """Reads archive and journal at one moment, with all digests checked. Raises as read_records does."""
    with _reading(directory) as connection:
        cursor = connection.cursor()
        records = list(_records(directory, connection, None))
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


def read_records(directory: Path, kind: str | None = None) -> Iterator[JournalRecord]:
    """Reads archive and journal without locking them, for tools; a running master is not disturbed.

    Oldest first, each record once; pruned_to() says whether the beginning is gone. Raises ConfigError when there is
    no journal in `directory`, FatalError when it is damaged, RetryLater when it was pruned while it was read.
    """
    with _reading(directory) as connection:
        yield from _records(directory, connection, kind)


def pruned_to(directory: Path) -> Pruned | None:
    """The newest deleted record of the history in `directory`; None when it is whole. Raises as read_records does."""
    with _reading(directory) as connection:
        return _pruned(connection.cursor())


@contextmanager
def _reading(directory: Path) -> Iterator[sqlite3.Connection]:
    path = directory / FILE_NAME
    if not path.is_file():
        raise ConfigError(f"no journal in {directory}: give the directory that a master was started with")
    with disk_errors_fatal(path), closing(connect_to_read(path)) as connection:
        # One view of the file for all that follows. Records that left the file before this moment are in a segment.
        yield connection


def _records(directory: Path, connection: sqlite3.Connection, kind: str | None) -> Iterator[JournalRecord]:
    """The archive's records, checked by their digests, then the file's, which were checked when it was opened."""
    first, _ = _bounds(connection)
    cursor = connection.cursor()
    pruned = _pruned(cursor)
    begin, checked = pruned.number + 1 if pruned else 1, has_digests(connection)
    archived = _archived(directory, begin, first)
    if checked:
        archived = _joined(directory, cursor, archived)
    for record in archived:
        if kind is None or record.kind == kind:
            yield record
    yield from _records_from(connection, kind, first)


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


def _records_from(connection: sqlite3.Connection, kind: str | None, first: int) -> Iterator[JournalRecord]:
    rows = RECORDS if has_digests(connection) else RECORDS_WITHOUT_DIGESTS
    for row in connection.execute(rows, (kind, first)):
        yield JournalRecord(*row)


def _of_one_segment(connection: sqlite3.Connection, first: int, end: int) -> list[JournalRecord]:
    """Records from `first` to before `end`: as many as a segment's bytes allow, and at least one."""
    taken: list[JournalRecord] = []
    size_bytes = 0
    for record in _records_from(connection, None, first):
        size_bytes += len(record.record_json)
        if record.number >= end or (taken and size_bytes > SEGMENT_BYTES):
            break
        taken.append(record)
    return taken


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


# ---- journal writer --------------------------------------------------------------------------------------------------
#
# Writes journal entries durably on a thread of its own: in the given order, with many entries in one flush.
#
# The event loop must never wait for a disk, and JournalWritten must never be sent before the disk has the entry and
# every earlier one. Entries that arrive during a flush are written with the next one, so that a slow disk makes
# batches larger, not the queue of flushes longer. Old records are moved on the same thread, step by step, and only
# while no entry waits.


THREAD_NAME = "dips-journal"

T = TypeVar("T")


class JournalWriter:
    """Passes entries to `append` and calls `written` with each entry's number once it is durable.

    After an error `failed` is called once, and nothing more is written: an entry must not follow a lost one.
    The number of waiting entries is bounded by the calls and rounds in flight, because each entry answers one of them.
    `tidy` does one short step of moving old records and returns whether there is another.
    """

    def __init__(
        self,
        append: Callable[[Sequence[WriteJournal]], None],
        written: Callable[[int], None],
        failed: Callable[[Exception], None],
        tidy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._append = append
        self._written = written
        self._failed = failed
        self._tidy = tidy
        self._closing = False
        self._waiting: list[WriteJournal] = []
        self._flush: asyncio.Task[None] | None = None
        self._broken = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREAD_NAME)

    def put(self, entry: WriteJournal) -> None:
        """Queues one entry; returns at once."""
        self._waiting.append(entry)
        if self._flush is None and not self._broken:
            self._flush = asyncio.create_task(self._run(), name="master-journal")

    async def close(self) -> None:
        """Writes the waiting entries, then ends the thread; old records are moved further at the next start."""
        self._closing = True
        if self._flush is not None:
            await self._flush
        self._thread.shutdown(wait=True)

    async def _run(self) -> None:
        untidy = True
        try:
            while self._waiting or (untidy and not self._closing):
                if self._waiting:
                    await self._write()
                    untidy = True
                else:
                    untidy = await self._on_thread(self._tidy)
        except Exception as error:
            self._broken = True
            self._failed(error)
        self._flush = None

    async def _write(self) -> None:
        batch, self._waiting = self._waiting, []
        await self._on_thread(lambda: self._append(batch))
        for entry in batch:
            self._written(entry.entry_id)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
