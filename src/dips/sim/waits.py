"""I15 with a bad cluster: checks how long the others wait for the verdicts of their pushes.

Judged only in runs whose faults are all of one cluster: slow, dead, cut off or hostile. No other cluster may wait
longer for it than the longest grace window and one round time-out, in addition to two ordinary rounds: the one under
way, and their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dips.master.state import pacing
from dips.sim.counts import BYSTANDER_S, BYSTANDER_SHARE
from dips.sim.hosts.calls import master_of

if TYPE_CHECKING:
    from dips.sim.world import World

ROUNDS = 2

SLOWEST = 3.0
"""A job, a flush or a message takes up to so many times its mean; longer ones are rarer than one in a thousand."""


class VerdictWaits:
    """The waits of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.judging = False
        self._since_s: dict[str, float] = {}
        self.judged = 0

    def said(self, cluster: str, kind: str) -> None:
        """Check a line of a cluster's tape."""
        if not self.judging or cluster == self._world.plan.sabotaged:
            return
        if kind == "admitted":
            self._since_s.setdefault(cluster, self._world.kernel.now_s)
        elif kind == "verdict" and (since_s := self._since_s.pop(cluster, None)) is not None:
            self._judge(cluster, self._world.kernel.now_s - since_s)
        elif kind in ("left", "failed", "fenced"):
            self._since_s.pop(cluster, None)

    def _judge(self, cluster: str, waited_s: float) -> None:
        world, most_s = self._world, self.most_s()
        if most_s is None or world.healed:
            return
        self.judged += 1
        world.counts.took(BYSTANDER_S, waited_s)
        world.counts.took(BYSTANDER_SHARE, waited_s / most_s)
        if waited_s > most_s:
            world.checks.violated(
                f"{cluster} waited {waited_s:.1f} s for its verdict, at most {most_s:.1f} s because of "
                f"{world.plan.sabotaged} (I15)"
            )

    def most_s(self) -> float | None:
        """Two ordinary rounds, the grace window and one round time-out; None while no version is published."""
        plan, master = self._world.plan, master_of(self._world)
        if master is None or master.state is None or master.state.shared.published is None:
            return None
        round_s = SLOWEST * (3 * plan.work_s + 4 * plan.flush_s + 12 * plan.delay_s)
        return ROUNDS * round_s + pacing.longest_window_s(master.state.shared) + plan.config.round_timeout_s
