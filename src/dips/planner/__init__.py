"""The planner: how to train a model on clusters in different places, and how long an iteration will take.

Pure computation: no network, no torch, no grpc. Times are integer nanoseconds, sizes bytes, everywhere.

    from dips import planner
    plan = planner.make("sites.toml", out="runs/plan")
    print(plan.chosen.name, plan.chosen.iteration_s)
"""

from dips.planner.api import compare, make, show, sweep_rows

__all__ = ["compare", "make", "show", "sweep_rows"]
