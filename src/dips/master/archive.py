"""The archive of old journal records: files of JSON lines that never change once they have their final name.

A segment is flushed, renamed, and its name flushed before its records may leave the journal; after a kill in between
they are in both, and the reader takes them once. Above its size limit the archive deletes its oldest segments. It must
never hold half a segment under a segment's name, and never decide what is old (docs/storage.md, directory of the
master).

Every record carries a digest that covers the digest of the record before it, here as in the journal's file, so that a
changed, missing or moved record is found wherever the history is read.

Every function blocks on the disk; only the master that holds the directory's lock may call those that write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from dips.core.errors import FatalError
from dips.core.files import TEMPORARY, make_folder, replace_file, sync_folder

FOLDER = "archive"

FILE_NAME = "journal.sqlite3"
"""The journal, next to the archive's folder."""

EPOCH = "EPOCH"
"""The kind of the record that begins an epoch; the only kind without its own snapshot."""

SEGMENT_RECORDS = 512
SEGMENT_BYTES = 4 << 20
"""A segment ends at whichever comes first. One append may have to wait until 4 MiB are written and flushed:
about 10 ms on a disk that writes 400 MB/s, in addition to its own flush."""

_NAME = re.compile(r"(\d{10,})-(\d{10,})\.jsonl\Z")


@dataclass(frozen=True)
class JournalRecord:
    """One record of the journal; entry 0 of each epoch is its EPOCH record."""

    epoch: int
    entry_id: int
    kind: str
    record_json: str
    number: int = 0  # counts all records of the run, from 1
    # of all other fields and of the previous record's digest; empty in records of a release that kept none
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
                yield record_of(self.path, line)


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
        _write(segment.path, records)
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
        make_folder(folder)
        sync_folder(directory, "master")
    for pattern in (f"{TEMPORARY}*", "*.tmp"):  # of a master that was killed; of one of an older release
        for left in folder.glob(pattern):
            left.unlink()
    first, last = records[0].number, records[-1].number
    segment = Segment(folder / f"{first:010d}-{last:010d}.jsonl", first, last)
    _write(segment.path, records)
    return segment


def drop_segment(segment: Segment) -> None:
    """Deletes one segment; the journal must have recorded that already. Raises OSError."""
    segment.path.unlink(missing_ok=True)
    sync_folder(segment.path.parent, "master")


def _write(path: Path, records: Sequence[JournalRecord]) -> None:
    text = "".join(map(line_of, records))
    replace_file(path, [text.encode()], place="master.archive")


def line_of(record: JournalRecord) -> str:
    """The record as a line of a segment."""
    line = {"n": record.number, "epoch": record.epoch, "entry": record.entry_id, "kind": record.kind}
    return json.dumps({**line, "record": record.record_json, "digest": record.digest}, separators=(",", ":")) + "\n"


def record_of(path: Path, line: bytes) -> JournalRecord:
    """Inverse of line_of. Raises FatalError, which names `path`, for a line that is none."""
    try:
        row = json.loads(line.decode())
        kind, text, digest = str(row["kind"]), str(row["record"]), str(row.get("digest", ""))
        return JournalRecord(int(row["epoch"]), int(row["entry"]), kind, text, int(row["n"]), digest)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise FatalError(
            f"the archive's file {path} is damaged ({error}): restore it from a copy, or move it away to go without "
            "the decisions that it holds; the run itself does not need them"
        ) from error
