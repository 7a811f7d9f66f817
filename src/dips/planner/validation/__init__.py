"""Compares the papers' published numbers with what the planner computes (`dips plan validate`).

Each paper's module holds its numbers with their places, names the values that were assumed or fitted where the paper
gives none, and holds the tolerances. A number without a tolerance is for information: its error is
printed.
"""

from __future__ import annotations

from collections.abc import Iterator

from dips.planner.errors import PlanError
from dips.planner.validation.check import PaperCheck

__all__ = ["PAPERS", "PaperCheck", "all_checks"]

PAPERS = ("jeeves", "crosspipe")


def all_checks(paper: str = "all", optimal_s: float = 0.0) -> Iterator[PaperCheck]:
    """The comparisons of all papers, or of one. optimal_s > 0: the solver's schedules too, with so much time for each.
    Raises PlanError for an unknown paper."""
    if paper not in (*PAPERS, "all"):
        raise PlanError(f"--paper {paper!r} is unknown: choose one of {', '.join(PAPERS)}, all")
    if paper in ("jeeves", "all"):
        from dips.planner.validation.jeeves import checks as of_jeeves

        yield from of_jeeves()
    if paper in ("crosspipe", "all"):
        from dips.planner.validation.crosspipe import checks as of_crosspipe

        yield from of_crosspipe(optimal_s)
