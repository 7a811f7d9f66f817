"""The out-of-order variant of the compact zero-bubble order: the pipeline never drains between iterations.

SpanTrain, section 4.2: "our compact zero-bubble pipeline disrupts the conventional weight update sequence, forward and
backward no longer strictly operate on the recent model parameters"; its authors count 6.4 to 8.2 % more iterations.
The paper does not say more. The model here:

* Microbatches of the next iteration enter while gradients of the present one are still missing. The order is the same:
  F before D before W, on each stage.
* A stage changes its weights as soon as it has all gradients of an iteration, and its all-reduce has ended. What runs
  later uses the new weights, what began before used the old ones. No stage keeps old weights.
* A stage holds as many microbatches as an iteration has, at most (and as its memory allows): from the beginning of F to
  the end of W. So weights lack about one iteration at most, or those that an all-reduce takes longer than.
* The all-reduce of an iteration runs while the next one computes. Iterations cannot follow each other faster than it:
  where it takes longer than all else, operations are stretched evenly, until they last as long.

Times are of the steady state: of iterations after the first ones, and before the last one. It is NOT equal to
synchronous training.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import NamedTuple

from dips.planner.costs import NS
from dips.planner.ir import Kind, Op
from dips.planner.schedules.greedy import compact_zb
from dips.planner.simulate import Timeline, peaks, simulate
from dips.planner.spantrain.search import Simulated

ITERATIONS = 8
"""Simulated one after another; the first half and the last one are not measured."""

MEASURED = range(ITERATIONS // 2, ITERATIONS - 1)

SENTENCE = (
    "out of order: forward and backward passes use weights that lack gradients, so this is not equal to synchronous "
    "training; SpanTrain's authors needed 6.4 to 8.2 % more iterations (section 4.2)"
)


class Staleness(NamedTuple):
    """How far behind the weights of a stage are, at most, in the steady state."""

    iterations: int  # whose gradients a forward pass lacks
    microbatches: int  # of earlier iterations, whose gradients were not computed when a forward pass began
    mixed: float  # part of the microbatches whose gradients were computed with other weights than their forward pass


@dataclass(frozen=True, eq=False)
class Flowing:
    """Iterations without a drain, in the steady state."""

    iteration_s: float
    staleness: tuple[Staleness, ...]  # of each stage
    activation_bytes: tuple[int, ...]  # the peak of each stage's tightest device
    timeline: Timeline  # of all iterations, without all-reduces


def flow(one: Simulated) -> Flowing:
    """The same chain, out of order."""
    n, stages = one.chain.microbatches, len(one.costs.stages)
    whole = tuple(replace(stage, d_release=0) for stage in one.costs.stages)  # held until W ends
    costs = replace(one.costs, stages=whole, exchanges=())
    limits = [min(limit, n * stage.activation) for limit, stage in zip(one.limits, whole, strict=True)]
    schedule = compact_zb(stages, n * ITERATIONS, costs, limits)
    timeline = simulate(schedule, costs)
    sync_ns = [e.reduce_ns + e.reduce_latency_ns for e in one.costs.exchanges] or [0] * stages
    ends = _ends_of_iterations(timeline, n)
    last = [max(row[k] for row in ends) for k in range(ITERATIONS)]
    period_ns = (last[MEASURED[-1]] - last[MEASURED[0] - 1]) / len(MEASURED)
    longest_ns = max(period_ns, *sync_ns)
    stretch = longest_ns / period_ns
    return Flowing(
        iteration_s=longest_ns / NS,
        staleness=tuple(
            _staleness(timeline, device, n, ends[device], round(sync_ns[device] / stretch)) for device in range(stages)
        ),
        activation_bytes=peaks(schedule, costs),
        timeline=timeline,
    )


def _ends_of_iterations(timeline: Timeline, n: int) -> list[list[int]]:
    """For each stage, when it has all gradients of each iteration."""
    found = [[0] * ITERATIONS for _ in timeline.ends]
    for row, order, ends in zip(found, timeline.schedule.orders, timeline.ends, strict=True):
        for op, end in zip(order, ends, strict=True):
            if op.kind is Kind.W:
                row[op.microbatch // n] = max(row[op.microbatch // n], end)
    return found


def _staleness(timeline: Timeline, device: int, n: int, ends: list[int], sync_ns: int) -> Staleness:
    """sync_ns: of the all-reduce, in the timeline's own time."""
    changed = [end + sync_ns for end in ends]  # in the order of iterations
    order, starts = timeline.schedule.orders[device], timeline.starts[device]
    began = {Op(op.kind, 0, op.microbatch): start for op, start in zip(order, starts, strict=True)}
    done = sorted(
        end for op, end in zip(order, timeline.ends[device], strict=True) if op.kind is Kind.W
    )  # in the order of microbatches, as W are
    iterations = microbatches = mixed = 0
    for microbatch in range(MEASURED[0] * n, (MEASURED[-1] + 1) * n):
        begins, back = (began[Op(kind, 0, microbatch)] for kind in (Kind.F, Kind.D))
        version, later = bisect_right(changed, begins), bisect_right(changed, back)
        iterations = max(iterations, microbatch // n - version)
        microbatches = max(microbatches, microbatch // n * n - bisect_right(done, begins))
        mixed += later != version
    return Staleness(iterations, microbatches, mixed / (n * len(MEASURED)))
