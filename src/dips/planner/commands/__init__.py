"""The commands of the planner, which `dips` finds by the entry point of this package (pyproject.toml)."""

from __future__ import annotations

from dips.cli.commands import MODEL, Command

COMMANDS: tuple[Command, ...] = (
    Command(
        "plan",
        "dips.planner.commands.plan",
        "Plan a pipeline over slow links: sites, links and a model in, a schedule out.",
        MODEL,
        (
            "dips plan examples/04-plan-a-schedule/sites.toml",
            "dips plan validate",
            "dips plan sweep --stages 4 --microbatches 8 --latency 0,0.5,1 --optimal",
            "dips plan sweep --latency 0,0.5,1,2 --bandwidth 0,0.5,1,2 --map --out runs/map",
            "dips plan show schedule.csv",
            "dips plan run zb_v --ranks 4",
            "dips plan calibrate runs/plan/plan.json runs/run/measured.json --out profile.toml",
        ),
        function="app",
    ),
    Command(
        "profile",
        "dips.planner.commands.profile",
        "Measure devices and links for the planner: times of each layer, bandwidths, latencies.",
        MODEL,
        (
            "dips profile device sites.toml --device h100 --on cuda --dtype bfloat16 --out profile.toml",
            "dips profile serve --listen 0.0.0.0:29500",
            "dips profile links sites.toml --from amsterdam --to stockholm=10.0.2.1:29500",
        ),
        function="app",
    ),
    Command(
        "place",
        "dips.planner.commands.place",
        "Choose the site of the servers from bandwidths and speeds.",
        MODEL,
        ("dips place examples/sites.toml",),
    ),
)
