"""Progress: a line every few seconds without a terminal, a picture that renews itself with one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from support.run_status import run_status

from dips.core.clock import ManualClock
from dips.core.ids import Version
from dips.core.messages import Alarm
from dips.local.log_files import HeldoutPoint
from dips.local.progress import (
    SEEN_ENOUGH_S,
    LiveProgress,
    PlainProgress,
    fault_sentence,
    left_sentence,
    loss_sentence,
    progress_for,
)
from dips.local.report import CLUSTER, Fault, Moment, PlannedFault
from dips.master.page.history import TokenRate

HELDOUT = [HeldoutPoint(Version(1, 11), 380_000, 2.75)]
FAULT = Fault(PlannedFault(CLUSTER, "b", 0.35), 71, "1.4", Moment(40.0, 350_000, 5))


def test_lines_come_at_once_and_then_every_few_seconds() -> None:
    out, clock = io.StringIO(), ManualClock()
    with PlainProgress(Console(file=out, width=60), clock, every_s=5.0) as progress:
        for _ in range(21):
            progress.show(run_status(), HELDOUT, ())
            clock.advance(0.5)
    lines = out.getvalue().splitlines()
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


def test_what_happens_is_said_at_once_in_one_line() -> None:
    out = io.StringIO()
    progress = PlainProgress(Console(file=out, width=20), ManualClock())
    progress.say("slave s1: was ended by SIGKILL, is started again in 0.5 s [odd]")
    assert out.getvalue() == "   0.0 s  slave s1: was ended by SIGKILL, is started again in 0.5 s [odd]\n"


def test_the_live_picture_shows_tables_loss_and_faults() -> None:
    out = io.StringIO()
    console = Console(file=out, width=140, height=60, force_terminal=True)
    with LiveProgress(console, ManualClock()) as progress:
        progress.say("hello")
        progress.show(run_status(), HELDOUT, [FAULT])
    for word in (
        "hello",
        "clusters",
        "slaves",
        "held-out loss 2.750",
        "cluster b killed with SIGKILL at 40 s, not back yet",
    ):
        assert word in out.getvalue()


@pytest.mark.parametrize(("terminal", "kind"), [(True, LiveProgress), (False, PlainProgress)])
def test_a_terminal_gets_the_picture(terminal: bool, kind: type[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO(), force_terminal=terminal)
    assert isinstance(progress_for(console, ManualClock()), kind)


def test_a_terminal_that_can_do_nothing_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress_for(Console(file=io.StringIO(), force_terminal=True), ManualClock()), PlainProgress)


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    rate = TokenRate()
    for second in range(100):
        rate.add(float(second), 1000 * second if second < 60 else 60_000 + 100 * (second - 60))
    assert rate.per_s() == pytest.approx(100.0)
    assert rate.left_s(6000) == pytest.approx(60.0)


def test_nothing_is_promised_before_anything_is_known() -> None:
    rate = TokenRate()
    assert rate.left_s(1000) is None
    rate.add(1.0, 500)
    assert rate.left_s(1000) is None
    assert left_sentence(run_status(), rate) == ""


def test_an_expectation_counts_until_the_run_was_seen_for_long_enough() -> None:
    rate = TokenRate()
    rate.add(0.0, 0)
    rate.add(10.0, 400_000)
    assert left_sentence(run_status(tokens=400_000), rate, 10_000.0) == "about 1 min left"
    rate.add(SEEN_ENOUGH_S, 400_000)
    assert left_sentence(run_status(tokens=400_000), rate, 10_000.0) == "about 22 s left"


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


def test_a_paused_run_has_no_time_left_to_tell() -> None:
    rate = TokenRate()
    rate.add(0.0, 0)
    rate.add(10.0, 100_000)
    assert left_sentence(run_status(paused=True), rate) == ""


def test_sentences() -> None:
    rate = TokenRate()
    rate.add(0.0, 0)
    rate.add(10.0, 100_000)
    assert left_sentence(run_status(tokens=400_000), rate) == "about 1 min left"
    assert left_sentence(run_status(tk_max_tokens=0), rate) == ""
    assert loss_sentence([]) == "held-out loss: not yet"
    assert loss_sentence(None) == ""
    FAULT_BACK = Fault(FAULT.planned, 71, "1.4", FAULT.when, Moment(46.0, 1, 6), "1.5")
    assert fault_sentence(FAULT_BACK) == "cluster b killed with SIGKILL at 40 s, back at 46 s as 1.5"
