"""A tape that does not cover the whole run is a gap: it accuses no one, and --without-tape settles it. Lines that were
taken out of a tape contradict the other records.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from support.corruptions import tape_of
from support.forge import Record, edit_tape
from support.history import Script, usual_run, write_run
from support.recorded_run import unpacked

from dips.judge.coverage import ABSENT, COVERED, KILLED, LOST, Coverage, drop_lost
from dips.judge.facts import Fact
from dips.judge.records import RunRecords, TapeRead
from dips.judge.verify import NOT_APPLICABLE, UNPROVEN, VIOLATED, VerifyReport, verify_run
from dips.master.archive import JournalRecord
from dips.master.directory import TAPE_NAME

Cut = Callable[[list[Record]], list[Record]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of real processes: s0 is killed after version 1:2 (its incarnations are 1.1 and 1.2), a after 1:5."""
    return unpacked(tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def recorded(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def keep(tape: Path, cut: Cut) -> None:
    """Write a tape again with a part of its lines, and with digests that fit, as if no other line had been written."""

    def change(lines: list[Record]) -> None:
        lines[:] = cut(list(lines))

    edit_tape(tape, change)


def from_nth(kind: str, n: int = 1) -> Cut:
    """What is left of a tape from the n-th line of a kind on (0: the first)."""
    return lambda lines: lines[[at for at, line in enumerate(lines) if line["kind"] == kind][n] :]


def up_to_nth(kind: str, n: int) -> Cut:
    return lambda lines: lines[: [at for at, line in enumerate(lines) if line["kind"] == kind][n]]


def results(report: VerifyReport) -> dict[str, str]:
    return {row.name: row.result for row in report.rows if not row.holds}


def settled(run: Path, name: str, about: str) -> None:
    """With --without-tape the judgement is complete, and says without what."""
    report = verify_run(run, without={name})
    assert (report.exit_code, report.verdict, report.unproven) == (0, "ok", [])
    (note,) = [note for note in report.notes if "--without-tape" in note]
    assert about in note
    assert f"(--without-tape {name})" in note


# ---- gaps ----


def test_the_part_that_was_kept_elsewhere_makes_it_whole_whatever_its_name(recorded: Path) -> None:
    tape = tape_of(recorded, "s0")
    older = tape.with_name("z-before.jsonl")
    shutil.copy(tape, older)
    keep(tape, from_nth("started"))
    keep(older, up_to_nth("started", 1))
    assert verify_run(recorded).ok


@pytest.mark.parametrize(
    ("name", "cut", "unproven", "gap", "lost"),
    [
        ("s0", up_to_nth("measured", 6), {"I4", "I5", "I9", "records"}, "ends with round r1.7", "version 1:7"),
        ("b", up_to_nth("push_begun", 6), {"records"}, "ends with push b/1.1#6", "push b/1.1#7"),
        ("master", up_to_nth("ticket", 8), {"I4", "records"}, "ends with record 8 of the journal", ""),
    ],
)
def test_a_tape_that_begins_late_or_was_copied_too_early_is_unproven_there(
    recorded: Path, name: str, cut: Cut, unproven: set[str], gap: str, lost: str
) -> None:
    keep(recorded / "master" / TAPE_NAME if name == "master" else tape_of(recorded, name), cut)
    report = verify_run(recorded)
    assert (report.violations, report.exit_code) == ([], 7)
    assert results(report) == dict.fromkeys(unproven, UNPROVEN)
    assert (f"{gap}, so that lines about {lost}" if lost else gap) in report.unproven[0]
    settled(recorded, name, gap)


def test_a_run_in_which_no_slave_wrote_a_tape_can_be_judged_without(recorded: Path) -> None:
    for name in ("s0", "s1"):
        tape_of(recorded, name).unlink()
    assert results(verify_run(recorded)).keys() >= {"I5", "I9", "records"}
    assert results(verify_run(recorded, without={"s0"})).keys() >= {"I5", "I9", "records"}
    report = verify_run(recorded, without={"s0", "s1"})
    assert (report.exit_code, report.verdict) == (0, "ok")
    assert {"I5", "I9"} <= {row.name for row in report.rows if row.result == NOT_APPLICABLE}


@pytest.mark.parametrize("kind", ["push", "staged", "prepared", "committed"])
def test_whoever_lost_lines_to_a_full_disk_is_unproven_there(recorded: Path, kind: str) -> None:
    """A cluster both lines of a push, a slave one about a version."""
    name, about = ("b", "push b/1.1#7 are missing") if kind == "push" else ("s0", "version")

    def cut(lines: list[Record]) -> list[Record]:
        if kind == "push":
            first, last = (at for at, line in enumerate(lines) if line.get("push") == "b/1.1#7" and "base" in line)
        else:
            first = last = [at for at, line in enumerate(lines) if line["kind"] == kind][5]
        gap = {name: lines[first][name] for name in ("wall_s", "monotonic_s", "role", "name")}
        return [*lines[:first], {**gap, "kind": "gap", "cause": "-", "lost": last - first + 1}, *lines[last + 1 :]]

    keep(tape_of(recorded, name), cut)
    report = verify_run(recorded)
    assert (report.violations, report.exit_code) == ([], 7)
    assert kind != "push" or results(report) == {"records": UNPROVEN}
    assert f"lost lines to a full disk, so that lines about {about}" in report.unproven[0]
    settled(recorded, name, "b/1.1#7" if kind == "push" else "lost lines to a full disk")


# ---- a run that was restored from a copy ----


def restored(lost_on: Collection[str], again: int, pulls: bool) -> Script:
    """Master and slaves are restored with version 1:1; before that the run made three more versions, of which the tapes
    of these roles and of cluster a still tell. Then it makes `again` versions. pulls: cluster a pulls 1:1 first."""
    script = Script()
    script.start_master()
    for cluster in "ab":
        script.join(cluster)
    script.commit(script.push("a"))
    script.commit(script.push("a"))
    before = copy.deepcopy(script)
    for _ in range(3):
        before.commit(before.push("a"), before.push("b"))
    lost = before.steps[len(script.steps) :]
    script.steps += [step for step in lost if step.source in lost_on or (step.source, step.who) == ("worker", "a")]
    script.start_master()
    for slave in ("s0", "s1"):
        script.restart_slave(slave)
    for cluster in "ab":
        script.join(cluster)
    if pulls:
        script.add("worker", "a", "installed", version="1:1", digest_of_slave=dict(script.digests[1, 1]))
    for _ in range(again):
        script.commit(script.push("a"), script.push("b"))
    return script


@pytest.mark.parametrize("lost_on", [(), ("slave",)], ids=["with their tapes", "without the slaves' tapes"])
@pytest.mark.parametrize("again", [1, 4])
@pytest.mark.parametrize("pulls", [True, False])
def test_what_was_lost_with_a_restored_run_is_not_judged(
    tmp_path: Path, lost_on: Collection[str], again: int, pulls: bool
) -> None:
    report = verify_run(write_run(tmp_path / "run", restored(lost_on, again, pulls)))
    assert (report.exit_code, [str(violation) for violation in report.violations], report.unproven) == (0, [], [])
    (note,) = report.notes
    assert "knew of version 1:2, and went on from an older one" in note


# ---- lines that were taken out ----


def without(*kinds: str, between: tuple[str, int, int]) -> Cut:
    """Without lines of these kinds (none: of all) between two lines of a kind."""
    kind, low, high = between

    def cut(lines: list[Record]) -> list[Record]:
        places = [at for at, line in enumerate(lines) if line["kind"] == kind]
        return [
            line
            for at, line in enumerate(lines)
            if not (places[low] < at < places[high] and (not kinds or line["kind"] in kinds))
        ]

    return cut


@pytest.mark.parametrize(
    ("name", "cut", "breaks"),
    [
        ("s0", without(between=("measured", 3, 6)), "I5"),  # in the middle of its second life
        ("s0", without("prepared", between=("committed", 4, 6)), "I5"),
        ("s0", lambda lines: lines[6:], "I5"),  # the beginning, and it does not begin with a start
        ("s0", lambda lines: [*lines[:12], *from_nth("started")(lines)], "I5"),  # the first life's end
        ("s0", without("staged", between=("measured", 3, 4)), "I9"),
        ("a", without(between=("push_begun", 1, 3)), "records"),
        ("a", lambda lines: lines[4:], "records"),  # the first incarnation's beginning
        ("b", without("push_begun", "push_sent", between=("verdict", 3, 5)), "records"),
    ],
)
def test_a_hole_in_the_middle_of_a_process_is_no_excuse(recorded: Path, name: str, cut: Cut, breaks: str) -> None:
    keep(tape_of(recorded, name), cut)
    assert results(verify_run(recorded))[breaks] == VIOLATED
    assert results(verify_run(recorded, without={name}))[breaks] == VIOLATED


def test_a_master_that_was_killed_as_it_wrote_its_last_record_is_not_accused(tmp_path: Path) -> None:
    """The COMMIT was durable; the lines about it were not written before the kill."""

    def cut(lines: list[Record]) -> list[Record]:
        second = [at for at, line in enumerate(lines) if line["kind"] == "epoch"][1]
        last = max(at for at, line in enumerate(lines[:second]) if line["kind"] == "publish")
        # The line before the epoch's own is about the EPOCH record; the one before that is the COMMIT's.
        commit = max(at for at, line in enumerate(lines[:last]) if line["kind"] == "journaled")
        return [*lines[:commit], *lines[second - 1 :]]

    run = write_run(tmp_path / "run", usual_run())
    keep(run / "master" / "test.tape.jsonl", cut)
    assert verify_run(run).violations == []


# ---- what each tape covers ----

FIELDS = {
    **dict.fromkeys(("incarnation", "joined"), ("incarnation",)),
    **dict.fromkeys(("push_begun", "ticket"), ("push",)),
    **{"slave_attached": ("slave", "incarnation"), "join": ("cluster", "incarnation", "process")},
    **dict.fromkeys(("verdict", "installed", "publish"), ("version",)),
    **{"epoch": ("epoch", "version"), "journaled": ("number",)},
    **dict.fromkeys(("committed", "configured"), ("round", "version")),
}  # fmt: skip
ROLES = {"m": "master", "s0": "slave", "a": "worker"}


def told(*tapes: str) -> RunRecords:
    """A tape is like `s0: started, incarnation 1.1, measured r1.2`; the journal like `journal: 1 EPOCH, 1 COMMIT r1.1`:
    the epoch of each record, its kind and round."""
    records = RunRecords(Path("nowhere"))
    for name, _, lines in (tape.partition(": ") for tape in tapes):
        for kind, *values in (line.split() for line in lines.split(", ")):
            if name == "journal":
                number, (of, *round_id) = len(records.rows) + 1, values
                records.rows.append(JournalRecord(int(kind), 0, of, "", number, ""))
                records.journal.append({"epoch": int(kind), "kind": of, "round": (*round_id, None)[0]})
                continue
            fields = dict(zip(FIELDS.get(kind, ("round",)), values, strict=False))
            numbers = {key: int(value) for key, value in fields.items() if key in ("epoch", "number")}
            records.lines[ROLES[name]].append(Fact(ROLES[name], name, kind, fields | numbers))
            records.tapes.setdefault((ROLES[name], name), TapeRead())
    return records


LATE = "s0: started, incarnation 1.2, configured r1.3, measured r1.5, measured r1.7, committed r1.6, configured r1.9"
ENDED = "s0: started, incarnation 1.1, measured r1.2, stopped"
TWO = "s0: started, incarnation 1.1, measured r1.2, started, incarnation {}, configured r1.4, measured {}"
SECOND, THIRD, LATER = TWO.format("1.2", "r1.6"), TWO.format("1.3", "r1.6"), TWO.format("3.1", "r3.6")
JOURNAL = "journal: 1 EPOCH, 1 COMMIT r1.1, 2 EPOCH, 2 COMMIT r2.2, 3 EPOCH, 3 COMMIT r3.3"
MASTER = "m: epoch 1, journaled 2, epoch 2, journaled {}, epoch 3, journaled 6"
BETWEEN = "has no line between incarnations"
MISSED, ENDS = f"{BETWEEN} 1.1 and 1.3", "ends with round r1.2"


@pytest.mark.parametrize(
    ("tapes", "round_id", "ended", "place"),
    [
        # The version that it loaded first was made in r1.3, and of those after it has lines until r1.7.
        ([LATE], (1, 3), False, "begins with incarnation 1.2"),
        ([LATE], (1, 4), False, COVERED),
        ([LATE], (1, 7), False, COVERED),
        ([LATE], (1, 7), True, "ends with round r1.7"),
        (["s0: snapshot_skipped, starting, started, incarnation 1.2, configured r1.3, measured r1.5"], (1, 3), False,
         "begins with incarnation 1.2"),
        # It loaded none: then its first round says where it begins; the first attachment of all rounds comes before.
        (["s0: started, incarnation 1.2, measured r1.5, measured r1.6"], (1, 4), False, "begins with incarnation 1.2"),
        (["s0: started, incarnation 2.1, measured r2.5"], (1, 9), False, "begins with incarnation 2.1"),
        # It begins in the middle of a process: its first lines were taken out.
        (["s0: measured r1.5, incarnation 1.4, measured r1.6"], (1, 1), False, COVERED),
        (["s0: measured r1.5, started, incarnation 1.3, configured r1.6, measured r1.7"], (1, 6), False, COVERED),
        (["s0: started, incarnation 1.1"], (1, 1), False, "ends before the first round"),
        (["s0: started"], (1, 1), False, "says of no attachment to the master"),
        (["a: joined 1.1"], (1, 1), False, ABSENT),
        # Between two processes: whether the master saw another one there, or may have.
        ([THIRD, "m: epoch 1, slave_attached s0 1.2"], (1, 3), False, MISSED),
        ([THIRD, "m: epoch 1, slave_attached s0 1.3"], (1, 3), False, COVERED),
        ([THIRD, "m: epoch 2, journaled 3", JOURNAL], (1, 3), False, MISSED),
        ([SECOND, "m: epoch 2, journaled 3", JOURNAL], (1, 3), False, COVERED),
        ([THIRD, "m: epoch 1, journaled 2", JOURNAL], (1, 3), False, COVERED),
        ([LATER, MASTER.format(4), JOURNAL], (1, 3), False, COVERED),
        ([LATER, MASTER.format(3), JOURNAL], (1, 3), False, f"{BETWEEN} 1.1 and 3.1"),
        ([TWO.format("2.1", "r3.6"), "m: epoch 1, journaled 2", JOURNAL], (1, 3), False, f"{BETWEEN} 1.1 and 2.1"),
        ([THIRD, "m: epoch 1", "journal: 1 ROLLBACK r1.9"], (1, 3), False, MISSED),
        ([THIRD, "m: epoch 1", "journal: 1 ROLLBACK r1.3"], (1, 3), False, COVERED),
        # Files of one process whose names give another order.
        (["s0: started, incarnation 1.2, configured r1.4, measured r1.6, started, incarnation 1.1, measured r1.2",
          "m: epoch 1, slave_attached s0 1.2"], (1, 2), False, COVERED),
        # An end in order, and whether it attached again.
        ([ENDED, "m: epoch 1, slave_attached s0 1.1"], (1, 3), False, COVERED),
        ([f"{ENDED}, measured r1.3", "m: epoch 1"], (1, 4), False, "ends with round r1.3"),
        ([f"{ENDED}, starting", "m: epoch 1"], (1, 3), False, COVERED),
        ([ENDED, "m: epoch 1, slave_attached s0 2.1"], (1, 3), False, ENDS),
        ([ENDED, "m: epoch 1, journaled 2", JOURNAL], (1, 3), False, ENDS),
    ],
)  # fmt: skip
def test_where_a_slaves_tape_has_what_it_says_of_a_round(
    tapes: list[str], round_id: tuple[int, int], ended: bool, place: str
) -> None:
    assert Coverage(told(*tapes)).of_slave("s0", round_id, ended) == place
    full = told(*tapes)
    full.tapes.get(("slave", "s0"), TapeRead()).lost = True
    assert Coverage(full).of_slave("s0", round_id, ended) == (place or LOST)


WENT_BACK = "s0: committed r1.1 1:1, committed r1.2 1:2, incarnation 2.1, configured r1.1 1:1"
JOINED = "a: joined 1.1, push_begun a/1.1#1, push_begun a/1.1#4, push_begun a/1.1#3, verdict 1:3, installed 1:2"


@pytest.mark.parametrize(
    ("tapes", "push", "version", "place"),
    [
        ([JOINED], ("a", 1, 1, 3), None, COVERED),
        ([JOINED], ("a", 1, 1, 4), None, "ends with push a/1.1#4"),
        ([JOINED], ("a", 1, 1, 4), (1, 3), COVERED),
        ([JOINED], ("a", 1, 1, 4), (1, 4), "ends with push a/1.1#4"),
        ([f"{JOINED}, left"], ("a", 1, 1, 9), (1, 4), COVERED),
        ([f"{JOINED}, left, installed 1:3"], ("a", 1, 1, 9), (1, 4), "ends with push a/1.1#4"),
        ([JOINED], ("a", 1, 2, 1), None, "ends with incarnation 1.1"),
        ([f"{JOINED}, push_begun a/3.1#1"], ("a", 1, 2, 1), None, "has no line of incarnation 1.2"),
        (["a: joined 1.1"], ("a", 1, 1, 1), None, "names no push"),
        (["a: verdict 1:3"], ("a", 1, 1, 1), (1, 0), COVERED),
        (["a: verdict 1:3", "m: epoch 1"], ("b", 1, 1, 1), (1, 0), ABSENT),
        # One process that joined twice writes one tape.
        ([JOINED, "m: join a 1.1 p, join a 1.2 p"], ("a", 1, 2, 1), (1, 3), COVERED),
        ([JOINED, "m: join a 1.1 p, join a 1.2 q"], ("a", 1, 2, 1), (1, 3), "ends with incarnation 1.1"),
        (["a: joined 1.2", "m: join a 1.1 p, join a 1.2 p"], ("a", 1, 1, 1), None, "begins with incarnation 1.2"),
    ],
)  # fmt: skip
def test_where_a_clusters_tape_has_the_begin_of_a_push(
    tapes: list[str], push: tuple[str, int, int, int], version: tuple[int, int] | None, place: str
) -> None:
    assert Coverage(told(*tapes)).of_push(push, version) == place
    full = told(*tapes)
    full.tapes.get(("worker", push[0]), TapeRead()).lost = True
    assert Coverage(full).of_push(push, version) == (place or LOST)


@pytest.mark.parametrize(
    ("tapes", "epoch", "number", "place"),
    [
        ([], 1, 1, COVERED),
        (["m: epoch 1, ticket a/3.1#1"], 2, None, "has no line of epoch 2"),
        (["m: epoch 1, ticket a/3.1#1"], 3, None, COVERED),
        (["m: epoch 1, ticket a/3.1#1"], 0, None, "begins with epoch 1"),
        (["m: epoch 1, ticket a/3.1#1"], 4, None, "ends with epoch 3"),
        ([MASTER.format(4), JOURNAL], 2, 4, COVERED),
        ([MASTER.format(3), JOURNAL], 2, 4, KILLED),
        ([MASTER.format(3), JOURNAL], 2, None, COVERED),
        (["m: epoch 1, epoch 2, journaled 3", JOURNAL], 2, 4, "ends with record 3 of the journal"),
        (["m: epoch 1, epoch 2, journaled 3", JOURNAL], 1, 1, KILLED),
    ],
)  # fmt: skip
def test_where_the_masters_tape_has_what_it_says_of_a_record(
    tapes: list[str], epoch: int, number: int | None, place: str
) -> None:
    assert Coverage(told(*tapes)).master.place(epoch, number) == place


@pytest.mark.parametrize(
    ("tape", "made", "lost"),
    [
        # What a process knew and the journal has not, or made again later, before it went on from an older version.
        (WENT_BACK.replace("incar", "measured r1.3, incar"), {(1, 1): 1}, 2),
        (WENT_BACK, {(1, 1): 1, (1, 2): 1}, 0),
        (WENT_BACK, {(1, 1): 1, (1, 2): 2}, 1),
        ("s0: committed r1.1 1:1, committed r1.2 1:2, incarnation 2.1, configured r1.2 1:2", {(1, 1): 1}, 0),
        ("s0: committed r1.1 1:1, committed r2.2 2:2, incarnation 2.1, configured r1.1 1:1", {(1, 1): 1}, 0),
        ("s0: committed r1.1 1:1, incarnation 2.1, committed r1.2 1:2, configured r1.1 1:1", {(1, 1): 1}, 0),
        ("s0: committed r1.2 1:2, measured r1.3, started, incarnation 2.1, configured r1.1 1:1, committed r2.2 1:2, "
         "incarnation 3.1, configured r1.1 1:1, measured r3.1", {(1, 1): 1, (1, 2): 3}, 3),
        ("m: epoch 1, publish 1:1, publish 1:2, epoch 2 1:1", {(1, 1): 1}, 1),
        ("m: epoch 1, publish 1:1, publish 1:2, epoch 2 1:1", {(1, 1): 1, (1, 2): 1}, 0),
        ("a: verdict 1:1, installed 1:2, push_begun a/1.1#4, joined 2.1, installed 1:1", {(1, 1): 1}, 2),
    ],
)  # fmt: skip
def test_what_was_lost_when_a_copy_was_put_back_is_taken_out(
    tape: str, made: dict[tuple[int, int], int], lost: int
) -> None:
    records = told(tape, "journal: 1 LEASE")
    records.journal += [{"kind": "COMMIT", "version": [*version], "epoch": epoch} for version, epoch in made.items()]
    before = [line for lines in records.lines.values() for line in lines]
    said = drop_lost(records)
    left = [line for lines in records.lines.values() for line in lines]
    assert (len(before) - len(left), bool(said)) == (lost, lost > 0)
    assert {"incarnation", "started", "joined"} & {line.kind for line in before} <= {line.kind for line in left}
