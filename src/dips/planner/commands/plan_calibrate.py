"""`dips plan calibrate`: fits overheads to a measured run of a plan, and keeps them in a profile file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dips.core.errors import ConfigError
from dips.core.units import format_seconds
from dips.planner.api import is_plan, read_text
from dips.planner.calibration import MAKE_IT, MeasuredRun, OverheadFit, fit_overheads, read_measured_run
from dips.planner.commands.plan_run import CASE, PlanSource, scaled, source_of
from dips.planner.problem import Problem, read_problem
from dips.planner.profile import Calibration, ProfileFile, ProfileHead, read_profile

MOST_ERROR = 0.5
"""With a larger error the overheads explain nothing of the run."""


@dataclass(frozen=True)
class PlanCalibration:
    """plan: the file. problem: what the plan was made for."""

    plan: Path
    source: PlanSource
    problem: Problem
    run: MeasuredRun
    fit: OverheadFit

    @property
    def table(self) -> Calibration:
        """The overheads as a profile has them."""
        fit = self.fit
        return Calibration(
            source=f"dips plan calibrate: {fit.iterations} iterations, {self.run.source}",
            operation_us=fit.overhead_per_op_s * 1e6,
            send_us=fit.overhead_per_message_s * 1e6,
            error=fit.error,
        )


def calibrate(plan: Path, measured: Path) -> PlanCalibration:
    """Fit the overheads of a plan.json to a measured.json. Raises ConfigError, which name file and key."""
    text = read_text(plan, "plan.json", "make one with dips plan FILE --out FOLDER")
    if not is_plan(text):
        raise ConfigError(
            f"{plan} is not a plan.json, which says what was planned for: name one of dips plan FILE --out"
        )
    source = source_of(str(plan), dict.fromkeys(CASE))
    found = json.loads(text)
    if "problem" not in found:
        raise ConfigError(f"{plan} was made by another release of dips: make it again with dips plan FILE --out FOLDER")
    problem = read_problem(found["problem"], str(plan))
    run = read_measured_run(read_text(measured, "measured.json", MAKE_IT), str(measured), source.schedule)
    costs = source.costs
    if run.forward_ms is not None:
        costs = scaled(costs, source.schedule.n_devices, run.forward_ms)
    fit = fit_overheads(source.schedule, costs, run.iterations)
    if fit.error > MOST_ERROR:
        raise ConfigError(
            f"{measured}: iterations take {format_seconds(fit.measured_s)}, but {format_seconds(fit.fitted_s)} with "
            "the best overheads, which do not explain them: correct forward_ms, or measure again on an idle machine"
        )
    return PlanCalibration(plan, source, problem, run, fit)


def calibrated_profile(found: PlanCalibration, out: Path, now: datetime) -> ProfileFile:
    """The profile file with these overheads: that at `out`, or, where there is none, a new one. Raises ConfigError for
    a file of another model."""
    setup = found.problem.setup
    table = found.table.model_copy(update={"at": now})
    head = ProfileHead(
        source=found.run.source,
        at=now,
        model=setup.model.name,
        layers=setup.model.layers,
        sequence_tokens=setup.training.sequence_tokens,
    )
    if not out.exists():
        return ProfileFile(str(out), head, calibration=table)
    before = read_profile(out)
    for key in ("model", "layers", "sequence_tokens"):
        was, wanted = getattr(before.head, key), getattr(head, key)
        if was != wanted:
            raise ConfigError(
                f"{out} [measured]: {key} = {was!r}, but {found.plan} is a plan of {wanted!r}: choose another --out"
            )
    return replace(before, calibration=table)


def calibration_json(found: PlanCalibration) -> dict[str, Any]:
    """The fit as a JSON object."""
    fit = found.fit
    return {
        "schedule": found.source.schedule.name,
        "source": found.run.source,
        "iterations": fit.iterations,
        "overhead_per_op_s": fit.overhead_per_op_s,
        "overhead_per_message_s": fit.overhead_per_message_s,
        "error": fit.error,
        "separated": not fit.joined,
        "why_not_separated": fit.joined or None,
        "measured_s": fit.measured_s,
        "fitted_s": fit.fitted_s,
        "uncalibrated_s": fit.uncalibrated_s,
        "uncalibrated_error": fit.uncalibrated_error,
    }


def calibration_lines(found: PlanCalibration, out: Path | None) -> Iterator[str]:
    """The fit for a person, and how to use it."""
    fit, table, name = found.fit, found.table, found.source.schedule.name
    yield (
        f"{name}: {fit.iterations} iterations, median {format_seconds(fit.measured_s)}; predicted "
        f"{format_seconds(fit.uncalibrated_s)} without overheads ({fit.uncalibrated_error:+.2%}), "
        f"{format_seconds(fit.fitted_s)} with them"
    )
    operation, message = (format_seconds(s) for s in (fit.overhead_per_op_s, fit.overhead_per_message_s))
    yield f"overhead: {operation} for each operation, {message} for each message"
    yield f"error: +- {fit.error:.2%}: nine of ten measured iterations are as near to the prediction"
    if fit.joined:
        yield f"not separated: {fit.joined}; the overhead of an operation stands for both"
    if fit.uncalibrated_error <= 0:
        yield "the run was not longer than the plan without overheads: the plan's times are too long for it"
    if out is None:
        keys = f"operation_us = {table.operation_us:.6g}, send_us = {table.send_us:.6g}, error = {table.error:.6g}"
        yield f"to plan with them: write them to a profile with --out PROFILE, or into [profile]: {keys}"
    else:
        yield f'to plan with them: file = "{out.name}" in [profile] of the problem, from its folder on'
