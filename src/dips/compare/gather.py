"""Collects the results of jobs: kept ones are read, the others are run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console

from dips.compare.jobs import ComparisonJob, Results, do_job
from dips.compare.pool import CompareProgress, JobWork, PoolJobFailed, run_jobs
from dips.compare.record import RunRecord
from dips.core.clock import Clock
from dips.core.errors import DipsError


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
