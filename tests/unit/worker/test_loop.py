"""dips.DiLoCo without a master: it must change nothing; and what it refuses."""

from __future__ import annotations

import logging
import math
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

import dips
from dips.core.errors import TERMINATED, ConfigError, DipsError, RetryLater, option
from dips.worker.commands import GoOn
from dips.worker.step_checks import Losses


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER", "CLUSTER", "RUN", "KEYS", "INSECURE"):
        monkeypatch.delenv(f"DIPS_{name}", raising=False)


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4)).square().sum().backward()
    optimizer.step()


def test_without_a_master_the_loop_is_ordinary_training(caplog: pytest.LogCaptureFixture) -> None:
    plain, plain_optimizer = make()
    for _ in range(5):
        step(plain, plain_optimizer)
    model, optimizer = make()
    with caplog.at_level(logging.INFO), dips.DiLoCo(model, optimizer, tokens_per_step=10, steps=5) as sync:
        assert not sync.active
        assert sync.version is None
        while not sync.done:
            step(model, optimizer)
    assert torch.equal(model.weight, plain.weight)  # type: ignore[arg-type]
    assert sync.steps == 5
    assert [r.message for r in caplog.records] == ["DIPS_MASTER is not set: training alone, nothing is shared"]


class Ranks:
    """Other ranks, one of which got a SIGTERM, as all hear where they meet for a checkpoint."""

    released = False

    def __init__(self) -> None:
        self.news = GoOn()

    @property
    def done(self) -> bool:
        return self.news.done

    def step(self, tokens: int, *, is_empty: bool) -> None: ...

    def checkpoint_if_due(self) -> None:
        self.news = GoOn(done=True, ends=True)


def test_a_sigterm_of_another_rank_that_is_heard_at_a_checkpoint_ends_this_one_in_the_same_step() -> None:
    """In the next one it would wait for the ranks that have ended."""
    model, optimizer = make()
    with dips.DiLoCo(model, optimizer, tokens_per_step=10) as sync:
        sync._together = cast(Any, Ranks())
        with pytest.raises(SystemExit) as ended:
            step(model, optimizer)
        sync._together = None
    assert ended.value.code == TERMINATED
    assert sync.steps == 1


class RanksThatLeft(Ranks):
    def __init__(self) -> None:
        self.news = GoOn(done=True)

    def checkpoint_if_due(self) -> None: ...


@pytest.mark.parametrize("ended", [False, True])
def test_losses_that_no_run_reads_are_not_kept(ended: bool) -> None:
    model, optimizer = make()
    with dips.DiLoCo(model, optimizer, tokens_per_step=10) as sync:
        sync._together = cast(Any, RanksThatLeft()) if ended else None
        sizes = set()
        for _ in range(100):
            sync.report(1.0)
            step(model, optimizer)
            sizes.add(len(pickle.dumps(sync._losses)))
        sync._together = None
    assert len(sizes) == 1


def make_two() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.Muon([model.weight], lr=0.1), torch.optim.AdamW([model.bias], lr=0.1)


def step_both(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], sync: dips.DiLoCo) -> None:
    """One iteration, after which one more step is counted, and not before."""
    before = sync.steps
    model(torch.ones(4)).square().sum().backward()
    for optimizer in optimizers:
        assert sync.steps == before
        optimizer.step()
    assert sync.steps == before + 1


@pytest.mark.parametrize("turned", [False, True])
def test_a_step_is_complete_when_each_of_several_optimizers_has_made_one(turned: bool) -> None:
    model, muon, adamw = make_two()
    order = (adamw, muon) if turned else (muon, adamw)
    with dips.DiLoCo(model, [muon, adamw], tokens_per_step=10) as sync:
        for _ in range(2):
            step_both(model, order, sync)
    assert sync.progress == 20


class Shell:
    """A cluster's, that only remembers what becomes of the last steps."""

    done = released = push_is_near = False
    push_pending = False

    def step(self, tokens: int, *, loss: float) -> None: ...

    def checkpoint_if_due(self) -> None: ...

    def close(self, reason: str, *, push_pending: bool, patient: bool) -> None:
        self.push_pending = push_pending


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("skips_last", [False, True])
def test_an_optimizer_whose_step_is_skipped_moves_no_later_step(turned: bool, asks: bool, skips_last: bool) -> None:
    """A GradScaler skips the step of one optimizer alone when its gradients overflow."""
    model, muon, adamw = make_two()
    order = (adamw, muon) if turned else (muon, adamw)
    with dips.DiLoCo(model, [muon, adamw], tokens_per_step=10) as sync:
        shell = Shell()
        sync._shell = cast(Any, shell)
        if not asks:
            step_both(model, order, sync)  # a loop that does not read `done` shows its order with its first whole step
        for skipped in order:
            assert not asks or not sync.done
            model(torch.ones(4)).square().sum().backward()
            (other,) = {muon, adamw} - {skipped}
            other.step()
            for _ in range(2):
                assert not asks or not sync.done
                step_both(model, order, sync)
        if skips_last:
            order[0].step()
    assert shell.push_pending


def test_a_fused_optimizer_that_finds_an_overflow_makes_no_step() -> None:
    """GradScaler calls it all the same: it decides by itself that nothing changes."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    with dips.DiLoCo(model, optimizer, tokens_per_step=10) as sync:
        for scale in (1.0, math.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale(scale * model(torch.ones(4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert (sync.steps, sync.progress) == (2, 20)


def test_a_list_of_optimizers_has_each_once() -> None:
    model, muon, _ = make_two()
    for optimizers in ([], [muon, muon]):
        with pytest.raises(ConfigError, match="give each optimizer that steps the model once"):
            dips.DiLoCo(model, optimizers, tokens_per_step=10)
    model, *both = make_two()
    dips.DiLoCo(model, both, tokens_per_step=10)
    for optimizer in both:
        with pytest.raises(ConfigError, match="not entered"):
            optimizer.step()


class Prepared(torch.optim.Optimizer):
    """As Accelerate makes of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state


Prepared.__module__ = "accelerate.optimizer"


def test_a_step_of_an_optimizer_that_a_trainer_prepared_is_one_of_that_inside() -> None:
    model, optimizer = make()
    with dips.DiLoCo(model, Prepared(optimizer), tokens_per_step=10) as sync:
        step(model, optimizer)
    assert sync.steps == 1


def test_count_overrides_the_next_step_only() -> None:
    model, optimizer = make()
    with dips.DiLoCo(model, optimizer, tokens_per_step=10) as sync:
        sync.count(3, loss=1.0)
        step(model, optimizer)
        step(model, optimizer)
        assert sync.progress == 13


def test_a_loop_that_forgot_with_is_told_so_at_its_first_step_also_where_it_does_not_keep_the_object() -> None:
    model, optimizer = make()
    dips.DiLoCo(model, optimizer, tokens_per_step=10)
    with pytest.raises(ConfigError, match="not entered"):
        step(model, optimizer)
    sync = dips.DiLoCo(model, optimizer, tokens_per_step=10)
    for use in (lambda: sync.done, lambda: sync.count(1), lambda: sync.report(1.0), lambda: step(model, optimizer)):
        with pytest.raises(
            ConfigError, match=r"write `with dips.DiLoCo\(model, optimizer, tokens_per_step=...\) as sync:`"
        ):
            use()
    with sync:
        step(model, optimizer)
    assert sync.steps == 1


def test_an_object_that_another_one_replaced_asks_for_nothing() -> None:
    model, optimizer = make()
    first = dips.DiLoCo(model, optimizer, tokens_per_step=10)
    with dips.DiLoCo(model, optimizer, tokens_per_step=10) as sync:
        step(model, optimizer)
    step(model, optimizer)
    assert (first.steps, sync.steps) == (0, 1)


def test_a_loop_has_ended_after_the_block_and_one_that_stands_outside_is_told_so() -> None:
    with pytest.raises(ConfigError, match="done before the `with` block"):
        _ = dips.DiLoCo(*make(), tokens_per_step=10).done
    with dips.DiLoCo(*make(), tokens_per_step=10) as sync:
        assert not sync.done
    assert sync.done
    with pytest.raises(ConfigError, match="indent the loop"):
        sync.count(1)
    with dips.DiLoCo(*make(), tokens_per_step=10) as empty:
        pass
    with pytest.raises(ConfigError, match="done after the `with` block"):
        _ = empty.done


def test_losses_are_averaged_over_what_was_reported_since_they_were_read() -> None:
    losses = Losses()
    assert math.isnan(losses.take(0.0, push_is_due=True))
    for loss in (1.0, torch.tensor(2.0, requires_grad=True), torch.tensor([6.0], dtype=torch.bfloat16)):
        losses.add(loss)
    assert losses.take(0.0, push_is_due=False) == 3.0
    assert math.isnan(losses.take(0.0, push_is_due=True))


@pytest.mark.parametrize(
    ("loss", "sentence"), [(torch.ones(3), "3 elements"), ("much", "is a str"), (None, "NoneType")]
)
def test_what_is_no_loss_is_refused(loss: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Losses().add(loss)  # type: ignore[arg-type]


def test_a_loss_that_is_not_finite_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    losses = Losses()
    for loss in (1.0, math.inf, math.nan, torch.tensor(math.nan)):
        losses.add(loss)
        losses.take(0.0, push_is_due=True)
    (record,) = caplog.records
    assert record.getMessage().startswith("sync.report() or count() got a loss that is inf: ")


def test_a_loss_on_a_device_is_not_read_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[torch.Tensor] = []

    def item(tensor: torch.Tensor) -> float:
        read.append(tensor)
        return 4.0

    monkeypatch.setattr(torch.Tensor, "item", item)
    losses = Losses()  # tensors of the device "meta" have no values: whoever reads one stumbles, but for the line above
    looks = [(0.0, False, 4.0), (0.1, False, None), (0.2, True, 2.0), (2.1, False, None), (2.3, False, 2.0)]
    for now_s, push_is_due, wanted in looks:
        losses.add(torch.ones((), device="meta"))
        told = losses.take(now_s, push_is_due=push_is_due)
        assert math.isnan(told) if wanted is None else told == wanted
    assert len(read) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "tokens_per_step is missing: give the tokens of one optimizer.step"),
        ({"tokens_per_step": 0}, "tokens_per_step is 0: give the tokens of one optimizer.step"),
        ({"tokens_per_step": 8.5}, r"tokens_per_step is 8.5: .* a whole number of at least 1"),
        ({"tokens_per_step": 1, "steps": -1}, "steps is -1"),
        ({"tokens_per_step": 1, "wire_dtype": "int2"}, "'int2': give one of float32, bfloat16, int8, int4"),
        ({"tokens_per_step": 1, "buffers": "mine"}, 'buffers is \'mine\': give "own", or "average"'),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        dips.DiLoCo(*make(), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"cluster_id": None}, "the cluster's name is missing: set DIPS_CLUSTER, or give cluster_id="),
        (
            {"insecure": None},
            "cluster a has no keys: give keys= (or DIPS_KEYS=DIR) with an identity made by `dips keys`",
        ),
        ({"keys": "nowhere", "insecure": None}, "nowhere/ca.crt cannot be read"),
        ({"resume": True}, "resuming needs checkpoints: give checkpoint_dir=, or leave out resume="),
        ({"outer_lr": -1.0}, "dips.DiLoCo: outer_lr = -1.0: "),
        ({"state": {"scheduler": 3}}, "state 'scheduler' is a int: give an object with state_dict()"),
        ({"master": "10.0.0.1:1"}, "give keys= instead of insecure="),
    ],
)
def test_a_wrong_setting_names_the_keyword_argument_and_no_option(arguments: dict[str, Any], sentence: str) -> None:
    good = {"tokens_per_step": 8, "master": "127.0.0.1:1", "cluster_id": "a", "insecure": True}
    model = torch.nn.Linear(2, 1)
    with (
        pytest.raises(ConfigError) as caught,
        dips.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), **{**good, **arguments}),
    ):
        pass
    assert sentence in str(caught.value)
    assert "--" not in str(caught.value)


class ZeroRedundancyOptimizer(torch.optim.SGD):
    pass


def test_an_optimizer_that_cuts_its_state_is_refused_before_anything_is_joined() -> None:
    model = make()[0]
    optimizer = ZeroRedundancyOptimizer(model.parameters(), lr=0.1)
    where = {"master": "127.0.0.1:1", "cluster_id": "a", "insecure": True}
    with pytest.raises(ConfigError, match="ZeroRedundancyOptimizer cuts"):
        dips.DiLoCo(model, optimizer, tokens_per_step=8, **where).__enter__()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ConfigError, RetryLater])
def test_what_joining_raises_names_the_keyword_argument_too(
    kind: type[DipsError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(sync: dips.DiLoCo) -> None:
        raise kind(f"give {option('keys', 'DIR')} instead of {option('insecure')}")

    monkeypatch.setattr(dips.DiLoCo, "_join", refuse)
    with pytest.raises(kind) as caught, dips.DiLoCo(*make(), tokens_per_step=8):
        pass
    assert str(caught.value) == "give keys= instead of insecure="
    assert option("keys", "DIR") == "--keys DIR", "elsewhere it is the command line's"


@pytest.mark.parametrize("name", ["replicas", "group", "data_mesh", "shards", "order", "master_parameters"])
def test_what_has_moved_to_the_value_of_the_ranks_is_refused_with_where_to_give_it(name: str) -> None:
    moved: dict[str, Any] = {name: None}
    with pytest.raises(ConfigError, match=f"give parallel=dips.Parallel\\({name}=...\\)"):
        dips.DiLoCo(*make(), tokens_per_step=8, **moved)
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
        dips.DiLoCo(*make(), tokens_per_step=8, x=1)


def test_count_refuses_nothing_trained() -> None:
    with dips.DiLoCo(*make(), tokens_per_step=10) as sync, pytest.raises(ConfigError, match="at least 1 token"):
        sync.count(0)
    with dips.DiLoCo(*make(), tokens_per_step=10) as sync, pytest.raises(ConfigError, match="a whole number"):
        sync.count(2.5)  # type: ignore[arg-type]


def test_import_dips_does_not_import_torch() -> None:
    code = "import sys, dips, dips.worker.shell, dips.worker.reader; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
