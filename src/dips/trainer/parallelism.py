"""How the processes of a cluster share the model and its batches: `--parallel fsdp=2,tensor=2`.

Does not import torch, so that settings and command lines can be read without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from dips.core.errors import ConfigError
from dips.trainer.sizes import SIZES, ModelConfig


@dataclass(frozen=True)
class Parallelism:
    """Into how many parts each of these cuts the work; all of them together are the number of processes.

    pipeline: stages of whole layers. data: copies of all else, with rows of their own. fsdp: shards of every parameter,
    with rows of their own. tensor: shards of each layer's heads and hidden units.
    """

    pipeline: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @classmethod
    def parse(cls, text: str) -> Parallelism:
        """Read "fsdp=2,tensor=2"; "" is one process. Raises ConfigError."""
        parts: dict[str, int] = {}
        for word in filter(None, map(str.strip, text.split(","))):
            name, equals, number = map(str.strip, word.partition("="))
            if name not in NAMES:
                raise ConfigError(
                    f"{name!r} is no way to share a model: give pipeline=N, data=N, fsdp=N or tensor=N, or several of "
                    "them, as in fsdp=2,tensor=2"
                )
            if name in parts:
                raise ConfigError(f"{text!r} has {name} twice: give it once")
            if not (equals and number.isdecimal() and int(number) >= 1):
                raise ConfigError(f"{word!r} has no number of processes: write it as in {name}=2")
            parts[name] = int(number)
        return cls(**parts)

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in NAMES if getattr(self, name) > 1)

    @property
    def n_ranks(self) -> int:
        return self.pipeline * self.data * self.fsdp * self.tensor

    @property
    def n_data(self) -> int:
        """Into how many parts the rows of a batch are dealt."""
        return self.data * self.fsdp

    def check(self, model_size: str, batch_size: int) -> None:
        """Raises ConfigError where this model or batch cannot be cut so."""
        model = SIZES[model_size]
        if batch_size % self.n_data:
            raise ConfigError(
                f"batch_size {batch_size} cannot be dealt evenly to the {self.n_data} processes with data of their own "
                f"(parallel {self}): give a multiple of {self.n_data}"
            )
        if self.pipeline > model.n_layers:
            raise ConfigError(
                f"the {model.n_layers} layers of model_size {model_size} cannot be {self.pipeline} stages of a "
                f"pipeline: give at most {model.n_layers}"
            )
        if not self._divides(model):
            others = [f"{name} ({size.n_heads})" for name, size in SIZES.items() if self._divides(size)]
            parts = f"{model.n_heads} heads" if model.n_heads % self.tensor else f"{model.hidden} hidden units"
            raise ConfigError(
                f"the {parts} of model_size {model_size} cannot be dealt evenly to {self.tensor} tensor-parallel "
                "processes: give tensor a number that divides its heads and its hidden units"
                + (f", or a model_size with other heads: {', '.join(others)}" if others else "")
            )

    def _divides(self, model: ModelConfig) -> bool:
        """Whether each layer's heads and hidden units are dealt evenly to the tensor-parallel processes."""
        return model.n_heads % self.tensor == 0 and model.hidden % self.tensor == 0


NAMES: Sequence[str] = tuple(field.name for field in fields(Parallelism))
"""The dimensions, the outermost first: neighbouring ranks share a layer's heads."""


@dataclass(frozen=True)
class Place:
    """This process among those of its cluster; local_rank: among those on its machine."""

    rank: int = 0
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        return self.rank == 0


def place_here(parallelism: Parallelism, environment: Mapping[str, str] = os.environ) -> Place:
    """The place that torchrun has given this process. Raises ConfigError where it started another number of them."""
    n_started, wanted = _number(environment, "WORLD_SIZE", 1), parallelism.n_ranks
    if n_started == 1 and wanted > 1:
        raise ConfigError(
            f"parallel {parallelism} is for {wanted} processes and this is one: start them with `torchrun "
            f"--nproc-per-node {wanted} -m dips train --parallel {parallelism} ...`"
        )
    if wanted == 1 and n_started > 1:
        raise ConfigError(
            f"{n_started} processes were started and nothing says how they share the model: give --parallel "
            f"fsdp={n_started}, say, or start one"
        )
    if n_started != wanted:
        raise ConfigError(
            f"parallel {parallelism} is for {wanted} processes and {n_started} were started: give numbers whose "
            f"product is {n_started}, or start torchrun with --nproc-per-node {wanted}"
        )
    return Place(_number(environment, "RANK", 0), _number(environment, "LOCAL_RANK", 0))


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if text and not text.isdecimal():
        raise ConfigError(f"{name} is {text!r} in the environment, where torchrun gives a number: unset it")
    return int(text) if text else default
