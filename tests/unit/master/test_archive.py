"""Old decisions move out of the journal: none is lost, none is read twice, whenever the master dies."""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forge import as_of_schema_2, journal_sql
from support.journals import append, records_of

from dips.core.errors import ConfigError, FatalError, RetryLater
from dips.core.observe.failpoints import armed
from dips.master.archive import FILE_NAME, FOLDER, JournalRecord, Segment, segments, write_segment
from dips.master.journal import Journal, Retention, read_content
from dips.master.state.effects import WriteJournal

KEPT = Retention(records=16, archive_bytes=1 << 30)
PLACES = [
    *(f"master.archive.{place}" for place in ("before_write", "before_fsync", "before_rename", "after_rename")),
    *("master.directory.before_fsync", "master.archive.before_delete"),
]


@contextlib.contextmanager
def opened(directory: Path, retention: Retention = KEPT) -> Iterator[Journal]:
    with contextlib.closing(Journal.open(directory, "demo", retention)) as journal:
        yield journal


def fill(journal: Journal, n_entries: int, begin: int = 1, epoch: int | None = None) -> int:
    """Append entries `begin` to `n_entries`, numbered alike, each with its snapshot; returns the epoch."""
    epoch = epoch or journal.begin_epoch()
    for number in range(begin, n_entries + 1):
        append(journal, epoch, number, "COMMIT" if number % 5 == 0 else "LEASE", json.dumps({"n": number}), f"{number}")
    return epoch


def tidy_up(journal: Journal) -> int:
    """Tidy until nothing is left to do; returns the number of steps."""
    steps = 1
    while journal.tidy():
        steps += 1
    return steps


def archived(directory: Path, n_entries: int, retention: Retention = KEPT) -> None:
    """A journal of so many entries more, tidied up."""
    with opened(directory, retention) as journal:
        fill(journal, n_entries)
        tidy_up(journal)


def numbers(directory: Path) -> list[int]:
    return [record.number for record in records_of(directory)]


def in_file(directory: Path) -> int:
    with contextlib.closing(sqlite3.connect(directory / FILE_NAME)) as connection:
        return int(connection.execute("SELECT COUNT(*) FROM records").fetchone()[0])


def test_the_oldest_records_move_and_all_are_read_in_order(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        epoch = fill(journal, 10)
        assert tidy_up(journal) == 1
        assert not (tmp_path / FOLDER).exists(), "a short journal stays whole"
        fill(journal, 60, begin=11, epoch=epoch)
        journal.tidy()
        (tmp_path / FOLDER / "README").write_text("mine")
        fill(journal, 99, begin=61, epoch=epoch)
        assert tidy_up(journal) > 10, "in small steps"
        assert numbers(tmp_path) == list(range(1, 101))
        assert journal.latest_snapshot() == "99"
        assert journal.pruned() is None
    assert KEPT.records <= in_file(tmp_path) <= KEPT.records + KEPT.segment_records
    read = records_of(tmp_path)
    assert [record.number for record in read] == list(range(1, 101))
    assert [(record.epoch, record.entry_id) for record in read] == [(1, n) for n in range(100)]
    assert [json.loads(record.record_json)["n"] for record in read[1:]] == list(range(1, 100))
    assert [record.entry_id for record in records_of(tmp_path, "COMMIT")] == list(range(5, 100, 5))
    assert read_content(tmp_path).pruned is None
    kept = segments(tmp_path)
    assert kept[0].first == 1
    assert all(later.first == earlier.last + 1 for earlier, later in itertools.pairwise(kept))
    assert len(list((tmp_path / FOLDER).glob("*.jsonl"))) == len(kept)
    assert (tmp_path / FOLDER / "README").read_text() == "mine"
    archived(tmp_path, 30)
    assert numbers(tmp_path) == list(range(1, 132))


def test_the_newest_record_stays_however_few_are_kept(tmp_path: Path) -> None:
    with opened(tmp_path, Retention(records=0)) as journal:
        epoch = fill(journal, 20)
        tidy_up(journal)
        append(journal, epoch, 21, "COMMIT", "{}", "21")
    assert 1 <= in_file(tmp_path) <= 3
    assert numbers(tmp_path) == list(range(1, 23))


@pytest.mark.parametrize("place", PLACES)
def test_an_error_at_any_step_loses_nothing(tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as journal:
        epoch = fill(journal, 40)
        with armed(f"{place}=1*error(no space left)"):
            assert journal.tidy() is False
        assert "old decisions cannot be moved" in caplog.text
        assert "no space left" in caplog.text
        assert journal.tidy() is False, "not at once again"
        assert numbers(tmp_path) == list(range(1, 42))
        fill(journal, 45, begin=41, epoch=epoch)
        tidy_up(journal)
    assert numbers(tmp_path) == list(range(1, 47))
    assert in_file(tmp_path) <= KEPT.records + KEPT.segment_records


@pytest.mark.parametrize("lost", ["DROP TABLE records", "ALTER TABLE records RENAME COLUMN record_json TO lost"])
def test_disk_trouble_of_the_journal_is_fatal_and_names_the_remedy(tmp_path: Path, lost: str) -> None:
    """The second one shows only where records are read, after the count of them."""
    with opened(tmp_path) as journal:
        fill(journal, 40)
        with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
            other.execute(lost)
        with pytest.raises(FatalError, match="check that the disk has room"):
            journal.tidy()


@pytest.mark.parametrize("place", [*PLACES, "master.journal.before_commit", "master.journal.after_commit"])
def test_a_kill_at_any_step_loses_nothing_and_doubles_nothing(tmp_path: Path, place: str) -> None:
    class Killed(BaseException):
        """Goes through every handler, as a kill does; what runs on the way out writes nothing."""

    def die(*_: object) -> None:
        raise Killed

    with opened(tmp_path) as journal:
        fill(journal, 40)
        with armed(f"{place}=1*error"), pytest.MonkeyPatch.context() as patch:
            patch.setattr("dips.core.observe.failpoints._carry_out", die)
            with pytest.raises(Killed):
                journal.tidy()
        assert numbers(tmp_path) == list(range(1, 42)), "a tool that reads now"
    with opened(tmp_path) as journal:
        assert numbers(tmp_path) == list(range(1, 42))
        fill(journal, 3)
        tidy_up(journal)
    assert numbers(tmp_path) == list(range(1, 46))
    assert not list((tmp_path / FOLDER).glob("*.tmp"))


def test_beyond_its_room_the_archive_gives_up_the_oldest_and_says_so(tmp_path: Path) -> None:
    room = Retention(records=16, archive_bytes=600)
    with opened(tmp_path, room) as journal:
        fill(journal, 199)
        tidy_up(journal)
        pruned = journal.pruned()
    assert pruned is not None
    assert sum(segment.size_bytes for segment in segments(tmp_path)) <= room.archive_bytes
    assert read_content(tmp_path).pruned == pruned
    assert numbers(tmp_path) == list(range(pruned.number + 1, 201))
    assert f"after record {pruned.number}" in str(pruned)


def test_an_archive_whose_room_was_made_smaller_shrinks_step_by_step(tmp_path: Path) -> None:
    archived(tmp_path, 199)
    before = len(segments(tmp_path))
    with opened(tmp_path, Retention(records=16, archive_bytes=300)) as journal:
        epoch = fill(journal, 2)
        journal.tidy()
        assert before - 4 <= len(segments(tmp_path)) < before, "a few at a time"
        fill(journal, 200, begin=3, epoch=epoch)
        tidy_up(journal)
    assert sum(segment.size_bytes for segment in segments(tmp_path)) <= 300


def test_a_kill_between_the_note_and_the_deletion_hides_the_pruned_records(tmp_path: Path) -> None:
    room = Retention(records=16, archive_bytes=600)
    with opened(tmp_path, room) as journal:
        fill(journal, 199)
        with armed("master.archive.before_prune=1*error"):
            tidy_up(journal)
        pruned = journal.pruned()
        assert pruned is not None
        assert segments(tmp_path)[0].first == 1, "the file is there still"
        assert numbers(tmp_path)[0] == pruned.number + 1
    with opened(tmp_path, room) as journal:
        assert segments(tmp_path)[0].first == pruned.number + 1
        assert numbers(tmp_path)[0] == pruned.number + 1


def test_a_segment_that_goes_while_it_is_read_asks_to_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived(tmp_path, 99)

    def seen(directory: Path) -> Iterator[Segment]:
        first, *others = segments(directory)
        yield first
        for segment in others:
            segment.path.unlink()
            yield segment

    monkeypatch.setattr("dips.master.journal.segments", seen)
    with pytest.raises(RetryLater, match="read the journal again"):
        read_content(tmp_path)


def test_a_reader_that_began_before_a_move_misses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 60)

        def move(directory: Path) -> list[Segment]:
            monkeypatch.undo()
            assert tidy_up(journal) > 1
            return segments(directory)

        monkeypatch.setattr("dips.master.journal.segments", move)
        assert numbers(tmp_path) == list(range(1, 62))
        assert in_file(tmp_path) < 61


def test_a_damaged_segment_is_named_with_what_to_do(tmp_path: Path) -> None:
    archived(tmp_path, 60)
    path = segments(tmp_path)[1].path
    path.write_text("{\n" + path.read_text())
    with pytest.raises(FatalError, match=r"is damaged .*: restore it from a copy") as caught:
        numbers(tmp_path)
    assert str(path) in str(caught.value)
    with opened(tmp_path) as journal:
        assert journal.begin_epoch() == 2, "the run goes on without its history"


def test_an_archive_without_its_journal_or_of_another_one_is_refused(tmp_path: Path) -> None:
    archived(tmp_path, 60)
    for path in tmp_path.glob(f"{FILE_NAME}*"):
        path.unlink()
    with pytest.raises(ConfigError, match="move that folder away"):
        Journal.open(tmp_path, "demo")
    with opened(tmp_path / "one") as journal:
        fill(journal, 20)
    write_segment(tmp_path / "one", [JournalRecord(7, n, "COMMIT", "{}", n) for n in (1, 2, 3)])
    with pytest.raises(FatalError, match="one of the two came from elsewhere"):
        Journal.open(tmp_path / "one", "demo")


@pytest.mark.parametrize("n_entries", [0, 30], ids=["of nothing", "of the beginning"])
def test_a_journal_put_back_from_a_copy_goes_on_after_the_archive(tmp_path: Path, n_entries: int) -> None:
    with opened(tmp_path) as journal:
        epoch = fill(journal, n_entries) if n_entries else 0
    copy = (tmp_path / FILE_NAME).read_bytes()
    with opened(tmp_path) as journal:
        fill(journal, 60, begin=n_entries + 1, epoch=epoch or None)
        tidy_up(journal)
    newest = segments(tmp_path)[-1].last
    for path in tmp_path.glob(f"{FILE_NAME}*"):
        path.unlink()
    (tmp_path / FILE_NAME).write_bytes(copy)
    for life in range(1, 4):
        with opened(tmp_path) as journal:
            journal.begin_epoch(at_least=5)
            assert numbers(tmp_path)[-life:] == list(range(newest + 1, newest + 1 + life))


def test_a_journal_of_the_first_schema_is_brought_up_to_date(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 20)
    as_of_schema_2(tmp_path)
    with journal_sql(tmp_path) as cursor:
        cursor.execute("UPDATE meta SET value = '1' WHERE key = 'schema'")
    assert numbers(tmp_path) == list(range(1, 22)), "tools read it as it is"
    with opened(tmp_path) as journal:
        tidy_up(journal)
    with journal_sql(tmp_path) as cursor:
        assert cursor.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() == ("3",)
    assert numbers(tmp_path) == list(range(1, 22))


@pytest.mark.parametrize("killed_at", ["", "master.archive.before_rename", "master.archive.after_rename"])
def test_a_journal_without_digests_and_its_archive_get_them_when_opened(tmp_path: Path, killed_at: str) -> None:
    room = Retention(records=16, archive_bytes=1200)
    with opened(tmp_path, room) as journal:
        fill(journal, 99)
        tidy_up(journal)
        pruned = journal.pruned()
    assert pruned is not None
    as_of_schema_2(tmp_path)
    for segment in segments(tmp_path):
        rows = [json.loads(line) for line in segment.path.read_text().splitlines()]
        text = "".join(json.dumps({key: row[key] for key in row if key != "digest"}) + "\n" for row in rows)
        segment.path.write_text(text)
    expected = list(range(pruned.number + 1, 101))
    assert numbers(tmp_path) == expected, "tools read it as it is"
    assert not read_content(tmp_path).has_digests
    if killed_at:
        with armed(f"{killed_at}=1*error"), pytest.raises(FatalError):
            Journal.open(tmp_path, "demo", room)
    archived(tmp_path, 5, room)
    assert read_content(tmp_path).has_digests
    assert numbers(tmp_path)[-1] == 106
    path = segments(tmp_path)[1].path
    path.write_text(path.read_text().replace("LEASE", "LEASF", 1))
    with pytest.raises(FatalError, match="its digest differs"):
        numbers(tmp_path)


def test_a_missing_segment_is_said(tmp_path: Path) -> None:
    archived(tmp_path, 99)
    kept = segments(tmp_path)
    newest = kept[-1].path.read_bytes()
    kept[-1].path.unlink()
    with pytest.raises(FatalError, match=r"ends at record \d+, and the journal continues after record"):
        numbers(tmp_path)
    kept[-1].path.write_bytes(newest)
    kept[1].path.unlink()
    with pytest.raises(FatalError, match="its digest differs"):
        numbers(tmp_path)
    for segment in segments(tmp_path):
        segment.path.unlink()
    content = read_content(tmp_path)
    assert content.missing == (1, content.records[0].number - 1)
    with opened(tmp_path) as journal:
        assert journal.begin_epoch() == 2, "the run goes on without its history"


def test_a_segment_ends_at_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dips.master.journal.SEGMENT_BYTES", 1100)
    with opened(tmp_path, Retention(records=800)) as journal:
        epoch = journal.begin_epoch()
        entries = [WriteJournal(n, "COMMIT", json.dumps("x" * (900 if n % 2 else 90)), "{}") for n in range(1, 1001)]
        journal.append_all(epoch, entries)
        journal.tidy()
    [segment] = segments(tmp_path)
    assert segment.last == 3, "the EPOCH record and two entries have 1022 bytes"


def test_at_least_one_record_is_in_a_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dips.master.journal.SEGMENT_BYTES", 1)
    archived(tmp_path, 30)
    assert {segment.last - segment.first for segment in segments(tmp_path)} == {0}
    assert numbers(tmp_path) == list(range(1, 32))


def test_an_epoch_can_be_asked_to_be_late_but_never_goes_back(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        assert journal.begin_epoch(at_least=40) == 40
        assert journal.begin_epoch(at_least=7) == 41
        assert journal.begin_epoch() == 42
        epochs = [json.loads(record.record_json) for record in records_of(tmp_path, "EPOCH")]
    assert epochs == [{"kind": "EPOCH", "epoch": epoch} for epoch in (40, 41, 42)]
