"""Progress: a line every few seconds without a terminal, a picture that renews itself with one."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from support.manual_clock import ManualClock
from support.run_status import run_status

from dips.core.ids import Version
from dips.core.messages import Alarm
from dips.local.report import CLUSTER, Fault, Moment, PlannedFault
from dips.local.view import (
    SEEN_ENOUGH_S,
    LiveProgress,
    PlainProgress,
    fault_sentence,
    left_sentence,
    loss_sentence,
    progress_for,
)
from dips.master.page.history import HeldoutPoint, TokenRate

HELDOUT = [HeldoutPoint(Version(1, 11), 380_000, 2.75)]
FAULT = Fault(PlannedFault(CLUSTER, "b", 0.35), 71, "1.4", Moment(40.0, 350_000, 5))


def test_lines_come_at_once_and_then_every_few_seconds() -> None:
    out, clock = io.StringIO(), ManualClock()
    with PlainProgress(Console(file=out, width=60), clock, every_s=5.0) as progress:
        for _ in range(21):
            progress.show(run_status(), HELDOUT, ())
            clock.advance(0.5)
        progress.say("slave s1: was ended by SIGKILL, is started again in 0.5 s and more words [odd]")
    lines = out.getvalue().splitlines()
    assert lines.pop() == "  10.5 s  slave s1: was ended by SIGKILL, is started again in 0.5 s and more words [odd]"
    assert len(lines) == 3
    assert lines[1].startswith("   5.0 s  version 1:12 ")
    assert "held-out loss 2.750 at version 1:11" in lines[0]


def test_an_alarm_is_said_in_full_when_it_begins_and_by_its_kind_after_that() -> None:
    out, clock = io.StringIO(), ManualClock()
    progress = PlainProgress(Console(file=out, width=60), clock, every_s=1.0)
    for norm in (0.31, 0.32, None, 0.33):
        standing = () if norm is None else (Alarm("same_data", ("a", "b"), f"a and b push the same, norm {norm}"),)
        progress.show(run_status(alarms=standing), None, ())
        clock.advance(1.0)
    said = [line.split("  ")[-1] for line in out.getvalue().splitlines()]
    assert [line for line in said if line.startswith("alarm")] == [
        "alarm: a and b push the same, norm 0.31",
        "alarm: a and b push the same, norm 0.33",
    ]
    lines = [line for line in said if not line.startswith("alarm")]
    assert ["alarm same_data: a b" in line for line in lines] == [True, True, False, True]


def test_the_live_picture_shows_tables_loss_and_faults() -> None:
    out = io.StringIO()
    console = Console(file=out, width=140, height=60, force_terminal=True)
    with LiveProgress(console, ManualClock()) as progress:
        progress.say("hello")
        progress.show(run_status(), HELDOUT, [FAULT])
    fault = "cluster b killed with SIGKILL at 40 s, not back yet"
    for word in ("hello", "clusters", "slaves", "held-out loss 2.750", fault):
        assert word in out.getvalue()


@pytest.mark.parametrize(
    ("terminal", "term", "kind"),
    [(True, "xterm", LiveProgress), (False, "xterm", PlainProgress), (True, "dumb", PlainProgress)],
)
def test_a_terminals_picture(terminal: bool, term: str, kind: type[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    console = Console(file=io.StringIO(), force_terminal=terminal)
    assert isinstance(progress_for(console, ManualClock()), kind)


def rate_of(*points: tuple[float, int]) -> TokenRate:
    rate = TokenRate()
    for at_s, tokens in points:
        rate.add(at_s, tokens)
    return rate


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    rate = rate_of(*((float(s), 1000 * s if s < 60 else 60_000 + 100 * (s - 60)) for s in range(100)))
    assert rate.per_s() == pytest.approx(100.0)
    assert rate.left_s(6000) == pytest.approx(60.0)
    assert rate_of().left_s(1000) is None
    assert rate_of((1.0, 500)).left_s(1000) is None


TEN_SECONDS = ((0.0, 0), (10.0, 100_000))


@pytest.mark.parametrize(
    ("points", "changes", "expected_per_s", "said"),
    [
        ((), {}, None, ""),
        (TEN_SECONDS, {"tokens": 400_000}, None, "about 1 min left"),
        (TEN_SECONDS, {"tk_max_tokens": 0}, None, ""),
        (TEN_SECONDS, {"paused": True}, None, ""),
        # An expectation counts until the run was seen for long enough.
        (((0.0, 0), (10.0, 400_000)), {"tokens": 400_000}, 10_000.0, "about 1 min left"),
        (((0.0, 0), (10.0, 400_000), (SEEN_ENOUGH_S, 400_000)), {"tokens": 400_000}, 10_000.0, "about 22 s left"),
    ],
)
def test_what_is_left_is_told_when_it_is_known(
    points: tuple[tuple[float, int], ...], changes: dict[str, Any], expected_per_s: float | None, said: str
) -> None:
    given = () if expected_per_s is None else (expected_per_s,)
    assert left_sentence(run_status(**changes), rate_of(*points), *given) == said


def test_the_time_before_the_first_version_does_not_count_for_the_rate() -> None:
    out, clock = io.StringIO(), ManualClock()
    progress = PlainProgress(Console(file=out, width=200), clock, every_s=0.0)
    for seconds, changes in (
        (60.0, {"published": None, "tokens": 0}),
        (10.0, {"tokens": 0}),
        (10.0, {"tokens": 100_000}),
    ):
        clock.advance(seconds)
        progress.show(run_status(**changes), None, ())
    assert ["left" in line for line in out.getvalue().splitlines()] == [False, False, True]
    assert out.getvalue().endswith("about 1 min 30 s left\n")


def test_sentences() -> None:
    assert (loss_sentence([]), loss_sentence(None)) == ("held-out loss: not yet", "")
    back = replace(FAULT, back=Moment(46.0, 1, 6), back_as="1.5")
    assert fault_sentence(back) == "cluster b killed with SIGKILL at 40 s, back at 46 s as 1.5"
