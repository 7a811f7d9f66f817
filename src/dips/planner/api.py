"""The planner's Python API, with the names of the command: make, compare, sweep_rows and show are `dips plan make`,
`compare`, `sweep` and `show`. What they return is what the command prints or writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dips.core.errors import ConfigError
from dips.planner.cluster import read_setup
from dips.planner.costs import uniform
from dips.planner.ir import Schedule
from dips.planner.plan import Plan, make_plan, read_plan, ready_folder, write_plan
from dips.planner.problem import Problem
from dips.planner.profile import read_profile
from dips.planner.simulate import Timeline, check_complete, validate
from dips.planner.sweep import UNCALIBRATED, GridPoint, SweepOverheads, SweepRow, cases, overheads_of, rows_of

MOST_SECONDS = 3600.0
"""The longest search of a solver."""

MOST_MS = 60_000.0
"""The longest T_F."""

MOST_ERROR = 10.0
"""Of a calibration, as a fraction."""

MOST_BYTES = 1 << 26
"""The largest file that is shown: several times the largest plan's."""

# ---- make, compare ----


def make(
    setup: str | Path, *, out: str | Path | None = None, seconds: float | None = None, sensitivity: bool = True
) -> Plan:
    """Make the best plan for a TOML file, or for a shipped setting by its name.

    Args:
        setup: The file, or the name of a setting that ships. Not readable, or a key that is wrong: ConfigError, whose
            sentence names the file and the key.
        out: A folder for the plan's files; left out, nothing is written.
        seconds: A solver's, for each kind of schedule; left out, what the file says. Below 0 or above an hour:
            ConfigError.
        sensitivity: Also which change of a setting would help most.
    """
    problem = pose(setup, seconds)
    if out is not None:
        ready_folder(Path(out))
    plan = make_plan(problem, sensitivity)
    if out is not None:
        write_plan(plan, Path(out))
    return plan


def compare(setups: Iterable[str | Path]) -> dict[str, list[float | None]]:
    """Schedule -> its best iteration with each of the setups, in seconds; None where it is not possible. Raises
    ConfigError."""
    return compared([make(setup, sensitivity=False) for setup in setups])


def compared(plans: Sequence[Plan]) -> dict[str, list[float | None]]:
    """What compare() says of plans that are made."""
    names = dict.fromkeys(c.name for plan in plans for c in plan.candidates)
    return {
        name: [min((c.iteration_s for c in plan.candidates if c.name == name), default=None) for plan in plans]
        for name in names
    }


def pose(setup: str | Path, seconds: float | None = None) -> Problem:
    """The problem of a file or shipped setting. Raises ConfigError."""
    problem = Problem(read_setup(setup))
    if seconds is None:
        return problem
    if not 0 <= seconds <= MOST_SECONDS:
        raise ConfigError(f"{seconds:g} seconds are not a valid time for a solver: give 0 to {MOST_SECONDS:g}")
    return problem.with_options(solver_s=seconds)


# ---- sweep ----


def sweep_rows(
    stages: Sequence[int] = (4,),
    microbatches: Sequence[int] = (8,),
    sites: Sequence[int] = (2,),
    latency: Sequence[float] = (0, 0.5, 1),
    bandwidth: Sequence[float] = (0,),
    memory: Sequence[float] = (1,),
    *,
    optimal: bool = False,
    seconds: float = 20.0,
    profile: str | Path | None = None,
    operation_ms: float | None = None,
) -> list[SweepRow]:
    """Every schedule for every combination, in units of T_F, the time of one forward operation.

    Raises ConfigError for an impossible combination, before anything is computed.

    Args:
        stages: Numbers of stages, one for each device.
        microbatches: Numbers of microbatches.
        sites: Numbers of sites of equal size.
        latency: Times of a message, in T_F.
        bandwidth: Times that one activation takes on the link, in T_F; 0: none.
        memory: Memory of a device, as a multiple of what 1F1B needs.
        optimal: Also the best order that a solver finds.
        seconds: The solver's, for each schedule.
        profile: A profile file whose calibration counts; needs operation_ms.
        operation_ms: Milliseconds of T_F, with a profile.
    """
    overheads = calibrated(profile, operation_ms)
    grid = cases(stages, microbatches, sites, latency, bandwidth, memory, overheads=overheads)
    return list(swept(grid, optimal, seconds))


def calibrated(profile: str | Path | None, operation_ms: float | None) -> SweepOverheads:
    """The overheads of a profile file, in units of a T_F of operation_ms; none without a file. Raises ConfigError."""
    if profile is None and operation_ms is None:
        return UNCALIBRATED
    if profile is None or operation_ms is None:
        raise ConfigError("overheads of a sweep need --profile and --operation-ms, the time of T_F: give both or none")
    if not 0 < operation_ms <= MOST_MS:
        raise ConfigError(f"--operation-ms {operation_ms:g} is no time of T_F: give more than 0, up to {MOST_MS:g}")
    calibration = read_profile(Path(profile)).calibration
    if calibration is None:
        raise ConfigError(
            f"{profile} has no [calibration]: fit it with dips plan calibrate PLAN MEASURED --out {profile}"
        )
    return overheads_of(calibration, operation_ms)


def swept(grid: Iterable[GridPoint], optimal: bool, seconds: float) -> Iterator[SweepRow]:
    """The rows of each case, one case after another. Raises ConfigError."""
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(
            f"{seconds:g} seconds are not a valid time for a solver: give more than 0, up to {MOST_SECONDS:g}"
        )
    return (row for case in grid for row in rows_of(case, seconds if optimal else 0.0))


# ---- show ----


def show(file: str | Path, latency: float = 0.0) -> Timeline:
    """The timeline of a plan.json as it was planned, or of a schedule alone with equal times.

    latency: of a message between any two devices of a schedule alone, in T_F. Raises ConfigError for a file that is
    neither a plan nor a schedule; the sentence names the cell that is wrong.
    """
    text = read_text(Path(file))
    return planned(text, str(file)) if is_plan(text) else played(text, str(file), latency)


def is_plan(text: str) -> bool:
    """Whether a file's text is a plan.json, not a schedule alone."""
    return text.lstrip().startswith("{")


def planned(text: str, where: str) -> Timeline:
    schedule, times = read_plan(text, where)
    with named(where):
        check_complete(schedule)
    starts, ends = (tuple(tuple(pair[which] for pair in row) for row in times) for which in (0, 1))
    return Timeline(schedule, starts, ends, ())


def error_of(text: str, where: str) -> float | None:
    """The error of the calibration that a plan.json was made with, as a fraction; None: it has none. Raises
    ConfigError."""
    error = json.loads(text).get("calibration_error")
    if error is None:
        return None
    if isinstance(error, bool) or not isinstance(error, int | float) or not 0 <= error <= MOST_ERROR:
        raise ConfigError(
            f"{where}: calibration_error = {error!r}: make the plan again with dips plan FILE --out FOLDER"
        )
    return float(error)


def iteration_of(text: str) -> float | None:
    """The iteration that a plan.json predicts, in seconds, with all replicas and what they exchange; None: it has none,
    as plan.json of older releases."""
    chosen = json.loads(text).get("chosen")
    found = chosen.get("iteration_s") if isinstance(chosen, dict) else None
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


def played(text: str, name: str, latency: float) -> Timeline:
    with named(name):
        schedule = Schedule.from_csv(text, "schedule")
        n, n_mb = schedule.n_devices, schedule.n_microbatches
        (case,) = cases([n], [n_mb], [n], [latency], [0.0], [float(n_mb)])
        timeline = validate(schedule, uniform(schedule.n_stages, schedule.chunks, wires=case.costs().wires))
    return timeline


@contextmanager
def named(file: str) -> Iterator[None]:
    """Add the file's name to the error about a schedule."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def read_text(file: Path, kind: str = "schedule", remedy: str = "give a plan.json or a schedule like plan.csv") -> str:
    """Read the text of a plan or schedule. Raises ConfigError, which says what the file should be and ends with the
    remedy."""
    try:
        with file.open("rb") as stream:
            text = stream.read(MOST_BYTES + 1).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{file} cannot be read as a {kind}: it is not text: {remedy}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read as a {kind}: {error.strerror}: {remedy}") from error
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{file} has more than {MOST_BYTES} bytes, so it is not a {kind}: {remedy}")
    return text
