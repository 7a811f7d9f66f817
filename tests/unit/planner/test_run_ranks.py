"""What the ranks of a planned pipeline do together, each a thread of this process: shared stages, layers that move; and
one rank of `dips plan run` through its jobs."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dips.core.errors import ConfigError
from dips.planner.run import rank as model
from dips.planner.run.links import PlanJob, job_file, parse_cells, read_report, write_job
from dips.planner.run.share import StageHelper, StageShare
from dips.planner.run.step import PlannedPipeline, move_layers

CPU = torch.device("cpu")
FUSED = "0F0,1F0,0F1,1B0,0B0,1F1,1B1,0B1\n"
SPLIT = "0F0,0F1,1F0,1I0,0I0,1F1,1W0,1I1,0I1,0W1,1W1,0W0\n"
FUSED_3 = "0F0,1F0,2F0,0F1,2B0,1F1,1B0,2F1,0B0,2B1,1B1,0B1\n"
SPLIT_3 = "0F0,1F0,2F0,0F1,2I0,1F1,1I0,2F1,0I0,2I1,1W0,1I1,0I1,2W0,0W0,2W1,1W1,0W1\n"


@dataclass(frozen=True)
class Member:
    """A rank of a group whose members are threads."""

    rank: int
    size: int
    ways: dict[tuple[int, int], SimpleQueue[torch.Tensor]]


class Passing(NamedTuple):
    op: Callable[..., Any]
    tensor: torch.Tensor
    group: Member
    group_peer: int


def send(tensor: torch.Tensor, group: Member, group_dst: int) -> None:
    group.ways[group.rank, group_dst].put(tensor.clone())


def receive(tensor: torch.Tensor, group: Member, group_src: int) -> None:
    found = group.ways[group_src, group.rank].get()
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    tensor.copy_(found)


def all_reduce(tensor: torch.Tensor, group: Member) -> None:
    others = [rank for rank in range(group.size) if rank != group.rank]
    for rank in others:
        send(tensor, group, rank)
    for rank in others:
        tensor += group.ways[rank, group.rank].get()


def pass_all(ops: list[Passing]) -> tuple[()]:
    for op, tensor, group, peer in sorted(ops, key=lambda one: one.op is dist.irecv):
        (send if op is dist.isend else receive)(tensor, group, peer)
    return ()


def members(size: int) -> list[Any]:
    ways: dict[tuple[int, int], SimpleQueue[torch.Tensor]] = defaultdict(SimpleQueue)
    return [Member(rank, size, ways) for rank in range(size)]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Groups of threads, besides a process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    for name, ours in (("get_rank", lambda group: group.rank), ("get_world_size", lambda group: group.size)):
        theirs = getattr(dist, name)
        monkeypatch.setattr(
            dist,
            name,
            lambda group=None, ours=ours, theirs=theirs: ours(group) if isinstance(group, Member) else theirs(group),
        )
    for name, made in (("send", send), ("recv", receive), ("all_reduce", all_reduce), ("P2POp", Passing)):
        monkeypatch.setattr(dist, name, made)
    monkeypatch.setattr(dist, "batch_isend_irecv", pass_all)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    yield
    dist.destroy_process_group()


def together(first: Callable[[], Any], *others: Callable[[], Any]) -> None:
    """The first one here."""
    failed: list[BaseException] = []

    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    started = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in others]
    for thread in started:
        thread.start()
    first()
    for thread in started:
        thread.join()
    assert not failed


@pytest.mark.parametrize(
    ("text", "stages", "shared"),
    [(FUSED, 2, 0), (FUSED, 2, 1), (SPLIT, 2, 0), (SPLIT, 2, 1), (FUSED_3, 3, 1), (SPLIT_3, 3, 1)],
)
@pytest.mark.usefixtures("threads")
def test_members_of_a_shared_stage_all_get_the_gradients_of_whole_microbatches(
    text: str, stages: int, shared: int
) -> None:
    """Also over two steps without an update, whose gradients add up."""
    leader, *helping = (StageShare(member, (3, 2, 1)) for member in members(3))
    modules = {stage: model.block(stage, CPU) for stage in range(stages)}
    helpers = [model.block(shared, CPU) for _ in helping]
    pipeline = PlannedPipeline(parse_cells(text, "plan"), modules, model.loss, CPU, shares={shared: leader})
    inputs, targets = model.batch(6, CPU)

    def help_with(module: nn.Module, share: StageShare) -> Callable[[], None]:
        helper = StageHelper(module, shared, share, CPU)

        def work() -> None:
            for _ in range(2):
                helper.step()

        return work

    together(
        lambda: [pipeline.step(inputs, targets) for _ in range(2)],
        *(help_with(module, share) for module, share in zip(helpers, helping, strict=True)),
    )
    whole = [model.block(stage, CPU) for stage in range(stages)]
    (2 * model.loss(nn.Sequential(*whole)(inputs), targets)).backward()
    for stage, ours in (*modules.items(), *((shared, helper) for helper in helpers)):
        for a, b in zip(ours.parameters(), whole[stage].parameters(), strict=True):
            assert a.grad is not None
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-14)


def layer(number: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        made = nn.BatchNorm1d(3)
        nn.init.normal_(made.weight)
        made.running_mean = torch.randn(3)
        return made


def optimizer_of(layers: dict[int, nn.Module]) -> torch.optim.Optimizer:
    """Biases in a group of their own; two steps were made."""
    groups = ("weight", "bias")
    optimizer = torch.optim.AdamW(
        [{"params": [getattr(one, name) for one in layers.values()]} for name in groups], lr=0.1
    )
    for number, one in layers.items():
        for parameter in one.parameters():
            parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return optimizer


@pytest.mark.usefixtures("threads")
def test_layers_move_between_ranks_with_buffers_and_what_the_optimizer_keeps() -> None:
    old, new = (0, 0, 1, 1, 0), (1, 0, 1, 0, 1)
    everything = {number: layer(number) for number in range(5)}
    expected = optimizer_of(everything)
    kept: dict[int, Any] = {}

    def move(group: Any) -> Callable[[], None]:
        layers = {number: layer(number) for number, place in enumerate(old) if place == group.rank}
        optimizer = optimizer_of(layers)

        def work() -> None:
            kept[group.rank] = move_layers(layers, old, new, lambda n: layer(100 + n), optimizer, group), optimizer

        return work

    together(*(move(group) for group in members(2)))
    for rank, (layers, optimizer) in kept.items():
        assert list(layers) == [number for number, place in enumerate(new) if place == rank]
        for which, name in enumerate(("weight", "bias")):
            ours = [getattr(one, name) for one in layers.values()]
            assert {id(p) for p in optimizer.param_groups[which]["params"]} == {id(p) for p in ours}
        assert set(optimizer.state) == {p for one in layers.values() for p in one.parameters()}
        for number, one in layers.items():
            torch.testing.assert_close(one.state_dict(), everything[number].state_dict(), rtol=0, atol=0)
            for mine, true in zip(one.parameters(), everything[number].parameters(), strict=True):
                torch.testing.assert_close(optimizer.state[mine], expected.state[true], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("made", "groups", "sentence"),
    [
        (lambda: nn.BatchNorm1d(4), 2, "layer 0 was made with"),
        (lambda: nn.BatchNorm1d(3), 1, "is in group 1 of its optimizer, and the one here has 1 groups"),
    ],
)
@pytest.mark.usefixtures("threads")
def test_a_layer_that_does_not_fit_where_it_arrives_is_refused(
    made: Callable[[], nn.Module], groups: int, sentence: str
) -> None:
    source, target = members(2)
    layers = {0: layer(0)}
    sending = optimizer_of(layers)
    own = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr=0.1)
    move_layers(layers, (0,), (1,), lambda n: pytest.fail("nothing arrives"), sending, source)
    with pytest.raises(ConfigError, match=sentence):
        move_layers({}, (0,), (1,), lambda n: made(), own, target)
    assert not sending.state


def test_a_rank_trains_through_its_jobs_as_one_process_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers as two stages, then as one stage in another order, with iterations between them that are not timed."""
    first = PlanJob(SPLIT, ((2, 3, 4), (5, 6, 7)), (), 2, "gloo", 60.0, last=False)
    second = replace(first, csv="0F0,0B0,0F1,0B1\n", lasts_ns=((1, 1, 1),), layers=(2,), repeats=3, last=True)
    for number, job in enumerate((first, second)):
        write_job(tmp_path, job, number)
    looks: list[Path] = []

    def seen_late(folder: Path, number: int) -> Path:
        looks.append(job_file(folder, number))
        return looks[-1] if len(looks) > 4 else folder / "not yet"

    monkeypatch.setattr(model, "job_file", seen_late)
    torch.set_num_threads(2)
    assert model.main([str(tmp_path), "0"]) == 0
    assert torch.get_num_threads() == 1, "ranks share the processors"
    assert not dist.is_initialized()
    reports = [read_report(tmp_path, 0, number) for number in range(2)]
    assert [len(report.iterations) for report in reports] == [2, 3]
    assert [report.skipped for report in reports] == [0, 4]
    assert reports[0].taken_ns < reports[1].taken_ns
    for job, report in zip((first, second), reports, strict=True):
        assert report.gradient_error < 1e-12
        assert report.parameters == 2 * len(list(model.block(0, CPU).parameters()))
        assert report.message_bytes == model.ROWS * model.WIDTH * 8
        assert [len(one.times) for one in report.iterations] == [len(job.csv.split(","))] * job.repeats
        for one in report.iterations:
            assert all(before[1] <= after[0] for before, after in pairwise(one.times))


def test_a_rank_that_cannot_run_says_why_and_ends_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path, PlanJob("0F0,0B0\n", ((1, 1, 1),), (), 1, "nccl", 60.0), 0)
    assert model.main([str(tmp_path), "1000"]) == ConfigError.exit_code
    assert "--backend nccl gives each rank a GPU" in capsys.readouterr().err
