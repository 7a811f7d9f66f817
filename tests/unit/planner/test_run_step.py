"""A user's own stages in a plan's order, on one rank: losses, gradients, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dips.core.errors import ConfigError
from dips.planner.run import rank as model
from dips.planner.run.links import parse_cells
from dips.planner.run.step import PlannedPipeline

CPU = torch.device("cpu")
FUSED = "0F0,1F0,0F1,1B0,0B0,1F1,1B1,0B1\n"
SPLIT = "0F0,0F1,1F0,1I0,0I0,1F1,1W0,1I1,0I1,0W1,1W1,0W0\n"


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def stages() -> dict[int, nn.Module]:
    return {stage: model.block(stage, CPU) for stage in range(2)}


@pytest.mark.parametrize("text", [FUSED, SPLIT])
def test_gradients_are_those_of_the_whole_model_at_once(text: str) -> None:
    modules = stages()
    pipeline = PlannedPipeline(parse_cells(text, "plan.csv"), modules, model.loss, CPU)
    inputs, targets = model.batch(2, CPU)
    losses = pipeline.step(inputs, targets)
    assert model.OneProcess(2, 2, CPU).gradient_error(0, modules) < 1e-14
    whole = model.loss(nn.Sequential(*stages().values())(inputs), targets)
    assert torch.stack(losses).mean().item() == pytest.approx(whole.item(), rel=1e-14)


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
