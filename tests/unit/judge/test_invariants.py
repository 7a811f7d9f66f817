"""A run that went well breaks no promise; each way to break one is seen, and said in a sentence."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.history import (
    CHUNK_TOKENS,
    TOTAL_TOKENS,
    Change,
    Script,
    Step,
    begun,
    changed,
    check,
    feed,
    nth,
    push_name,
    rolled_back_run,
    usual_run,
)

from dips.judge.coverage import Coverage
from dips.judge.facts import Fact
from dips.judge.invariants import Checker
from dips.judge.records import RunRecords

NAMES = [*(f"I{number}" for number in range(1, 15)), "I18"]


def broken_by(script: Script, change: Change, **options: Any) -> dict[str, list[str]]:
    """Invariant -> what it says of the changed history."""
    found: dict[str, list[str]] = {}
    for violation in check(changed(script, change), **options).violations:
        found.setdefault(violation.invariant, []).append(violation.sentence)
    return found


# ---- what is well ----


def test_every_invariant_judges_some_facts_and_has_a_broken_history() -> None:
    counts = check(usual_run().steps).counts
    assert list(counts) == NAMES
    assert [name for name, count in counts.items() if count == 0] == []
    assert {name for name, _, _ in BROKEN} == set(NAMES)


def test_the_round_that_waits_for_its_flips_is_no_violation() -> None:
    """A run may be killed anywhere: every beginning of a history is well, too."""
    for script in (usual_run(), rolled_back_run()):
        checker = Checker()
        for step in script.steps:
            assert feed(checker, step) == [], step


def test_a_round_that_was_aborted_leaves_shadows_that_mean_nothing() -> None:
    script = begun("a")
    shadow = {"version": "1:1", "round": script.next_round(), "digest": "0" * 32, "durable": True, "finite": True}
    script.add("slave", "s0", "prepared", **shadow)
    script.commit(script.push("a"))
    assert check(script.steps).violations == []


def test_a_job_that_ends_after_a_newer_promise_is_well_if_it_began_before() -> None:
    checker = Checker()
    checker.feed(Fact("slave", "s0", "promised", {"epoch": 1}, 1.0))
    checker.feed(Fact("slave", "s0", "promised", {"epoch": 2}, 10.0))
    made = {"version": "1:1", "round": "r1.1", "digest": "00", "finite": True}
    assert checker.feed(Fact("slave", "s0", "prepared", {**made, "took_s": 2.0}, 11.0)) == []
    assert [v.invariant for v in checker.feed(Fact("slave", "s0", "prepared", {**made, "took_s": 0.5}, 11.0))] == ["I8"]


@pytest.mark.parametrize(("promises", "wrong"), [
    ("a19 a1", ["I8"]), ("a19 b1", []), ("-19 -1", ["I8"]), ("a19 b5 b1", ["I8"]), ("a19 b5 -1", ["I8"]),
])  # fmt: skip
def test_promise_holds_in_the_directory_that_it_was_made_in(promises: str, wrong: list[str]) -> None:
    """A slave with a new disk promises a small epoch to a master that lost its own disk too. A tape of an old release
    does not say the directory."""
    checker, found = Checker(), []
    for at_s, said in enumerate(promises.split()):
        attached = {"slave": "s1", "directory": said[0].strip("-")}
        checker.feed(Fact("master", "test", "slave_attached", attached, at_s))
        found += checker.feed(Fact("slave", "s1", "promised", {"epoch": int(said[1:])}, at_s))
    assert [violation.invariant for violation in found] == wrong


@pytest.mark.parametrize(("change", "breaks"), [
    ({}, []), ({"round": "r1.3"}, ["I1"]), ({"commit_hash": "ab"}, ["I1"]), ({"digest": "cd", "who": "s0"}, ["I2"]),
    ({"digest": "cd"}, []), ({"round": "r1.3", "version": "1:2"}, []),
])  # fmt: skip
def test_without_the_journals_record_the_slaves_sayings_are_compared(change: dict[str, Any], breaks: list[str]) -> None:
    checker = Checker(whole=False)
    held = {"version": "1:1", "round": "r1.2", "digest": "ab", "commit_hash": "cd", "durable": True, "who": "s1"}
    assert feed(checker, Step("slave", "s0", "committed", held)) == []
    found = feed(checker, Step("slave", {**held, **change}["who"], "committed", {**held, **change}))
    assert [violation.invariant for violation in found] == breaks


def test_what_a_killed_master_only_noted_may_be_decided_otherwise() -> None:
    """It died before its VOID was durable, or before anybody heard of its ABORTED: its next life merges the push."""
    script = begun("a")
    again = script.push("a")
    script.add("master", "test", "verdict", push=push_name(again), verdict="EXCLUDED", version="1:0", round="r1.2")
    script.start_master()
    script.commit(again)
    assert check(script.steps).violations == check(script.steps, live=False).violations == []
    script.add("master", "test", "verdict", push=push_name(again), verdict="ABORTED", version="None", round="None")
    assert [v.invariant for v in check(script.steps).violations] == ["I6"]


def once_more(
    heard: Step | None, lost: Callable[[Checker], object], after: tuple[str, str, int] = ("journal", "COMMIT", 1)
) -> set[str]:
    """A COMMIT is lost with the journal, and its two pushes merged again: what that breaks.

    heard: what is known outside of the journal when it is lost. after: the last fact before that.
    """
    before, again = begun("a"), begun("a")
    for script in (before, again):
        script.join("b")
    pushes, seeded = [before.push(name) for name in "ab"], len(again.steps)
    before.commit(*pushes)
    end = before.steps.index(nth(before.steps, *after)) + 1
    checker = Checker()
    for step in [*before.steps[:end], *([heard] if heard else [])]:
        assert feed(checker, step) == []
    lost(checker)
    again.epoch = 2
    again.fences |= {name: push["fence"] for name, push in zip("ab", pushes, strict=True)}
    again.commit(*pushes)
    return {violation.invariant for step in again.steps[seeded:] for violation in feed(checker, step)}


ADOPTED = Step("journal", "", "ADOPT", {"epoch": 2, "round": [1, 1], "version": [1, 0], "from_version": [1, 1]})
HEARD = Step("worker", "b", "verdict", {"push": "b/1.1#1", "verdict": "APPLIED", "version": "1:1"})
_PUBLISH, _COMMITTED = ("master", "publish"), ("slave", "committed")


def lose(*kept: tuple[int, int]) -> Callable[[Checker], None]:
    return lambda checker: checker.lost_journal(kept)


def adopt(checker: Checker) -> None:
    """A copy of the journal has both versions; the slaves have only the first one, and the run goes on from it."""
    checker.lost_journal({(1, 0), (1, 1)})
    assert feed(checker, ADOPTED) == []


def adopt_and_exclude(checker: Checker) -> None:
    """What was given up may be decided in another way."""
    adopt(checker)
    fields = {**HEARD.fields, "verdict": "EXCLUDED"}
    assert feed(checker, Step("worker", "b", "verdict", fields)) == []


@pytest.mark.parametrize(
    ("heard", "lost", "breaks"),
    [
        (None, lose((1, 0)), set()),
        (HEARD, lose((1, 0)), {"I6"}),
        (None, lose((1, 0), (1, 1)), {"I1", "I6"}),
        (None, adopt, set()),
        (HEARD, adopt, {"I6"}),
        (HEARD, adopt_and_exclude, {"I6"}),
    ],
    ids=["lost", "lost, and heard of", "in the copy", "another history", "another history, and heard of", "decided"],
)
def test_a_lost_decision_may_be_made_again(
    heard: Step | None, lost: Callable[[Checker], object], breaks: set[str]
) -> None:
    assert once_more(heard, lost) == breaks


@pytest.mark.parametrize("lost", [lose((1, 0)), adopt], ids=["lost", "another history"])
def test_what_was_published_is_never_decided_again(lost: Callable[[Checker], object]) -> None:
    assert once_more(None, lost, (*_PUBLISH, 1)) >= {"I1", "I6"}


def test_a_slave_that_had_flipped_holds_what_another_history_may_not_make_again() -> None:
    assert once_more(None, adopt, (*_COMMITTED, 2)) == {"I1"}


def test_a_version_that_was_adopted_from_another_round_replaces_the_one_of_its_name() -> None:
    script = begun("a")
    script.commit(script.push("a"))
    checker = Checker()
    for step in script.steps[: script.steps.index(nth(script.steps, "journal", "COMMIT", 1)) + 1]:
        assert feed(checker, step) == []
    checker.lost_journal({(1, 0), (1, 1)})
    held = {"version": "1:1", "round": "r1.9", "digest": "0" * 32}
    assert [v.invariant for v in feed(copy.deepcopy(checker), Step("slave", "s0", "configured", held))] == ["I1", "I2"]
    assert feed(checker, Step("journal", "", "ADOPT", {"epoch": 2, "round": [1, 9], "version": [1, 1]})) == []
    assert feed(checker, Step("slave", "s0", "configured", held)) == []


# ---- what is not ----


def set_field(source: str, kind: str, name: str, value: Any, index: int = -1) -> Change:
    return lambda steps: nth(steps, source, kind, index).fields.__setitem__(name, value)


def drop(source: str, kind: str, index: int = -1) -> Change:
    return lambda steps: steps.remove(nth(steps, source, kind, index))


def move_before(moved: tuple[str, str], before: tuple[str, str]) -> Change:
    """The last fact of the one kind stands before the last of the other."""

    def change(steps: list[Step]) -> None:
        step = nth(steps, *moved, -1)
        steps.remove(step)
        steps.insert(steps.index(nth(steps, *before, -1)), step)

    return change


def in_participant(name: str, value: Any, index: int = -1) -> Change:
    return lambda steps: nth(steps, "journal", "COMMIT", index).fields["participants"][0].__setitem__(name, value)


def judged(change_record: Callable[[dict[str, Any]], None], index: int = -1) -> Change:
    """The record of a judged round, changed."""

    return lambda steps: change_record(nth(steps, "journal", "COMMIT", index).fields)


def other_steps(record: dict[str, Any]) -> None:
    """As a release recorded it that forgot a cluster's usual tokens with its local steps."""
    inputs = record["judgement"]["inputs"]
    inputs["settings"].update(steps_change="0.25")
    inputs.update(local_steps=[7, 1])


def number(name: str, value: Any, *path: str) -> Change:
    """A number of a judgement, or of a part of it."""

    def change_record(record: dict[str, Any]) -> None:
        part = record["judgement"]
        for step in path:
            part = part[step]
        part[name] = value

    return judged(change_record)


def leases(change_rows: Any) -> Change:
    return lease_table(lambda table: change_rows(table["holdings"]))


def lease_table(change_table: Any) -> Change:
    def change(steps: list[Step]) -> None:
        ledger = usual_run().ledger()
        change_table(ledger["leases"])
        nth(steps, "manifest", "manifest", -1).fields |= {"ledger": ledger}

    return change


def of_an_older_release(table: dict[str, Any]) -> None:
    """It wrote rows instead of counts."""
    del table["settled"]
    table["passes"] = table.pop("begun")
    for row in table["holdings"]:
        row[3] = "applied" if row[3] == "settled" else row[3]


def older(change_rows: Any) -> Change:
    def change(table: dict[str, Any]) -> None:
        of_an_older_release(table)
        change_rows(table["holdings"])

    return lease_table(change)


def moved(table: dict[str, Any]) -> dict[str, int]:
    """One APPLIED token is counted as EXCLUDED."""
    return {"applied": table["settled"]["applied"] - 1, "excluded": table["settled"]["excluded"] + 1}


def with_a_pass_that_is_over(table: dict[str, Any]) -> None:
    """It has no row; all of it was excluded."""
    table["begun"] = 2
    table["settled"]["excluded"] += TOTAL_TOKENS
    for row in table["holdings"]:
        row[0] = 1


def voided(**fields: Any) -> Change:
    """A VOID of one more push of cluster a, with its newest state, follows."""

    def change(steps: list[Step]) -> None:
        newest = nth(steps, "journal", "COMMIT", -1).fields
        item = {**newest["participants"][0], "push": ["a", 2, 2, 2], "base": [1, 4], "fence": 4, "verdict": "EXCLUDED"}
        steps.append(Step("journal", "", "VOID", {"epoch": 2, "round": [2, 6], "participants": [{**item, **fields}]}))
        steps[-1].fields["s_max"] = newest["s_max"]

    return change


def without_manifests(then: Change) -> Change:
    def change(steps: list[Step]) -> None:
        steps[:] = [step for step in steps if step.source != "manifest"]
        then(steps)

    return change


def told_at_the_end(digests: dict[str, str]) -> Change:
    """A cluster's last push_sent line is read after the journal."""

    def change(steps: list[Step]) -> None:
        sent = nth(steps, "worker", "push_sent", -1)
        steps.remove(sent)
        sent.fields["digest_of_slave"] |= digests
        steps.append(sent)

    return change


ANOTHER = "f" * 32

BROKEN = [
    ("I1", set_field("slave", "committed", "round", "r1.77"), r"version 2:4|version 1:4 comes from round r1\.77"),
    ("I1", set_field("manifest", "manifest", "commit_record", "{}"), "was altered"),
    ("I2", set_field("slave", "configured", "digest", ANOTHER), r"on slave s1 is ffffffffffff .* but was"),
    ("I2", set_field("manifest", "manifest", "digest", ANOTHER), "is ffffffffffff"),
    ("I2", lambda steps: nth(steps, "worker", "installed").fields["digest_of_slave"].update(s1=ANOTHER), "slave s1 is"),
    ("I3", set_field("worker", "installed", "version", "1:77"), "which no record in the journal made"),
    ("I4", move_before(_PUBLISH, _COMMITTED), "no record says that it was committed on slave s1"),
    ("I4", without_manifests(set_field("slave", "committed", "durable", False)), "only in the memory of slave s1"),
    ("I4", set_field("master", "publish", "version", "1:77"), "no record in the journal made it"),
    ("I5", set_field("slave", "prepared", "durable", False), "only in memory"),
    ("I5", drop("slave", "prepared"), "before slaves s1 had prepared it"),
    ("I6", set_field("worker", "verdict", "verdict", "ROLLED_BACK"), "no ROLLBACK in the journal"),
    ("I6", set_field("worker", "verdict", "push", "b/1.1#9"), "the journal has no decision on it"),
    ("I6", in_participant("ranges", [[1, 0, 0, 0, CHUNK_TOKENS]]), "which version 1:1 applied"),
    ("I7", set_field("journal", "COMMIT", "version", [1, 6]), "a number is left out"),
    ("I7", set_field("journal", "COMMIT", "from_version", [1, 1]), "but the newest was 1:3"),
    ("I7", set_field("journal", "COMMIT", "version", [1, 1], 0), "so its number must be 0"),
    ("I7", set_field("journal", "COMMIT", "from_version", [1, -1], 0), "1:-1, which no record made"),
    ("I7", set_field("worker", "verdict", "push", "b/1.1#9"), "no record in the journal merged it"),
    ("I7", set_field("master", "verdict", "version", "1:2"), r"is APPLIED in version 1:2, but its record says"),
    ("I8", set_field("journal", "JOIN", "epoch", 1), "written after one of epoch 2"),
    ("I8", set_field("journal", "JOIN", "incarnation", [1, 1]), "joined as incarnation"),
    ("I8", set_field("journal", "COMMIT", "round", [1, 4]), r"comes after round r1\.4"),
    ("I8", set_field("journal", "EPOCH", "epoch", 1), "EPOCH has epoch 1, but was written after one of epoch 1"),
    ("I8", in_participant("push", ["a", 1, 1, 3]), "decides push a/1.1#3 after push a/1.1#3"),
    ("I8", set_field("slave", "promised", "epoch", 1), "promised epoch 1 after epoch 2"),
    ("I8", set_field("slave", "prepared", "round", "r1.77"), "but had promised epoch 2"),
    ("I8", set_field("master", "ticket", "push", "a/1.1#1"), "after one to push a/1.1#3"),
    ("I8", in_participant("fence", 1), "it is based on an older state"),
    ("I8", judged(lambda r: r["participants"][1].update(fence=0), 2), "cluster was decided with fence"),
    ("I10", in_participant("base", [1, -6]), "9 versions old: at most 8 are allowed"),
    ("I10", judged(lambda r: r["participants"][1].update(base=[1, -9]), 2), "10 versions old: at most 8 are allowed"),
    ("I10", voided(base=[1, -5]), "9 versions old: at most 8 are allowed"),
    ("I10", in_participant("base", [0, 3]), "into timeline 1"),
    ("I10", in_participant("base", None), "which has no base version"),
    ("I10", in_participant("base", [1, 4]), "newer than 1:3"),
    ("I9", drop("slave", "staged", 5), "merged push b/1.1#1, but slave s1 never recorded"),
    (
        "I9",
        set_field("worker", "push_sent", "digest_of_slave", {"s1": ANOTHER}, 2),
        "on slave s1, but its cluster sent",
    ),
    ("I9", told_at_the_end({"s1": ANOTHER}), "on slave s1, but its cluster sent ffffffffffff"),
    ("I11", set_field("journal", "COMMIT", "tokens", 7), "says 7 tokens, but there were"),
    ("I12", leases(lambda rows: rows.pop(0)), "in no state"),
    ("I12", leases(lambda rows: rows.insert(1, rows[0])), "in two states"),
    ("I12", leases(lambda rows: rows.__setitem__(0, [*rows[0][:3], "free", "", 0])), "settled tokens, but counts"),
    ("I12", leases(lambda rows: rows[-1].__setitem__(2, TOTAL_TOKENS - 1)), "ends at 9999 of 10000 tokens"),
    ("I12", leases(lambda rows: rows.insert(0, [0, 0, 0, "free", "", 0])), "in no state"),
    ("I12", leases(lambda rows: rows.append([1, 0, TOTAL_TOKENS, "free", "", 0])), "names pass 1, which was not begun"),
    ("I12", leases(lambda rows: rows[-1].__setitem__(3, "lent")), "are 'lent' of cluster"),
    ("I12", leases(lambda rows: rows[-1].__setitem__(slice(3, 6), ["leased", "a", 0])), "are 'leased' of cluster 'a'"),
    ("I12", leases(lambda rows: rows[-1].__setitem__(slice(3, 6), ["free", "a", 7])), "are 'free' of cluster 'a'"),
    ("I12", lease_table(lambda table: table["settled"].update(applied=601, excluded=-1)), "settled tokens, but counts"),
    ("I12", leases(lambda rows: rows.clear()), "settled tokens, but counts"),
    ("I12", lease_table(lambda table: table.update(begun=2)), "settled tokens, but counts"),
    ("I12", lease_table(lambda table: table.pop("settled")), "settled tokens, but counts"),
    ("I12", lease_table(lambda table: table["settled"].update(moved(table))), "APPLIED tokens, but the run has"),
    ("I12", older(lambda rows: rows.__setitem__(0, [*rows[0][:3], "free", "", 0])), "APPLIED tokens, but the run has"),
    ("I12", older(lambda rows: rows.clear()), "settled tokens, but counts"),
    ("I13", number("kappa", "nan"), "has kappa = nan"),
    ("I13", number("outer_step", {"scale": "inf"}), "has scale = inf"),
    ("I13", number("norms", [["a", "inf", "nan"]]), "has norm of a = inf"),
    ("I14", set_field("slave", "committed", "digest", ANOTHER), "but committed it as ffffffffffff"),
    ("I18", judged(lambda r: r["judgement"].update(weights=["0.25", "0.75"]), 2), "the weight of cluster a is 0.25"),
    ("I18", judged(lambda r: r["judgement"].update(weights=["1.0"]), 2), "1 weights for 2 accepted"),
    ("I18", judged(lambda r: r["participants"][0].update(tokens=1000), 2), "tokens of what was accepted makes it"),
    ("I18", number("merged_norm", "1.5"), "its merged norm is 1.5, but weights and Gram matrix"),
    ("I18", number("rho", "1.0"), "its rho is 1.0, but live clusters"),
    ("I18", number("threshold", "9.0"), "its threshold is 9.0, but the last scores make it 3.0"),
    ("I18", number("clip_norm", "2.0"), "its clip is 2.0, but the settings make it 1.0"),
    ("I18", number("round_tokens", "100.0", "inputs"), "its T_round is 100.0"),
    ("I18", number("outer_lr", "0.5", "outer_step"), "its outer_lr is 0.5, but settings"),
    ("I18", number("scale", "0.5", "outer_step"), "its scale is 0.5, but settings"),
    ("I18", judged(lambda r: r["judgement"]["norms"][0].__setitem__(1, "2.5")), "the norm of cluster a is 2.5"),
    ("I18", judged(lambda r: r["judgement"]["norms"][1].__setitem__(1, "2.5"), 2), "the norm of cluster b is 2.5"),
    ("I18", judged(lambda r: r["judgement"]["norms"].pop(), 2), r"its norms are of \['a'\], but its pushes of"),
    ("I18", judged(lambda r: r["judgement"]["inputs"].update(nonfinite_elems=[0, 1]), 2), "cluster b is accepted, but"),
    ("I18", judged(lambda r: r["judgement"]["rejected"].append(["a", "score"]), 2), "it judged"),
    ("I18", judged(lambda r: r["judgement"].update(outer_step=None), 2), "it was committed without a step"),
    ("I18", judged(lambda r: r["judgement"]["inputs"]["gram"].append("0.0"), 2), "cannot be read"),
    ("I18", judged(lambda r: r["judgement"]["norms"][0].__setitem__(2, "1.0")), "the score of cluster a is 1.0"),
    ("I18", judged(lambda r: r["judgement"].update(accepted=["a"]), 2), "it judged|it applies"),
    (
        "I18",
        judged(lambda r: r["participants"][0].update(verdict="EXCLUDED"), 2),
        "it applies b, but a, b was accepted",
    ),
    ("I18", judged(lambda r: r["judgement"]["inputs"].update(nonfinite_elems=[1, 0]), 2), "cluster a is accepted, but"),
    ("I18", judged(lambda r: r["judgement"]["inputs"]["gram"].__setitem__(0, "4.0"), 2), "but the slaves measured"),
    ("I18", judged(lambda r: r["judgement"]["inputs"].pop("gram")), "cannot be read"),
    ("I18", judged(lambda r: r["judgement"]["inputs"].update(local_steps=[1, 1, 1]), 2), "cannot be read"),
    ("I18", judged(lambda r: r.update(judgement=None)), "without a judgement"),
    ("I18", judged(lambda r: r["judgement"]["inputs"]["detector"].update(voids_in_a_row=2)), "void rounds in a row"),
    ("I18", judged(lambda r: r["judgement"]["inputs"]["detector"].update(norms=[9.0])), "the last norms are"),
    ("I18", judged(other_steps, 2), "for cluster a it has"),
]


@pytest.mark.parametrize(("name", "change", "sentence"), BROKEN, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(BROKEN)])
def test_what_breaks_a_promise_is_seen_and_said(name: str, change: Change, sentence: str) -> None:
    found = broken_by(usual_run(), change)
    assert name in found, found
    assert any(re.search(sentence, said) for said in found[name]), found[name]


@pytest.mark.parametrize(
    "change",
    [
        in_participant("base", [1, -5]),
        judged(lambda r: r.update(s_max=None)),
        lambda steps: [nth(steps, "slave", "staged", at).fields.update(attempt=2) for at in (4, 5)],
        lambda steps: steps.insert(
            8, Step("slave", "s0", "staged", {"push": "b/1.1#1", "attempt": 0, "digest": ANOTHER})
        ),
        leases(lambda rows: rows[-1].__setitem__(slice(3, 6), ["leased", "a", 7])),
        lease_table(lambda table: table.update(leases=None)),
    ],
)
def test_what_comes_near_to_a_broken_promise_and_keeps_it_is_well(change: Change) -> None:
    assert broken_by(usual_run(), change) == {}


# ---- going back ----


def test_a_rollback_must_name_the_pushes_that_it_takes_back() -> None:
    script = rolled_back_run()
    lost = nth(script.steps, "journal", "COMMIT", 2).fields["participants"][0]

    def change(steps: list[Step]) -> None:
        steps.remove(nth(steps, "journal", "ROLLBACK"))

    found = broken_by(script, change)
    assert any(push_name(lost) in said for said in found["I6"])


@pytest.mark.parametrize(
    ("name", "field", "value", "sentence"),
    [
        ("I5", "digests", {"s0": ANOTHER, "s1": ANOTHER}, "its origin"),
        ("I7", "version", [1, 1], "timeline 1 was used before"),
        ("I7", "version", [2, 5], "the number must stay"),
        ("I11", "tokens", 300, "its origin has"),
        ("I11", "lost_tokens", 0, "tokens are lost"),
    ],
)
def test_a_rollback_that_is_none_is_seen(name: str, field: str, value: Any, sentence: str) -> None:
    found = broken_by(rolled_back_run(), set_field("journal", "ROLLBACK", field, value))
    assert any(re.search(sentence, said) for said in found.get(name, ())), found


# ---- what is not known ----


def test_a_tape_that_is_not_here_is_no_violation_but_proves_nothing() -> None:
    script = usual_run()
    here = [step for step in script.steps if step.source in ("journal", "master")]
    checker = check(here, live=False, coverage=Coverage(RunRecords(Path("nowhere"))))
    assert checker.violations == []
    assert [name for name, count in checker.counts.items() if count == 0] == [
        "I3", "I4", "I5", "I9", "I12", "I14",
    ]  # fmt: skip


@pytest.mark.parametrize("change", [of_an_older_release, with_a_pass_that_is_over])
def test_a_lease_table_without_rows_or_without_counts_is_no_violation(change: Callable[[dict[str, Any]], None]) -> None:
    script = usual_run()
    lease_table(change)(script.steps)
    assert check(script.steps).violations == []


def test_a_journal_without_its_beginning_is_no_violation() -> None:
    script = usual_run()
    first = next(i for i, step in enumerate(script.steps) if step.kind == "COMMIT" and step.fields["version"] == [1, 2])
    late = [step for i, step in enumerate(script.steps) if step.source != "journal" or i >= first]
    assert check(late, live=False, whole=False).violations == []


def test_a_missing_line_of_a_slave_is_proven_by_what_stood_there_later() -> None:
    """Where the run went back since, as it does when a slave's disk is lost with its tape; not else."""
    first = changed(rolled_back_run(), drop("slave", "prepared", 0))
    assert check(first, live=False).violations == []
    gone = [step for step in first if (step.who, step.kind) not in (("s0", "committed"), ("s0", "manifest"))]
    assert "I5" in {violation.invariant for violation in check(gone, live=False).violations}
    last = changed(usual_run(), drop("slave", "prepared"))
    (found,) = check(last, live=False).violations
    assert "no record says that slave s1 prepared it" in str(found)


def test_violations_are_told_once_and_kept_few() -> None:
    checker = Checker()
    for _ in range(50):
        feed(checker, Step("slave", "s0", "prepared", {"finite": False, "version": "1:1", "round": "r1.1"}))
    assert len(checker.violations) == 20
    assert checker.broken["I13"] == 50
