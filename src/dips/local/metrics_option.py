"""The option --metrics of commands that start whole runs: all processes serve metrics."""

from __future__ import annotations

from typing import Annotated

import typer

from dips.local.processes import RunPlan
from dips.local.run_directory import RunDirectory

MetricsOption = Annotated[
    bool, typer.Option("--metrics", help="Every process serves Prometheus metrics; metrics/*.json say where.")
]


def metrics_sentence(plan: RunPlan, directory: RunDirectory) -> str:
    """How to configure Prometheus; empty when no metrics are served."""
    if not plan.metrics:
        return ""
    return f"metrics: let Prometheus read the addresses from {directory.metrics}/*.json (file_sd_configs)"
