"""What a judge must keep apart: facts that say nothing, ranges and pushes of one round, histories that were lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.history import (
    CHUNK_TOKENS,
    Script,
    Step,
    begun,
    changed,
    check,
    feed,
    nth,
    push_name,
    usual_run,
    write_run,
)

from dips.core.errors import ConfigError, RetryLater
from dips.core.ids import ClusterId, Incarnation, PushId
from dips.core.observe.tape import read_chained
from dips.judge import verify
from dips.judge.facts import hex_of, push_of, say_push, say_version
from dips.judge.invariants import Checker
from dips.judge.judgement import t_round_of
from dips.judge.records import TRIES, read_run
from dips.judge.replay import Replayed
from dips.judge.story import tell_story
from dips.judge.verify import OK, VIOLATED, verify_run
from dips.master.journal import read_content
from dips.slave import snapshot_files
from dips.slave.snapshot_files import SnapshotError


def broken(script: Script) -> set[str]:
    return {violation.invariant for violation in check(script.steps).violations}


# ---- rounds and ranges ----


def test_every_range_of_a_push_is_compared_with_what_was_applied() -> None:
    script = begun("a")
    script.commit(script.push("a"))
    before = nth(script.steps, "journal", "COMMIT", -1).fields["participants"][0]["ranges"]
    again = script.push("a", 2 * CHUNK_TOKENS)
    again["ranges"][1] = before[0]
    script.commit(again)
    assert "I6" in broken(script)
    script = begun("a")
    two = script.push("a", 2 * CHUNK_TOKENS)
    script.commit(two)
    again = script.push("a")
    again["ranges"] = two["ranges"][1:]
    script.commit(again)
    assert "I6" in broken(script)


@pytest.mark.parametrize("halves", [((0, 50), (50, 100)), ((50, 100), (0, 50))])
def test_halves_of_a_chunk_are_two_ranges(halves: tuple[tuple[int, int], ...]) -> None:
    script = begun("a")
    for half in halves:
        script.commit({**script.push("a"), "ranges": [[1, 0, 0, *half]]})
    assert "I6" not in broken(script)
    script.commit({**script.push("a"), "ranges": [[1, 0, 0, 99, 101]]})
    assert "I6" in broken(script)


@pytest.mark.parametrize(("heard", "breaks"), [(["a/1.1#2", "b/1.1#1"], set()), (["a/1.1#1"], {"I6"})])
def test_every_push_of_the_versions_that_a_run_goes_back_over_is_taken_back(heard: list[str], breaks: set[str]) -> None:
    script = begun("a", "b")
    script.commit(script.push("a"))
    script.commit(script.push("b"))
    script.start_master()
    script.roll_back((1, 0), [])
    for push in heard:
        script.add("worker", push[0], "verdict", push=push, verdict="ROLLED_BACK", version="2:0", reason="lost")
    assert broken(script) == breaks


def test_what_the_version_that_a_run_goes_back_to_applied_stays_applied() -> None:
    script = begun("a", "b")
    script.commit(script.push("a"))
    kept = nth(script.steps, "journal", "COMMIT", -1).fields["participants"][0]
    lost = [script.push("a"), script.push("b")]
    script.commit(*lost)
    script.start_master()
    script.roll_back((1, 1), [one["push"] for one in lost])
    script.join("b")
    again = script.push("b")
    again["ranges"] = kept["ranges"]
    script.commit(again)
    said = [str(one) for one in check(script.steps).violations if one.invariant == "I6"]
    assert any(push_name(kept) in one for one in said), said


@pytest.mark.parametrize("digest", ["", "ab"])
def test_facts_that_name_no_round_or_version_are_not_judged(digest: str) -> None:
    checker = Checker()
    assert feed(checker, Step("slave", "s0", "promised", {"epoch": 3})) == []
    before = dict(checker.counts)
    loaded = {"version": "None", "round": "None", "digest": digest, "finite": True, "durable": True}
    for kind in ("configured", "prepared", "committed", "measured", "persisted", "rolled_back"):
        assert feed(checker, Step("slave", "s0", kind, loaded)) == []
    for role, kind in (("master", "publish"), ("worker", "installed"), ("worker", "pulled")):
        assert feed(checker, Step(role, "b", kind, {**loaded, "digest_of_slave": {"s0": digest}})) == []
    assert feed(checker, Step("slave", "s0", "measured", {"round": "r3.1"})) == []
    assert checker.counts == {**before, "I8": before["I8"] + 1, "I13": 1}
    named = Step("slave", "s0", "configured", {"version": "1:1", "round": "r3.1"})
    assert feed(checker, named) == []
    assert checker.counts["I2"] == checker.counts["I14"] == 0


def test_intervals_that_are_not_known_yet_do_not_count_in_the_tokens_of_a_round() -> None:
    def of(rates: dict[str, float], intervals_s: dict[str, float]) -> float:
        given: Any = SimpleNamespace(rates=rates, intervals_s=intervals_s)
        return t_round_of(given)

    assert of({"a": 10.0, "b": 30.0}, {"a": 0.0, "b": 5.0}) == 200.0
    assert of({"a": 0.0, "b": 30.0}, {"a": 5.0}) == of({"a": 10.0, "b": 30.0}, {"a": 0.0}) == 0.0
    assert of({"a": 0.0}, {"a": 5.0}) == of({}, {"a": 5.0}) == 0.0


def test_names_are_said_as_roles_say_them() -> None:
    push = PushId(ClusterId("eu/west-1"), Incarnation(3, 12), 7)
    assert say_push(push_of(str(push))) == str(push)
    assert (say_version(None), hex_of(b"\x01\xff")) == ("none", "01ff")


# ---- a journal that was lost ----


def test_after_the_journal_was_lost_a_cluster_joins_and_gets_tickets_as_if_it_were_new() -> None:
    script, checker = usual_run(), Checker()
    for step in script.steps:
        feed(checker, step)
    join = Step("journal", "", "JOIN", {"epoch": 2, "cluster": "a", "incarnation": [1, 1]})
    ticket = nth(script.steps, "master", "ticket")
    assert [one.invariant for one in feed(checker, join)] == ["I8"]
    assert feed(checker, ticket) != []
    checker.lost_journal()
    assert feed(checker, join) == []
    assert feed(checker, ticket) == []


@pytest.mark.parametrize(("first", "then", "lossy", "taken_back", "breaks"), [
    ("APPLIED", "EXCLUDED", False, False, True),
    ("APPLIED", "EXCLUDED", False, True, True),
    ("EXCLUDED", "ABORTED", False, False, True),
    ("APPLIED", "ROLLED_BACK", False, False, False),
    ("EXCLUDED", "ABORTED", True, False, False),
    ("APPLIED", "EXCLUDED", True, False, True),
    ("APPLIED", "EXCLUDED", True, True, False),
])  # fmt: skip
def test_a_cluster_that_heard_two_verdicts(first: str, then: str, lossy: bool, taken_back: bool, breaks: bool) -> None:
    checker = Checker()
    if lossy:
        checker.lost_journal()
    said = {"push": "a/1.1#2", "version": "1:1", "reason": "x"}
    feed(checker, Step("worker", "a", "verdict", {**said, "verdict": first}))
    if taken_back:
        back = {"epoch": 2, "version": [2, 0], "origin": [1, 0], "rolled_back": [["a", 1, 1, 2]]}
        feed(checker, Step("journal", "", "ROLLBACK", back))
    found = feed(checker, Step("worker", "a", "verdict", {**said, "verdict": then}))
    assert any(f"{first} before" in str(one) for one in found) is breaks, found


# ---- files that change while they are read ----


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", usual_run())


def test_a_journal_that_a_live_master_moves_is_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s: list[float] = []
    read, tries = read_content, [0]

    def busy(directory: Path) -> Any:
        tries[0] += 1
        if tries[0] <= most:
            raise RetryLater("it moves its records", retry_after_s=9.0)
        return read(directory)

    monkeypatch.setattr("dips.judge.records.read_content", busy)
    monkeypatch.setattr("dips.judge.records.time.sleep", pauses_s.append)
    most = TRIES - 1
    assert read_run(run).journal
    assert pauses_s == [1.0] * most
    tries[0], most = 0, TRIES
    with pytest.raises(RetryLater):
        read_run(run)
    assert tries[0] == TRIES


@pytest.mark.parametrize(("times", "changes", "reads"), [(1, True, 2), (1, False, 1), (99, True, TRIES)])
def test_a_manifest_that_changes_while_it_is_read_is_read_again(
    run: Path, monkeypatch: pytest.MonkeyPatch, times: int, changes: bool, reads: int
) -> None:
    usual = [item.path for item in read_run(run).manifests]
    decode, seen = snapshot_files.decode, list[str]()

    def torn(data: bytes, name: str) -> Any:
        seen.append(name)
        if seen.count(name) <= times:
            if changes:
                Path(name).write_bytes(data + b" " * seen.count(name))
            raise SnapshotError(f"{name} is torn")
        return decode(data, name)

    monkeypatch.setattr(snapshot_files, "decode", torn)
    found = read_run(run)
    is_read = times < reads
    assert ([item.path for item in found.manifests], len(found.problems)) == (
        (usual, 0) if is_read else ([], len(usual))
    )
    assert all(seen.count(str(path)) == reads for path in usual)


def test_manifests_are_listed_again_when_a_live_slave_replaced_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = [item.path for item in read_run(run).manifests]
    newer = usual[-1].with_name("manifest-newer.json")
    decode = snapshot_files.decode

    def replaced(data: bytes, name: str) -> Any:
        if usual[-1].exists():
            usual[-1].rename(newer)
        return decode(data, name)

    monkeypatch.setattr(snapshot_files, "decode", replaced)
    found = read_run(run)
    assert ({item.path for item in found.manifests}, found.problems) == ({*usual[:-1], newer}, [])


def test_a_manifest_that_cannot_be_opened_is_a_problem_and_one_that_is_gone_is_none(run: Path) -> None:
    first, second, *_ = (item.path for item in read_run(run).manifests)
    first.unlink()
    first.mkdir()
    second.unlink()
    second.symlink_to(run / "nowhere")
    found = read_run(run)
    assert {first, second}.isdisjoint(item.path for item in found.manifests)
    assert [str(first) in said for said in found.problems] == [True]


def test_tapes_that_lost_events_or_have_no_digests_are_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chained = read_chained

    def bare(path: Path) -> Any:
        for number, (event, _) in enumerate(chained(path)):
            yield ({**event, "kind": "gap", "lost": 5} if path.stem.startswith("s0") and not number else event), False

    monkeypatch.setattr("dips.judge.records.read_chained", bare)
    found = read_run(run)
    assert [who for who, tape in found.tapes.items() if tape.lost] == [("slave", "s0")]
    assert any("slave s0 lost 5 events" in note for note in found.notes)
    assert any("s0" in said and "no digests" in said for said in found.unproven)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_record_of_a_state_that_is_no_json_was_changed(run: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    content = replace(read_content(run / "master"), snapshot_json=text)
    monkeypatch.setattr("dips.judge.records.read_content", lambda directory: content)
    if text == "[1]":
        assert read_run(run).ledger == {}
        return
    with pytest.raises(ConfigError, match="not JSON"):
        read_run(run)


# ---- the report of a replay ----


def test_a_replay_counts_for_its_promises_and_what_it_could_not_do_is_unproven(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Replayed(shards=8, judged=3, missing=["1:2 has no push", "1:3 neither"], unproven=["no checksum"])
    usual = {row.name: row for row in verify_run(run).rows}
    monkeypatch.setattr(verify, "replay_run", lambda run_dir, records: found)
    report = verify_run(run, True)
    rows = {row.name: row for row in report.rows}
    added = {name: row.records - usual[name].records for name, row in rows.items()}
    assert added == {**dict.fromkeys(usual, 0), "I14": 8, "I18": 3}
    assert (rows["I14"].result, rows["I18"].result, report.replayed) == (OK, OK, found)
    assert [said.split(", the")[0] for said in report.unproven] == ["no checksum", "2 shards were not computed again"]
    assert verify_run(run, True, allow_skipped=True).unproven == ["no checksum"]
    found.wrong, found.misjudged = ["a shard differs"], ["a norm differs", "another too"]
    report = verify_run(run, True)
    broken = {row.name: row.why.split()[0] for row in report.rows if row.result == VIOLATED}
    assert broken == {"I14": "1", "I18": "2"}
    violations = [(one.invariant, one.sentence) for one in report.violations]
    assert violations == [("I14", "a shard differs"), ("I18", "a norm differs"), ("I18", "another too")]


# ---- stories ----


def test_lines_that_name_a_round_alone_or_were_caused_by_it_are_of_its_story(tmp_path: Path) -> None:
    script = usual_run()
    script.add("master", "test", "window", round="r1.2")
    script.add("master", "test", "window", round="r1.3")
    script.add("master", "test", "window", round="r1.9", version="1:9")
    run = write_run(tmp_path / "run", script, changed(script, lambda steps: None))
    for name, rounds in (
        ("r1.2", {"r1.2"}),
        ("1:1", {"r1.2"}),
        ("r1.9", {"r1.9"}),
        ("1:9", {"r1.9"}),
        ("a/1.1#2", set()),
        ("b", set()),
    ):
        told = [line.fields["round"] for line in tell_story(run, name).lines if line.kind == "window"]
        assert set(told) == rounds
