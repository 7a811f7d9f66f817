"""Writes and reads a problem as JSON inside of a plan.json, so that it can be planned again with measured numbers; and
lists the assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dips.planner.cluster import setup_of
from dips.planner.errors import PlanError
from dips.planner.problem import Problem


def problem_json(problem: Problem) -> dict[str, Any]:
    """The tables of the file that was read, with the numbers of a shipped model, and how fast devices were measured."""
    setup = problem.setup
    tables: dict[str, Any] = {
        "model": _table(setup.model),
        "sites": [_table(site) for site in setup.sites],
        "links": [_table(link) for link in setup.links],
        "training": _table(setup.training),
        "options": _table(setup.options),
    }
    if setup.profile is not None:
        tables["profile"] = _table(setup.profile)
    return {"tables": tables, "released": problem.released, "paces": [list(pace) for pace in problem.paces]}


def _table(knobs: BaseModel) -> dict[str, Any]:
    return knobs.model_dump(mode="json", exclude_unset=True)


def read_problem(found: Mapping[str, Any], file: str) -> Problem:
    """Inverse of problem_json(). Raises PlanError or ConfigError."""
    try:
        setup = setup_of(dict(found["tables"]), Path(file))
        paces = tuple((float(f), float(d), float(w)) for f, d, w in found["paces"])
        problem = Problem(setup, float(found["released"]))
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f'{file}: "problem" is not what dips plan writes ({type(error).__name__}: {error}): make the plan again'
        ) from error
    if paces and len(paces) != problem.n_devices:
        raise PlanError(f"{file}: paces of {len(paces)} devices for {problem.n_devices}: make the plan again")
    return problem.with_paces(paces)


def assumptions(problem: Problem) -> list[str]:
    """What a plan of this problem does not count, as sentences without a full stop."""
    training, sites = problem.setup.training, problem.setup.sites
    found = ["a sender computes while it sends, and a receiver while it receives"]
    if training.data * training.context > 1:
        if any(site.network_gbps is None for site in sites):
            found.append("the exchange of weights and gradients inside a site without network_gbps costs no time")
        if training.zero_stage >= 2:
            found.append(
                f"what zero_stage = {training.zero_stage} exchanges for every microbatch is hidden; counted are "
                "weights before the first one and gradients after the last one"
            )
    found.append(
        "after the gradient of the input 2/34 of an activation are released, the rest after that of the weights"
    )
    return found
