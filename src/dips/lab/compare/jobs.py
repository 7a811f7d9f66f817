"""Defines the runs of a comparison, executes those that are not done yet, and keeps their results in files.

A finished run is not repeated: its file names, by a digest, everything that its numbers depend on (set-up with its
device, method, seed, injection, text, program). It must never use a result with another digest.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from rich.console import Console

import dips
from dips.core.clock import Clock
from dips.core.errors import ConfigError, DipsError
from dips.core.files import by_umask, replace_file
from dips.core.release import software_versions
from dips.lab.compare.methods import find_method
from dips.lab.compare.pool import CompareProgress, JobWork, PoolJobFailed, run_jobs
from dips.lab.compare.record import Progress, RunRecord
from dips.lab.compare.setup import ComparisonSetup
from dips.trainer.config import TrainConfig, corpus_of

SCHEMA = "dips-compare-run/1"
_COMPUTES = "dips.lab.compare.engine"
"""The module that computes a run: numbers depend on it and on all that it imports, such as simulator and judge."""


@dataclass(frozen=True)
class ComparisonJob:
    """One run: a method on a set-up with a seed."""

    method: str
    seed: int
    setup: ComparisonSetup
    text: str
    """Digest of the text, from text_digest."""
    data: tuple[Path, ...] = ()
    inject: str = ""
    variant: str = ""  # tells runs of one figure apart
    threads: int = 1  # of the processor; not in the digest, since a result changes with them by rounding only

    @property
    def name(self) -> str:
        """The run's name, also that of the result's file."""
        return "-".join(part for part in (self.method, self.variant, self.inject, str(self.seed)) if part)

    @property
    def title(self) -> str:
        """The run's title on the screen."""
        what = " ".join(part for part in (self.method, self.variant, self.inject) if part)
        return f"{what}, seed {self.seed}"

    def digest(self) -> str:
        """A digest that is equal for runs that give the same numbers."""
        method = find_method(self.method)
        flags = (*method.flags(), *method.flags_of_clusters())
        parts = [self.setup.digest(), method.kind, *flags, self.seed, self.inject, self.text]
        return hashlib.blake2b("\0".join(map(str, [*parts, program_digest()])).encode(), digest_size=16).hexdigest()


def on_device(setup: ComparisonSetup, device: str | None = None) -> ComparisonSetup:
    """The set-up, to be trained on `device` (None: its own), where `auto` becomes what this machine has: results name
    a device, and so do the digests of runs. Raises ConfigError for cuda where PyTorch finds no CUDA device."""
    wanted = setup if device is None else setup.with_overrides(device=device)
    if wanted.run.device == "cpu":
        return wanted
    from dips.trainer.train import device_of  # torch, whose import takes seconds

    found = device_of(TrainConfig(device=wanted.run.device))
    return wanted.with_overrides(device=found.type)


def jobs_of(
    methods: Sequence[str], seeds: Sequence[int], setup: ComparisonSetup, data: Sequence[Path], inject: str = ""
) -> list[ComparisonJob]:
    """The runs of every method with every seed, the first seed of all methods first.

    Data parallel has no pushes to spoil: in a comparison with an injection it runs clean. Raises ConfigError for text
    that cannot be used, and for a method that cannot run on the set-up.
    """
    for name in methods:
        setup.check(find_method(name))
    text = text_digest(setup, data)

    def injected(method: str) -> str:
        return inject if find_method(method).kind == "servers" else ""

    return [
        ComparisonJob(method, seed, setup, text, tuple(data), inject=injected(method))
        for seed in seeds
        for method in methods
    ]


class Results:
    """The result files DIR/runs/*.json."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "runs"

    def path(self, job: ComparisonJob) -> Path:
        return self.folder / f"{job.name}.json"

    def load(self, job: ComparisonJob) -> RunRecord | None:
        """The result of the same run; None when there is none, or one of another set-up, program or text."""
        try:
            kept = json.loads(self.path(job).read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(kept, dict) or (kept.get("schema"), kept.get("digest")) != (SCHEMA, job.digest()):
            return None
        return RunRecord.from_json(kept["record"])

    def keep(self, job: ComparisonJob, record: RunRecord) -> None:
        """Write the result atomically."""
        made = {"setup": job.setup.name, "device": job.setup.run.device, "threads": job.threads}
        kept = {"schema": SCHEMA, "digest": job.digest(), **made, "record": record.to_json()}
        write_json(self.path(job), kept)


def do_job(job: ComparisonJob, tell: Progress) -> RunRecord:
    """Execute a run in this process, to its end. Raises DipsError with a sentence when it fails."""
    from dips.lab.compare.engine import run_method

    return run_method(job.setup, job.method, job.seed, job.data, job.inject, tell, job.threads)


def text_digest(setup: ComparisonSetup, data: Sequence[Path]) -> str:
    """A digest of the text, which is read for it. Raises ConfigError for text that cannot be used."""
    corpus = corpus_of(TrainConfig(data=tuple(data), heldout_max_bytes=setup.run.heldout_bytes))
    found = hashlib.blake2b(corpus.heldout, digest_size=16)
    for document in corpus.training:
        found.update(f"\0{document.key}\0".encode())
        found.update(document.text)
    return found.hexdigest()


@functools.cache
def program_digest() -> str:
    """A digest of the source that a run's numbers depend on, so that a changed program repeats its runs.

    Other releases of torch or numpy round differently: their versions are included.
    """
    found = hashlib.blake2b(json.dumps(software_versions(), sort_keys=True).encode(), digest_size=16)
    for name, path in sorted(computing_modules().items()):
        found.update(name.encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def computing_modules() -> dict[str, Path]:
    """Our modules that compute a run, by name: those that _COMPUTES imports, at any place, and what these import. Not
    tables, pictures and figures, which only show results."""
    assert dips.__file__ is not None
    finder = ModuleFinder(path=[str(Path(dips.__file__).parent.parent)])
    finder.import_hook(_COMPUTES)
    files = {name: getattr(module, "__file__", None) for name, module in finder.modules.items()}
    return {name: Path(file) for name, file in files.items() if file is not None}


def write_json(path: Path, content: dict[str, Any], option: str = "--run-dir") -> None:
    """Write a JSON file atomically. Raises ConfigError for a place that cannot be written; option: what chose it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [f"{json.dumps(content, indent=1, allow_nan=False)}\n".encode()], opener=by_umask)
    except OSError as error:
        remedy = f"choose another folder with {option}"
        raise ConfigError(f"{path} cannot be written: {error.strerror}: {remedy}") from error


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
    at_once, n_cores = max(1, min(processes, len(rest))), len(os.sched_getaffinity(0))
    todo = [replace(jobs[at], threads=threads_of(jobs[at].setup, at_once, n_cores)) for at in rest]
    if rest:
        kept = f"{len(found)} of {len(jobs)} runs are kept in {results.folder} from before; " if found else ""
        _say(console, f"{kept}{len(rest)} to do, {at_once} at a time{_where(todo[0])}")
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
        job, trace = todo[failed.index], ""
        if failed.trace:
            path = run_dir / "logs" / f"{job.name}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(failed.trace)
            trace = f"; place in the program: {path}"
        done = _kept(len(found), len(jobs), results.folder)
        raise DipsError(f"{job.title}: {failed}{trace}; {done}") from failed
    except KeyboardInterrupt:
        _say(console, f"interrupted: {_kept(len(found), len(jobs), results.folder)}")
        raise
    return [found[at] for at in range(len(jobs))]


def threads_of(setup: ComparisonSetup, at_once: int, n_cores: int) -> int:
    """Threads of a run, with so many at once: its part of the cores, and no more than the set-up allows."""
    return max(1, min(setup.run.threads, n_cores // at_once))


def _where(job: ComparisonJob) -> str:
    """Where runs are computed, unless it is the usual: one thread of the processor."""
    if job.setup.run.device != "cpu":
        return f", on {job.setup.run.device}"
    return f", {job.threads} threads each" if job.threads > 1 else ""


def _kept(n_found: int, n_jobs: int, folder: Path) -> str:
    if not n_found:
        return "the run had not ended" if n_jobs == 1 else f"none of {n_jobs} runs had ended"
    return f"{n_found} of {n_jobs} runs are kept in {folder}, and the same command goes on from there"


def _say(console: Console, sentence: str) -> None:
    console.print(sentence, highlight=False, markup=False, soft_wrap=True)
