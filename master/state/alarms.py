"""What stands and a person should look at: the same alarms in the status, on the page and in the metrics.

An alarm is told once when it begins (World.alarm), and stands here until it is over. The direction of a cluster's
pushes has its own place in ClusterStatus. Reads the state and changes nothing.
"""

from __future__ import annotations

from dips.core.messages import Alarm
from dips.master.state.world import World

TOKEN_COUNTS = "token_counts"

GONE_S = 3600.0
"""A cluster whose push was refused ends; what was wrong is shown so long, unless it comes back and counts well."""

KINDS = (TOKEN_COUNTS,)
"""All values of Alarm.kind, and of the label `kind` of dips_master_alarm."""


def standing(world: World) -> tuple[Alarm, ...]:
    """All alarms that stand, in the order of their kinds."""
    return tuple(
        Alarm(TOKEN_COUNTS, (name,), words)
        for name, (words, at_s) in sorted(world.token_doubts.items())
        if name in world.members or world.now_s - at_s < GONE_S
    )
