"""Writes and reads costs as JSON, with the schedule that was made for them: a plan can be simulated and run again."""

from __future__ import annotations

from typing import Any

from dips.planner.costs import Costs, StageCost, Wire


def costs_json(costs: Costs) -> dict[str, Any]:
    """Costs as JSON: times in nanoseconds, activations in bytes (or the units of the costs). What replicas exchange is
    not written, only whether they do: replicas_exchange."""
    return {
        "stages": [
            {"f_ns": s.f_ns, "d_ns": s.d_ns, "w_ns": s.w_ns, "activation": s.activation, "d_release": s.d_release}
            for s in costs.stages
        ],
        "wires": [
            {
                "sender": sender,
                "receiver": receiver,
                "resource": wire.resource,
                "busy_ns": wire.busy_ns,
                "latency_ns": wire.latency_ns,
                "hold_ns": wire.hold_ns,
            }
            for (sender, receiver), wire in sorted(costs.wires.items())
        ],
        "replicas_exchange": bool(costs.exchanges),
    }


def read_costs(found: Any) -> Costs:
    """Inverse of costs_json(), without exchanges. Raises KeyError, TypeError or ValueError for anything else, and
    PlanError for a negative cost."""
    stages = tuple(
        StageCost(*(int(one[key]) for key in ("f_ns", "d_ns", "w_ns", "activation", "d_release")))
        for one in found["stages"]
    )
    wires = {
        (int(one["sender"]), int(one["receiver"])): Wire(
            int(one["resource"]), int(one["busy_ns"]), int(one["latency_ns"]), int(one["hold_ns"])
        )
        for one in found["wires"]
    }
    return Costs(stages, wires)
