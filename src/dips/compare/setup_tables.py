"""The tables of a comparison's set-up, field by field, except [master], whose settings are those of `dips master`."""

from __future__ import annotations

import string
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dips.core.config import Knobs
from dips.core.units import BitsPerSecond, Bytes, Count, Seconds
from dips.trainer.sizes import SIZES

MAX_CLUSTERS = len(string.ascii_lowercase)


def _listed(value: object) -> object:
    """One value for all clusters, or one for each."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _known_size(name: str) -> str:
    if name not in SIZES:
        raise ValueError(f"choose one of {', '.join(SIZES)}")
    return name


Rates = Annotated[tuple[BitsPerSecond, ...], BeforeValidator(_listed)]


class RunTable(Knobs):
    """[run]"""

    about: str = Field("", description="One sentence about the set-up")
    tokens: Annotated[Count, Field(ge=1)] = Field(786_432, description="Tokens of the run, equal for all methods")
    inner_steps: int = Field(16, ge=1, le=1_000_000, description="H: inner steps between two pushes")
    evaluations: int = Field(12, ge=1, le=1000, description="Points of a curve, equally spaced in tokens")
    heldout_bytes: Bytes = Field(16_384, ge=1024, description="Held-out text that an evaluation reads")


class ModelTable(Knobs):
    """[model]"""

    size: Annotated[str, AfterValidator(_known_size)] = Field(
        "tiny", description="The byte model that is really trained: tiny or small"
    )
    wire_parameters: Count = Field(
        0, description="Parameters from which the size of transfers follows, in float32; 0: as many as the model has"
    )


class InnerTable(Knobs):
    """[inner]: AdamW and its schedule, by the names of `dips train`."""

    batch_size: int = Field(4, ge=1, description="Sequences in an inner step")
    sequence_tokens: int = Field(128, ge=1, description="Tokens in a sequence")
    lr: float = Field(3e-3, gt=0, description="Peak learning rate")
    warmup_tokens: Count = Field(50_000, description="Tokens of the run over which the learning rate rises")
    min_lr_fraction: float = Field(0.1, ge=0, le=1, description="Learning rate at the end, as a fraction of the peak")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay, of matrices only")
    grad_clip: float = Field(1.0, gt=0, description="Largest norm of the gradient of an inner step")


class ClustersTable(Knobs):
    """[clusters]: one entry of gaps for each."""

    fastest_step: Seconds = Field(1.0, gt=0, description="One inner step without a gap")
    gaps: tuple[float, ...] = Field(
        (0.0, 0.16, 0.33, 0.5),
        description="By how much a step of each cluster takes longer than without a gap: 0.16 = 16 %",
    )
    jitter: float = Field(
        0.0, ge=0, lt=0.5, description="Random variation of a step's time: 0.1 = up to 10 % more or less"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 1 <= len(self.gaps) <= MAX_CLUSTERS:
            raise ValueError(f"gaps has {len(self.gaps)} entries: give one for each cluster, 1 to {MAX_CLUSTERS}")
        if min(self.gaps) < 0:
            raise ValueError(f"gaps holds {min(self.gaps):g}: a gap is the additional time of a step, so 0 or more")
        return self


class LinksTable(Knobs):
    """[links]: one rate for all clusters, or a list. 0: no limit."""

    up: Rates = Field((0.0,), description="Each cluster's rate towards the servers")
    down: Rates = Field((0.0,), description="Each cluster's rate from the servers")
    latency: Seconds = Field(0.001, gt=0, description="One way between any two processes")
    slave_card: BitsPerSecond = Field(0.0, description="Network card of one slave, each way")


class ServersTable(Knobs):
    """[servers]"""

    slaves: int = Field(2, ge=1, le=64, description="How many slaves hold the model")
    flush: Seconds = Field(0.001, description="One durable write of a slave's or the master's disk")
    work: Seconds = Field(0.001, description="Time of one job of a slave: to measure, to prepare, to write")
