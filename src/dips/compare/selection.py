"""Parses the options of `dips compare`: texts of the command line to values, with a sentence for every mistake."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from dips.compare.figures import FIGURES
from dips.compare.jobs import ComparisonJob, Results, do_job
from dips.compare.methods import KINDS, METHODS, find_method
from dips.compare.pool import CompareProgress, JobWork, PoolJobFailed, run_jobs
from dips.compare.record import RunRecord
from dips.compare.setup import ComparisonSetup, load_setup
from dips.compare.speed import SPEED_FIGURES
from dips.core.clock import Clock
from dips.core.errors import ConfigError, DipsError
from dips.core.units import parse_count

DEFAULT_METHODS = "dp,diloco,diloco-clip,async,paper,dips,dynamic"
DEFAULT_SETUP = "small"
ALL = "all"
ALL_FIGURES = tuple(sorted((*FIGURES, *SPEED_FIGURES), key=lambda name: int(name.rstrip("b"))))

_NEEDED = ("matplotlib", "torch", "numba")

T = TypeVar("T")


def setup_of(
    name: str, gaps: str | None, inner_steps: int | None, tokens: str | None, lr: float | None = None
) -> ComparisonSetup:
    """The set-up with the command line's changes. Raises ConfigError."""
    return load_setup(name).with_overrides(
        gaps=None if gaps is None else _numbers("--gaps", gaps, _gap, "0,16,33,50"),
        inner_steps=inner_steps,
        tokens=None if tokens is None else _tokens(tokens),
        lr=lr,
    )


def methods_of(text: str) -> tuple[str, ...]:
    """Names of methods, each once. Raises ConfigError with the nearest name for one that is not known."""
    if text.strip() == ALL:
        return tuple(METHODS)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--methods {text!r} names no method: write names with commas, such as {DEFAULT_METHODS}")
    return tuple(dict.fromkeys(find_method(name).name for name in names))


def seeds_of(text: str) -> tuple[int, ...]:
    """Seeds, each once. Raises ConfigError."""
    return tuple(dict.fromkeys(_numbers("--seeds", text, _seed, "1,2,3")))


def check_inject(kind: str | None) -> None:
    """Check the kind of injection. Raises ConfigError for an unknown one."""
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"--inject {kind!r} is not known: choose one of {', '.join(KINDS)}")


def check_figure(figure: str, given: Mapping[str, object]) -> None:
    """Check the figure. Raises ConfigError for an unknown one, and for an option in `given` that a figure sets
    itself."""
    if figure not in ALL_FIGURES:
        raise ConfigError(f"--figure {figure!r} is not known: choose one of {', '.join(ALL_FIGURES)}")
    for option, value in given.items():
        if value is not None:
            raise ConfigError(f"figure {figure} does not use {option}: leave {option} out, or leave --figure out")


def check_place(run_dir: Path) -> None:
    """Check the run's folder and packages before the training. Raises ConfigError, or ModuleNotFoundError, which the
    command reports."""
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir} cannot be made: {error.strerror}: choose another folder") from error


def _numbers(option: str, text: str, parse: Callable[[str], T], example: str) -> tuple[T, ...]:
    try:
        return tuple(parse(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: write numbers with commas, such as {example}") from error


def _gap(percent: str) -> float:
    """0.16 from "16" or "16 %"."""
    return float(percent.strip().removesuffix("%")) / 100


def _seed(text: str) -> int:
    seed = int(text)
    if seed < 0:
        raise ValueError("negative")
    return seed


def _tokens(text: str) -> int:
    try:
        return parse_count(text)
    except ConfigError as error:
        raise ConfigError(f"--tokens: {error}") from error


# ---- gather ----------------------------------------------------------------------------------------------------------
#
# Collects the results of jobs: kept ones are read, the others are run.


def gather(
    jobs: Sequence[ComparisonJob],
    run_dir: Path,
    processes: int,
    console: Console,
    clock: Clock,
    *,
    again: bool = False,
    work: JobWork[ComparisonJob, RunRecord] = do_job,
) -> list[RunRecord]:
    """The record of each job, in the order of the jobs. again: runs all jobs, also those with a kept result.

    Every finished run is kept at once, so that an interrupted comparison can go on later. Raises DipsError, with one
    sentence, when a run fails.
    """
    results = Results(run_dir)
    found = {} if again else {at: record for at, job in enumerate(jobs) if (record := results.load(job)) is not None}
    rest = [at for at in range(len(jobs)) if at not in found]
    if rest:
        kept = f"{len(found)} of {len(jobs)} runs are kept in {results.folder} from before; " if found else ""
        _say(console, f"{kept}{len(rest)} to do, {min(processes, len(rest))} at a time")
    todo = [jobs[at] for at in rest]
    try:
        titles, tokens = [job.title for job in todo], [job.setup.run.tokens for job in todo]
        with (
            CompareProgress(console, clock, titles, tokens) as progress,
            closing(run_jobs(todo, work, processes, progress)) as running,
        ):
            for index, record in running:
                found[rest[index]] = record
                results.keep(todo[index], record)
    except PoolJobFailed as failed:
        raise DipsError(_sentence(todo[failed.index], failed, run_dir, len(found), len(jobs))) from failed
    except KeyboardInterrupt:
        _say(console, f"interrupted: {_kept(len(found), len(jobs), results.folder)}")
        raise
    return [found[at] for at in range(len(jobs))]


def _sentence(job: ComparisonJob, failed: PoolJobFailed, run_dir: Path, n_found: int, n_jobs: int) -> str:
    trace = ""
    if failed.trace:
        path = run_dir / "logs" / f"{job.name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(failed.trace)
        trace = f"; place in the program: {path}"
    return f"{job.title}: {failed}{trace}; {_kept(n_found, n_jobs, run_dir / 'runs')}"


def _kept(n_found: int, n_jobs: int, folder: Path) -> str:
    if not n_found:
        return "the run had not ended" if n_jobs == 1 else f"none of {n_jobs} runs had ended"
    return f"{n_found} of {n_jobs} runs are kept in {folder}, and the same command goes on from there"


def _say(console: Console, sentence: str) -> None:
    console.print(sentence, highlight=False, markup=False, soft_wrap=True)
