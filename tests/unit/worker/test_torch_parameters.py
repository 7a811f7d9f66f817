"""A torch model as one flat vector, and back, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dips.core.errors import ConfigError, Refused
from dips.worker.torch_parameters import TorchParameters, wait_for


class Tied(torch.nn.Module):
    """Two layers by name, one frozen parameter, one tied one, one buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4, dtype=dtype)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, dtype=dtype) for _ in range(2))
        self.head = torch.nn.Linear(4, 7, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))


def store(model: torch.nn.Module) -> TorchParameters:
    return TorchParameters(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_layout_has_trained_parameters_once_and_groups_them_by_layer() -> None:
    layout = store(Tied()).layout()
    assert [p.name for p in layout.parameters] == [
        "embedding.weight", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias",
    ]  # fmt: skip
    assert layout.layers == ("embedding", "layers.0", "layers.1")
    assert layout.n_elems == 7 * 4 + 2 * (16 + 4)


def test_snapshot_and_install_are_inverse_to_the_bit() -> None:
    model, other = Tied(), Tied()
    with torch.no_grad():
        model.layers[0].weight[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    flat = np.empty(store(model).layout().n_elems, np.float32)
    store(model).snapshot(flat)
    store(other).install(flat)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.detach().numpy().tobytes() == theirs.detach().numpy().tobytes()
    assert other.head.weight is other.embedding.weight


def test_install_copies_and_keeps_the_parameters_identity() -> None:
    model = Tied()
    parameters = store(model)
    before = model.embedding.weight
    flat = np.arange(parameters.layout().n_elems, dtype=np.float32)
    parameters.install(flat)
    flat[:] = 0
    assert model.embedding.weight is before
    assert model.embedding.weight[0, 1].item() == 1.0
    assert model.frozen.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_travel_as_float32(dtype: torch.dtype) -> None:
    model = Tied(dtype)
    parameters = store(model)
    assert {p.dtype for p in parameters.layout().parameters} == {str(dtype).removeprefix("torch.")}
    flat = np.empty(parameters.layout().n_elems, np.float32)
    parameters.snapshot(flat)
    assert np.array_equal(flat[:28], model.embedding.weight.detach().float().numpy().reshape(-1))
    parameters.install(flat)
    again = np.empty_like(flat)
    parameters.snapshot(again)
    assert np.array_equal(flat, again)


def test_parameters_that_are_not_contiguous_are_copied_in_their_logical_order() -> None:
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    parameters = store(model)
    flat = np.empty(6, np.float32)
    parameters.snapshot(flat)
    assert flat.tolist() == [0, 3, 1, 4, 2, 5]
    parameters.install(flat * 2)
    assert model.w.tolist() == [[0, 6], [2, 8], [4, 10]]


def test_resetting_the_inner_optimizer_clears_its_moments() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.layers[0](torch.ones(4)).sum().backward()
    optimizer.step()
    assert optimizer.state
    TorchParameters(model, optimizer).reset_inner_optimizer()
    assert not optimizer.state
    optimizer.step()  # and it goes on from nothing


def test_dtypes_that_are_not_served_are_named() -> None:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2, dtype=torch.float64)])
    with pytest.raises(ConfigError, match=r"layers\.0\.weight.*float64"):
        store(model)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="none of the model's parameters"):
        TorchParameters(Tied(), torch.optim.SGD(Tied().parameters(), lr=0.1))


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    with pytest.raises(Refused, match="no parameters to train"):
        TorchParameters(model, optimizer)


def test_sharded_parameters_are_refused() -> None:
    model = Tied()
    model.embedding.weight.device_mesh = "a mesh"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="sharded"):
        store(model)


def test_copies_are_waited_for_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: a model on another device than the current one was copied without waiting for the copy."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    devices = [torch.device("cuda", 1), torch.device("cuda", 3)]
    wait_for(devices)
    assert waited == devices
    parameters = store(Tied())
    flat = np.zeros(parameters.layout().n_elems, np.float32)
    parameters._pinned, parameters._devices = torch.empty(flat.size), set(devices)
    parameters.snapshot(flat)
    parameters.install(flat)
    assert set(waited[2:4]) == set(waited[4:]) == set(devices)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_a_cuda_device_round_trips_to_the_bit(dtype: torch.dtype) -> None:
    model = Tied(dtype).cuda()
    parameters = store(model)
    flat = np.empty(parameters.layout().n_elems, np.float32)
    parameters.snapshot(flat)
    assert np.array_equal(flat[:28], model.embedding.weight.detach().float().cpu().numpy().reshape(-1))
    parameters.install(flat + 1)
    again = np.empty_like(flat)
    parameters.snapshot(again)
    expected = torch.from_numpy(flat + 1).to(dtype).float().numpy()
    assert np.array_equal(again, expected)
