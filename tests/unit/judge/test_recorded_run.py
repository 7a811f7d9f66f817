"""A run that an earlier version recorded: it stays readable, and whatever is changed in its files is named.

tests/frozen/recorded_run.tar.xz was made by tests/support/recorded_run.py; recorded_run.json is what
`dips verify --replay` said of it on that day.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.corruptions import CORRUPTIONS, Corruption, judged, newest_manifest, tape_of
from support.journals import append
from support.recorded_run import NUMBERS, numbers_of, unpacked

from dips.cli import main
from dips.core.errors import ConfigError
from dips.judge import pack
from dips.judge.verify import EXIT_UNREADABLE, verify_run
from dips.master.archive import EPOCH
from dips.master.journal import Journal, connect_to_read, read_content

PINNED = json.loads(NUMBERS.read_text())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def test_every_promise_is_proven_and_every_version_computed_again_as_on_the_day_it_was_recorded(recorded: Path) -> None:
    assert numbers_of(recorded) == PINNED


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda item: f"{item.kind}: {item.name}")
def test_each_corruption_is_said_by_name(run: Path, corruption: Corruption) -> None:
    corruption.apply(run)
    code, said = judged(run)
    assert code != 0
    assert corruption.finds in said


def test_what_breaks_off_is_noted_and_what_cannot_be_opened_is_a_problem(run: Path) -> None:
    assert verify_run(run).notes == []
    tape = tape_of(run, "s0")
    tape.write_bytes(b"".join(tape.read_bytes().splitlines(keepends=True)[:-1]))
    (run / "s1" / "manifest-9.json").mkdir()
    snapshot = newest_manifest(run).with_name(json.loads(newest_manifest(run).read_bytes())["body"]["file"])
    snapshot.write_bytes(snapshot.read_bytes()[:-1] + b"?")
    report = verify_run(run)
    assert ["tape of slave s0 does not end with the line of an orderly end" in note for note in report.notes] == [True]
    assert ["manifest-9.json cannot be read" in problem for problem in report.problems] == [False, True]
    assert str(snapshot) in report.problems[0]
    assert report.exit_code == EXIT_UNREADABLE


def test_what_a_backup_is_sending_is_no_problem(run: Path) -> None:
    """A copier that ends in between leaves the manifest of a snapshot, whose file has another name there."""
    (run / "s1" / "backup").mkdir()
    shutil.copy(max((run / "s1").glob("manifest-*.json")), run / "s1" / "backup")
    assert verify_run(run).problems == []


def standby_of(run: Path, n_records: int | None = None) -> Journal:
    """A standby's journal next to the master's, with all or the first records of it."""
    content = read_content(run / "master")
    journal = Journal.open(run / "standby", content.run_id)
    for row in content.records[:n_records]:
        if row.kind == EPOCH:
            journal.begin_epoch()
        else:
            append(journal, row.epoch, row.entry_id, row.kind, row.record_json, content.snapshot_json or "")
    return journal


def test_the_journal_of_a_standby_that_took_over_is_judged_with_the_masters(run: Path) -> None:
    standby = standby_of(run)
    assert standby.newest()[1] == read_content(run / "master").records[-1].digest
    assert ["standby is the same up to its end" in note for note in verify_run(run).notes] == [True]
    standby.begin_epoch(1001)
    standby.close()
    report = verify_run(run)
    assert (report.ok, ["master is the same up to its end" in note for note in report.notes][-1]) == (True, True)
    with closing(Journal.open(run / "master", "recorded")) as master:
        append(master, master.begin_epoch(), 1, "LEAVE", '{"kind": "LEAVE", "cluster": "a"}', "{}")
    report = verify_run(run)
    assert (report.ok, ["master has 2 records after number" in note for note in report.notes][-1]) == (True, True)


def test_what_the_older_of_two_masters_published_may_not_be_missing_at_the_newer_one(run: Path) -> None:
    last = max(at for at, row in enumerate(read_content(run / "master").records) if row.kind == "COMMIT")
    with closing(standby_of(run, last)) as standby:
        standby.begin_epoch(1001)
    said = [violation.sentence for violation in verify_run(run).violations]
    assert sum("was published, and the master that took over does not have it" in sentence for sentence in said) == 1


def test_the_newer_of_two_masters_need_not_have_what_came_before_the_version_that_it_took(run: Path) -> None:
    rows = read_content(run / "master").records
    *_, lacking, last = (at for at, row in enumerate(rows) if row.kind == "COMMIT")
    adopted = json.dumps({**json.loads(rows[last].record_json), "kind": "ADOPT", "epoch": 1001})
    with closing(standby_of(run, lacking)) as standby:
        append(standby, standby.begin_epoch(1001), 1, "ADOPT", adopted, "{}")
    report = verify_run(run)
    assert not [violation for violation in report.violations if "was published" in violation.sentence]
    assert any("from which the run does not go on" in note for note in report.notes)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_journal_from_before_a_rebuild_is_named_and_accuses_no_one(run: Path, damaged: bool) -> None:
    for place, epoch in (("lost", 3), ("older", 2), ("master", 5)):
        with closing(Journal.open(run / place, "recorded")) as journal:
            journal.begin_epoch(epoch)
    if damaged:
        (run / "lost" / "journal.sqlite3").write_bytes(b"not a journal" * 99)
    report = verify_run(run)
    assert report.violations == []
    assert ["/lost/journal" in problem for problem in report.problems] == [True] * damaged
    unknown = {note.split()[3].rpartition("/")[2] for note in report.notes if "has no record in common" in note}
    assert unknown == {"older", *["lost"] * (not damaged)}


def test_two_journals_that_differ_without_a_take_over_contradict_each_other(run: Path) -> None:
    with closing(standby_of(run)) as standby, closing(Journal.open(run / "master", "recorded")) as master:
        epoch = standby.begin_epoch()
        assert master.begin_epoch() == epoch
        for journal, cluster in ((standby, "a"), (master, "b")):
            append(journal, epoch, 1, "LEAVE", f'{{"kind": "LEAVE", "cluster": "{cluster}"}}', "{}")
    said = [violation.sentence for violation in verify_run(run).violations]
    assert sum("is not the same in both journals" in sentence for sentence in said) == 1


SECRET = b"a key that no one else may have"


@pytest.mark.parametrize(("until", "missing"), [("", 0), ("r1.2", 1)])
def test_a_pack_proves_the_same_elsewhere_and_holds_no_secret(
    recorded: Path, tmp_path: Path, until: str, missing: int
) -> None:
    run, to = Path(shutil.copytree(recorded, tmp_path / "run")), tmp_path / "pack"
    for place in ("keys/a/key.pem", "master/page-token", "master/archive/key.pem", "s0/key.pem", "s0/pushes/key.pem"):
        (run / place).parent.mkdir(parents=True, exist_ok=True)
        (run / place).write_bytes(SECRET)
    (run / "x.jsonl").write_bytes(b'{"key":"%b"}\n' % SECRET)
    report = pack.pack_run(run, to, until)
    assert (report.ok, report.replayed is not None and bool(report.replayed.missing)) == (True, bool(missing))
    shutil.rmtree(run)  # nothing in the folder may lead back to it
    held = {path.relative_to(to): path.read_bytes() for path in to.rglob("*") if path.is_file()}
    assert not [path for path, data in held.items() if SECRET in data]
    lines = (line.split("  ") for line in held.pop(Path(pack.SUMS)).decode().splitlines())
    sums = {name: digest for digest, name in lines}
    assert sums == {str(path): hashlib.sha256(data).hexdigest() for path, data in held.items()}
    again = verify_run(to, replay=True, allow_skipped=bool(until))
    assert again.to_json() == report.to_json()
    assert {path.relative_to(to) for path in to.rglob("*") if path.is_file()} == {*held, Path(pack.SUMS)}
    of_slaves = {
        path.relative_to(recorded) for name in ("identity.json", "promise.json") for path in recorded.rglob(name)
    }
    assert of_slaves <= held.keys()


def test_a_round_that_is_committed_meanwhile_is_packed_as_well(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, later = Path(shutil.copytree(recorded, tmp_path / "run")), []
    for path in [*run.rglob("pushes/round-r1.12.json"), *run.rglob("manifest-*.json")]:
        later.append((path, path.read_bytes()))
        path.unlink()

    def committed(journal: Path) -> sqlite3.Connection:
        for path, data in later:
            path.write_bytes(data)
        return connect_to_read(journal)

    monkeypatch.setattr(pack, "connect_to_read", committed)
    assert pack.pack_run(run, tmp_path / "pack").ok


@pytest.mark.parametrize(("link", "sentence"), [
    ("", "leads out of"), ("../../../../key.safetensors", "it was changed"), ("key.pem", "it was changed"),
])  # fmt: skip
def test_a_slaves_directory_cannot_bring_other_files_into_a_pack(
    recorded: Path, tmp_path: Path, link: str, sentence: str
) -> None:
    run, key = Path(shutil.copytree(recorded, tmp_path / "run")), tmp_path / "key.safetensors"
    key.write_bytes(SECRET)
    record = next(run.rglob("pushes/round-r1.2.json"))
    raw = json.loads(record.read_bytes())
    record.with_name("key.pem").write_bytes(SECRET)
    if not link:
        pushed = record.with_name(raw["accepted"][0]["file"])
        pushed.unlink()
        pushed.symlink_to(key)
    else:
        raw["accepted"][0]["file"] = link
        record.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=sentence):
        pack.pack_run(run, tmp_path / "pack")
    assert not [path for path in (tmp_path / "pack").rglob("*.*") if path.is_file() and path.read_bytes() == SECRET]


@pytest.mark.parametrize(
    ("to", "until", "sentence"),
    [
        ("full", "", "is not empty"),
        ("run/pack", "", "inside of the run's directory"),
        ("pack", "r0.1", "no recorded pushes up to round r0.1"),
        ("pack", "1:6", "'1:6' is not a round"),
    ],
)
def test_a_pack_that_cannot_be_is_refused(run: Path, tmp_path: Path, to: str, until: str, sentence: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a file").touch()
    with pytest.raises(ConfigError, match=sentence):
        pack.pack_run(run, tmp_path / to, until)
    assert not (tmp_path / "pack").exists()


def test_the_command_names_the_one_that_verifies_its_pack(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "pack"
    assert main.run(["pack", str(recorded), "--to", str(to), "--until", "r1.2"]) == 0
    named = capsys.readouterr().out.partition("dips verify ")[2].partition(" what they prove")[0]
    assert main.run(["verify", *named.split()]) == 0
    assert main.run(["verify", str(to), "--replay"]) != 0, "rounds after r1.2 cannot be replayed"
