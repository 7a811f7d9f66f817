"""Names and configuration of the byte model as Hugging Face's LlamaForCausalLM; both models compute the same.

Both rotate pairs half a head apart by the same angles, so no row changes its place. Does not import torch.
"""

from __future__ import annotations

import re
from typing import Any

from dips.trainer.sizes import HEAD_DIM, NORM_EPS, ROPE_THETA, VOCABULARY, ModelConfig

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
