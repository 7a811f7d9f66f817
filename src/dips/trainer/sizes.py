"""The sizes of the byte model, and its configuration read back from parameter names and shapes.

Does not import torch, so that settings and command lines can name a size without loading it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from dips.core.errors import ConfigError
from dips.core.layout import Layout

VOCABULARY = 256
"""Number of tokens: tokens are bytes."""

HEAD_DIM = 32
"""Fixed: the number of heads is then dim / HEAD_DIM, and the shapes determine the whole configuration."""

ROPE_THETA = 10_000.0
NORM_EPS = 1e-5

_FLOAT32 = "float32"


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of one model; dim is a multiple of HEAD_DIM."""

    dim: int
    n_layers: int
    hidden: int

    def __post_init__(self) -> None:
        if self.dim < HEAD_DIM or self.dim % HEAD_DIM or self.n_layers < 1 or self.hidden < 1:
            raise ConfigError(
                f"a model of dim {self.dim}, {self.n_layers} layers and hidden {self.hidden} cannot be built: "
                f"dim must be a multiple of {HEAD_DIM}, the others at least 1"
            )

    @property
    def n_heads(self) -> int:
        return self.dim // HEAD_DIM

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter, in the model's own order."""
        square, up = (self.dim, self.dim), (self.hidden, self.dim)
        shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (VOCABULARY, self.dim)}
        for index in range(self.n_layers):
            at = f"layers.{index}."
            shapes[f"{at}attention_norm.weight"] = (self.dim,)
            shapes |= {f"{at}attention.{name}.weight": square for name in ("wq", "wk", "wv", "wo")}
            shapes[f"{at}feed_forward_norm.weight"] = (self.dim,)
            shapes[f"{at}feed_forward.gate.weight"] = up
            shapes[f"{at}feed_forward.up.weight"] = up
            shapes[f"{at}feed_forward.down.weight"] = (self.dim, self.hidden)
        shapes["norm.weight"] = (self.dim,)
        return shapes

    @property
    def n_elems(self) -> int:
        return sum(math.prod(shape) for shape in self.parameter_shapes.values())

    @classmethod
    def from_layout(cls, layout: Layout) -> ModelConfig:
        """Read the configuration back from a layout.

        Raises ConfigError when the layout is not exactly that of one of these models in float32.
        """
        shapes = {p.name: p.shape for p in layout.parameters}
        config = cls._from_shapes(shapes)
        if config is None or config.parameter_shapes != shapes:
            raise ConfigError(f"the layout is not a dips byte model: {_difference(shapes, config)}")
        for parameter in layout.parameters:
            if parameter.dtype != _FLOAT32:
                raise ConfigError(
                    f"the layout is not a dips byte model: parameter {parameter.name!r} is {parameter.dtype}, "
                    "the byte model is float32"
                )
        return config

    @classmethod
    def _from_shapes(cls, shapes: dict[str, tuple[int, ...]]) -> ModelConfig | None:
        embedding, gate = shapes.get("embedding.weight", ()), shapes.get("layers.0.feed_forward.gate.weight", ())
        numbers = {int(match.group(1)) for name in shapes if (match := re.match(r"layers\.(\d+)\.", name))}
        if len(embedding) != 2 or len(gate) != 2 or numbers != set(range(len(numbers))) or embedding[1] % HEAD_DIM:
            return None
        return cls(dim=embedding[1], n_layers=len(numbers), hidden=gate[0])


SIZES: dict[str, ModelConfig] = {
    "tiny": ModelConfig(dim=96, n_layers=3, hidden=256),
    "small": ModelConfig(dim=256, n_layers=4, hidden=704),
    "medium": ModelConfig(dim=384, n_layers=6, hidden=1024),
    "wide": ModelConfig(dim=128, n_layers=2, hidden=256),
}
"""tiny: 357 thousand parameters, for a laptop's cores; small: 3.3 million; medium: 10.7 million, for hours of a core or
an accelerator; wide: 361 thousand, in layers and heads that two or four ranks can share."""


def _difference(shapes: dict[str, tuple[int, ...]], config: ModelConfig | None) -> str:
    if config is None:
        return "it lacks embedding.weight, layers.0.feed_forward.gate.weight or a layer, or its dim does not fit"
    wanted = config.parameter_shapes
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            return f"parameter {name!r} should have shape {list(shape)}, it has {list(shapes.get(name, ()))}"
    extra = next(name for name in shapes if name not in wanted)
    return f"it has the parameter {extra!r}"


# ---- llama -----------------------------------------------------------------------------------------------------------
#
# Names and configuration of the byte model as Hugging Face's LlamaForCausalLM; both models compute the same.
#
# Both rotate pairs half a head apart by the same angles, so no row changes its place. Does not import torch.


MAX_TOKENS = 2048
"""Positions that the configuration allows; the byte model itself has no limit."""

_OUTSIDE = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_IN_A_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def llama_name(name: str) -> str:
    """The name in LlamaForCausalLM of one of the byte model's parameters."""
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    return f"model.layers.{layer[1]}.{_IN_A_LAYER[layer[2]]}.weight" if layer else _OUTSIDE[name]


def llama_config(model: ModelConfig) -> dict[str, Any]:
    """The content of config.json for a byte model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": model.dim,
        "intermediate_size": model.hidden,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_heads,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": NORM_EPS,
        # Releases before 5 read the first key, later ones the second.
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
