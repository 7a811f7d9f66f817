"""What a torch model holds besides its trained parameters: which contents count, and which do not."""

from __future__ import annotations

import logging

import pytest
import torch

from dips.core.model_description import Untrained, difference
from dips.worker.torch_model import untrained_of


class Adapted(torch.nn.Module):
    """A frozen base with an adapter, a constant, and a layer with running statistics."""

    def __init__(self, seed: int = 0, table: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(40, 30, dtype=dtype).requires_grad_(False)
        self.adapter = torch.nn.Linear(30, 2)
        self.norm = torch.nn.BatchNorm1d(30)
        self.head = torch.nn.Linear(40, 30, bias=False)
        self.head.weight = self.base.weight
        self.register_buffer("angles", torch.full((5,), table), persistent=False)


def listed(model: torch.nn.Module) -> Untrained:
    return untrained_of(model, {id(p) for p in model.parameters() if p.requires_grad})


def test_frozen_parameters_and_buffers_are_listed_once_by_name() -> None:
    found = listed(Adapted())
    assert [item.name for item in found.frozen] == ["base.weight", "base.bias"]
    assert [item.name for item in found.buffers] == [
        "angles", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    ]  # fmt: skip
    assert listed(Adapted()) == found
    assert listed(torch.nn.Linear(3, 3)) == Untrained()


def test_another_base_differs_in_every_frozen_parameter() -> None:
    found = difference("weights", listed(Adapted()).frozen, listed(Adapted(seed=1)).frozen)
    assert found == "weights 'base.weight', 'base.bias' differ"
    other = Adapted(dtype=torch.bfloat16)
    assert difference("weights", listed(Adapted()).frozen, listed(other).frozen) == found


def test_one_bit_of_the_last_element_counts() -> None:
    one, other = Adapted(), Adapted()
    other.base.weight.detach().view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    assert difference("weights", listed(one).frozen, listed(other).frozen) == "weights 'base.weight' differ"


def test_constant_buffers_count_and_running_statistics_do_not() -> None:
    one, trained = Adapted(), Adapted()
    trained.norm(torch.randn(8, 30))
    assert trained.norm.running_mean is not None
    assert trained.norm.running_mean.any()
    assert listed(one) == listed(trained)
    assert difference("buffers", listed(one).buffers, listed(Adapted(table=2.0)).buffers) == "buffers 'angles' differ"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.complex64, torch.float16])
def test_every_dtype_and_shape_is_read(dtype: torch.dtype) -> None:
    class Held(torch.nn.Module):
        def __init__(self, value: int) -> None:
            super().__init__()
            self.register_buffer("scalar", torch.tensor(value).to(dtype))
            self.register_buffer("empty", torch.zeros(0, 3, dtype=dtype))
            self.register_buffer("strided", torch.arange(12).reshape(3, 4).to(dtype).t()[::2])

    assert listed(Held(1)) == listed(Held(1))
    assert difference("buffers", listed(Held(0)).buffers, listed(Held(1)).buffers) == "buffers 'scalar' differ"


def test_what_cannot_be_read_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2).requires_grad_(False).to("meta")
    with caplog.at_level(logging.WARNING):
        found = listed(model)
    assert [item.name for item in found.frozen] == ["weight", "bias"]
    assert "the values of 'weight' cannot be read and are not compared" in caplog.text
