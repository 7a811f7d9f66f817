"""Times the exchanges between a pipeline's replicas: weights before a stage's first operation, gradients after its
last.

CrossPipe's Figure 7 (arXiv:2507.00217): with ZeRO stage 1 an all-gather of weights precedes the first F of each stage,
and a reduce-scatter of gradients follows its last W; without, an all-reduce follows. An exchange is a message like
others: it occupies its resource for a time, its latency does not, and devices compute meanwhile. Its resource is the
network of its device, or the link between two sites that all stages there share; either way exchanges with the same
resource go one after the other, all-gathers in the order of the stages (which is that of their first F), gradients in
the order in which they are ready. Messages of the pipeline use other resources: inside a site each pair of stages has
its own, and a link between sites carries one or the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from dips.planner.errors import PlanError


class Exchange(NamedTuple):
    """The costs of one stage's exchange. All 0: no exchange."""

    resource: int
    gather_ns: int  # time on its resource, before the stage
    reduce_ns: int  # and after it
    gather_latency_ns: int = 0  # weights arrive so much later
    reduce_latency_ns: int = 0  # and gradients

    @property
    def gathers(self) -> bool:
        return bool(self.gather_ns or self.gather_latency_ns)

    @property
    def reduces(self) -> bool:
        return bool(self.reduce_ns or self.reduce_latency_ns)


class Exchanged(NamedTuple):
    """One simulated exchange."""

    stage: int
    before: bool  # weights; else gradients
    resource: int
    start_ns: int  # it occupied its resource from here
    freed_ns: int  # to here
    ends_ns: int


def gathered(exchanges: Sequence[Exchange]) -> list[Exchanged]:
    """The all-gathers, from time 0 on."""
    found, free = [], dict[int, int]()
    for stage, one in enumerate(exchanges):
        if one.gathers:
            start = free.get(one.resource, 0)
            freed = free[one.resource] = start + one.gather_ns
            found.append(Exchanged(stage, True, one.resource, start, freed, freed + one.gather_latency_ns))
    return found


def gates(exchanges: Sequence[Exchange], overlapped: bool) -> list[int]:
    """When the first F of each stage may start. Not overlapped: when all weights have arrived."""
    found = [0] * len(exchanges)
    for one in gathered(exchanges):
        found[one.stage] = one.ends_ns
    return found if overlapped else [max(found, default=0)] * len(exchanges)


def reduced(exchanges: Sequence[Exchange], ready: Sequence[int], overlapped: bool) -> list[Exchanged]:
    """The exchanges of gradients. ready[s]: when stage s has ended. Not overlapped: they wait for the last stage."""
    at = list(ready) if overlapped else [max(ready)] * len(ready)
    found, free = [], dict[int, int]()
    for stage in sorted(range(len(exchanges)), key=lambda stage: (at[stage], stage)):
        one = exchanges[stage]
        if one.reduces:
            start = max(at[stage], free.get(one.resource, 0))
            freed = free[one.resource] = start + one.reduce_ns
            found.append(Exchanged(stage, False, one.resource, start, freed, freed + one.reduce_latency_ns))
    return found


def check_exchanges(
    done: Iterable[Exchanged], exchanges: Sequence[Exchange], first: Sequence[int], last: Sequence[int]
) -> None:
    """Check the exchanges. first[s], last[s]: start of the first operation and end of the last one of stage s.

    Raises PlanError, which names the stage, for an exchange that is missing, doubled or of another length, for one that
    does not precede or follow its stage, and for two at a time on one resource.
    """
    rows = list(done)
    wanted = sorted(
        (stage, before)
        for stage, one in enumerate(exchanges)
        for before, there in ((True, one.gathers), (False, one.reduces))
        if there
    )
    if sorted((row.stage, row.before) for row in rows) != wanted:
        raise PlanError(f"{len(rows)} exchanges between replicas instead of {len(wanted)}: give one for each stage")
    for row in rows:
        one = exchanges[row.stage]
        lasts = (one.gather_ns, one.gather_latency_ns) if row.before else (one.reduce_ns, one.reduce_latency_ns)
        if (row.freed_ns - row.start_ns, row.ends_ns - row.freed_ns, row.resource) != (*lasts, one.resource):
            raise PlanError(f"stage {row.stage}: its exchange {row} does not have its cost ({one})")
        if row.before and row.ends_ns > first[row.stage]:
            raise PlanError(
                f"stage {row.stage} starts at {first[row.stage]} ns, its weights arrive at {row.ends_ns} ns"
            )
        if not row.before and row.start_ns < last[row.stage]:
            raise PlanError(f"stage {row.stage} ends at {last[row.stage]} ns, its gradients leave at {row.start_ns} ns")
    ordered = sorted(rows, key=lambda row: (row.resource, row.start_ns, row.freed_ns))
    for row, after in pairwise(ordered):
        if row.resource == after.resource and after.start_ns < row.freed_ns:
            raise PlanError(f"stages {row.stage} and {after.stage} exchange at the same time on one network")
