"""Defines the runs of a comparison, keeps their results in files, and executes one run.

A finished run is not repeated: its file names, by a digest, everything that its numbers depend on (set-up, method,
seed, injection, text, program). It must never use a result with another digest.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dips
from dips.compare.methods import Injection, find_method
from dips.compare.pool import TellProgress
from dips.compare.record import RunRecord
from dips.compare.setup import ComparisonSetup
from dips.core.errors import ConfigError
from dips.core.release import software_versions
from dips.trainer.config import TrainConfig, corpus_of

SCHEMA = "dips-compare-run/1"
_PROGRAM = ("core", "master", "slave", "worker", "trainer", "sim", "compare", "protos")
"""Packages whose source the numbers depend on."""


@dataclass(frozen=True)
class ComparisonJob:
    """One run: a method on a set-up with a seed. variant: tells runs of one figure apart."""

    method: str
    seed: int
    setup: ComparisonSetup
    text: str
    """Digest of the text, from text_digest."""
    data: tuple[Path, ...] = ()
    inject: str = ""
    variant: str = ""

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
        return _short_hash("\0".join(map(str, [*parts, program_digest()])).encode())


def jobs_of(
    methods: Sequence[str], seeds: Sequence[int], setup: ComparisonSetup, data: Sequence[Path], inject: str = ""
) -> list[ComparisonJob]:
    """The runs of every method with every seed, the first seed of all methods first.

    Data parallel has no pushes to spoil: in a comparison with an injection it runs clean. Raises ConfigError for text
    that cannot be used, and for settings of the set-up with which a method's master would not start.
    """
    for name in methods:
        if (method := find_method(name)).kind == "servers":
            setup.master_config(method)
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
        kept = {"schema": SCHEMA, "digest": job.digest(), "setup": job.setup.name, "record": record.to_json()}
        write_json(self.path(job), kept)


def do_job(job: ComparisonJob, tell: TellProgress) -> RunRecord:
    """Execute a run in this process, to its end. Raises DipsError with a sentence when it fails."""
    method = find_method(job.method)
    from dips.trainer.learner import ByteLearner, evaluator, read_text

    config = _train_config(job.setup, job.data, job.seed)
    text = read_text(config)
    tokens = job.setup.run.tokens
    evaluate = evaluator(config, text)
    if method.kind == "data parallel":
        from dips.compare.data_parallel import run_data_parallel

        return run_data_parallel(job.setup, job.seed, ByteLearner(config, text, tokens), evaluate, tell)
    from dips.compare.engine import run_on_servers

    return run_on_servers(
        job.setup,
        method,
        job.seed,
        lambda name, index: ByteLearner(config, text, tokens),
        evaluate,
        injection=Injection(job.inject) if job.inject else None,
        progress=tell,
    )


def text_digest(setup: ComparisonSetup, data: Sequence[Path]) -> str:
    """A digest of the text, which is read for it. Raises ConfigError for text that cannot be used."""
    corpus = corpus_of(_train_config(setup, data, seed=0))
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
    for path in _sources():
        found.update(path.name.encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _sources() -> Iterator[Path]:
    assert dips.__file__ is not None
    root = Path(dips.__file__).parent
    for package in _PROGRAM:
        yield from sorted((root / package).rglob("*.py"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically. Raises ConfigError for a place that cannot be written."""
    temporary = path.with_suffix(f".{os.getpid()}.part")  # another command may be writing the same run at this moment
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        temporary.replace(path)
    except OSError as error:
        remedy = "choose another folder with --run-dir"
        raise ConfigError(f"{path} cannot be written: {error.strerror}: {remedy}") from error


def _train_config(setup: ComparisonSetup, data: Sequence[Path], seed: int) -> TrainConfig:
    """The trainer's settings: the seed gives the order of the text and the first parameters."""
    inner = setup.inner
    return TrainConfig(
        data=tuple(data),
        data_seed=seed,
        seed=seed,
        model_size=setup.model.size,
        heldout_max_bytes=setup.run.heldout_bytes,
        batch_size=inner.batch_size,
        sequence_tokens=inner.sequence_tokens,
        lr=inner.lr,
        warmup_tokens=inner.warmup_tokens,
        min_lr_fraction=inner.min_lr_fraction,
        weight_decay=inner.weight_decay,
        grad_clip=inner.grad_clip,
        device="cpu",
    )


def _short_hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
