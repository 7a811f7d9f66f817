"""Transition tables: only arrows of the table are walked, and every walk is remembered."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any

import pytest

from dips.core import machine
from dips.core.errors import LocalProtocolError, RefusalCode, Refused, watchers
from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, Version


class Door(Enum):
    OPEN = "OPEN"
    SHUT = "SHUT"
    LOCKED = "LOCKED"


TABLE = machine.TransitionTable(
    "door",
    Door.SHUT,
    {
        (Door.SHUT, "push"): [Door.OPEN],
        (Door.SHUT, "turn"): [Door.LOCKED, Door.SHUT],
        (Door.OPEN, "push"): [Door.SHUT],
        (Door.LOCKED, "turn"): [Door.SHUT],
    },
)


def test_an_arrow_back_to_the_same_phase_keeps_its_time() -> None:
    phase = machine.Phase(TABLE, machine.MachineHistory())
    phase.move("push", Door.OPEN, at_s=1.0)
    phase.move("push", Door.SHUT, at_s=2.0)
    phase.move("turn", Door.SHUT, at_s=9.0)
    assert phase.since_s == 2.0


@pytest.mark.parametrize(
    ("input_name", "to"), [("turn", Door.OPEN), ("push", Door.LOCKED), ("kick", Door.OPEN), ("", Door.SHUT)]
)
def test_any_other_move_raises_and_changes_nothing(input_name: str, to: Door) -> None:
    story = machine.MachineHistory()
    phase = machine.Phase(TABLE, story, "front door")
    phase.move("push", Door.OPEN, at_s=1.0, cause="c-1", why="someone came")
    phase.move("push", Door.SHUT, at_s=2.0, cause="c-2")
    before = [*story.lines]
    with pytest.raises(LocalProtocolError) as caught:
        phase.move(input_name, to, at_s=3.0)
    assert (phase.now, phase.since_s, [*story.lines]) == (Door.SHUT, 2.0, before)
    text = str(caught.value)
    assert f"front door: no transition from SHUT to {to.value} upon {input_name}" in text
    assert "1.000 [c-1] front door: SHUT -> OPEN upon push: someone came" in text


def test_a_machine_tells_which_inputs_it_takes() -> None:
    phase = machine.Phase(TABLE, machine.MachineHistory())
    assert phase.allows("turn")
    assert not phase.allows("kick")
    phase.move("push", Door.OPEN, at_s=0.0)
    assert not phase.allows("turn")


def test_a_story_forgets_its_oldest_lines() -> None:
    story = machine.MachineHistory()
    for n in range(machine.HISTORY_LENGTH + 10):
        story.add(float(n), "m", "-", "x")
    assert len(story.lines) == machine.HISTORY_LENGTH
    assert story.lines[0].startswith("10.000 ")


def test_the_error_shows_only_the_end_of_a_long_story() -> None:
    story = machine.MachineHistory()
    phase = machine.Phase(TABLE, story)
    for n in range(100):
        phase.move("turn", Door.SHUT, at_s=float(n))
    with pytest.raises(LocalProtocolError) as caught:
        phase.move("kick", Door.OPEN, at_s=100.0)
    assert str(caught.value).count("\n") == 30
    assert "99.000" in str(caught.value)


class Sample(machine.Record, kind="sample"):
    push: PushId
    base: Version | None
    digest: bytes
    tokens: int
    round: RoundId | None = None
    count: int = 0


def test_a_line_of_a_tape_has_its_fields_as_text_and_leaves_defaults_out() -> None:
    push = PushId(ClusterId("a"), Incarnation(1, 2), 3)
    line = Sample("why", push=push, base=None, digest=b"\x01\xff", tokens=0)
    assert (line.kind, line.cause) == ("sample", "why")
    assert list(line.fields.items()) == [("push", str(push)), ("base", "None"), ("digest", "01ff"), ("tokens", 0)]
    more = replace(line, base=Version(1, 4), round=RoundId(1, 5), count=2).fields
    assert (more["base"], more["round"], more["count"]) == ("1:4", str(RoundId(1, 5)), 2)


def test_an_observer_sees_each_move_once_before_it_is_made_until_it_is_forgotten() -> None:
    phase, seen = machine.Phase(TABLE, machine.MachineHistory()), list[tuple[Any, Any]]()

    def look(step: machine.Transition[Any]) -> None:
        seen.append((step.arrow, phase.now))

    machine.observers.append(look)
    try:
        phase.move("push", Door.OPEN, at_s=1.0)
        with pytest.raises(LocalProtocolError):
            phase.move("turn", Door.LOCKED, at_s=2.0)
    finally:
        machine.observers.remove(look)
    phase.move("push", Door.SHUT, at_s=3.0)
    assert seen == [(("door", "SHUT", "push", "OPEN"), Door.SHUT)]
    assert TABLE in machine.tables()
    assert len(TABLE.arrows()) == 5


def test_a_watcher_learns_of_each_refusal_and_where_it_is_made() -> None:
    seen: list[tuple[RefusalCode, str]] = []

    def watch(code: RefusalCode, module: str) -> None:
        seen.append((code, module))

    watchers.append(watch)
    try:
        Refused(RefusalCode.BUSY, "not now")
    finally:
        watchers.remove(watch)
    Refused(RefusalCode.DISK, "no")
    assert seen == [(RefusalCode.BUSY, __name__)]
