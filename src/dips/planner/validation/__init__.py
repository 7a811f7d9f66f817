"""Compares the papers' published numbers with what the planner computes (`dips plan validate`).

Each paper's section holds its numbers with their places, names the values that were assumed or fitted where the paper
gives none, and holds the tolerances. A number without a tolerance is for information: its error is
printed.
"""

from __future__ import annotations

from collections.abc import Iterator

from dips.core.errors import ConfigError
from dips.planner.validation.checks import PaperCheck
from dips.planner.validation.crosspipe import crosspipe_checks
from dips.planner.validation.jeeves import jeeves_checks
from dips.planner.validation.scaleacross import scaleacross_checks
from dips.planner.validation.spantrain import spantrain_checks

PAPERS = ("jeeves", "crosspipe", "spantrain", "scaleacross")


def all_checks(paper: str = "all", optimal_s: float = 0.0) -> Iterator[PaperCheck]:
    """The comparisons of all papers, or of one. optimal_s > 0: the solver's schedules too, with so much time for each.
    Raises ConfigError for an unknown paper."""
    if paper not in (*PAPERS, "all"):
        raise ConfigError(f"--paper {paper!r} is unknown: choose one of {', '.join(PAPERS)}, all")
    if paper in ("jeeves", "all"):
        yield from jeeves_checks()
    if paper in ("crosspipe", "all"):
        yield from crosspipe_checks(optimal_s)
    if paper in ("spantrain", "all"):
        yield from spantrain_checks()
    if paper in ("scaleacross", "all"):
        yield from scaleacross_checks()
