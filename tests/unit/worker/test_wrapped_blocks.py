"""Blocks in wrappers: their cluster is one run with a plain one, also of a run and a checkpoint with former names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.wrappers import _FabricModule
from support import kept_state
from support.cluster_bench import ClusterBench, session_config
from support.run_for_workers import RefuseCall
from support.run_in_memory import RunInMemory
from support.trainer_models import Model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.nn.parallel import DistributedDataParallel

import dips
from dips.core import messages
from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.layout import Layout
from dips.core.model_description import Untrained
from dips.worker import torch_model
from dips.worker.parallel.agreement import Agreed, Alone, agree
from dips.worker.parallel.held import ShardOf, held_here
from dips.worker.parallel.rank_state import RankState, TorchState, merged
from dips.worker.parallel.shard_files import SavedShards, write_shards
from dips.worker.parallel.untrained import untrained_of_ranks
from dips.worker.state import effects
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.saved import SavedSession
from dips.worker.torch_model import TorchParameters, description_of, former_names, untrained_of

pytestmark = pytest.mark.usefixtures("one_thread")

Wrap = Callable[[torch.nn.Module], torch.nn.Module]
T = TypeVar("T")


def replicated(module: torch.nn.Module) -> torch.nn.Module:
    """As DistributedDataParallel, which is not made without other processes."""
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(wrapper)
    wrapper.module = module
    return wrapper


def compiled(module: torch.nn.Module) -> torch.nn.Module:
    wrapper: Any = torch.compile(module, backend="eager")  # compiles at the first call
    return wrapper  # type: ignore[no-any-return]


WRAPPERS: dict[str, Wrap] = {
    "plain": lambda block: block, "checkpointed": checkpoint_wrapper, "offloaded": offload_wrapper,
    "compiled": compiled, "replicated": replicated,
    "set up by Fabric": lambda block: _FabricModule(block, SingleDeviceStrategy(torch.device("cpu"))),
    "compiled and checkpointed": lambda block: checkpoint_wrapper(compiled(block)),
    "checkpointed, compiled and replicated": lambda block: replicated(compiled(checkpoint_wrapper(block))),
}  # fmt: skip


class Block(torch.nn.Module):
    """Its submodules have the names that wrappers put into names."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 3)
        self._orig_mod = torch.nn.Linear(3, 2).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("table", torch.arange(4))


class Net(torch.nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(wrap(Block()) for _ in range(2))
        self.head = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)


def of_one(net: Net) -> tuple[Layout, Untrained, str]:
    parameters = TorchParameters(net, net.optimizer, buffers="average")
    untrained = untrained_of(net, parameters.ids)
    return parameters.layout(), untrained, description_of(net, parameters.ids, untrained)


def of_ranks(net: Net) -> tuple[Layout, Untrained, str]:
    agreed = agreed_of(net, "average")
    return agreed.layout, *untrained_of_ranks(Alone(), lambda values, ranks: None, agreed)


def agreed_of(net: Net, buffers: str = "own") -> Agreed:
    agreed = agree(Alone(), held_here([net], [net.optimizer], buffers=buffers), {})
    assert agreed is not None
    return agreed


@pytest.mark.parametrize("told_by", [of_one, of_ranks])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_names_are_those_of_plain_blocks(wrap: Wrap, told_by: Callable[[Net], tuple[Layout, Untrained, str]]) -> None:
    assert told_by(Net(wrap)) == of_one(Net(WRAPPERS["plain"]))
    layout, untrained, _ = of_one(Net(wrap))
    names = [parameter.name for parameter in layout.parameters]
    assert names[:2] == ["layers.0.module.weight", "layers.0.module.bias"], "a user's own part of a name stays"
    assert names[-1] == "layers.1.norm.running_var"
    assert [each.name for each in untrained.frozen][:1] == ["layers.0._orig_mod.weight"]


def test_two_names_that_would_become_one_are_refused() -> None:
    net = Net(replicated)
    net.layers[1].register_module("head", torch.nn.Linear(2, 2))
    net.layers[1].get_submodule("module").register_module("head", torch.nn.Linear(2, 2))
    net.optimizer = torch.optim.AdamW(net.parameters())
    for told_by in (of_one, of_ranks):
        with pytest.raises(
            ConfigError, match=r"'layers.1.module.head.weight' and 'layers.1.head.weight' are both called"
        ):
            told_by(net)


def test_what_a_user_says_of_a_tensor_may_have_both_names() -> None:
    net = Net(compiled)
    for layer in ("layers.0", "layers.0._orig_mod"):
        name = f"{layer}.module.weight"
        held = held_here([net], [net.optimizer], shards={name: ShardOf("layers.9.module.weight")})
        assert held.rows[0].parameter.name == "layers.9.module.weight"
        assert "layers.0.module.weight" not in held.former
        assert held.former["layers.1.module.weight"] == "layers.1._orig_mod.module.weight"
        masters = {name: net.get_parameter("layers.0._orig_mod.module.weight").detach().clone()}
        held = held_here([net], [net.optimizer], master_parameters=masters)
        assert held.tensors()[0].data_ptr() == masters[name].data_ptr()
        rest = [f"{layer.replace('0', n)}.{part}" for n in "10" for part in ("module.weight", "module.bias")]
        order = [
            "head.bias",
            "head.weight",
            *rest,
            *(f"{layer.replace('0', n)}.norm.{k}" for n in "10" for k in ("weight", "bias")),
        ]
        agreed = agree(Alone(), held_here([net], [net.optimizer]), {}, order=order)
        assert agreed is not None
        names = [parameter.name for parameter in agreed.layout.parameters]
        assert names == [each.replace("._orig_mod", "") for each in order]


# ---- runs and checkpoints with former names ----


@pytest.fixture
def earlier(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], T]], T]:
    """Calls something as an earlier release, which knew wrappers around the whole model only."""

    def call(what: Callable[[], T]) -> T:
        with monkeypatch.context() as patched:
            patched.setattr(torch_model, "_WRAPPERS", ())
            return what()

    return call


Earlier = Callable[[Callable[[], Any]], Any]


def bench_of(net: Net) -> ClusterBench:
    layout, untrained, _ = of_one(net)
    return ClusterBench(session_config(layout=layout, untrained=untrained, former=former_names(net)))


def test_a_run_whose_layout_has_former_names_is_joined_with_these(run: RunInMemory) -> None:
    former = [f"layers.{i}._checkpoint_wrapped_module.w" for i in range(5)]

    def refuse(method: str, request: Any) -> None:
        if method == "Join" and [parameter.name for parameter in request.layout.parameters] != former:
            raise RefuseCall(RefusalCode.LAYOUT, "another model")

    run.hook = refuse
    model = Model(0)
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given: dict[str, Any] = {"tokens_per_step": 10, "master": run.address, "cluster_id": "a", "insecure": True}
    with dips.DiLoCo(model, optimizer, **given):
        for _ in range(4):
            run.clock.advance(1.0)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert [push.steps for push in run.pushes] == [4]


@pytest.mark.parametrize("code", [RefusalCode.LAYOUT, RefusalCode.FROZEN])
def test_the_second_join_says_what_an_earlier_release_said(earlier: Earlier, code: RefusalCode) -> None:
    net = Net(WRAPPERS["compiled and checkpointed"])
    bench = bench_of(net)
    layout, untrained, _ = earlier(lambda: of_one(net))
    bench.say(effects.Started())
    assert bench.refuse(messages.JoinRequest, code).layout != layout
    request = bench.join()
    assert (request.layout, request.layout_hash) == (layout, layout.layout_hash)
    assert (request.frozen, request.buffers) == (untrained.frozen, untrained.buffers)


@pytest.mark.parametrize(
    ("second", "told"), [(RefusalCode.LAYOUT, "the first"), (RefusalCode.FROZEN, "refused: FROZEN")]
)
def test_a_model_that_is_another_under_both_names_is_refused_by_its_plain_ones(second: RefusalCode, told: str) -> None:
    bench = bench_of(Net(compiled))
    bench.say(effects.Started())
    job, _ = bench.job(messages.JoinRequest)
    bench.say(effects.Done(job, Refused(RefusalCode.LAYOUT, "the first")))
    bench.refuse(messages.JoinRequest, second)
    assert bench.ended_with(Refused).sentence == told


def test_a_checkpoint_with_former_names_is_gone_on_from(earlier: Earlier) -> None:
    net = Net(compiled)
    bench, layout = bench_of(net), earlier(lambda: of_one(net))[0]
    now = bench.session.config
    bench.session = ClusterMachine(now.with_former_names())
    bench.begin()
    saved = bench.session.saved()
    assert saved is not None
    assert saved.layout_hash == layout.layout_hash != now.layout.layout_hash
    bench.session = ClusterMachine(now)
    bench.session.resume(SavedSession.from_json(saved.to_json()), None)
    assert bench.session.config.layout == layout
    another = replace(now, layout=Layout(now.layout.parameters[1:]))
    with pytest.raises(ConfigError, match="of another model"):
        ClusterMachine(another).resume(saved, None)


class OwnAdamW(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


@pytest.mark.parametrize("of", ["one process", "ranks"])
def test_a_checkpoints_state_with_former_names_is_put_back(earlier: Earlier, tmp_path: Path, of: str) -> None:
    net, again = Net(compiled), Net(compiled)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    net.optimizer.step()
    for each in net.buffers():
        each.add_(3)
    if of == "ranks":
        state, shards = earlier(lambda: RankState(Alone(), agreed_of(net), [net.optimizer]).capture())
        assert any("_orig_mod.module" in shard.name for shard in shards)
        saved = SavedShards(tmp_path, [write_shards(tmp_path, 0, shards)])
        told = merged([json.loads(json.dumps(state))])
        RankState(Alone(), agreed_of(again), [again.optimizer]).restore(told, saved)
    else:
        net.optimizer.__class__ = again.optimizer.__class__ = OwnAdamW  # kept by places, not by names
        content = earlier(lambda: kept_state.saved(TorchState(net, net.optimizer), tmp_path))
        TorchState(again, again.optimizer).restore(*content)
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), again.buffers(), strict=True))
    moments = [[each[key] for each in one.optimizer.state.values() for key in each] for one in (net, again)]
    assert len(moments[0]) == 3 * 10
    assert all(map(torch.equal, *moments))
