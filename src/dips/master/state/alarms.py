"""Lists the active alarms: the same list in the status, on the page and in the metrics.

An alarm is reported once when it begins (SharedState.alarm), and is listed here until it is over. The direction of a
cluster's pushes has its own field in ClusterStatus.
"""

from __future__ import annotations

from itertools import takewhile

from dips.core.messages import Alarm, RoundSummary
from dips.master.state.shared import SharedState

TOKEN_COUNTS = "token_counts"
NOTHING_MERGED = "nothing_merged"

SAME_DATA = "same_data"

KINDS = (NOTHING_MERGED, SAME_DATA, TOKEN_COUNTS)
"""All values of Alarm.kind, and of the label `kind` of dips_master_alarm."""

GONE_S = 3600.0
"""Seconds for which a refused token count stays listed: the cluster's process ends after the refusal. A later push
of the cluster with a correct count removes the alarm earlier."""

FRUITLESS_ROUNDS = 5
"""Rounds in a row without a version before the alarm. Three VOID rounds clear the shared histories, so that more than
three are unusual."""


def standing(shared: SharedState) -> tuple[Alarm, ...]:
    """All active alarms, in the order of their kinds."""
    fruitless = _fruitless(shared)
    nothing = [Alarm(NOTHING_MERGED, (), _nothing_words(fruitless))] if len(fruitless) >= FRUITLESS_ROUNDS else []
    counts = [
        Alarm(TOKEN_COUNTS, (name,), words)
        for name, (words, at_s) in sorted(shared.token_doubts.items())
        if name in shared.members or shared.now_s - at_s < GONE_S
    ]
    same = [Alarm(SAME_DATA, pair, words) for pair, words in sorted(shared.same_data.items())]
    return (*nothing, *same, *counts)


def round_was_fruitless(shared: SharedState) -> None:
    """Records that a round ended without a version; raises an alarm when there were too many in a row."""
    fruitless = _fruitless(shared)
    if len(fruitless) == FRUITLESS_ROUNDS:
        shared.alarm(_nothing_words(fruitless))


def _fruitless(shared: SharedState) -> list[RoundSummary]:
    """The last rounds that made no version, newest first, as far as they are remembered."""
    return list(takewhile(lambda summary: summary.outcome != "commit", reversed(shared.recent)))


def _nothing_words(fruitless: list[RoundSummary]) -> str:
    last, n_void = fruitless[0], sum(summary.outcome == "void" for summary in fruitless)
    kinds = ((n_void, "void"), (len(fruitless) - n_void, "given up"))
    how = ", ".join(f"{n} {word}" for n, word in kinds if n)
    return (
        f"nothing was merged in the last {len(fruitless)} rounds ({how}), so the model does not change while clusters "
        f"train; the last one: {last.reason}"
    )
