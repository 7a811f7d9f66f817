"""A user's own stages in a plan's order, on one rank: losses, gradients, and what does not fit."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dips.core.errors import ConfigError
from dips.planner.ir import Kind
from dips.planner.run import rank as model
from dips.planner.run.links import parse_cells
from dips.planner.run.share import Order, StageShare
from dips.planner.run.step import PlannedPipeline, _state_json, _state_of, layer_places, move_layers, stage_modules

CPU = torch.device("cpu")
FUSED = "0F0,1F0,0F1,1B0,0B0,1F1,1B1,0B1\n"
SPLIT = "0F0,0F1,1F0,1I0,0I0,1F1,1W0,1I1,0I1,0W1,1W1,0W0\n"


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def test_the_weights_of_a_layer_follow_from_its_number_alone() -> None:
    found = []
    for seed, number in ((1, 4), (2, 4), (2, 5)):
        torch.manual_seed(seed)
        found.append(nn.utils.parameters_to_vector(model.block(number, CPU).parameters()))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def stages() -> dict[int, nn.Module]:
    return {stage: model.block(stage, CPU) for stage in range(2)}


def test_gradients_add_up_over_steps_and_the_error_notices() -> None:
    """torch's own scaling would halve the first step's gradients in the second one."""
    modules = stages()
    assert model.OneProcess(2, 2, CPU).gradient_error(0, modules) == float("inf")
    pipeline = PlannedPipeline(parse_cells(FUSED, "plan.csv"), modules, model.loss, CPU)
    for _ in range(2):
        pipeline.step(*model.batch(2, CPU))
    assert model.OneProcess(2, 2, CPU).gradient_error(0, modules) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0F0,1F0,1B0,0B0\n2F0,2B0\n", "the plan has 2 ranks, the process group has 1: make them equal"),
        ("0F0,0B0\n", r"rank 0 was given stages \[0, 1\], the plan has \[0\] there: give those"),
        ("0F0,0F1,1F0,1F1,1B0,0B0,1B1\n", "torch cannot run the schedule: Invalid backward microbatches for stage 0"),
        ("0F0,0B0,1F0,1B0\n", "torch cannot run the schedule: Malformed compute schedule"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        PlannedPipeline(parse_cells(text, "plan.csv"), stages(), model.loss, CPU)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((3, 3), "given a batch of 3 as inputs: give a multiple of the plan's 2 microbatches"),
        ((0, 2), "given a batch of 0 as inputs"),
        ((2, None), "given none as targets"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(sizes: tuple[int | None, int | None], sentence: str) -> None:
    pipeline = PlannedPipeline(parse_cells(FUSED, "plan.csv"), stages(), model.loss, CPU)
    inputs, targets = (None if n is None else torch.zeros(n, model.WIDTH, dtype=torch.float64) for n in sizes)
    with pytest.raises(ConfigError, match=sentence):
        pipeline.step(inputs, targets)


def test_a_swapped_plan_goes_on_and_the_old_one_is_freed() -> None:
    """Also with other stages of the same layers; shapes are learnt again."""
    layers = {n: model.block(n, CPU) for n in range(3)}
    old, new = parse_cells(FUSED, "old"), parse_cells(SPLIT, "new")
    pipeline = PlannedPipeline(old, stage_modules(layers, old, (1, 2), 0), model.loss, CPU)
    inputs, targets = model.batch(4, CPU)
    pipeline.step(inputs, targets)
    before = weakref.ref(pipeline._schedule)
    places = layer_places(old, (1, 2)), layer_places(new, (2, 1))
    assert places == ((0, 0, 0), (0, 0, 0))
    layers = move_layers(layers, *places, lambda n: pytest.fail("nothing moves"))
    pipeline.swap(new, stage_modules(layers, new, (2, 1), 0))
    assert before() is None
    for layer in layers.values():
        layer.zero_grad()
    losses = pipeline.step(inputs[:4], targets[:4])
    whole = [model.block(n, CPU) for n in range(3)]
    loss = model.loss(nn.Sequential(*whole)(inputs[:4]), targets[:4])
    assert torch.stack(losses).mean().item() == pytest.approx(loss.item(), rel=1e-14)
    loss.backward()
    for ours, true in zip(layers.values(), whole, strict=True):
        for a, b in zip(ours.parameters(), true.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.allclose(a.grad, b.grad, rtol=1e-12, atol=1e-14)


def test_a_plan_that_cannot_be_swapped_to_leaves_the_old_one() -> None:
    modules = stages()
    pipeline = PlannedPipeline(parse_cells(FUSED, "old"), modules, model.loss, CPU)
    for text in ("0F0,0B0\n", "0F0,0F1,1F0,1F1,1B0,0B0,1B1\n", "0F0,1F0,1B0,0B0\n2F0,2B0\n"):
        with pytest.raises(ConfigError):
            pipeline.swap(parse_cells(text, "new"), modules)
    pipeline.step(*model.batch(2, CPU))
    assert model.OneProcess(2, 2, CPU).gradient_error(0, modules) < 1e-14


def test_plans_of_another_model_are_refused() -> None:
    cells = parse_cells(FUSED, "plan.csv")
    with pytest.raises(ConfigError, match="layers of 3 stages, the plan has 2: give a number for each"):
        layer_places(cells, (1, 1, 1))
    with pytest.raises(ConfigError, match="the old plan has 2 layers, the new one 3: plans must be of one model"):
        move_layers({}, (0, 0), (0, 0, 0), lambda n: nn.Identity())


def test_what_an_optimizer_keeps_is_said_without_code() -> None:
    """AdamW's count of steps is on the processor though the parameter is not; the meta device stands for another."""
    parameter = torch.zeros(2, 3, device="meta")
    for kept in (torch.tensor(7.0), torch.tensor([[1, 2], [3, 4]]), 0.5, True, None, "text", 3):
        said = json.loads(json.dumps(_state_json("kept", kept, parameter)))
        found = _state_of(said, parameter)
        if isinstance(kept, torch.Tensor):
            assert torch.equal(found, kept)
            assert found.dtype == kept.dtype
        else:
            assert found == kept
            assert type(found) is type(kept)
    moment = torch.zeros(2, 3, dtype=torch.bfloat16, device="meta")
    found = _state_of(_state_json("moment", moment, parameter), parameter)
    assert (found.shape, found.dtype, found.device) == (moment.shape, moment.dtype, moment.device)
    with pytest.raises(ConfigError, match="keeps 'history' of a parameter as list, which cannot move"):
        _state_json("history", [moment], parameter)
    with pytest.raises(ConfigError, match="'float3' is no dtype of this torch"):
        _state_of({"form": [[2], "float3"]}, parameter)


def test_a_leaders_orders_are_whole_numbers() -> None:
    orders = [Order(Kind.F, 3, (4, 5, 6), torch.bfloat16), *(Order(kind, 9) for kind in Kind)]
    for order in orders:
        said = order.to_tensor(CPU)
        assert said.dtype is torch.int64
        assert Order.of_tensor(said) == order
    assert Order.of_tensor(torch.full_like(said, -1)) is None
    for at, wrong in ((0, 4), (0, -2), (1, -1), (2, 6), (3, 9), (4, -5)):
        harmed = orders[0].to_tensor(CPU)
        harmed[at] = wrong
        with pytest.raises(ConfigError, match="is not what a leader says"):
            Order.of_tensor(harmed)
    for rows in (torch.zeros(2, dtype=torch.bool), torch.zeros((1,) * 9)):
        with pytest.raises(ConfigError, match=r"cannot be shared: give one of torch\.float32"):
            Order(Kind.F, 0, tuple(rows.shape), rows.dtype).to_tensor(CPU)


def test_shares_that_cannot_be_are_refused() -> None:
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(ConfigError, match="a stage is shared 1:2 by a group of 1 ranks: give each rank a whole number"):
        StageShare(group, (1, 2))
    with pytest.raises(ConfigError, match="a stage is shared 0 by a group of 1 ranks"):
        StageShare(group, (0,))
    share = StageShare(group, (3,))
    assert share.rows(6) == [6]
    with pytest.raises(ConfigError, match="4 rows of a microbatch do not divide 3: give a multiple of 3"):
        share.rows(4)
