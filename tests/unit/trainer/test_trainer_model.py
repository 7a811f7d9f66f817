"""The byte model: its shapes, its causality, its positions, and its configuration read back from a layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dips.core.errors import ConfigError
from dips.core.layout import Layout, Parameter
from dips.trainer.evaluate import heldout_loss, model_from_flat
from dips.trainer.model import IGNORED_TARGET, ByteModel, rotate
from dips.trainer.model import _rotation as rotation
from dips.trainer.sizes import HEAD_DIM, SIZES, ModelConfig
from dips.worker.torch_model import TorchParameters

SMALLEST = ModelConfig(dim=32, n_layers=2, hidden=48)


def layout_of(model: ByteModel) -> Layout:
    return TorchParameters(model, torch.optim.SGD(model.parameters(), lr=0.1)).layout()


def some_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", [SMALLEST, *SIZES.values()])
def test_the_configuration_tells_every_parameter_in_order(config: ModelConfig) -> None:
    shapes = {name: tuple(p.shape) for name, p in ByteModel(config).named_parameters()}
    assert list(shapes.items()) == list(config.parameter_shapes.items())


def test_the_first_parameters_depend_on_the_seed_alone_and_know_nothing() -> None:
    torch.manual_seed(1)
    first = ByteModel(SMALLEST, seed=7)
    torch.manual_seed(2)
    again, other = ByteModel(SMALLEST, seed=7), ByteModel(SMALLEST, seed=8)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    tokens = some_bytes(8, 65)
    loss = ByteModel(SIZES["tiny"]).loss(tokens[:, :-1], tokens[:, 1:]).item()
    assert loss == pytest.approx(np.log(256), abs=0.15)


@pytest.mark.parametrize("changed", [1, 9, 15])
def test_a_later_byte_never_changes_an_earlier_prediction(changed: int) -> None:
    model, tokens = ByteModel(SMALLEST), some_bytes(2, 16)
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % 256
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.allclose(before[:, changed:], after[:, changed:])


def test_rotary_products_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(HEAD_DIM, generator=generator).expand(1, 1, 64, HEAD_DIM) for _ in range(2))
    cos, sin = rotation(64, torch.device("cpu"))
    products = (rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2))[0, 0]
    for distance in (0, 1, 5, 31):
        diagonal = torch.diagonal(products, offset=distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)
    assert not torch.allclose(products[0, 1], products[0, 2], atol=1e-3)


def test_ignored_targets_add_nothing_to_loss_or_gradient() -> None:
    model, tokens = ByteModel(SMALLEST), some_bytes(1, 9)
    plain = model.loss(tokens[:, :-1], tokens[:, 1:])
    inputs = torch.cat((tokens[:, :-1], torch.zeros(1, 4, dtype=torch.int64)), dim=1)
    targets = torch.cat((tokens[:, 1:], torch.full((1, 4), IGNORED_TARGET)), dim=1)
    filled = model.loss(inputs, targets)
    assert filled.item() == pytest.approx(plain.item(), rel=1e-6)
    of_plain, of_filled = (torch.autograd.grad(loss, model.embedding.weight)[0] for loss in (plain, filled))
    assert torch.allclose(of_plain, of_filled, atol=1e-7)


def test_training_works_after_an_evaluation_in_the_same_process() -> None:
    model = ByteModel(SMALLEST)
    heldout_loss(model, some_bytes(2, 24).numpy())
    tokens = some_bytes(2, 24)
    torch.autograd.backward(model.loss(tokens[:, :-1], tokens[:, 1:]))
    assert model.embedding.weight.grad is not None


@pytest.mark.parametrize("config", [SMALLEST, *SIZES.values()])
def test_a_layout_tells_the_configuration(config: ModelConfig) -> None:
    assert ModelConfig.from_layout(layout_of(ByteModel(config))) == config


def test_a_flat_vector_is_the_model_and_one_of_another_length_is_refused() -> None:
    model = ByteModel(SMALLEST, seed=3)
    parameters = TorchParameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    flat = np.empty(parameters.layout().n_elems, np.float32)
    parameters.snapshot(flat)
    rebuilt = model_from_flat(parameters.layout(), flat)
    assert torch.equal(rebuilt(some_bytes(1, 8)), model(some_bytes(1, 8)))
    layout = layout_of(ByteModel(SMALLEST))
    with pytest.raises(ConfigError, match="the layout has"):
        model_from_flat(layout, np.zeros(layout.n_elems - 1, np.float32))


MANY = "layers.999999999.attention.wq.weight"


@pytest.mark.parametrize(
    ("lacks", "more", "says"),
    [
        *((name, "", "not a dips byte model") for name in ("embedding.weight", "norm.weight")),
        ("layers.1.attention.wq.weight", "", "not a dips byte model"),
        ("", "head.weight", r"'head\.weight'"),
        ("", MANY, "not a dips byte model"),  # a layer number that costs nothing
    ],
)
def test_a_layout_with_fewer_or_more_parameters_is_no_byte_model(lacks: str, more: str, says: str) -> None:
    kept = [p for p in layout_of(ByteModel(SMALLEST)).parameters if p.name != lacks]
    new = [Parameter(more, (32, 32), "float32", more.removesuffix(".attention.wq.weight"))] if more else []
    with pytest.raises(ConfigError, match=says):
        ModelConfig.from_layout(Layout((*kept, *new)))


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("embedding.weight", {"shape": (257, 32)}, r"should have shape \[256, 32\]"),
        ("embedding.weight", {"shape": (256, 33)}, "its dim does not fit"),
        ("norm.weight", {"dtype": "bfloat16"}, "bfloat16"),
        ("layers.0.attention.wq.weight", {"shape": (32, 31)}, "layers.0.attention.wq.weight"),
    ],
)
def test_a_layout_of_other_shapes_is_no_byte_model(name: str, changes: dict[str, object], says: str) -> None:
    parameters = layout_of(ByteModel(SMALLEST)).parameters
    changed = (replace(p, **changes) if p.name == name else p for p in parameters)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=says):
        ModelConfig.from_layout(Layout(tuple(changed)))


@pytest.mark.parametrize("sizes", [(31, 1, 8), (0, 1, 8), (32, 0, 8), (32, 1, 0)])
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="cannot be built"):
        ModelConfig(*sizes)
