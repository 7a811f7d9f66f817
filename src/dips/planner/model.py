"""Describes a transformer in numbers, read from TOML, and counts its parameters.

Dense and mixture-of-experts layers; multi-head, grouped-query and latent attention (DeepSeek-V2, arXiv:2405.04434,
section 2.1). Every file names the source of its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, Strict, model_validator

from dips.core.config import Knobs, SettingsFile
from dips.core.errors import ConfigError

PositiveCount = Annotated[int, Strict(), Field(ge=1, le=10**9)]
Maybe = Annotated[int, Strict(), Field(ge=0, le=10**9)]

Amount = Annotated[float, Strict(), Field(ge=1e-6, le=1e9)]
"""A rate or a size, in the unit of its key: a value outside of these limits is a mistake in the number or the unit."""

Duration = Annotated[float, Strict(), Field(gt=0, le=1e8)]
DurationOrNone = Annotated[float, Strict(), Field(ge=0, le=1e8)]
"""A time in milliseconds, up to a day; nanoseconds of all operations together stay whole numbers that a solver can
hold."""


def _one_line(name: str) -> str:
    if not name.strip() or not name.isprintable():
        raise ValueError("a name is one line of printable characters: it is shown in tables and pictures")
    return name


Name = Annotated[str, Field(max_length=200), AfterValidator(_one_line)]

MOST_LAYERS = 2000
"""The limit, ten times the layers of today's models; the time to divide layers into stages grows with their square."""


class Sourced(Knobs):
    """A table of numbers that says where they come from."""

    source: str | dict[str, str] = Field(
        description='where the numbers come from: one text for all, or a table { key = "..." } with every number'
    )

    @model_validator(mode="after")
    def _every_number_has_a_source(self) -> Self:
        if isinstance(self.source, str):
            if not self.source.strip():
                raise ValueError("source is empty: say where the numbers come from")
            return self
        given = self.model_fields_set - {"source"}
        bare = sorted(name for name in given if _is_number(getattr(self, name)) and name not in self.source)
        if bare:
            raise ValueError(f"source does not name {', '.join(bare)}: add where each number comes from")
        strange = sorted(set(self.source) - given)
        if strange:
            raise ValueError(f"source names {', '.join(strange)}, which the table does not give: remove it")
        return self


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Model(Sourced):
    """One decoder-only transformer."""

    name: Name = Field(description="name of the model")
    layers: Annotated[int, Strict(), Field(ge=1, le=MOST_LAYERS)] = Field(description="transformer layers")
    hidden: PositiveCount = Field(description="width of the residual stream")
    heads: PositiveCount = Field(description="attention heads")
    kv_heads: Maybe = Field(default=0, description="heads of keys and values; 0: as many as heads")
    head_width: Maybe = Field(default=0, description="width of a head; 0: hidden / heads")
    mlp_width: PositiveCount = Field(description="inner width of a dense MLP")
    gated_mlp: bool = Field(default=True, description="whether the MLP has a gate (SwiGLU: three matrices, not two)")
    vocabulary: PositiveCount = Field(description="tokens of the vocabulary")
    tied_embeddings: bool = Field(default=False, description="whether the output layer is the embedding")
    positions: Maybe = Field(default=0, description="learned position embeddings; 0: none")
    biases: bool = Field(default=False, description="whether linear layers and norms have biases")
    dropout: bool = Field(default=False, description="whether training keeps dropout masks")
    experts: Maybe = Field(default=0, description="routed experts of a layer; 0: a dense model")
    experts_per_token: Maybe = Field(default=0, description="routed experts that a token goes through")
    shared_experts: Maybe = Field(default=0, description="experts that every token goes through")
    expert_width: Maybe = Field(default=0, description="inner width of an expert")
    dense_layers: Maybe = Field(default=0, description="first layers that are dense in a mixture-of-experts model")
    router_bias: bool = Field(default=False, description="whether the router has a bias for each expert")
    latent_q: Maybe = Field(default=0, description="rank of the queries' compression; 0: no latent attention")
    latent_kv: Maybe = Field(default=0, description="rank of the keys' and values' compression")
    rope_width: Maybe = Field(default=0, description="latent attention: width of a head's part with positions")
    value_width: Maybe = Field(default=0, description="latent attention: width of a head's values")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.head_width and self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} does not divide into {self.heads} heads: give head_width")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not share {self.kv_heads} kv_heads evenly: give a divisor")
        if self.experts and not (0 < self.experts_per_token <= self.experts and self.expert_width):
            raise ValueError(
                f"{self.experts} experts need expert_width, and experts_per_token from 1 to {self.experts}"
            )
        if not self.experts and (self.experts_per_token or self.expert_width or self.dense_layers):
            raise ValueError("experts is 0, but other keys describe experts: give experts, or remove them")
        if self.dense_layers > self.layers:
            raise ValueError(f"dense_layers {self.dense_layers} is more than layers {self.layers}: give fewer")
        latent = (self.latent_q, self.latent_kv, self.rope_width, self.value_width)
        if any(latent) and not all(latent):
            raise ValueError("latent attention needs all of latent_q, latent_kv, rope_width and value_width")
        return self

    # ---- shapes ----

    @property
    def qk_width(self) -> int:
        """Width of a head's query and key."""
        return (self.head_width or self.hidden // self.heads) + self.rope_width

    @property
    def v_width(self) -> int:
        return self.value_width or self.qk_width

    @property
    def n_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    def is_dense(self, layer: int) -> bool:
        return not self.experts or layer < self.dense_layers

    # ---- parameters ----

    def attention_matrices(self) -> int:
        """Elements of the attention's matrices in one layer."""
        output = self.heads * self.v_width * self.hidden
        if not self.latent_q:
            keys_values = self.n_kv_heads * (self.qk_width + self.v_width)
            return self.hidden * (self.heads * self.qk_width + keys_values) + output
        nope = self.qk_width - self.rope_width
        queries = self.hidden * self.latent_q + self.latent_q * self.heads * self.qk_width
        compressed = self.hidden * (self.latent_kv + self.rope_width)
        return queries + compressed + self.latent_kv * self.heads * (nope + self.v_width) + output

    def mlp_matrices(self, width: int) -> int:
        return (3 if self.gated_mlp else 2) * self.hidden * width

    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return self.mlp_matrices(self.expert_width)

    def layer_matrices(self, layer: int, active: bool = False) -> int:
        """Elements of all matrices of a layer; active: only of those that one token goes through."""
        if self.is_dense(layer):
            return self.attention_matrices() + self.mlp_matrices(self.mlp_width)
        experts = (self.experts_per_token if active else self.experts) + self.shared_experts
        return self.attention_matrices() + experts * self.expert_parameters() + self.hidden * self.experts

    def layer_parameters(self, layer: int, active: bool = False) -> int:
        """Parameters of a layer, with norms and biases."""
        norms = 2 * self.hidden * (2 if self.biases else 1) + self.latent_q + self.latent_kv
        biases = 0
        if self.biases:
            attention = self.heads * self.qk_width + self.n_kv_heads * (self.qk_width + self.v_width) + self.hidden
            biases = attention + self.mlp_width * (2 if self.gated_mlp else 1) + self.hidden
        router = self.experts if self.router_bias and not self.is_dense(layer) else 0
        return self.layer_matrices(layer, active) + norms + biases + router

    def embedding_parameters(self) -> int:
        return (self.vocabulary + self.positions) * self.hidden

    def output_parameters(self) -> int:
        """Parameters of the last norm, and of the output layer where it does not share the embedding's."""
        norm = self.hidden * (2 if self.biases else 1)
        return norm + (0 if self.tied_embeddings else self.vocabulary * self.hidden)

    def parameters(self, active: bool = False) -> int:
        """Parameters of the whole model; active: only of those that one token goes through."""
        layers = sum(self.layer_parameters(layer, active) for layer in range(self.layers))
        return self.embedding_parameters() + layers + self.output_parameters()


def shipped(folder: str) -> list[str]:
    """Names of the files in a folder that comes with the planner."""
    files = (resources.files("dips.planner") / folder).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def read_shipped(folder: str, name: str, tables: Sequence[str]) -> SettingsFile:
    """The tables of a file in a folder that comes with the planner."""
    with resources.as_file(resources.files("dips.planner") / folder / f"{name}.toml") as file:
        return SettingsFile.read(file, tables)


def read_own_or_shipped(name: str | Path, folder: str, what: str, tables: Sequence[str]) -> SettingsFile:
    """The tables of a user's file, or of one that comes with the planner by its name. what: such files, in the sentence
    for a name that is neither. Raises ConfigError."""
    known = shipped(folder)
    if isinstance(name, str) and name in known:
        return read_shipped(folder, name, tables)
    if not Path(name).is_file():
        raise ConfigError(
            f"{name} is not a file that can be read, and none of the shipped {what} ({', '.join(known)}): give one of "
            "these"
        )
    return SettingsFile.read(Path(name), tables)


def read_model(name: str) -> Model:
    """Read a shipped model by its name. Raises ConfigError for an unknown name."""
    known = shipped("models")
    if name not in known:
        raise ConfigError(f"model {name!r} is unknown: choose one of {', '.join(known)}, or give its numbers")
    return model_of(read_shipped("models", name, ["model"]))


def model_of(file: SettingsFile) -> Model:
    """Parse the table [model]: all numbers, or only the name of a shipped model."""
    table = file.table("model")
    if set(table) == {"name"}:
        try:
            return read_model(str(table["name"]))
        except ConfigError as error:
            raise ConfigError(f"{file.where('model')}: {error}") from None
    return file.settings(Model, "model")
