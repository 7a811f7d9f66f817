"""A torch model as one flat vector, and back, to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dips.core.errors import ConfigError, Refused
from dips.worker.torch_model import TorchParameters, _groups, plain_model, plain_optimizer, refuse_shards, wait_for


class Tied(torch.nn.Module):
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
    first = model.layers[0]
    assert isinstance(first, torch.nn.Linear)
    with torch.no_grad():
        first.weight[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    flat = np.empty(store(model).layout().n_elems, np.float32)
    store(model).snapshot(flat)
    store(other).install(flat)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.detach().numpy().tobytes() == theirs.detach().numpy().tobytes()
    assert other.head.weight is other.embedding.weight


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


def holding(*parameters: torch.nn.Parameter) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, parameter in zip("abcdef", parameters, strict=False):
        model.register_parameter(name, parameter)
    return model


FLAT = torch.arange(24.0)


@pytest.mark.parametrize(
    ("parameter", "sentence"),
    [
        (torch.nn.parameter.UninitializedParameter(), "parameter 'b' has no shape yet, as its module is lazy: pass"),
        (torch.nn.Parameter(torch.eye(3).to_sparse()), "parameter 'b' is stored as sparse_coo.*to_dense"),
        (torch.nn.Parameter(torch.empty(3, device="meta")), "parameter 'b' is on the meta device and has no values"),
        (torch.nn.Parameter(torch.ones(3, 1).expand(3, 4)), r"parameter 'b' is expanded: .*contiguous\(\)"),
        (torch.nn.Parameter(torch.ones(()).expand(2, 2)), "parameter 'b' is expanded"),
        (torch.nn.Parameter(FLAT.unfold(0, 4, 2)), "parameter 'b' is expanded"),
    ],
)
def test_parameters_that_hold_no_values_of_their_own_are_refused_by_name(
    parameter: torch.nn.Parameter, sentence: str
) -> None:
    model = holding(torch.nn.Parameter(torch.ones(2)), parameter)
    with pytest.raises(ConfigError, match=sentence):
        TorchParameters(model, torch.optim.SGD([model.get_parameter("a")], lr=0.1))


def views(*tensors: torch.Tensor) -> torch.nn.Module:
    return holding(*(torch.nn.Parameter(tensor) for tensor in tensors))


@pytest.mark.parametrize("model", [
    views(FLAT[:10], FLAT[9:]), views(FLAT, FLAT[4:8]), views(FLAT.view(4, 6)[:, :4], FLAT.view(4, 6)[:, 3:]),
    views(FLAT.view(4, 6), FLAT.view(4, 6)[:, ::2]), views(FLAT[:4], FLAT.view(torch.bfloat16)[6:9]),
])  # fmt: skip
def test_parameters_that_share_a_part_of_their_memory_are_refused_by_name(model: torch.nn.Module) -> None:
    with pytest.raises(ConfigError, match="parameters 'a' and 'b' share a part of their memory"):
        store(model)


@pytest.mark.parametrize("model", [
    views(FLAT[:10], FLAT[10:]), views(FLAT, FLAT), views(FLAT.view(4, 6), FLAT.view(4, 6).t()),
    views(FLAT.view(4, 6)[:, :4], FLAT.view(4, 6)[:, :4]), views(FLAT.view(4, 6)[:, :4], FLAT.view(4, 6)[:, 4:]),
    views(FLAT[::2], FLAT[1::2]), views(FLAT.as_strided((4, 3), (3, 4))), views(torch.ones(1).expand(1, 1)),
])  # fmt: skip
def test_views_of_one_memory_that_are_apart_or_tied_are_served(model: torch.nn.Module) -> None:
    parameters = store(model)
    flat = np.empty(parameters.layout().n_elems, np.float32)
    parameters.snapshot(flat)
    parameters.install(flat)
    first = model.get_parameter("a")
    assert np.array_equal(flat[: first.numel()], first.detach().flatten().numpy())


def test_an_optimizer_of_another_model_and_a_model_with_nothing_to_train_are_refused() -> None:
    with pytest.raises(ConfigError, match="none of the model's parameters"):
        TorchParameters(Tied(), torch.optim.SGD(Tied().parameters(), lr=0.1))
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


def test_wrappers_of_trainers_are_removed_and_no_others() -> None:
    model, users_own = Tied(), torch.nn.Module()
    users_own._orig_mod = users_own.module = torch.nn.Linear(2, 2)
    wrapped = torch.nn.DataParallel(checkpoint_wrapper(torch.nn.DataParallel(model)))
    assert plain_model(wrapped) is plain_model(model) is model
    assert plain_model(users_own) is users_own
    inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lightning = kind_of(torch.optim.SGD, "LightningOptimizer", "lightning.core")
    wraps_nothing, of_lightning = (lightning(model.parameters(), lr=0.1) for _ in range(2))
    assert plain_optimizer(wraps_nothing) is wraps_nothing
    of_lightning.optimizer = inner
    of_accelerate = kind_of(torch.optim.SGD, "Accelerated", "accelerate.optimizer")(model.parameters(), lr=0.1)
    of_accelerate.optimizer = of_lightning
    assert plain_optimizer(of_accelerate) is inner
    another = kind_of(torch.optim.SGD, "Averaging", "a.library")(model.parameters(), lr=0.1)
    another.optimizer = inner
    assert plain_optimizer(another) is another


def kind_of(base: type, name: str, module: str = "a.library") -> Any:
    return type(name, (base,), {"__module__": module})


@pytest.mark.parametrize(("model", "optimizer", "named"), [
    ("FullyShardedDataParallel", "SGD", "FullyShardedDataParallel"), ("DeepSpeedEngine", "SGD", "DeepSpeedEngine"),
    ("PipelineEngine", "SGD", "PipelineEngine"), ("Linear", "ZeroRedundancyOptimizer", "ZeroRedundancyOptimizer"),
    ("Linear", "DeepSpeedOptimizerWrapper", "DeepSpeedOptimizerWrapper"),
    ("Linear", "deepspeed.FusedAdam", "DeepSpeed"), ("Linear", "SGD", ""),
])  # fmt: skip
def test_shards_in_a_form_of_their_own_are_refused_by_name(model: str, optimizer: str, named: str) -> None:
    """Also where the wrapper is inside of the model, as of FSDP1 with each layer wrapped."""
    library, _, kind = optimizer.rpartition(".")
    whole = torch.nn.Sequential(kind_of(torch.nn.Linear, model)(2, 2))
    stepping = kind_of(torch.optim.SGD, kind, f"{library or 'torch'}.ops.adam")(whole.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=f"^{named} cuts") if named else contextlib.nullcontext():
        refuse_shards(whole, stepping)


def test_copies_are_waited_for_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: a model on another device than the current one was copied without waiting for the copy."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    devices = [torch.device("cuda", 1), torch.device("cuda", 3)]
    wait_for(devices)
    assert waited == devices
    parameters = store(Tied())
    parameters._devices = set(devices)
    parameters.install(np.zeros(parameters.layout().n_elems, np.float32))
    assert set(waited[2:]) == set(devices)


class Tape:
    """Stands in for the parts of torch.cuda that order copies; writes down what is asked of them."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.events = 0

    def Stream(self, device: torch.device) -> TapeStream:
        return TapeStream(self, f"side {device.index}")

    def current_stream(self, device: torch.device) -> TapeStream:
        return TapeStream(self, f"compute {device.index}")

    @contextlib.contextmanager
    def stream(self, stream: TapeStream | None) -> Iterator[None]:
        if stream is not None:
            self.said.append(f"copy on {stream.name}")
        yield

    def Event(self) -> TapeEvent:
        self.events += 1
        return TapeEvent(self, self.events)


@dataclass
class TapeStream:
    tape: Tape
    name: str

    def wait_stream(self, other: TapeStream) -> None:
        self.tape.said.append(f"{self.name} waits for {other.name}")


@dataclass
class TapeEvent:
    tape: Tape
    number: int

    def record(self, stream: TapeStream) -> None:
        self.tape.said.append(f"event {self.number} on {stream.name}")

    def synchronize(self) -> None:
        self.tape.said.append(f"host waits for event {self.number}")


def test_a_snapshot_runs_beside_the_host_and_before_the_next_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a device, in order; the copies themselves are made on the host here."""
    tape = Tape()
    for name in ("Stream", "current_stream", "stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(tape, name))
    model, device = Tied(), torch.device("cuda", 1)
    parameters = store(model)
    monkeypatch.setattr("dips.worker.torch_model.GROUP_ELEMS", 20)
    host, *rest = _groups(parameters._spans)
    assert [group.stop_elem for group in (host, *rest)] == [28, 48, 68]
    parameters._groups = [host, *(replace(group, device=device) for group in rest)]
    parameters._devices = {device}
    monkeypatch.setattr(parameters, "_sides", {device: tape.Stream(device)})
    flat = np.empty(68, np.float32)
    ready = parameters.begin_snapshot(flat)
    assert ready is not None
    assert tape.said == [
        "side 1 waits for compute 1", "copy on side 1", "event 1 on side 1", "copy on side 1", "event 2 on side 1",
        "compute 1 waits for side 1",
    ]  # fmt: skip
    tape.said.clear()
    ready.wait(0, 28)
    assert tape.said == []
    ready.wait(20, 30)
    ready.wait(48, 50)
    assert tape.said == ["host waits for event 1", "host waits for event 2"]
    expected = np.empty_like(flat)
    store(model).snapshot(expected)
    assert np.array_equal(flat, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_a_cuda_device_round_trips_to_the_bit(dtype: torch.dtype) -> None:
    model = Tied(dtype).cuda()
    parameters = store(model)
    flat = parameters.empty(parameters.layout().n_elems)
    assert torch.from_numpy(flat).is_pinned()
    parameters.snapshot(flat)
    assert np.array_equal(flat[:28], model.embedding.weight.detach().float().cpu().numpy().reshape(-1))
    parameters.install(flat + 1)
    again = np.empty_like(flat)
    parameters.snapshot(again)
    expected = torch.from_numpy(flat + 1).to(dtype).float().numpy()
    assert np.array_equal(again, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_of_a_cuda_device_holds_the_parameters_from_before_the_next_step() -> None:
    model = torch.nn.Linear(2048, 2048, bias=False).cuda()
    parameters = store(model)
    flat, before = parameters.empty(2048 * 2048), model.weight.detach().cpu().numpy().reshape(-1).copy()
    ready = parameters.begin_snapshot(flat)
    with torch.no_grad():
        model.weight.add_(1.0)  # on the compute stream, which waits for the copy
    assert ready is not None
    ready.wait(0, flat.size)
    assert np.array_equal(flat, before)


def test_what_is_unfrozen_added_or_replaced_after_entering_is_found_at_the_next_push() -> None:
    def take(parameters: TorchParameters) -> None:
        parameters.begin_snapshot(np.empty(parameters.layout().n_elems, np.float32))

    model = Tied()
    parameters = store(model)
    model.frozen.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"'frozen' requires gradients and did not .* set requires_grad=False"):
        take(parameters)
    with pytest.raises(ConfigError, match="'frozen' requires gradients"):
        parameters.live()
    model.frozen.requires_grad_(False)
    take(parameters)
    model.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"'adapter.weight' requires gradients"):
        take(parameters)
    del model.adapter
    first = model.layers[0]
    assert isinstance(first, torch.nn.Linear)
    first.bias = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ConfigError, match=r"'layers.0.bias' is another tensor than when the loop was entered"):
        take(parameters)


def test_what_is_frozen_after_entering_is_still_part_of_the_run() -> None:
    model = Tied()
    parameters = store(model)
    model.embedding.weight.requires_grad_(False)
    flat = np.empty(parameters.layout().n_elems, np.float32)
    parameters.begin_snapshot(flat)
    assert flat[:28].tobytes() == model.embedding.weight.detach().numpy().tobytes()
    parameters.install(np.zeros_like(flat))
    assert not model.embedding.weight.any()


class Normed(torch.nn.Module):
    """A batch norm, a constant with infinities, one that is not saved, and a buffer that steps replace."""

    mean: torch.Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.full((2, 2), 0.25, dtype=dtype))
        self.register_buffer("mask", torch.full((4,), -torch.inf))
        self.register_buffer("angles", torch.ones(4), persistent=False)


def averaging(model: torch.nn.Module) -> TorchParameters:
    return TorchParameters(model, torch.optim.SGD(model.parameters(), lr=0.1), buffers="average")


def test_saved_floating_point_buffers_follow_behind_the_parameters() -> None:
    model = Normed()
    layout = averaging(model).layout()
    assert [p.name for p in layout.parameters if p.averaged] == ["mean", "norm.running_mean", "norm.running_var"]
    assert layout.n_trained == 6 + 2 + 2 + 2
    assert layout.n_elems == layout.n_trained + 4 + 2 + 2
    assert not any(p.averaged for p in store(model).layout().parameters)


def test_a_buffer_that_two_modules_share_is_averaged_once() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2))
    model[1].running_mean = model[0].running_mean
    averaged = [p.name for p in averaging(model).layout().parameters if p.averaged]
    assert averaged == ["0.running_mean", "0.running_var", "1.running_var"]


def test_buffers_travel_with_the_parameters_also_when_a_step_replaces_them() -> None:
    model = Normed()
    parameters = averaging(model)
    flat = np.empty(parameters.layout().n_elems, np.float32)
    parameters.snapshot(flat)
    assert flat[-8:].tolist() == [0.25] * 4 + [0.0, 0.0, 1.0, 1.0]
    model.mean = model.mean * 2
    parameters.snapshot(flat)
    assert flat[-8:-4].tolist() == [0.5] * 4
    model.mean = model.mean * 2
    parameters.install(np.arange(len(flat), dtype=np.float32))
    assert model.mean.tolist() == [[12.0, 13.0], [14.0, 15.0]]
    assert model.norm.running_var is not None
    assert model.norm.running_var.tolist() == [18.0, 19.0]
    model.mean = torch.zeros(3)
    with pytest.raises(ConfigError, match="buffer 'mean' has another shape"):
        parameters.snapshot(flat)


def test_a_buffer_of_a_type_that_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"buffer 'mean' is float64: .* persistent=False"):
        averaging(Normed(torch.float64))
