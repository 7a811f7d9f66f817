"""`dips verify` over a run's directory: what it finds, how it exits, and what it says when something is missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.forge import Record, as_of_schema_2, edit_journal, edit_tape, journal_sql
from support.history import Change, Script, Step, changed, nth, usual_run, write_run

from dips.cli import main
from dips.core.errors import ConfigError
from dips.core.ids import RoundId, Version
from dips.core.messages import SnapshotInfo
from dips.judge.facts import Fact
from dips.judge.records import RunRecords, TapeRead, find_tapes, master_directory, read_run
from dips.judge.verify import EXIT_BROKEN, EXIT_UNREADABLE, check_records, verify_or_say, verify_run
from dips.master.archive import FILE_NAME
from dips.master.journal import JournalContent, read_content, set_base, set_meta
from dips.slave.disk import LocalDisk
from dips.slave.ring import Ring

N_ELEMS = 8


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", usual_run())


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main.run([str(word) for word in arguments])
    out, error = capsys.readouterr()
    return code, out, error


def broken_run(directory: Path, change: Change) -> Path:
    script = usual_run()
    return write_run(directory / "run", script, changed(script, change))


# ---- what is well ----


def test_a_run_that_went_well_is_proven(run: Path) -> None:
    report = verify_run(run)
    assert (report.exit_code, report.verdict, report.problems) == (0, "ok", [])
    assert {row.name for row in report.rows if row.records} == {
        *(f"I{number}" for number in range(1, 15)),
        "I18",
        "records",
    }
    assert report.notes == []
    assert report.run_id == "test"


def test_what_a_demo_reports(run: Path, tmp_path: Path) -> None:
    said = verify_or_say(run)
    assert said["verify"] == "ok"
    assert said["verified"]["I1"] > 0
    assert verify_or_say(tmp_path / "nothing")["verify"].startswith("unreadable: ")


# ---- what is broken, unproven, or ruled out ----


def test_a_broken_promise_ends_with_7_and_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"digest_of_slave": {"s0": "ff" * 16, "s1": "ff" * 16}}
    run = broken_run(tmp_path, lambda steps: nth(steps, "worker", "installed", -1).fields.update(other))
    code, out, _ = told(capsys, "verify", run)
    assert code == EXIT_BROKEN == 7
    assert "I3: worker b pulled ffffffffffff as version 1:4 from slave s0" in out
    assert "I2 violated; I3 violated" in out


def test_a_run_that_never_published_is_unproven(tmp_path: Path) -> None:
    script = Script()
    script.start_master()
    script.join("a")
    report = verify_run(write_run(tmp_path / "run", script))
    assert report.exit_code == EXIT_BROKEN
    rows = {row.name: row for row in report.rows}
    assert (rows["I4"].result, rows["I4"].why) == ("unproven", "no record is about it")
    assert rows["I8"].result == "ok"


def test_own_data_rules_the_lease_table_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leased = Script.ledger
    own = {"leases": None, "data_plan": ["OWN", "", 0, 0]}
    monkeypatch.setattr(Script, "ledger", lambda script: {**leased(script), **own})
    script = usual_run()
    report = verify_run(write_run(tmp_path / "run", script))
    (row,) = [row for row in report.rows if row.name == "I12"]
    assert (row.result, row.records) == ("not applicable", 0)
    assert "own data" in row.why
    assert report.ok
    assert "I12" not in report.counts()


def test_the_durability_that_was_promised_is_the_one_that_is_asked_for(tmp_path: Path) -> None:
    def in_memory(steps: list) -> None:  # type: ignore[type-arg]
        nth(steps, "slave", "prepared", -1).fields["durable"] = False

    def promised_less(steps: list) -> None:  # type: ignore[type-arg]
        in_memory(steps)
        for index in (0, 1):
            nth(steps, "master", "epoch", index).fields["durability"] = "async"

    assert verify_run(broken_run(tmp_path / "sync", in_memory)).exit_code == EXIT_BROKEN
    assert verify_run(broken_run(tmp_path / "async", promised_less)).ok


# ---- what is missing or damaged ----


def test_a_tape_that_never_was_here_is_named_by_who_asks(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "tapes" / "a.tape.jsonl").unlink()
    code, out, _ = told(capsys, "verify", run)
    assert code == EXIT_BROKEN
    assert "unproven: the tape of cluster a is missing: put it into the directory" in out
    assert "DIPS_WORKER_TAPE" in out
    assert told(capsys, "verify", run, "--without-tape", "a")[0] == 0
    assert told(capsys, "verify", run, "--without-tape", "b")[0] == EXIT_BROKEN


def test_what_a_live_run_writes_while_it_is_read_is_not_missing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push is begun and decided between the reading of its cluster's tape and that of the journal."""
    tapes = [run / "tapes" / "a.tape.jsonl", run / "master" / "test.tape.jsonl", run / "tapes" / "b.tape.jsonl"]
    whole = {tape: tape.read_bytes() for tape in tapes}
    of_b = len(whole[tapes[2]].splitlines())
    for tape, count in zip(tapes, (3, 12, of_b), strict=True):
        tape.write_bytes(b"".join(whole[tape].splitlines(keepends=True)[:-count]))
    report = verify_run(run)
    assert (report.violations, len(report.unproven)) == ([], 3)

    def goes_on(directory: Path) -> JournalContent:
        for tape, data in whole.items():
            tape.write_bytes(data)
        return read_content(directory)

    monkeypatch.setattr("dips.judge.records.read_content", goes_on)
    later = read_run(run).later
    assert [sum(line.who == name for line in later) for name in ("a", "test", "b")] == [3, 12, of_b]
    for tape, count in zip(tapes, (3, 12, of_b), strict=True):
        tape.write_bytes(b"".join(whole[tape].splitlines(keepends=True)[:-count]))
    report = verify_run(run)
    assert (report.violations, report.unproven) == ([], [])


def slave_tape(run: Path) -> Path:
    return run / "slaves" / "s0" / "s0.tape.jsonl"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda run: slave_tape(run).write_text(slave_tape(run).read_text() + "rubbish\n{}\n"), "is not an event"),
        (lambda run: slave_tape(run).write_text("x" + slave_tape(run).read_text()), "is not an event"),
        (lambda run: (run / "master" / FILE_NAME).unlink(), "has no master's journal"),
        (lambda run: run.rename(run.with_name("gone")), "is not a directory"),
        (lambda run: edit_journal(run / "master", lambda records: records[3].pop("kind")), "has no kind"),
        (lambda run: edit_tape(slave_tape(run), lambda lines: lines[1].update(wall_s="x")), "is not an event"),
    ],
)
def test_what_cannot_be_read_is_the_operators_to_mend(
    run: Path, damage: Callable[[Path], object], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run)
    code, _, error = told(capsys, "verify", run)
    assert code == ConfigError.exit_code
    assert says in error
    assert "Traceback" not in error


def test_a_record_that_says_too_little_is_a_problem(run: Path) -> None:
    def change(records: list[Record]) -> None:
        records[2].clear()
        records[2].update(kind="VOID", participants=[{}])

    edit_journal(run / "master", change)
    report = verify_run(run)
    assert report.exit_code == EXIT_UNREADABLE
    assert "the journal's VOID cannot be read" in report.problems[0]


@pytest.mark.parametrize("says_so", [True, False])
def test_a_journal_that_was_cut_short_is_read_from_there_on(run: Path, says_so: bool) -> None:
    with journal_sql(run / "master") as cursor:
        (digest,) = cursor.execute("SELECT digest FROM records WHERE number = 5").fetchone()
        cursor.execute("DELETE FROM records WHERE number <= 5")
        set_base(cursor, 5, digest)
        if says_so:
            set_meta(cursor, "pruned", "5")
            set_meta(cursor, "pruned_digest", digest)
    report = verify_run(run)
    assert (report.violations, report.ok) == ([], says_so)
    said = report.notes if says_so else report.unproven
    assert ("the history begins after record 5" if says_so else "records 1 to 5 of the journal") in said[0]


@pytest.mark.parametrize("field", ["tokens", "leases", "data_plan"])
def test_a_ledger_that_lacks_fields_is_a_problem(run: Path, field: str) -> None:
    records = read_run(run)
    assert records.ledger is not None
    del records.ledger[field]  # type: ignore[attr-defined]
    for stored in records.manifests:
        record = json.loads(stored.body["commit_record"])
        del record["ledger"][field]
        stored.body.update(commit_record=json.dumps(record))  # type: ignore[attr-defined]
    check_records(records)
    read = [problem.partition(" cannot be read")[0] for problem in records.problems]
    named = [f"the record in {stored.path}" for stored in records.manifests]
    assert read == ([*named, "the journal's newest state"] if field != "leases" else [])


def told_by(directory: Path, steps: Sequence[Step], journal: list[Record]) -> RunRecords:
    """The tapes' lines of these facts, with another journal."""
    records = RunRecords(directory, journal=journal)
    for step in (step for step in steps if step.source in records.lines):
        records.lines[step.source].append(Fact(step.source, step.who, step.kind, step.fields))
        records.tapes.setdefault((step.source, step.who), TapeRead())
    return records


def test_a_journal_that_was_lost_once_is_said_and_what_it_knew_is_not_judged(tmp_path: Path) -> None:
    steps = usual_run().steps
    journal = [{"kind": step.kind, **step.fields} for step in steps if step.source == "journal"]
    records = told_by(tmp_path, steps, [record for record in journal if record["epoch"] == 2])
    assert check_records(records).violations == []
    assert records.notes[0].startswith("the journal has no record of epoch 1: it was lost or restored once")


def test_a_journal_that_was_lost_in_the_epoch_in_which_the_new_one_began_is_told_by_the_tape(tmp_path: Path) -> None:
    """The master began again without slaves that could tell of their promise, and was stopped before it took over."""
    records = told_by(tmp_path, usual_run().steps, [{"kind": "EPOCH", "epoch": 1}])
    assert check_records(records).violations != [], "a journal that says nothing of what was published"
    records.lines["master"].append(Fact("master", "master", "epoch", {"epoch": 1}))
    assert check_records(records).violations == []
    assert records.notes[0].startswith("epoch 1 was begun twice")


def test_other_files_of_lines_are_no_tapes(run: Path) -> None:
    (run / "mine.jsonl").write_text('{"loss": 2}\n')
    (run / "empty.jsonl").write_text("")
    assert len(find_tapes(run)) == 5
    assert master_directory(run / "master") == run / "master"


# ---- the journal's digests ----


def test_a_journal_of_an_older_release_is_unproven(run: Path) -> None:
    as_of_schema_2(run / "master")
    report = verify_run(run)
    assert (report.exit_code, report.rows[-1].result) == (EXIT_BROKEN, "unproven")
    assert "has no digests, because an older release wrote it" in report.unproven[0]


# ---- snapshots ----


def test_a_snapshot_with_nan_breaks_i13(run: Path) -> None:
    """A slave's ring with one committed snapshot."""
    directory = run / "slaves" / "s9"
    directory.mkdir(parents=True)
    ring = Ring(LocalDisk(directory), "test", "s9", 2)
    ring.make(N_ELEMS)
    info = SnapshotInfo(Version(1, 0), RoundId(1, 1), b"l" * 16, b"p" * 16, b"d" * 16, committed=False)
    ring.write_shadow(info, np.full(N_ELEMS, np.nan, np.float32), np.zeros(N_ELEMS, np.float32))
    ring.commit(info, b"h" * 32, b"{}")
    report = verify_run(run)
    said = [v.sentence for v in report.violations if v.invariant == "I13"]
    assert said == ["8 elements of theta in ring-0.safetensors are not finite"]


# ---- replay ----


def test_without_recorded_pushes_replay_says_how_to_get_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = told(capsys, "verify", run, "--replay")
    assert code == 2
    assert "--record-pushes" in error
