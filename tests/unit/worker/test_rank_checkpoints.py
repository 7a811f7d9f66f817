"""Checkpoints of ranks: a rank's own state, what does not fit, and what the leader does about them."""

from __future__ import annotations

import errno
import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.cluster_bench import ClusterBench
from support.manual_clock import ManualClock
from support.rank_table import RankTable, Seat
from support.repository import ROOT

from dips.core.errors import ConfigError
from dips.core.layout import Layout, Share
from dips.core.observe.tape import Tape
from dips.worker.checkpoint import Checkpointing
from dips.worker.checkpoint_files import CheckpointStore, read_record, write_record
from dips.worker.commands import BeginCheckpoint, CommitCheckpoint, FindCheckpoint, Order, PutBack, ShareOut
from dips.worker.config import ClientConfig
from dips.worker.model_part import ModelPart
from dips.worker.parallel.agreement import Agreed, Alone, agree
from dips.worker.parallel.held import ShardOf, held_here
from dips.worker.parallel.rank_checkpoints import LeadingCheckpoints, RankCheckpoints
from dips.worker.parallel.rank_state import RankState, TorchState, merged
from dips.worker.parallel.shard_files import SavedShards, boxes_of, restore_vectors, write_shards
from dips.worker.torch_model import TorchParameters
from dips.worker.torch_state import HasState, StateTreeError
from dips.worker.vectors import Vectors

CHUNK_BYTES = 32


pytestmark = pytest.mark.usefixtures("one_thread")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        guessed: torch.Tensor = self.last(self.norm(self.first(x)))
        return guessed


class Counter:
    def __init__(self, n: int) -> None:
        self.n = n

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.n = state["n"]


class Seen:
    """Of a loader: tensors, one of them without elements."""

    def __init__(self, value: float) -> None:
        self.seen, self.none = torch.full((2,), value), torch.zeros(0, 3, dtype=torch.int32)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"seen": self.seen, "none": self.none}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.seen, self.none = state["seen"], state["none"]


class Loop:
    def __init__(self, steps: int, optimizer: str = "AdamW", **options: Any) -> None:
        torch.manual_seed(steps)
        self.net = Net()
        self.optimizer = getattr(torch.optim, optimizer)(self.net.parameters(), **({"lr": 0.1} | options))
        self.counter = Counter(steps)
        held = held_here([self.net], [self.optimizer])
        agreed = agree(Alone(), held, {})
        assert agreed is not None
        self.agreed: Agreed = agreed
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(torch.randn(4, 3)).square().sum().backward()
        self.optimizer.step()

    def state(self, **parts: HasState) -> RankState:
        return RankState(Alone(), self.agreed, [self.optimizer], {"counter": self.counter, **parts})


class Part:
    def __init__(self, loop: Loop) -> None:
        self.parameters = TorchParameters(loop.net, loop.optimizer)
        self.layout: Layout = self.parameters.layout()
        self.vectors = Vectors(self.layout.n_elems, self.parameters)
        self.vectors.base.fill(loop.counter.n)

    @property
    def owned(self) -> tuple[ModelPart, Share, int]:
        return cast(ModelPart, self), Share.whole(self.layout), self.layout.n_elems


def gone_on(before: Loop, after: Loop, folder: Path) -> None:
    told, shards = before.state().capture()
    saved = SavedShards(folder, [write_shards(folder, 0, shards)])
    after.state().restore(merged([json.loads(json.dumps(told))]), saved)


def test_options_go_on(tmp_path: Path) -> None:
    before, after = Loop(2, lr=0.25, betas=(0.5, 0.75)), Loop(0)
    gone_on(before, after, tmp_path)
    assert (after.optimizer.param_groups[0]["lr"], after.optimizer.param_groups[0]["betas"]) == (0.25, (0.5, 0.75))


class Counts(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = self.state[parameter].get("seen", 0) + 1


def test_numbers_that_an_optimizer_keeps_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "Counts", Counts, raising=False)
    after = Loop(0, "Counts")
    gone_on(Loop(3, "Counts"), after, tmp_path)
    assert [dict(kept) for kept in after.optimizer.state.values()] == [{"seen": 3}] * 6


class Inside(torch.optim.SGD):
    """Contains the optimizers that step and keep the moments, as torchtitan's does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        named = self.param_groups[0]["params"]
        self.optimizers = {"a": torch.optim.AdamW(named[:2], lr), "b": torch.optim.AdamW(named[2:], lr)}

    def step(self, closure: Any = None) -> Any:
        for optimizer in self.optimizers.values():
            optimizer.step()


def test_moments_of_optimizers_that_another_contains_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "Inside", Inside, raising=False)
    before, after = Loop(3, "Inside"), Loop(0, "Inside")
    gone_on(before, after, tmp_path)
    kept, back = ([*each.optimizers["a"].state.values(), *each.optimizers["b"].state.values()]
                  for each in (cast(Inside, before.optimizer), cast(Inside, after.optimizer)))  # fmt: skip
    assert len(kept) == 6
    for one, two in zip(kept, back, strict=True):
        assert torch.equal(one["exp_avg_sq"], two["exp_avg_sq"])
    before.optimizer.state[before.net.first.weight]["own"] = torch.zeros(1)
    with pytest.raises(StateTreeError, match="Inside keeps state of its own, outside of the optimizers"):
        before.state().capture()


class Factored(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["row"] = torch.zeros(parameter.shape[0] + 1)


class Tells(Factored):
    def step(self, closure: Any = None) -> Any:
        cast(Any, self.state)["all"] = {"seen": 1}


@pytest.mark.parametrize(("kind", "sentence"), [(Factored, "keeps 'row' of shape"), (Tells, "belongs to no parameter")])
def test_an_optimizer_whose_state_cannot_be_shared_out_is_named(
    monkeypatch: pytest.MonkeyPatch, kind: type, sentence: str
) -> None:
    monkeypatch.setattr(torch.optim, kind.__name__, kind, raising=False)
    with pytest.raises(ConfigError, match=f"{kind.__name__} keeps .*leave out checkpoint_dir") as raised:
        Loop(1, kind.__name__).state().capture()
    assert sentence in str(raised.value)


def test_moments_of_a_tensor_that_is_none_of_the_models_cannot_be_shared_out() -> None:
    loop, other = Loop(1), torch.nn.Parameter(torch.ones(7))
    loop.optimizer.add_param_group({"params": [other]})
    loop.state().capture()
    other.grad = torch.ones(7)
    loop.optimizer.step()
    with pytest.raises(StateTreeError, match=r"AdamW steps a tensor of shape \[7\] that is no parameter"):
        loop.state().capture()


def test_groups_that_were_others_are_refused(tmp_path: Path) -> None:
    before = Loop(1)
    first = before.net.first
    groups: list[dict[str, Any]] = [{"params": [first.weight]}, {"params": [first.bias], "lr": 0.5}]
    before.optimizer = torch.optim.AdamW(groups)
    with pytest.raises(ConfigError, match=r"'first.weight' and 'first.bias' are in one group .* different options"):
        gone_on(before, Loop(0), tmp_path)


def test_ranks_that_had_different_states_are_named_where_their_number_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether in numbers or in tensors; what else the ranks hold is each one's own."""
    for said, other in {"": 1.0, "different states of 'order', and there are 1 now": 2.0}.items():
        told, shards = zip(
            *(Loop(int(value), "SGD").state(order=Seen(value)).capture() for value in (1.0, other)), strict=True
        )  # fmt: skip
        saved, now, loop = SavedShards(tmp_path, [write_shards(tmp_path, 0, shards[0])]), Seen(0.0), Loop(0, "SGD")
        loop.state(order=now).restore(merged(told), saved)
        assert (now.seen.tolist(), loop.counter.n) == ([1.0, 1.0], 1)
        assert (now.none.shape, now.none.dtype) == ((0, 3), torch.int32), "also what has no elements"
        assert said in caplog.text
        assert len(caplog.records) == 2 * bool(said)


class OfTwo(Alone):
    """One rank of two. others: what the other one gives where this one gives `mine`."""

    n_ranks = 2

    def __init__(self, others: Callable[[bytes], bytes], rank: int = 0) -> None:
        self.others, self.rank = others, rank

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine, self.others(mine)][:: -1 if self.rank else 1]


def second(*buffers: object) -> OfTwo:
    """Rank 0; the other one steps nothing, and has these buffers."""
    return OfTwo(lambda mine: json.dumps([[], buffers]).encode())


def test_a_buffer_that_comes_after_the_start_is_refused_unless_no_file_needs_it() -> None:
    loop = Loop(1)
    state = loop.state()
    loop.net.norm.register_buffer("cache", torch.ones(2), persistent=False)
    state.capture()
    loop.net.norm.register_buffer("seen", torch.ones(2))
    with pytest.raises(StateTreeError, match=r"buffer 'norm.seen' was registered after the loop was entered"):
        state.capture()


def test_a_buffer_that_is_two_tensors_is_refused_at_the_start() -> None:
    loop = Loop(0)
    for dtype, shape in (("torch.float32", [7]), ("torch.float32", [5, 1]), ("torch.int64", [5])):
        other = ["norm.running_mean", dtype, shape, [0] * len(shape), shape]
        with pytest.raises(
            ConfigError, match=r"buffer 'norm.running_mean' is .* on rank 1, and .* one tensor of a name"
        ):
            RankState(second(other), loop.agreed, [loop.optimizer])


def test_the_optimizers_state_of_a_tied_parameter_is_written_by_the_rank_that_steps_it() -> None:
    loop = Loop(1)
    both = replace(loop.agreed, held=(*loop.agreed.held, *loop.agreed.held))
    _, shards = RankState(second(), both, [loop.optimizer]).capture()
    written = {shard.name for shard in shards if shard.name.startswith("optimizer.")}
    names = [name for name, _ in loop.net.named_parameters()]
    assert written == {f"optimizer.{name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}


def test_what_several_ranks_hold_is_written_once_and_each_writes_a_part() -> None:
    loop = Loop(1)
    both = replace(loop.agreed, held=(*loop.agreed.held, *loop.agreed.held))
    states = [RankState(OfTwo(lambda mine: mine, n), replace(both, rank=n), [loop.optimizer]) for n in range(2)]
    written = [[shard.name for shard in state.capture()[1] if not shard.name.startswith("ranks.")] for state in states]
    alone = [shard.name for shard in loop.state().capture()[1] if not shard.name.startswith("ranks.")]
    assert sorted(written[0] + written[1]) == sorted(alone)
    assert all(any("exp_avg" in name for name in each) for each in written)


def test_what_ranks_hold_in_part_and_in_fewer_bits_goes_on_to_the_last_element(tmp_path: Path) -> None:
    """Rank 0 holds all, and rank 1 three elements in the middle."""

    def made(seat: Seat, value: float) -> tuple[torch.nn.Module, torch.Tensor, torch.optim.Optimizer, RankState]:
        start, size = ((0, 10), (3, 3))[seat.rank]
        net, master = torch.nn.Module(), torch.arange(float(start), float(start + size))
        net.register_parameter("w", torch.nn.Parameter((master + value).bfloat16()))
        optimizer = torch.optim.SGD([master], lr=0.0, momentum=0.5)
        master.grad = master * value
        optimizer.step()
        shards, masters = {"w": ShardOf("w", (10,), (start,))}, {"w": master}
        agreed = agree(seat, held_here([net], [optimizer], shards=shards, master_parameters=masters), {})
        assert agreed is not None
        return net, master, optimizer, RankState(seat, agreed, [optimizer])

    def ranks(value: float) -> Any:
        return RankTable(2).together(lambda seat: made(seat, value))

    states, files = [], []
    for rank, each in enumerate(ranks(2.0)):
        told, shards = each[3].capture()
        states.append(told)
        files.append(write_shards(tmp_path, rank, shards))
    for net, master, optimizer, state in ranks(3.0):
        state.restore(merged(states), SavedShards(tmp_path, files))
        assert torch.equal(net.w.float(), master + 2.0)
        assert torch.equal(optimizer.state[master]["momentum_buffer"], master * 2.0)


def test_the_installed_version_of_ranks_that_own_parameters_in_fewer_bits_is_enough(tmp_path: Path) -> None:
    """The others need none; so ranks of another cut, and one process, must not ask for all of it."""
    shares = [Share.of_runs([(0, 12)]), Share.of_runs([(12, 20)])]
    written = [["theta_base", "theta_installed"], ["theta_base"]]
    files = []
    for rank, (share, names) in enumerate(zip(shares, written, strict=True)):
        vector = np.full(share.n_elems, rank + 1, np.float32)
        files.append(write_shards(tmp_path, rank, [box for name in names for box in boxes_of(name, vector, share, 20)]))
    saved = SavedShards(tmp_path, files)
    for share in (*shares, Share.of_runs([(0, 20)])):
        vectors = Vectors(share.n_elems)
        restore_vectors(vectors, saved, share, 20, with_residual=False)
        assert np.array_equal(vectors.base, np.where(np.arange(20) < 12, 1, 2)[slice(*share.runs()[0])])


class OneRank:
    """A cluster of this rank alone, as LeadingCheckpoints sees it (rank_part.LeadingPart)."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self, own: RankCheckpoints, part: Part) -> None:
        self.own, self.part = own, part
        self.checkpoint_is_written = False
        self.shared_by: int | None = None

    def do(self, command: Order) -> Any:
        match command:
            case ShareOut(chunk_bytes):
                self.shared_by = chunk_bytes
            case BeginCheckpoint(number, session):
                self.own.begin(*self.part.owned, number, session)
            case CommitCheckpoint():
                return self.own.commit()
            case FindCheckpoint(number):
                return self.own.find(number)
            case PutBack(with_residual):
                self.own.put_back(*self.part.owned, with_residual=with_residual)


class Cluster:
    def __init__(self, folder: Path, steps: int, **config: Any) -> None:
        self.loop = Loop(steps)
        self.part = Part(self.loop)
        self.clock = ManualClock()
        self.bench = ClusterBench()
        self.bench.begin()
        self.bench.train(1)
        store = CheckpointStore(folder, 2)
        own = RankCheckpoints(folder, Alone(), self.loop.state())
        self.ranks = OneRank(own, self.part)
        settings = ClientConfig(checkpoint_dir=folder, checkpoint_every_s=10.0, **config)
        self.checkpoints = LeadingCheckpoints(self.ranks, store, settings, self.clock)
        self.checkpoints.begin(lambda event: None, Tape(None, "worker", ""))

    def take(self, label: str = "a") -> bool:
        return self.checkpoints.take_now(self.bench.session, "cause", label)

    def resume(self, label: str | None = None) -> bool:
        return self.checkpoints.resume(ClusterBench().session, label)

    def close(self) -> None:
        self.ranks.own.close()
        self.checkpoints.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """After one step."""
    with closing(Cluster(tmp_path, 1)) as cluster:
        yield cluster


def test_the_newest_of_a_label_is_gone_on_from(tmp_path: Path) -> None:
    first = Cluster(tmp_path, 2)
    assert first.take("step 2")
    theta = np.zeros(first.part.layout.n_elems, np.float32)
    first.part.parameters.snapshot(theta)
    first.loop.step()
    assert first.take("step 3")
    first.close()
    next_one = Cluster(tmp_path, 0)
    assert not next_one.resume("step 4")
    assert next_one.resume("step 2")
    assert next_one.ranks.shared_by == CHUNK_BYTES
    assert next_one.loop.counter.n == 2
    assert np.array_equal(next_one.part.vectors.base, np.full(theta.size, 2, np.float32))
    again = np.zeros_like(theta)
    next_one.part.parameters.snapshot(again)
    assert np.array_equal(again, theta)
    next_one.close()


def of_one_process(folder: Path, loop: Loop, part: Part, **settings: Any) -> Checkpointing:
    inner = TorchState(loop.net, loop.optimizer, {"counter": loop.counter})
    return begun(folder, ClientConfig(checkpoint_dir=folder, **settings), part, inner, ManualClock())


def begun(
    folder: Path, config: ClientConfig, part: Part, inner: TorchState | None, clock: ManualClock
) -> Checkpointing:  # fmt: skip
    kept = Checkpointing(config, CheckpointStore(folder, 3), part.parameters, part.vectors, inner, clock)
    kept.begin(lambda event: None, Tape(None, "worker", ""))
    return kept


def written_by_one_process(folder: Path, steps: int) -> tuple[Loop, Part]:
    loop = Loop(steps)
    part, bench = Part(loop), ClusterBench()
    bench.begin()
    bench.train(1)
    kept = of_one_process(folder, loop, part)
    assert kept.take_now(bench.session, "cause", "x")
    kept.close()
    return loop, part


def everything(loop: Loop, part: Part) -> list[Any]:
    theta = np.zeros(part.layout.n_elems, np.float32)
    part.parameters.snapshot(theta)
    moments = [tensor.tolist() for state in loop.optimizer.state.values() for tensor in state.values()]
    return [theta.tolist(), part.vectors.base.tolist(), moments, [buffer.tolist() for buffer in loop.net.buffers()]]


def test_ranks_go_on_from_what_one_process_wrote_and_one_process_too(tmp_path: Path) -> None:
    loop, part = written_by_one_process(tmp_path, 2)
    expected = everything(loop, part)
    ranks = Cluster(tmp_path, 0)
    assert ranks.resume()
    assert (everything(ranks.loop, ranks.part), ranks.loop.counter.n) == (expected, 2)
    ranks.close()
    again = Loop(0)
    kept = of_one_process(tmp_path, again, other := Part(again))
    assert kept.resume(ClusterBench().session)
    kept.close()
    assert (everything(again, other), again.counter.n) == (expected, 2)


def test_what_fails_while_one_process_writes_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no such file")

    loop, bench = Loop(1), ClusterBench()
    with closing(of_one_process(tmp_path, loop, Part(loop), checkpoint_every_s=0.0)) as kept:
        assert not kept.take_now(bench.session, "cause", "x"), "there is nothing to go on from"
        bench.begin()
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointStore, "write", fails)
            assert not kept.take_now(bench.session, "cause", "x")
        assert "no such file" in caplog.text
        kept.take_if_due(bench.session, "cause")
        assert kept.take_now(bench.session, "cause", "x"), "after the one under way"
    assert len(list(tmp_path.glob("checkpoint-*.json"))) == 2


@pytest.mark.parametrize("damage", ["first bytes", "header", "data", "cut", "no length"])
def test_a_damaged_checkpoint_of_one_process_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    loop, part = written_by_one_process(tmp_path, 1)
    path, manifest = tmp_path / "checkpoint-00000001.safetensors", tmp_path / "checkpoint-00000001.json"
    data = bytearray(path.read_bytes())
    if damage == "no length":
        body = read_record(manifest)
        del body["tensors"]["n_bytes"]
        write_record(manifest, body)
    elif damage == "cut":
        del data[-1]
    else:
        data[{"first bytes": 1, "header": 40, "data": len(data) - 9}[damage]] ^= 1
    path.write_bytes(data)
    ranks = Cluster(tmp_path, 0)
    assert not ranks.resume()
    ranks.close()
    kept = of_one_process(tmp_path, loop, part)
    assert not kept.resume(ClusterBench().session)
    kept.close()
    assert caplog.text.count(f"checkpoint 1 in {tmp_path} cannot be used: ") == 2


def test_checkpoints_of_earlier_releases_are_gone_on_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their numbers: theta of the i-th parameter is i and an eighth more for each element, its moments i + 1/4, 1/2."""
    for kind in ("one", "ranks"):
        shutil.copytree(ROOT / "tests" / "frozen" / "checkpoints" / kind, tmp_path / kind)
        loop = Loop(0)
        part = Part(loop)
        kept = of_one_process(tmp_path / kind, loop, part)
        assert kept.resume(ClusterBench().session), kind
        kept.close()
        for i, parameter in enumerate(loop.net.parameters()):
            assert torch.equal(parameter.flatten(), torch.arange(parameter.numel()) / 8 + i), kind
            moments = loop.optimizer.state[parameter]
            assert (moments["exp_avg"].unique(), moments["exp_avg_sq"].unique()) == (i + 0.25, i + 0.5), kind
        assert (loop.counter.n, dict(loop.net.named_buffers())["norm.running_var"].tolist()) == (3, [1.25] * 5)
    ranks = Cluster(tmp_path / "ranks", 0)
    assert ranks.resume()
    ranks.close()
    ranks = Cluster(tmp_path / "one", 0)
    assert not ranks.resume()
    assert "keeps its state without names of parameters: resume with one process; trying" in caplog.text
    ranks.close()


def test_one_that_is_damaged_is_passed_over_with_a_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Cluster(tmp_path, 1)
    assert first.take()
    first.loop.counter.n = 2
    assert first.take()
    first.close()
    path = tmp_path / "checkpoint-00000002.ranks" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-5])
    next_one = Cluster(tmp_path, 0)
    caplog.set_level(logging.INFO)
    assert next_one.resume()
    assert next_one.loop.counter.n == 1
    said = [record.getMessage() for record in caplog.records]
    assert any(f"checkpoint 2 in {tmp_path} cannot be used: __0_0.distcp has" in line for line in said)
    assert said[-1].startswith(f"resumed from checkpoint 1 in {tmp_path}, which one process has written: version")
    next_one.close()


def test_without_one_that_can_be_used_it_begins_anew_unless_one_is_required(tmp_path: Path) -> None:
    first = Cluster(tmp_path, 1)
    assert not first.resume()
    assert first.take()
    first.close()
    (tmp_path / "checkpoint-00000001.json").write_text("{}")
    required = Cluster(tmp_path, 0, resume_required=True)
    with pytest.raises(ConfigError, match=r"no checkpoint in .* can be used, and one is required"):
        required.resume()
    required.close()


def test_at_intervals_one_is_begun_at_a_boundary_and_completed_at_a_later_one(cluster: Cluster, tmp_path: Path) -> None:
    session, kept = cluster.bench.session, cluster.checkpoints
    kept.take_if_due(session, "cause")
    first_step_s = cluster.clock.monotonic_s()
    assert not list(tmp_path.glob("*.ranks"))
    cluster.clock.advance(11.0)
    assert kept.wants_boundary
    kept.take_if_due(session, "cause")
    assert list(tmp_path.glob("*.ranks"))
    assert not kept.wants_boundary, "the ranks have not said that they have written"
    kept.take_if_due(session, "cause")
    assert not list(tmp_path.glob("*.json"))
    assert kept.written_s == first_step_s, "its age counts from there before the first one"
    cluster.ranks.checkpoint_is_written = True
    assert kept.wants_boundary
    kept.take_if_due(session, "cause")
    assert kept.written_s == first_step_s + 11.0
    assert list(tmp_path.glob("*.json"))
    assert not kept.wants_boundary


def test_what_is_on_its_way_at_the_end_is_completed(cluster: Cluster) -> None:
    cluster.clock.advance(11.0)
    cluster.checkpoints.take_if_due(cluster.bench.session, "cause")
    assert cluster.checkpoints.finish()
    assert not cluster.checkpoints.finish(), "there is no other"
    cluster.clock.advance(11.0)
    cluster.checkpoints.take_if_due(cluster.bench.session, "cause")
    assert cluster.take(), "after the one under way"
    assert cluster.checkpoints._store.numbers() == [2, 3]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_cannot_keep_is_said_on_every_rank(cluster: Cluster, tmp_path: Path, rank: int) -> None:
    """The other rank has state that no checkpoint holds, or this one has an optimizer of such a kind."""
    first = {b"[": b'[".", ""]', b"1": b"1", b"": b"no such state"}  # of the folder, and of the checkpoint
    own = RankCheckpoints(tmp_path, OfTwo(lambda mine: first.get(mine[:1], b""), rank), cluster.loop.state())
    (tmp_path / "checkpoint-00000001.ranks").mkdir()
    saved = cluster.bench.session.saved()
    assert saved is not None
    for says in (
        f"rank {1 - rank} of this cluster can keep no checkpoint: no such",
        f"rank {rank} of .* has tensors in containers",
    ):
        own.begin(*cluster.part.owned, 1, json.dumps(saved.to_json()))
        with pytest.raises(ConfigError, match=says):
            own.commit()
        cluster.loop.optimizer.state[cluster.loop.net.last.bias]["kept"] = [torch.ones(1)]
    own.close()


def test_the_time_in_which_all_ranks_wait_for_the_manifest_is_part_of_the_pause(
    cluster: Cluster, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = []
    tape: Any = SimpleNamespace(write=lambda event, cause, **values: rows.append(values))
    cluster.checkpoints.begin(lambda event: None, tape)
    do = cluster.ranks.do

    def slowly(command: Order) -> Any:
        cluster.clock.advance(3.0 * isinstance(command, CommitCheckpoint))
        return do(command)

    cluster.ranks.do = slowly  # type: ignore[method-assign]
    assert cluster.take()
    assert (rows[0]["pause_s"], rows[0]["write_s"]) == (3.0, 3.0)
    assert rows[0]["bytes"] == sum(file.stat().st_size for file in tmp_path.glob("*.ranks/__*"))


@pytest.mark.parametrize(
    ("fails", "error"),
    [
        ("parallel.rank_checkpoints.write_shards", ValueError("No space")),
        *((name, OSError(errno.ENOSPC, "No space")) for name in (
            "parallel.rank_checkpoints.write_shards", "parallel.rank_checkpoints.write_metadata",
            "checkpoint_files.make_folder", "checkpoint_files.write_record",
        )),
    ],
)  # fmt: skip
def test_what_fails_while_a_checkpoint_is_written_ends_nothing_and_leaves_nothing(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str,
    error: Exception,
) -> None:  # fmt: skip
    def full(*given: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(f"dips.worker.{fails}", full)
        assert not cluster.take()
    assert "No space" in caplog.text
    assert "; training goes on" in caplog.text
    assert not list(tmp_path.glob("checkpoint-*"))
    assert not cluster.checkpoints.take_now(ClusterBench().session, "cause", "a"), "before the first version"
    assert cluster.take()


def test_a_rank_that_does_not_see_the_leaders_folder_is_named(tmp_path: Path) -> None:
    """It has a disk of its own."""
    with pytest.raises(ConfigError, match=r"rank 1 of this cluster does not see rank 0's folder .* all ranks share"):
        RankCheckpoints(tmp_path, OfTwo(lambda mine: b""), cast(Any, None))
    assert not list(tmp_path.iterdir())


def test_a_rank_that_may_not_look_into_the_folder_does_not_see_it(tmp_path: Path) -> None:
    """The name that it is told cannot even be asked for."""
    first = OfTwo(lambda mine: json.dumps(["x" * 300, ""]).encode() if mine.startswith(b"[") else b"1", rank=1)
    with pytest.raises(ConfigError, match=r"rank 1 of this cluster does not see rank 0's folder"):
        RankCheckpoints(tmp_path, first, cast(Any, None))


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_read_other_manifests_agree_on_none(cluster: Cluster, tmp_path: Path, rank: int) -> None:
    assert cluster.take()
    said = {b'[".': b'[".", ""]', b'[""': b'["", "another"]'}
    for answers, found in ((said, ["", "rank 1 has another one of this number"]), ({b'[".': b'[".", ""]'}, ["", ""])):
        other = OfTwo(lambda mine, answers=answers: answers.get(mine[:3], mine), rank)  # type: ignore[misc]
        own = RankCheckpoints(tmp_path, other, cast(Any, None))
        assert own.find(1) == found
        own.close()


def test_the_age_of_a_checkpoint_that_could_never_be_written_counts_from_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(CheckpointStore, "write", full)
    clock, bench, part = ManualClock(), ClusterBench(), Part(Loop(1))
    bench.begin()
    bench.train(1)
    kept = begun(tmp_path, ClientConfig(checkpoint_dir=tmp_path, checkpoint_every_s=10.0), part, None, clock)
    clock.advance(100.0)
    assert math.isnan(kept.written_s), "a process that waits for its run has nothing to lose"
    first_step_s = clock.monotonic_s()
    for _ in range(3):
        kept.take_if_due(bench.session, "cause")
        clock.advance(20.0)
    kept.close()
    assert kept.written_s == first_step_s
