"""`dips story`: one thing, over all processes, in time order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.history import nth, rolled_back_run, usual_run, write_run
from support.manual_clock import ManualClock

from dips.cli import main
from dips.core.errors import ConfigError
from dips.core.observe.tape import Tape
from dips.judge.facts import Fact
from dips.judge.story import Story, render, slow_rounds, tell_story


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("story") / "run", usual_run())


def kinds(lines: list[Fact]) -> set[tuple[str, str]]:
    return {(str(told), told.kind) for told in lines}


ROUND = {
    ("master", "ticket"),
    ("slave s0", "staged"),
    ("worker a", "push_sent"),
    ("slave s1", "prepared"),
    ("journal", "COMMIT"),
    ("slave s0", "committed"),
    ("master", "publish"),
    ("worker b", "verdict"),
}


@pytest.mark.parametrize(("name", "what"), [("r1.2", "round"), ("1:1", "version")])
def test_a_round_and_its_version_are_told_from_the_tickets_on(run: Path, name: str, what: str) -> None:
    story = tell_story(run, name)
    assert story.what == what
    assert kinds(story.lines) >= ROUND
    assert [told.at_s for told in story.lines] == sorted(told.at_s for told in story.lines)
    rounds = {told.fields["round"] for told in story.lines if told.kind in ("prepared", "committed", "COMMIT")}
    assert rounds == {"r1.2"}


def test_a_push_is_told_from_its_ticket_to_its_verdict(run: Path) -> None:
    story = tell_story(run, "b/1.1#1")
    said = [(str(told), told.kind) for told in story.lines]
    for line in (("master", "ticket"), ("slave s0", "staged"), ("journal", "COMMIT"), ("worker b", "verdict")):
        assert line in said
    assert {told.fields.get("push", "b/1.1#1") for told in story.lines} == {"b/1.1#1"}


def test_a_slave_and_a_cluster_have_their_own(run: Path) -> None:
    slave = tell_story(run, "s0")
    assert slave.what == "slave"
    assert {who for who, _ in kinds(slave.lines)} == {"slave s0", "journal", "master"}
    cluster = tell_story(run, "a")
    assert cluster.what == "cluster"
    of_cluster = {("journal", "JOIN"), ("worker a", "push_sent"), ("master", "verdict"), ("journal", "COMMIT")}
    assert of_cluster <= kinds(cluster.lines)
    assert not any(str(told) == "worker b" for told in cluster.lines)


def test_who_left_no_tape_is_known_by_the_journal(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", usual_run())
    for tape in run.rglob("*.tape.jsonl"):
        tape.unlink()
    assert (tell_story(run, "s0").what, tell_story(run, "a").what) == ("slave", "cluster")


def test_a_rollback_is_part_of_the_story_of_what_it_made(tmp_path: Path) -> None:
    script = rolled_back_run()
    nth(script.steps, "journal", "COMMIT", 2).fields["wall_s"] = 4e9
    story = tell_story(write_run(tmp_path / "run", script), "2:1")
    rollback = next(told for told in story.lines if told.kind == "ROLLBACK")
    assert rollback.at_s == 4e9, "it says no time, and comes after that record"
    assert rollback.fields["rolled_back"] == ["b/1.1#1"]
    assert rollback.fields["origin"] == "1:1"


def test_values_are_shown_in_short() -> None:
    fields = {
        "digest": "ab" * 16, "tokens": 5, "share": 0.123456789, "words": "two words", "word": "one", "none": None,
        "empty": [], "unset": "None", "few": [1, 2.5], "many": [1] * 7, "maps": [{"a": 1}], "map": {"k": "ab" * 16},
    }  # fmt: skip
    story = Story("push", "p", [Fact("master", "", "ticket", fields, 10.0, "c1"), Fact("slave", "s0", "x", {}, 11.5)])
    assert list(render(story)) == [
        "+    0.000 s  master    ticket  digest=abababababab tokens=5 share=0.123457 words='two words' word=one "
        "few=[1, 2.5] many=(7 items) maps=(1 items) map={k: abababababab}",
        "+    1.500 s  slave s0  x",
    ]
    told = Story("push", "p", [Fact("master", "", "ticket", {"kind": "other", "tokens": 5}, 10.0, "c1")]).to_json()
    assert told["lines"] == [{"at_s": 10.0, "who": "master", "kind": "ticket", "cause": "c1", "tokens": 5}]
    assert list(render(Story("push", "p"))) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("r1.22", "Did you mean r1.2"),
        ("1:11", "Did you mean"),
        ("a/1.1#9", "Did you mean"),
        ("a/1.1", "a/1.1#1"),
        ("s7", "Did you mean"),
        ("nobody", "The run has a, b, s0, s1."),
    ],
)
def test_an_unknown_name_is_answered_with_names_like_it(run: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tell_story(run, name)
    assert says in str(caught.value)


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["story", str(run), "1:1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert (head, lines[0][:13]) == ("version 1:1", "+    0.000 s ")
    assert main.run(["story", str(run), "1:1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["what"], told["name"]) == ("version", "1:1")
    assert len(told["lines"]) == len(lines)
    assert {"at_s", "who", "kind", "cause"} <= told["lines"][0].keys()
    assert main.run(["story", str(run), "s7"]) == 2
    assert "Did you mean" in capsys.readouterr().err


# ---- the slowest rounds ----


class Timed:
    """Tapes with times, beside those of a history."""

    def __init__(self, run_dir: Path) -> None:
        self.clock = ManualClock(1000.0)
        self._tapes = {
            name: Tape(run_dir / "timed" / f"{name}.tape.jsonl", "master" if name == "m" else "slave", name, self.clock)
            for name in ("m", "s0", "s1")
        }

    def close(self) -> None:
        for tape in self._tapes.values():
            tape.close()

    def note(self, after_s: float, who: str, kind: str, **fields: object) -> None:
        self.clock.advance(after_s)
        self._tapes[who].write(kind, "-", **fields)

    def round(
        self, name: str, *, push_s: float = 0.1, staged_s: float = 0.0, stood_s: float = 0.0, worked_s: float = 0.1
    ) -> None:
        """push_s: until the second push, of which s1 takes staged_s longer than s0; in PREPARE both slaves work for
        worked_s, and s1 stands still for stood_s.
        """
        self.note(5.0, "m", "admitted", push="a/1.1#1")
        self.note(0.0, "m", "round", round=name, phase="WINDOW", why="")
        push = f"b/1.1#{name[3:]}"
        self.note(push_s - staged_s, "s0", "staged", push=push)
        self.note(staged_s, "s1", "staged", push=push)
        self.note(0.0, "m", "admitted", push=push)
        self.note(0.0, "m", "round", round=name, phase="SEALED", why="every cluster is in")
        self.note(0.0, "m", "round", round=name, phase="PREPARE", why="")
        self.note(worked_s, "s0", "prepared", round=name, took_s=worked_s)
        self.note(stood_s, "s1", "prepared", round=name, took_s=worked_s)
        self.note(0.0, "m", "round", round=name, phase="COMMIT", why="")
        for slave in ("s0", "s1"):
            self.note(0.01, slave, "committed", round=name, took_s=0.01)
        self.note(0.0, "m", "round", round=name, phase="IDLE", why="")


@pytest.fixture
def timed(tmp_path: Path) -> Iterator[tuple[Path, Timed]]:
    run = write_run(tmp_path / "run", usual_run())
    made = Timed(run)
    yield run, made
    made.close()


def test_each_slow_round_says_whom_it_waited_for(timed: tuple[Path, Timed]) -> None:
    run, tapes = timed
    tapes.round("r9.1")
    tapes.round("r9.2", stood_s=12.0)
    tapes.round("r9.3", push_s=20.0)
    tapes.round("r9.4", worked_s=8.0)
    tapes.round("r9.5", push_s=30.0, staged_s=29.0)
    first, *found = slow_rounds(run, 4)
    assert first.cause.endswith("came 30 s after the first; slave s1 had all of it 29 s after the others")
    assert [(one.name, one.step, round(one.took_s)) for one in found] == [
        ("r9.3", "WINDOW", 20),
        ("r9.2", "PREPARE", 12),
        ("r9.4", "PREPARE", 8),
    ]
    push, stood, worked = (one.cause for one in found)
    assert push.startswith("the push of cluster b came 20 s after the first")
    assert stood.startswith("slave s1 was done 12 s after the others, with 100 ms of work: it stood still")
    assert worked.startswith("all slaves took as long")


def test_a_round_in_which_the_master_stood_still_or_lost_a_slave_says_so(timed: tuple[Path, Timed]) -> None:
    run, tapes = timed
    tapes.note(0.0, "m", "admitted", push="a/1.1#1")
    tapes.note(0.0, "m", "round", round="r1.1", phase="WINDOW", why="")
    tapes.note(60.0, "m", "stood_still", gap_s=60.0)
    tapes.note(0.0, "m", "slave_lost", slave="s1", reason="its stream ended")
    tapes.note(0.0, "m", "round", round="r1.1", phase="IDLE", why="")
    [one] = slow_rounds(run, 9)
    assert (one.step, one.step_s, one.took_s) == ("WINDOW", 60.0, 60.0)
    assert "the master itself stood still for 1 min" in one.cause
    assert "slave s1 was lost: its stream ended" in one.cause


@pytest.mark.parametrize(("pushes", "closed_s", "phase", "cause"), [
    ([], 30.0, "IDLE", "no cluster is left"),
    ([0.0, 9.0], 11.0, "IDLE", "for 11 s no further push came: no cluster is left"),
    ([0.0, 11.0], 10.0, "IDLE", "the push of cluster b came 11 s after the first"),
    ([0.0], 1.0, "MEASURE", "a slave; the tapes of the slaves are not here"),
    ([0.0], 1.0, "MERGE", "the master's own work, or its journal's disk"),
])  # fmt: skip
def test_what_a_round_waited_for(
    timed: tuple[Path, Timed], pushes: list[float], closed_s: float, phase: str, cause: str
) -> None:
    run, tapes = timed
    tapes.note(0.0, "m", "round", round="r1.1", phase="WINDOW", why="")
    for name, after_s in zip("ab", pushes, strict=False):
        tapes.note(after_s, "m", "admitted", push=f"{name}/1.1#1")
    tapes.note(closed_s, "m", "round", round="r1.1", phase=phase, why="no cluster is left")
    if phase != "IDLE":
        tapes.note(99.0, "m", "stood_still", gap_s=49.5)
        tapes.note(0.0, "m", "round", round="r1.1", phase="IDLE", why="")
    [one] = slow_rounds(run, 9)
    assert one.cause == cause


def test_the_slowest_rounds_are_printed_where_nothing_is_named(
    timed: tuple[Path, Timed], capsys: pytest.CaptureFixture[str]
) -> None:
    run, tapes = timed
    tapes.round("r9.1", stood_s=12.0)
    tapes.round("r9.2", push_s=20.0)
    assert main.run(["story", str(run)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert ("r9.2" in first, "slave s1 was done 12 s after the others" in second) == (True, True)
    assert main.run(["story", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["step"]) for one in told] == [("r9.2", "WINDOW"), ("r9.1", "PREPARE")]
