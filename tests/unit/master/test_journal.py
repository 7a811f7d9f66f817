"""The journal keeps what it confirmed, for one run and one master at a time, and says clearly when it cannot."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.journals import append, records_of

from dips.core.errors import ConfigError, FatalError, LocalProtocolError
from dips.core.net.newcomers import Bounds, PortWatch, files_of_process
from dips.master.archive import FILE_NAME
from dips.master.directory import ADDRESS_NAME, MasterAddress, lock_directory, read_address, remove_file, write_address
from dips.master.journal import Journal
from dips.master.state.effects import WriteJournal


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with contextlib.closing(Journal.open(tmp_path, "demo")) as opened:
        yield opened


def sql(directory: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(directory / FILE_NAME, isolation_level=None)) as connection:
        connection.execute(statement)


def test_snapshot_records_and_port_survive_a_restart_and_each_start_begins_the_next_epoch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no journal in"):
        records_of(tmp_path)
    kinds: list[tuple[int, int, str]] = []
    for epoch in (1, 2, 3):
        with contextlib.closing(Journal.open(tmp_path, "demo")) as journal:
            assert journal.latest_snapshot() == (None if epoch == 1 else f'"COMMIT {epoch - 1}"')
            assert journal.last_port() == (0 if epoch == 1 else 45_000 + epoch - 1)
            journal.remember_port(45_000 + epoch)
            assert journal.begin_epoch() == epoch
            for number, kind in ((1, "JOIN"), (2, "COMMIT")):  # numbers begin again in each epoch
                append(journal, epoch, number, kind, f'{{"n": {epoch}}}', f'"{kind} {epoch}"')
            kinds += [(epoch, 0, "EPOCH"), (epoch, 1, "JOIN"), (epoch, 2, "COMMIT")]
            assert [(record.epoch, record.entry_id, record.kind) for record in records_of(tmp_path)] == kinds
            assert [record.record_json for record in records_of(tmp_path, "COMMIT")] == [
                f'{{"n": {n + 1}}}' for n in range(epoch)
            ]
        journal.close()


def test_several_entries_are_written_together_or_not_at_all_and_no_number_is_used_again(journal: Journal) -> None:
    epoch = journal.begin_epoch()
    journal.append_all(epoch, [WriteJournal(1, "JOIN", "{}", '"one"'), WriteJournal(2, "EVICT", "{}", '"two"')])
    assert journal.latest_snapshot() == '"two"'
    with pytest.raises(LocalProtocolError, match="rising numbers"):
        journal.append_all(epoch, [WriteJournal(3, "JOIN", "{}", '"three"'), WriteJournal(3, "EVICT", "{}", '"four"')])
    for used in (0, 1, 2):
        with pytest.raises(LocalProtocolError, match="rising numbers"):
            append(journal, epoch, used, "COMMIT", "{}", '"lost"')
    assert journal.latest_snapshot() == '"two"'
    assert [record.entry_id for record in records_of(journal._path.parent)] == [0, 1, 2]


def test_a_master_whose_epoch_is_over_writes_nothing(journal: Journal) -> None:
    old = journal.begin_epoch()
    append(journal, old, 1, "JOIN", "{}", '"old"')
    new = journal.begin_epoch()
    with pytest.raises(FatalError, match="a newer master runs") as caught:
        append(journal, old, 2, "COMMIT", "{}", '"stale"')
    assert f"epoch {new}" in str(caught.value)
    assert journal.latest_snapshot() == '"old"'
    assert [record.kind for record in records_of(journal._path.parent)] == ["EPOCH", "JOIN", "EPOCH"]


def test_another_run_schema_or_place_is_refused_and_the_lock_given_back(journal: Journal, tmp_path: Path) -> None:
    journal.close()
    with pytest.raises(ConfigError, match="belongs to run 'demo', not 'other'"):
        Journal.open(tmp_path, "other")
    Journal.open(tmp_path, "demo").close()
    sql(tmp_path, "UPDATE meta SET value = '999' WHERE key = 'schema'")
    with pytest.raises(ConfigError, match="schema 999"):
        Journal.open(tmp_path, "demo")
    sql(tmp_path, "DROP TABLE snapshot")
    with pytest.raises(FatalError, match=r"tables \['snapshot'\] are missing"):
        Journal.open(tmp_path, "demo")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give one that it may write"):
        Journal.open(tmp_path / "file" / "run", "demo")


@pytest.mark.parametrize("content", [b"this is no database " * 300, b"SQLite format 3\x00" + b"\xff" * 8192])
def test_a_file_that_is_no_journal_is_named_with_a_remedy(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(FatalError, match="is damaged") as caught:
        Journal.open(tmp_path, "demo")
    assert str(tmp_path / FILE_NAME) in str(caught.value)
    assert "copy" in str(caught.value)
    assert (tmp_path / FILE_NAME).read_bytes() == content, "the evidence is left as it was"


def test_a_damaged_page_is_found_at_the_start(journal: Journal, tmp_path: Path) -> None:
    epoch = journal.begin_epoch()
    journal.append_all(epoch, [WriteJournal(n, "COMMIT", json.dumps({"n": "x" * 500}), "{}") for n in range(1, 200)])
    journal.close()
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    page_bytes = 4096
    middle = len(whole) // page_bytes // 2 * page_bytes
    path.write_bytes(whole[:middle] + b"\xa5" * page_bytes + whole[middle + page_bytes :])
    with pytest.raises(FatalError, match="is damaged"):
        Journal.open(tmp_path, "demo")


def test_disk_trouble_is_fatal_and_names_the_remedy(journal: Journal, tmp_path: Path) -> None:
    epoch = journal.begin_epoch()
    sql(tmp_path, "DROP TABLE records")
    with pytest.raises(FatalError, match="check that the disk has room"):
        append(journal, epoch, 1, "COMMIT", "{}", '"lost"')
    assert journal.latest_snapshot() is None


@pytest.mark.parametrize("number_was_given_away", [False, True])
def test_a_look_at_a_port_takes_no_lock_from_the_journal(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number_was_given_away: bool
) -> None:
    """Without its locks SQLite's tools delete the log of an open journal, and truncate the memory that it maps."""
    journal.begin_epoch()
    held = locks_on(tmp_path)
    assert any(lock.startswith("POSIX") for lock in held)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if number_was_given_away:  # a connection ended, and its number is the journal's since the look saw a socket
            file = os.open(tmp_path / FILE_NAME, os.O_RDONLY)
            real_dup = os.dup
            monkeypatch.setattr(os, "dup", lambda fd: real_dup(file))
        PortWatch(listener.getsockname()[1], Bounds(4, 4, 10.0)).look(files_of_process() or (), lambda _: False, 0.0)
    assert locks_on(tmp_path) == held


def locks_on(directory: Path) -> list[str]:
    """Kind and range of each lock on the files of a folder."""
    inodes = {str(file.stat().st_ino) for file in directory.iterdir()}
    lines = [line.partition(":")[2].split() for line in Path("/proc/locks").read_text().splitlines()]
    return sorted(" ".join(words) for words in lines if words[-3].rpartition(":")[2] in inodes)


def test_the_address_file_comes_whole_and_goes(tmp_path: Path) -> None:
    assert read_address(tmp_path) is None
    first = MasterAddress("127.0.0.1:4000", "demo", 12, 1)
    second = MasterAddress("127.0.0.1:4001", "demo", 13, 2)
    write_address(tmp_path, first)
    write_address(tmp_path, second)
    assert read_address(tmp_path) == second
    assert [path.name for path in tmp_path.iterdir()] == ["master.json"], "no temporary file stays"
    remove_file(tmp_path / ADDRESS_NAME)
    remove_file(tmp_path / ADDRESS_NAME)
    assert read_address(tmp_path) is None


def test_a_full_disk_is_told_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal may have had its room; this file is the first that finds none."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(FatalError, match=r"address .*master\.json cannot be written \(No space left"):
        write_address(tmp_path, MasterAddress("127.0.0.1:4000", "demo", 12, 1))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(FatalError, match=r"directory .* cannot be used \(No space left"):
        lock_directory(tmp_path)
    monkeypatch.undo()
    lock_directory(tmp_path).release()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"address": "127.0.0.1:1"}', '{"other": 1}'])
def test_an_address_file_of_nobody_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "master.json").write_text(text)
    with pytest.raises(ConfigError, match="does not name a master"):
        read_address(tmp_path)


def test_a_lock_file_left_by_a_dead_process_does_not_hold_the_directory(tmp_path: Path) -> None:
    (tmp_path / "master.lock").write_text("999999\n")
    lock = lock_directory(tmp_path)
    assert (tmp_path / "master.lock").read_text() == f"{os.getpid()}\n"
    lock.release()
    lock.release()


def filled(directory: Path) -> None:
    with contextlib.closing(Journal.open(directory, "demo")) as journal:
        epoch = journal.begin_epoch()
        for n in range(1, 7):
            append(journal, epoch, n, "COMMIT", json.dumps({"v": n, "kappa": "0.5"}), json.dumps({"tokens": n}))


@pytest.mark.parametrize("statement", [
    "UPDATE records SET record_json = replace(record_json, '0.5', '0.6') WHERE number = 3",
    "UPDATE records SET number = 70 WHERE number = 7", "DELETE FROM records WHERE number = 3",
    "DELETE FROM records WHERE number = 7", "UPDATE snapshot SET snapshot_json = '{\"tokens\": 7}'",
    "DELETE FROM snapshot", "UPDATE meta SET value = '2' WHERE key = 'epoch'",
    "UPDATE meta SET value = '0 x' WHERE key = 'base'", "DELETE FROM meta WHERE key = 'digest'",
    "INSERT INTO meta VALUES ('pruned', '1')",
    "INSERT INTO records (epoch, entry_id, kind, record_json, digest) VALUES (1, 7, 'COMMIT', '{}', '')",
])  # fmt: skip
def test_whatever_was_changed_in_the_file_is_found_by_master_and_tools(tmp_path: Path, statement: str) -> None:
    filled(tmp_path)
    sql(tmp_path, statement)
    for read in (lambda: Journal.open(tmp_path, "demo"), lambda: records_of(tmp_path)):
        with pytest.raises(FatalError, match=r"is damaged \(.*one with --rebuild if the slaves still hold") as caught:
            read()
        assert caught.value.exit_code == 6


def test_a_bit_in_any_byte_that_means_something_is_found(tmp_path: Path) -> None:
    """Most bits of the file are free space; one that changes what SQLite reads must be found."""
    filled(tmp_path)
    path, tables = tmp_path / FILE_NAME, ("records", "snapshot", "meta")
    whole = path.read_bytes()

    def content() -> object:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
                return [connection.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() for table in tables]
        except (sqlite3.Error, UnicodeDecodeError) as error:
            return str(error)

    written, changed = content(), 0
    used = [at for at in range(len(whole)) if whole[at]]
    for at in used[:: max(1, len(used) // 400)]:
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        if content() == written:
            continue
        changed += 1
        with pytest.raises((FatalError, ConfigError)):
            records_of(tmp_path)
    assert changed > 100
