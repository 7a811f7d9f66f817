"""The cost model against figures that others have published."""

from __future__ import annotations

from typing import Any

import pytest

from dips.planner.cluster import Training
from dips.planner.model import Model, read_model
from dips.planner.units import (
    layer_activation_bytes,
    layer_state_bytes,
    layer_work,
    output_work,
    pipeline_message_bytes,
    state_bytes,
)

GB = 1e9


def training(**keys: Any) -> Training:
    given = {"pipeline": 1, "microbatches": 1, "sequence_tokens": 2048, "source": "a test"}
    return Training(**{**given, **keys})


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-8b", 8_030_261_248),  # of the released checkpoints, to the last one
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-32b", 32_763_876_352 - 64 * (40 + 8 + 8) * 128),  # this model leaves out Qwen's biases of Q, K and V
    ],
)
def test_parameters_to_the_last_one(name: str, parameters: int) -> None:
    assert read_model(name).parameters() == parameters


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"),
    [
        ("gpt3-175b", 174.6, 174.6),  # Brown et al., Table D.1
        ("deepseek-v3", 671, 37.5),  # the technical report: 671B, of which a token takes 37B
        ("mixtral-8x7b", 46.7, 12.9),  # Mistral's announcement of the model
    ],
)
def test_parameters_as_they_are_told(name: str, billions: float, active_billions: float) -> None:
    model = read_model(name)
    assert model.parameters() / 1e9 == pytest.approx(billions, rel=0.001)
    assert model.parameters(active=True) / 1e9 == pytest.approx(active_billions, rel=0.005)


def test_megatrons_formula() -> None:
    """96 B s l h^2 (1 + s/6h + V/16lh) for GPT with activations recomputed (arXiv:2104.04473, equation 3)."""
    model, s = read_model("gpt3-175b"), 2048
    h, layers, vocabulary = model.hidden, model.layers, model.vocabulary
    work = sum(layer_work(model, 0, s, s, causal=False).recomputed()) * layers + 3 * 2 * s * vocabulary * h
    formula = 96 * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    assert work == pytest.approx(formula, rel=1e-12)


def test_work_of_models() -> None:
    """Section 5.2: a stage of 1/16 on 8 GPUs of 500 TFLOP/s takes about 109 ms (of 128 layers, the embedding and the
    output being layers too)."""
    work = layer_work(read_model("llama3-405b"), 0, 8192, 8192)
    assert 8 * work.forward / (8 * 500e12) == pytest.approx(0.109, rel=0.01)
    model = read_model("gpt3-175b")
    whole, causal = (layer_work(model, 0, 64, 2048, causal=causal) for causal in (False, True))
    half = 64 * 2048 * 2 * model.hidden  # 2 operations for each of S H multiplications, of which half are left out
    assert [a - b for a, b in zip(whole, causal, strict=True)] == [half, 2 * half, 0]
    assert sum(output_work(model, 64)) == 3 * 2 * 64 * model.vocabulary * model.hidden


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_zeros_figure_1(stage: int, gigabytes: float) -> None:
    """7.5B parameters on 64 devices (arXiv:1910.02054, Figure 1)."""
    assert state_bytes(7.5e9, training(data=64, zero_stage=stage)) / GB == pytest.approx(gigabytes, rel=0.003)


@pytest.mark.parametrize("tensor", [1, 8])
def test_korthikantis_activations_of_gpt_3(tensor: int) -> None:
    """s b h / t (34 + 5 a s / h) without recomputation, where 5 a s / h is 80; 2 s b h / t with all of it."""
    model, s = read_model("gpt3-175b"), 2048
    assert 5 * model.heads * s / model.hidden == 80
    shape: dict[str, Any] = {"tensor": tensor, "flash_attention": False}
    assert layer_activation_bytes(model, 0, training(**shape)) == s * model.hidden * (34 + 80) / tensor
    assert layer_activation_bytes(model, 0, training(**shape, recompute="full")) == 2 * s * model.hidden / tensor


def test_memory_of_models() -> None:
    """70 % for GPT-3 (arXiv:2205.05198, section 5)."""
    model = read_model("gpt3-175b")
    whole = layer_activation_bytes(model, 0, training(flash_attention=False))
    assert 1 - layer_activation_bytes(model, 0, training()) / whole == pytest.approx(0.70, abs=0.005)
    model = read_model("deepseek-v3")
    alone = layer_state_bytes(model, 10, training(data=64))
    spread = layer_state_bytes(model, 10, training(data=64, expert=64))
    experts = model.experts * model.expert_parameters()
    # Weights and gradients of an expert stand once in its group; its optimizer's state was sharded before.
    assert alone - spread == pytest.approx(experts * 4 * (1 - 1 / 64))
    assert layer_state_bytes(model, 0, training(data=64)) == layer_state_bytes(model, 0, training(data=64, expert=64))


@pytest.mark.parametrize(
    ("name", "tokens", "size", "megabytes"),
    [
        ("crosspipe-m8", 4096, 2, 32 * 2**20 / 1e6),  # CrossPipe, section 7: about 32 MB and 64 MB
        ("crosspipe-m70", 4096, 2, 64 * 2**20 / 1e6),
        ("gpt3-175b", 2048, 1, 25.17),  # JEEVES, section 2.2: about 25 MB
    ],
)
def test_messages_between_stages(name: str, tokens: int, size: float, megabytes: float) -> None:
    shape = training(sequence_tokens=tokens, activation_bytes=size)
    assert pipeline_message_bytes(read_model(name), shape) / 1e6 == pytest.approx(megabytes, rel=1e-3)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"hidden": 100, "heads": 3}, "hidden 100 does not divide into 3 heads: give head_width"),
        ({"kv_heads": 3}, "8 heads do not share 3 kv_heads evenly"),
        ({"experts": 4}, "4 experts need expert_width"),
        ({"expert_width": 4}, "experts is 0, but other keys describe experts"),
        ({"latent_q": 4}, "latent attention needs all of"),
        ({"source": {"layers": "here"}}, "source does not name heads, hidden, mlp_width, vocabulary"),
        ({"source": " "}, "source is empty: say where the numbers come from"),
        ({"layers": 0}, "greater than or equal to 1"),
    ],
)
def test_a_model_that_cannot_be(keys: dict[str, Any], sentence: str) -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 8, "mlp_width": 128, "vocabulary": 256}
    with pytest.raises(ValueError, match=sentence):
        Model(**{"name": "m", "source": "a test", **sizes, **keys})
