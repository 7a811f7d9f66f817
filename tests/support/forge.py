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
from pathlib import Path
from typing import Any

from dips.core.telemetry import CHAIN, next_chain
from dips.master import journal_file
from dips.master.archive import JournalRecord, first_digest
from dips.master.journal_file import EPOCH, FILE_NAME

Record = dict[str, Any]


@contextmanager
def journal_sql(master: Path) -> Iterator[sqlite3.Cursor]:
    """A cursor on the journal's file; everything is written back to the file itself at the end."""
    with closing(sqlite3.connect(master / FILE_NAME, isolation_level=None)) as connection:
        yield connection.cursor()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def rechain_journal(master: Path) -> None:
    """Compute every digest in the journal's file again, from the record before the first."""
    with journal_sql(master) as cursor:
        number, digest = journal_file.base(cursor)
        assert number or digest == first_digest(str(journal_file.get_meta(cursor, "run_id"))), "a chain begins here"
        decided = JournalRecord(0, 0, "", "", 0, digest)
        for row in cursor.execute(journal_file.RECORDS, (None, 0)).fetchall():
            record = JournalRecord(*row).after(digest)
            digest = record.digest
            decided = record if record.kind != EPOCH else decided
            cursor.execute("UPDATE records SET digest = ? WHERE number = ?", (digest, record.number))
        for (text,) in cursor.execute("SELECT snapshot_json FROM snapshot").fetchall():
            journal_file.put_snapshot(cursor, decided.epoch, decided.entry_id, text, decided.digest)
        journal_file.set_meta(cursor, "epoch", str(journal_file.get_meta(cursor, "epoch")))


def retell_journal(master: Path) -> None:
    """Let the master's tape say the digests that the journal has now, of as many records as it has."""
    with journal_sql(master) as cursor:
        digests = dict(cursor.execute("SELECT number, digest FROM records").fetchall())

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
        rows = cursor.execute("SELECT number, record_json FROM records ORDER BY number").fetchall()
        before = {number: json.loads(text) for number, text in rows}
        parsed = copy.deepcopy(before)
        kept = list(parsed.values())
        change(kept)
        left = {id(record) for record in kept}
        for number, record in parsed.items():
            if id(record) not in left:
                cursor.execute("DELETE FROM records WHERE number = ?", (number,))
            elif record != before[number]:
                text = json.dumps(record, sort_keys=True, separators=(",", ":"))
                cursor.execute(
                    "UPDATE records SET record_json = ?, kind = ? WHERE number = ?", (text, record["kind"], number)
                )
    if rechain:
        rechain_journal(master)
    if rechain and retell:
        retell_journal(master)


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
