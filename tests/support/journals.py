"""The records of a master's directory."""

from __future__ import annotations

from pathlib import Path

from dips.master.archive import JournalRecord
from dips.master.journal import Journal, read_content
from dips.master.state.effects import WriteJournal


def records_of(directory: Path, kind: str | None = None) -> list[JournalRecord]:
    """All records, oldest first, or those of a kind. Raises as read_content does."""
    return [record for record in read_content(directory).records if kind in (None, record.kind)]


def append(journal: Journal, epoch: int, entry_id: int, kind: str, record_json: str, snapshot_json: str) -> None:
    """Makes one entry durable."""
    journal.append_all(epoch, [WriteJournal(entry_id, kind, record_json, snapshot_json)])
