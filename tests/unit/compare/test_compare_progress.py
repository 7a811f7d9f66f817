"""How far the runs are: bars on a terminal, lines elsewhere, and the time that is left."""

from __future__ import annotations

import io

from rich.console import Console
from support.manual_clock import ManualClock

from dips.lab.compare.pool import CompareProgress


def progress(clock: ManualClock, *, terminal: bool) -> tuple[CompareProgress, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=150, force_terminal=terminal, legacy_windows=False)
    return CompareProgress(console, clock, ["dp, seed 1", "dips, seed 1"], [1000, 1000]), out


def test_lines_say_what_runs_and_how_long_it_will_take() -> None:
    clock = ManualClock()
    shown, out = progress(clock, terminal=False)
    with shown:
        shown.began(0)
        shown.began(1)
        shown.moved(0, 100, 5.0)
        assert out.getvalue() == "", "not yet"
        clock.advance(20.0)
        shown.moved(1, 300, 9.0)
        assert out.getvalue() == "0 of 2 runs done, about 1 min 20 s left; dp, seed 1 10%; dips, seed 1 30%\n"
        clock.advance(1.0)
        shown.ended(0)
    assert out.getvalue().splitlines()[1] == "        21 s  done: dp, seed 1"
