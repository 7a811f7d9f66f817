"""`dips track`: writes what a run's master records to an experiment tracker, while the run goes on or afterwards."""

from __future__ import annotations

import time
from typing import Any

from dips.cli.run_options import RequiredRun
from dips.core.config import load
from dips.core.errors import FatalError
from dips.core.observe.logs import configure_logging
from dips.local.operator_client import NamedRun
from dips.local.options import overrides_for, with_knobs
from dips.local.tracking import Tracking, TrackKnobs, check_tracker
from dips.trainer.progress import StopSignals

LOOK_S = 1.0
LATE_S = 60.0
"""After the run's end: for so long held-out losses are waited for."""


@with_knobs(TrackKnobs)
def track(run: RequiredRun, **given: Any) -> int:
    """Write loss, tokens, norms, staleness, speeds and link rates of each round to a tracker, until the run has ended.

    RUN is a directory with the master's tape, which has every round; an address has only samples. Started again, it
    goes on with what the tracker lacks. A tracker that is away is a warning, and is tried again. Exit code 6: the
    signal to end came while the tracker did not take the last rounds.
    """
    knobs = load(TrackKnobs, "track", overrides=overrides_for(TrackKnobs, given)).value
    check_tracker(knobs)
    named = NamedRun.of(run)
    tracking = Tracking(named.directory or named.masters, knobs)
    configure_logging("track", "track")
    ended_s: float | None = None
    with StopSignals() as signals:
        while True:
            asked = signals.caught is not None
            all_written = tracking.look(time.monotonic())
            if asked:
                break
            ended_s = (ended_s or time.monotonic()) if tracking.ended else None
            if ended_s is not None and (tracking.heldout_is_whole or time.monotonic() > ended_s + LATE_S):
                break
            if all_written or tracking.is_away:
                signals.wait(LOOK_S)
        tracking.close()
    print(f"{knobs.to}: {tracking.written} points of run {tracking.run_id} were written to project {knobs.project}")
    if not all_written:
        raise FatalError(f"{knobs.to} lacks the last rounds: `dips track {run} --to {knobs.to}` writes them")
    return 0
