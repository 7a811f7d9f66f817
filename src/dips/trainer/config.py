"""Settings of the trainer that is part of dips.

What all clusters must share (text, data_seed, chunk_tokens, model_size) is checked at Join: a cluster that differs is
refused. The rest may differ from cluster to cluster.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from dips.core.config import Knobs
from dips.core.errors import ConfigError
from dips.core.units import Bytes, Count, validating
from dips.trainer.corpus import Corpus, CorpusLimits, check_paths, read_corpus
from dips.trainer.parallelism import Parallelism, Place
from dips.trainer.sizes import SIZES
from dips.worker.config import ClientConfig, check

SECTION = "train"
"""The TOML table, and the middle of the environment names DIPS_TRAIN_<FIELD>."""

ALONE = "alone"
"""Name and cause in records of training without a master."""


def _known_size(name: str) -> str:
    if name not in SIZES:
        raise ValueError(f"choose one of {', '.join(SIZES)}")
    return name


class TrainConfig(Knobs):
    """Settings of a cluster's training. The defaults take `tiny` on 4 clusters below 2 nats per byte in a million
    tokens."""

    GROUPS: ClassVar = {
        "data": "Text",
        "model_size": "Model",
        "batch_size": "Training",
        "threads": "Processors and devices",
        "log_every_steps": "Progress",
    }

    data: tuple[Path, ...] = Field(
        (), description="Text files and folders of text files; none: the source of Python's standard library."
    )
    max_bytes: Bytes = Field(24_000_000, ge=1, description="Most text that is read.")
    heldout_fraction: float = Field(
        0.02, gt=0, lt=0.5, description="Share of the files that is kept for evaluation and never trained on."
    )
    heldout_max_bytes: Bytes = Field(
        32_768, ge=1, description="Most text of the held-out files that an evaluation reads."
    )
    chunk_tokens: int = Field(
        1024, ge=1, description="Tokens in a chunk of text, the unit of leases; the same on all clusters."
    )
    data_seed: int = Field(0, ge=0, description="Seed of the order of the text; the same on all clusters.")
    model_size: Annotated[str, AfterValidator(_known_size)] = Field(
        "tiny",
        description="tiny (0.36 million parameters), small (3.3 million), medium (10.7 million), or wide (0.36 "
        "million, in 2 layers of 4 heads).",
    )
    parallel: Annotated[str, AfterValidator(lambda text: str(validating(Parallelism.parse)(text)))] = Field(
        "",
        description="How the processes that torchrun started share the model: data=N (each has all of it), fsdp=N, "
        "tensor=N (a part of each layer's heads) or pipeline=N (stages), or several, as in fsdp=2,tensor=2; the "
        "product is their number. Empty: one process.",
    )
    seed: int = Field(0, ge=0, description="Seed of the first parameters; counts on the cluster that seeds the run.")
    batch_size: int = Field(4, ge=1, description="Sequences in an inner step.")
    sequence_tokens: int = Field(128, ge=1, description="Tokens in a sequence.")
    inner_optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw for all parameters; or muon: Muon for the matrices of the layers, AdamW for the embedding "
        "and the norms, both with lr and weight_decay. The clusters of a run may differ.",
    )
    lr: float = Field(3e-3, gt=0, description="Peak learning rate.")
    warmup_tokens: Count = Field(
        50_000, ge=0, description="Tokens of the whole run over which the learning rate rises to its peak."
    )
    min_lr_fraction: float = Field(
        0.1, ge=0, le=1, description="The learning rate at the run's end, as a fraction of the peak (cosine)."
    )
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay, of matrices only.")
    grad_clip: float = Field(1.0, gt=0, description="Largest norm of the gradient of an inner step.")
    threads: int = Field(1, ge=1, description="Processor threads of the computation.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a CUDA device when there is one.")
    emulate_gap: float = Field(
        0.0, ge=0, le=0.95, description="Train slower than the hardware by this fraction, to try out unequal clusters."
    )
    log_every_steps: int = Field(20, ge=1, description="Steps between two lines of the log and of the tape.")
    steps: int | None = Field(
        None,
        ge=1,
        description="Inner steps of plain training, without a master; with a master the run decides when it ends.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        validating(self.parallelism.check)(self.model_size, self.batch_size)
        return self

    @property
    def parallelism(self) -> Parallelism:
        return Parallelism.parse(self.parallel)

    @property
    def step_tokens(self) -> int:
        """Tokens of a full inner step."""
        return self.batch_size * self.sequence_tokens


def corpus_of(config: TrainConfig) -> Corpus:
    """Read the text that these settings name. Raises ConfigError as read_corpus does."""
    limits = CorpusLimits(config.max_bytes, config.heldout_fraction, config.heldout_max_bytes)
    return read_corpus(config.data, limits)


def check_settings(train: TrainConfig, client: ClientConfig) -> None:
    """Raise ConfigError for what can be seen without torch, whose import takes seconds."""
    if client.master:
        check(client)
    elif train.steps is None:
        raise ConfigError(
            "neither a master nor a number of steps is given: give --master HOST:PORT to take part in a run, or "
            "--steps N to train without one"
        )
    check_paths(train.data)


def settings_of_rank(client: ClientConfig, place: Place) -> ClientConfig:
    """Of several ranks the leader writes the records and says how training goes on; the others, what goes wrong."""
    if place.leads:
        return client
    level = "WARNING" if client.log_level == "INFO" else client.log_level
    return client.model_copy(update={"tape": "none", "log_level": level})
