"""Records of the same fact by different processes agree: each that was changed, with all its digests, is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.history import digest, push_name, usual_run

from dips.judge.evidence import Evidence, ended_without_a_word, judge_evidence
from dips.judge.facts import Fact, History
from dips.judge.records import RunRecords, StoredManifest, TapeRead
from dips.judge.verify import check_records
from dips.master.archive import JournalRecord
from dips.slave.disk import IDENTITY, LocalDisk, write_small
from dips.slave.disk import NAME as PROMISE

Change = Callable[[RunRecords], object]

RANGE = ("lease_id", "pass_index", "chunk", "begin_tokens", "end_tokens")


def tape(records: RunRecords, role: str, name: str, kind: str, **fields: Any) -> None:
    records.lines[role].append(Fact(role, name, kind, fields))
    records.tapes.setdefault((role, name), TapeRead())


def recorded(directory: Path, durability: str = "sync") -> RunRecords:
    """The usual run in memory, with all lines that are compared; two manifests of each slave are left."""
    script = usual_run()
    records = RunRecords(directory, run_id="test")
    for step in script.steps:
        if step.source == "manifest":
            path, body = directory / step.who / "manifest", {**step.fields, "file": "ring-0"}
            records.manifests.append(StoredManifest(step.who, path, body, {}))
        elif step.source != "journal":
            if step.kind == "epoch":
                step.fields["durability"] = durability
            tape(records, step.source, step.who, step.kind, **step.fields)
        else:
            record = {"kind": step.kind, **step.fields}
            number = len(records.rows) + 1
            records.journal.append(record)
            records.rows.append(JournalRecord(record["epoch"], 0, step.kind, "", number, digest(number)))
            tape(records, "master", "test", "journaled", number=number, digest=digest(number))
            if step.kind == "COMMIT":
                tell_commit(records, record)
    records.manifests = records.manifests[-4:]
    newest = script.version
    records.ledger = {
        **script.ledger(),
        "commit": {
            "version": [*(newest or ())],
            "round": [2, script.rounds],
            "digests": script.digests[newest or (0, 0)],
            "record": records.manifests[-1].body["commit_record"],
        },
    }
    return records


def tell_commit(records: RunRecords, record: dict[str, Any]) -> None:
    """What the master and the clusters say of a COMMIT on their tapes."""
    round_name = "r{}.{}".format(*record["round"])
    judgement = record["judgement"]
    if judgement:
        numbers = {name: float(judgement[name]) for name in ("kappa", "rho", "merged_norm")}
        norms = {row[0]: float(row[1]) for row in judgement["norms"]}
        accepted = list(judgement["accepted"])
        tape(records, "master", "test", "judged", round=round_name, **numbers, norms=norms, accepted=accepted)
    tape(records, "master", "test", "commit", round=round_name, s_max=record["s_max"])
    for item in record["participants"]:
        known = {name: item[name] for name in ("attempt", "base", "fence", "tokens", "steps")}
        ranges = [dict(zip(RANGE, row, strict=True)) for row in item["ranges"]]
        tape(records, "worker", item["push"][0], "push_begun", push=push_name(item), **known, ranges=ranges)


def compared(records: RunRecords, history: History | None = None, without: Collection[str] = ()) -> list[str]:
    records.unproven.clear()
    found = judge_evidence(records, history or check_records(records).history, without)
    return [*(violation.sentence for violation in found.violations), *records.unproven]


def line_of(records: RunRecords, role: str, kind: str, index: int = -1) -> Fact:
    return [line for line in records.lines[role] if line.kind == kind][index]


def say(role: str, kind: str, index: int = -1, **fields: Any) -> Change:
    return lambda records: line_of(records, role, kind, index).fields.update(fields)  # type: ignore[attr-defined]


def drop(role: str, kind: str, index: int = -1) -> Change:
    return lambda records: records.lines[role].remove(line_of(records, role, kind, index))


def both(*changes: Change) -> Change:
    return lambda records: [change(records) for change in changes]


def manifests_of(slave: str, *kept: int) -> Change:
    """Only these of a slave's manifests are left, oldest first."""

    def change(records: RunRecords) -> None:
        mine = [item for item in records.manifests if item.slave == slave]
        stay = [mine[index] for index in kept]
        records.manifests = [item for item in records.manifests if item.slave != slave or item in stay]

    return change


def in_another_directory(records: RunRecords) -> None:
    """The newest manifest of a slave lies where the older one does not."""
    stored = records.manifests[-1]
    records.manifests[-1] = replace(stored, path=stored.path.parent / "copy" / "manifest")


def in_manifest(**fields: Any) -> Change:
    return lambda records: records.manifests[-1].body.update(fields)  # type: ignore[attr-defined]


def in_ledger(**fields: Any) -> Change:
    return lambda records: records.ledger.update(fields)  # type: ignore[union-attr]


def in_newest(**fields: Any) -> Change:
    """Of the COMMIT that the newest state holds."""
    return lambda records: records.ledger["commit"].update(fields)  # type: ignore[index]


def judged_twice(records: RunRecords) -> None:
    """A master that died before its COMMIT was durable judged the round, and its next life judged it again."""
    line = line_of(records, "master", "judged")
    tape(records, "master", "test", "judged", **{**line.fields, "kappa": 0.5})
    tape(records, "master", "test", "commit", **{**line_of(records, "master", "commit").fields, "s_max": 3})


def second_attempt(records: RunRecords) -> None:
    """Of its newest push a cluster recorded another attempt than the one that was merged; the ticket is there."""
    for kind in ("push_begun", "push_sent"):
        line_of(records, "worker", kind).fields.update(attempt=2, tokens=7)  # type: ignore[attr-defined]


def before_commits_were_told(records: RunRecords) -> None:
    for _ in range(2):
        drop("master", "commit", 0)(records)


def a_newer_epoch_went_on(records: RunRecords) -> None:
    """The newest record of the first epoch is not the one that was written; a later master went on from there."""
    second = [at for at, record in enumerate(records.journal) if record["kind"] == "EPOCH"][1]
    line_of(records, "master", "journaled", second - 1).fields.update(digest="0" * 32)  # type: ignore[attr-defined]


def without_digests(records: RunRecords) -> None:
    """An older release wrote journal and tape."""
    records.rows = [replace(row, digest="") for row in records.rows]
    records.lines["master"] = [line for line in records.lines["master"] if line.kind != "journaled"]


OF_PUSH = f"push a/2.2#1 of the COMMIT of round r2.{usual_run().rounds}"

DIFFERENT: dict[str, tuple[Change, str]] = {
    "the state's tokens": (in_ledger(tokens=7), "newest state has 7 tokens, its newest version 600"),
    "the state's version": (in_newest(version=[1, 3], round=[1, 1]), "of another version than its newest decision"),
    "the state's digests": (in_newest(digests={}), "of another version than its newest decision"),
    "two homes": (in_another_directory, "manifests of slave s1 are in more than one directory"),
    "a manifest's hash": (in_manifest(commit_hash="ab" * 32), "in the manifest of slave s1 than in the journal's"),
    "rho": (say("master", "judged", rho=0.125), "says rho = "),
    "merged norm": (say("master", "judged", merged_norm=None), "says merged_norm = "),
    "norms": (say("master", "judged", norms={"a": 9.0}), "says norm of a = "),
    "no commit line": (drop("master", "commit"), "the master's tape has no line about the COMMIT of round r2."),
    "ranges": (say("worker", "push_begun", ranges=[]), f"{OF_PUSH} has ranges = "),
    "a ticket's fence": (say("master", "ticket", fence=99), f"{OF_PUSH} has fence = 3, but its ticket says 99"),
    "a ticket's attempt": (say("master", "ticket", attempt=2), "has attempt = 1, for which no ticket was recorded"),
    "all records lost": (
        lambda records: records.rows.clear(),
        "the journal ends at record 0, but the master's tape says that record 1 was written",
    ),
    "no digests told": (
        lambda records: [drop("master", "journaled")(records) for _ in records.rows],
        "does not say how far the journal goes",
    ),
}  # fmt: skip


def test_records_that_agree_are_all_compared(tmp_path: Path) -> None:
    records = recorded(tmp_path)
    found = judge_evidence(records, check_records(records).history)
    assert (found.violations, records.unproven) == ([], [])
    journaled = len(recorded(tmp_path).rows)
    slaves, manifests, commits, judged, pushes = 2, 4, 5, 4, 7
    newest_state = 1 + 1 + slaves
    assert found.judged == journaled + slaves + newest_state + manifests + commits + judged + 3 * pushes


@pytest.mark.parametrize(("change", "words"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_another_record_contradicts_is_named_once(tmp_path: Path, change: Change, words: str) -> None:
    records = recorded(tmp_path)
    change(records)
    (said,) = compared(records)
    assert words in said


def test_the_newest_states_own_record_is_compared(tmp_path: Path) -> None:
    records = recorded(tmp_path)
    assert records.ledger is not None
    newest = records.ledger["commit"]
    newest["record"] = json.dumps({**json.loads(newest["record"]), "s_max": 9})
    said = compared(records)
    assert "says s_max = 8 in the journal, but 9 in the journal's newest state" in said[0]
    assert ["another COMMIT record" in sentence for sentence in said[1:]] == [True, True]


@pytest.mark.parametrize(
    "change",
    [
        judged_twice,
        second_attempt,
        before_commits_were_told,
        a_newer_epoch_went_on,
        lambda records: records.later.append(records.lines["worker"].pop()),
        both(drop("master", "ticket"), lambda records: tape(records, "master", "test", "epoch", epoch=1)),
        lambda records: records.rows.__delitem__(slice(0, 2)),
        without_digests,
    ],
    ids=["judged twice", "last attempt", "older release", "put back", "later", "lost", "pruned", "no digests"],
)  # fmt: skip
def test_what_can_be_explained_is_no_contradiction(tmp_path: Path, change: Change) -> None:
    records = recorded(tmp_path)
    change(records)
    assert compared(records) == []


def test_a_journal_that_was_put_back_is_noted_with_the_first_record_that_is_gone(tmp_path: Path) -> None:
    records = recorded(tmp_path)
    a_newer_epoch_went_on(records)
    compared(records)
    number = next(n for n, row in enumerate(records.rows) if row.epoch == 2 and row.kind == "EPOCH")
    (note,) = records.notes
    assert f"restored from a copy, or lost its end, once: record {number} and what followed" in note


def test_without_durability_a_slave_must_have_what_it_says_is_on_its_disk(tmp_path: Path) -> None:
    records = recorded(tmp_path, "async")
    for index, version in enumerate(("1:2", "1:3")):
        tape(records, "slave", "s0", "persisted", version=version, digest="", round=f"r1.{index + 3}")
    manifests_of("s0", 0)(records)
    manifests_of("s1")(records)
    assert compared(records) == [], "s1 said nothing, s0 has 1:3"
    manifests_of("s0")(records)
    history = check_records(records).history
    for without in ((), ("s0",)):
        (said,) = compared(records, history, without)
        assert "version 1:3 was on the disk of slave s0" in said
    del records.tapes["slave", "s0"]
    assert compared(records, history, ("s0",)) == [], "its tape could say more"


def test_twenty_sentences_of_one_kind_are_enough() -> None:
    found = Evidence()
    for n in range(25):
        found.differs(f"difference {n}", "here")
        found.differs("another", "there") if n == 24 else None
    assert [violation.fact for violation in found.violations] == ["here"] * 20 + ["there"]


# ---- directories ----


@pytest.mark.parametrize(
    ("slave", "promised", "words"),
    [
        ("s0", 2, ""),
        ("s0", 3, "promises epoch 3, which the journal never began"),
        ("s0", None, "slave s0 promised epoch 2, as its tape says, but"),
        ("s7", None, ""),
    ],
)
def test_a_slaves_directory_is_its_own_with_the_promise_that_its_tape_says(
    tmp_path: Path, slave: str, promised: int | None, words: str
) -> None:
    records, disk = recorded(tmp_path), LocalDisk(tmp_path)
    write_small(disk, IDENTITY, {"run_id": "test", "slave_id": slave})
    if promised is not None:
        write_small(disk, PROMISE, {"promised_epoch": promised})
    assert [words in said for said in compared(records)] == [True] * bool(words)
    if promised == 3:
        records.later.append(Fact("master", "test", "epoch", {"epoch": 3}))
        assert compared(records) == [], "a live master began it meanwhile"
    (tmp_path / IDENTITY).write_text("{")
    compared(records)
    assert [str(tmp_path) in problem for problem in records.problems] == [True]


def test_a_record_that_lacks_fields_is_a_problem(tmp_path: Path) -> None:
    records = recorded(tmp_path)
    del records.journal[-1]["participants"][0]["fence"]
    history = check_records(recorded(tmp_path)).history
    judge_evidence(records, history)
    assert ["lacks fields" in problem and "fence" in problem for problem in records.problems] == [True]


# ---- the end ----


def test_a_process_that_did_not_end_in_order_is_noted_where_the_run_did(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    ends = {"slave": ("stopped", "prepared"), "worker": ("left", "heldout", "stopped", "verdict")}
    for role, kinds in ends.items():
        records.tapes |= {(role, kind): TapeRead(last_kind=kind) for kind in kinds}
    assert ended_without_a_word(records) == [], "the run goes on"
    records.tapes["master", "test"] = TapeRead(last_kind="master-ended")
    assert [" ".join(note.split()[:5]) for note in ended_without_a_word(records)] == [
        "the tape of slave prepared",
        "the tape of worker verdict",
    ]
