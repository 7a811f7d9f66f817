"""What a torch process holds, captured and given back, and the form of a tree of state: JSON, and tensors by name."""

from __future__ import annotations

import enum
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kept_state import saved

from dips.core.errors import ConfigError
from dips.worker.checkpoint_files import CheckpointError, RawTensor
from dips.worker.parallel.rank_state import TorchState
from dips.worker.torch_state import StateTreeError, flatten, unflatten

pytestmark = pytest.mark.usefixtures("one_thread")


class Part:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).to(dtype)


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Random input, so that the losses tell whether the generators are where they were."""
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 4) + random.random() + float(np.random.rand())
        loss = net(x.to(next(net.parameters()).dtype)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parameters(net: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


Maker = Callable[[torch.nn.Module], list[torch.optim.Optimizer]]


def muon_and_adamw(net: torch.nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = ([p for p in net.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


OPTIMIZERS: dict[str, Maker] = {
    "adamw": lambda net: [torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)],
    "adamw amsgrad": lambda net: [torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-2), amsgrad=True)],
    "sgd": lambda net: [torch.optim.SGD(net.parameters(), lr=1e-2)],
    "sgd momentum": lambda net: [torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, nesterov=True)],
    "groups": lambda net: [torch.optim.Adam(
        [{"params": [p], "weight_decay": 0.1 * i} for i, p in enumerate(net.parameters())], lr=1e-2
    )],
    "nadam": lambda net: [torch.optim.NAdam(net.parameters())],
    "adagrad": lambda net: [torch.optim.Adagrad(net.parameters())],
    "rmsprop": lambda net: [torch.optim.RMSprop(net.parameters(), momentum=0.9)],
    "muon and adamw": muon_and_adamw,
    "of other shapes than its parameters": lambda net: [torch.optim.Adafactor(net.parameters(), lr=1e-2)],
    "with a state_dict() of its own": lambda net: [OwnAdamW(net.parameters(), lr=1e-2)],
    "two, of which one has": lambda net: [OwnAdamW(group, lr=1e-2) if at else torch.optim.SGD(group, lr=1e-2)
        for at, group in enumerate([[*net.parameters()][:2], [*net.parameters()][2:]])
    ],
    "one that contains both": lambda net: [Both(muon_and_adamw(net))],
}  # fmt: skip


class OwnAdamW(torch.optim.AdamW):
    """Has a state_dict() of its own, as optimizers do whose state is not shaped as their parameters."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


class Both(torch.optim.SGD):
    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__([p for each in optimizers for group in each.param_groups for p in group["params"]])
        self.optimizers = optimizers

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_to_the_bit(make: Maker, dtype: torch.dtype, tmp_path: Path) -> None:
    net = model(dtype)
    optimizers = make(net)
    train(net, Both(optimizers), 3)
    content, weights = saved(TorchState(net, optimizers), tmp_path), parameters(net)
    expected = train(net, Both(optimizers), 4)

    again = model(dtype)
    with torch.no_grad():
        for parameter, value in zip(again.parameters(), weights, strict=True):
            parameter.copy_(value)
    optimizers = make(again)
    TorchState(again, optimizers).restore(*content)
    assert train(again, Both(optimizers), 4) == expected
    for one, two in zip(net.buffers(), again.buffers(), strict=True):
        assert torch.equal(one, two)


def test_optimizers_of_another_kind_or_number_are_refused_before_anything_is_changed(tmp_path: Path) -> None:
    net = model()
    both, alone = muon_and_adamw(net), [torch.optim.AdamW(net.parameters())]
    contents = []
    for optimizers in (both, alone):
        train(net, Both(list(optimizers)), 1)
        (tmp_path / "x.safetensors").unlink(missing_ok=True)
        contents.append(saved(TorchState(net, optimizers), tmp_path))
    of_both, of_one = contents
    again, generator = model(), torch.get_rng_state()
    here: Sequence[torch.optim.Optimizer]
    for here, content, sentence in (
        ([torch.optim.AdamW(again.parameters())], of_both, "the state of Muon, this loop has AdamW: "),
        (muon_and_adamw(again), of_one, "the state of AdamW, this loop has Muon: "),
        ([torch.optim.SGD(again.parameters())], of_one, "the state of AdamW, this loop has SGD: "),
    ):
        with pytest.raises(ConfigError, match=sentence + ".*same --inner-optimizer.* or without --resume"):
            TorchState(again, here).restore(*content)
        assert not any(optimizer.state for optimizer in here)
        assert torch.equal(torch.get_rng_state(), generator)


def test_the_loops_own_things_come_back_as_they_were(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    state: dict[str | int, Any] = {
        "seen": 7, 3: (1, [2.5, None]), "flag": True, "name": "x", "raw": b"\x00\xff", "nothing": torch.empty(0, 3),
        "half": torch.tensor([1.5, -2], dtype=torch.bfloat16), "mask": torch.tensor([True, False]), "big": 2**70,
        "scalar": torch.tensor(3), "rows": np.arange(6, dtype=np.int16).reshape(2, 3), "wide": torch.ones(2, 2)[:, ::2],
    }  # fmt: skip
    part, scheduler = Part(state), torch.optim.lr_scheduler.StepLR(optimizer, 5)
    content = saved(TorchState(net, optimizer, {"loop": part, "scheduler": scheduler}), tmp_path)
    back = Part()
    again = torch.optim.lr_scheduler.StepLR(optimizer, 9)
    TorchState(net, optimizer, {"loop": back, "scheduler": again}).restore(*content)
    assert again.state_dict() == scheduler.state_dict()
    assert list(back.state) == list(state)
    for name, value in state.items():
        got = back.state[name]
        assert type(got) is type(value)
        if isinstance(value, torch.Tensor):
            assert (got.dtype, got.shape) == (value.dtype, value.shape)
            assert torch.equal(got, value)
        elif isinstance(value, np.ndarray):
            assert got.dtype == value.dtype
            assert np.array_equal(got, value)
        else:
            assert got == value
    for part in content[0]["parts"]["loop"]:  # an earlier release said the type alone
        part["empty"] = {name: dtype for name, (dtype, _) in part["empty"].items()}
    TorchState(net, optimizer, {"loop": back, "scheduler": again}).restore(*content)
    assert back.state["nothing"].shape == (0,)


def test_what_was_captured_does_not_change_while_training_goes_on() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 2)
    state = TorchState(net, optimizer)
    _, tensors = state.capture()
    before = {name: raw.data.tobytes() for name, raw in tensors.items()}
    train(net, optimizer, 2)
    assert {name: raw.data.tobytes() for name, raw in tensors.items()} == before
    _, later = state.capture()
    assert all(np.shares_memory(later[n].data, raw.data) for n, raw in tensors.items()), "memory is used again"
    assert later["optimizer.0.weight.exp_avg"].data.tobytes() != before["optimizer.0.weight.exp_avg"]


def test_a_buffer_that_gets_another_shape_is_kept_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dips.worker.checkpoint")
    net, again = model(), model()
    state = TorchState(net, torch.optim.SGD(net.parameters()))
    state.capture()
    for each in (net, again):
        each.register_buffer("cache", torch.zeros(3))
    net.register_buffer("cache", torch.ones(3))
    TorchState(again, torch.optim.SGD(again.parameters())).restore(*saved(state, tmp_path))
    state.capture()
    assert caplog.text.count("only one process can go on from these checkpoints: the model has other buffers") == 1
    assert torch.equal(dict(again.named_buffers())["cache"], torch.ones(3))


def test_a_state_that_cannot_be_kept_is_named() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    with pytest.raises(StateTreeError, match=r"loop\.mine\.rule.*function"):
        TorchState(net, optimizer, {"mine": Part({"rule": train})}).capture()
    with pytest.raises(StateTreeError, match="complex64"):
        TorchState(net, optimizer, {"mine": Part({"z": torch.zeros(1, dtype=torch.complex64)})}).capture()


def test_another_loop_or_optimizer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    content = saved(TorchState(net, optimizer), tmp_path)
    with pytest.raises(ConfigError, match="same loop"):
        TorchState(net, optimizer, {"mine": Part()}).restore(*content)
    other = model()
    other.register_buffer("more", torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"does not hold 'buffers\.more'"):
        TorchState(other, torch.optim.AdamW(other.parameters())).restore(*content)


def through(state: object) -> Any:
    skeleton, tensors = flatten(state)
    text = json.dumps(skeleton, allow_nan=False)
    raw = {
        name: RawTensor("F32", tuple(tensor.shape), torch.as_tensor(tensor).reshape(-1).numpy().view(np.uint8))
        for name, tensor in tensors.items()
    }
    return unflatten(json.loads(text), raw)


numbers = st.lists(st.floats(width=32, allow_nan=False), max_size=3)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | numbers.map(torch.tensor) | numbers.map(lambda row: np.array(row, np.float32))
)  # fmt: skip
keys = st.none() | st.booleans() | st.integers() | st.text()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, two)) and all(
            same(a, b) for a, b in zip(one.values(), two.values(), strict=True)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, torch.Tensor | np.ndarray):
        return one.shape == two.shape and bool((one == two).all())
    return bool(one == two)


@given(trees)
def test_a_tree_comes_back_with_its_types(tree: Any) -> None:
    assert same(through(tree), tree)


def test_numbers_that_json_does_not_have() -> None:
    nan, above, below, zero = through([math.nan, math.inf, -math.inf, -0.0])
    assert math.isnan(nan)
    assert (above, below, math.copysign(1, zero)) == (math.inf, -math.inf, -1.0)


def test_names_of_tensors_say_where_they_stand_and_never_meet() -> None:
    one, two, three = torch.zeros(1), torch.zeros(2), np.zeros(3, np.float32)
    state = {"a.b": one, "a": {"b": two}, "list": [three]}
    tensors = flatten(state)[1]
    assert [(name, id(tensor)) for name, tensor in tensors.items()] == [
        ("a.b", id(one)), ("a.b#2", id(two)), ("list.0", id(three)),
    ]  # fmt: skip
    assert same(through(state), state)
    assert list(flatten(one)[1]) == ["state"]


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(("state", "where"), [
    ({"a": [1, object()]}, "a.1"), ({"a": {2: {1, 2}}}, "a.2"), ({(1, 2): 3}, "top"), ([Colour.RED], "0"),
    (print, "top"),
])  # fmt: skip
def test_what_cannot_come_back_is_refused_with_its_place(state: object, where: str) -> None:
    with pytest.raises(StateTreeError, match=where):
        flatten(state)


def test_a_state_that_holds_itself_is_refused() -> None:
    state: list[object] = []
    state.append(state)
    with pytest.raises(StateTreeError, match="hold itself"):
        flatten(state)


@pytest.mark.parametrize("skeleton", [[1], {"z": 1}, {"l": [], "t": []}, {"d": [[{"q": 1}, 1]]}, {"x": ["torch", "x"]}])
def test_something_else_is_no_skeleton(skeleton: object) -> None:
    with pytest.raises(StateTreeError):
        unflatten(skeleton, {})
