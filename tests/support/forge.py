"""Changes what a run recorded, with and without the digests that would give the change away.

With `rechain` the digests are computed again, as somebody would who knows the formats: what is found then is found by
comparing records with one another.
"""

from __future__ import annotations

import copy
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.journals import records_of

from dips.core.observe.tape import CHAIN, next_chain
from dips.master import archive
from dips.master import journal as journal_file
from dips.master.archive import EPOCH, FILE_NAME, JournalRecord, first_digest, segments

Record = dict[str, Any]


@contextmanager
def journal_sql(master: Path) -> Iterator[sqlite3.Cursor]:
    """A cursor on the journal's file; everything is written back to the file itself at the end."""
    with closing(sqlite3.connect(master / FILE_NAME, isolation_level=None)) as connection:
        yield connection.cursor()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _rows(cursor: sqlite3.Cursor, master: Path) -> dict[Path | None, list[JournalRecord]]:
    rows: dict[Path | None, list[JournalRecord]] = {item.path: list(item.records()) for item in segments(master)}
    rows[None] = [JournalRecord(*row) for row in cursor.execute(journal_file.RECORDS, (0,))]
    return rows


def rechain_journal(master: Path, cursor: sqlite3.Cursor, rows: dict[Path | None, list[JournalRecord]]) -> None:
    """Write the records back, every digest computed again from the first one on."""
    run_id = str(journal_file.get_meta(cursor, "run_id"))
    digest, number = first_digest(run_id), 0
    decided = JournalRecord(0, 0, "", "", 0, digest)
    for path, records in rows.items():
        written = []
        for record in records:
            written.append(record.after(digest))
            digest, number = written[-1].digest, record.number
            decided = written[-1] if record.kind != EPOCH else decided
        if path is not None:
            archive._write(path, written)
            journal_file.set_base(cursor, number, digest)
        else:
            cursor.execute("DELETE FROM records")
            for record in written:
                journal_file.insert_record(cursor, record)
    for (text,) in cursor.execute("SELECT snapshot_json FROM snapshot").fetchall():
        journal_file.put_snapshot(cursor, decided.epoch, decided.entry_id, text, decided.digest)
    newest = rows[None][-1].epoch if rows[None] else 0
    journal_file.set_meta(cursor, "epoch", str(newest))


def retell_journal(master: Path) -> None:
    """Let the master's tape say the digests that the journal has now, of as many records as it has."""
    digests = {record.number: record.digest for record in records_of(master)}

    def change(lines: list[Record]) -> None:
        lines[:] = [line for line in lines if line["kind"] != "journaled" or line["number"] in digests]
        for line in lines:
            if line["kind"] == "journaled":
                line["digest"] = digests[line["number"]]

    for tape in master.glob("*.jsonl"):
        edit_tape(tape, change)


def edit_journal(
    master: Path, change: Callable[[list[Record]], object], *, rechain: bool = True, retell: bool = True
) -> None:
    """`change` may alter the records, parsed, and take some out of the list.

    rechain: with digests that fit. retell: on the master's tape as well, which says how the journal grew.
    """
    with journal_sql(master) as cursor:
        rows = _rows(cursor, master)
        before = {record.number: json.loads(record.record_json) for part in rows.values() for record in part}
        parsed = copy.deepcopy(before)
        kept = list(parsed.values())
        change(kept)
        left = {id(record) for record in kept}
        for path, part in rows.items():
            rows[path] = [_edited(record, before, parsed) for record in part if id(parsed[record.number]) in left]
        if rechain:
            rechain_journal(master, cursor, rows)
        else:
            cursor.execute("DELETE FROM records")
            for record in rows[None]:
                journal_file.insert_record(cursor, record)
    if rechain and retell:
        retell_journal(master)


def _edited(record: JournalRecord, before: dict[int, Record], after: dict[int, Record]) -> JournalRecord:
    said = after[record.number]
    if said == before[record.number]:
        return record
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return replace(record, kind=str(said.get("kind", record.kind)), record_json=text)


def as_of_schema_2(master: Path) -> None:
    """The journal's file as the release before digests wrote it."""
    with journal_sql(master) as cursor:
        rows = cursor.execute("SELECT number, epoch, entry_id, kind, record_json FROM records").fetchall()
        snapshot = cursor.execute("SELECT only_row, epoch, entry_id, snapshot_json FROM snapshot").fetchall()
        for table in ("records", "snapshot"):
            cursor.execute(f"DROP TABLE {table}")
            cursor.execute(journal_file.TABLES_WITHOUT_DIGESTS[table])
        cursor.executemany(
            "INSERT INTO records (number, epoch, entry_id, kind, record_json) VALUES (?, ?, ?, ?, ?)", rows
        )
        cursor.executemany("INSERT INTO snapshot VALUES (?, ?, ?, ?)", snapshot)
        cursor.execute("DELETE FROM meta WHERE key IN ('base', 'digest', 'pruned_digest')")
        cursor.execute("UPDATE meta SET value = '2' WHERE key = 'schema'")


def edit_tape(path: Path, change: Callable[[list[Record]], object], *, rechain: bool = True) -> None:
    """`change` may alter the lines, parsed, and take some out of the list. Without `rechain` each keeps its digest."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    chain, written = b"", []
    for line in lines:
        said = line.pop(CHAIN, None)
        text = json.dumps(line, separators=(",", ":")).encode()[:-1]
        chain = next_chain(chain, text) if rechain else str(said).encode()
        written.append(b'%b,"chain":"%b"}\n' % (text, chain))
    path.write_bytes(b"".join(written))
