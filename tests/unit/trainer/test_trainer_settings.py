"""Settings of the trainer, its inner step, its speed measurement, and signals."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dips.core.config import load
from dips.core.errors import ConfigError, FatalError
from dips.trainer import calibrate
from dips.trainer.config import SECTION, TrainConfig
from dips.trainer.corpus import all_ranges
from dips.trainer.cut_model import CutModel
from dips.trainer.data import LeasedBatches
from dips.trainer.model import ByteModel
from dips.trainer.parallelism import Parallelism
from dips.trainer.progress import StopSignals
from dips.trainer.sizes import ModelConfig
from dips.trainer.train import InnerTrainer, device_of, inner_step, make_optimizers


def config(text: Path, **changes: object) -> TrainConfig:
    given = {"data": (text,), "chunk_tokens": 64, "sequence_tokens": 32, "batch_size": 2, **changes}
    return load(TrainConfig, SECTION, environment={}, overrides=given).value


def test_text_settings_are_read_as_written_on_a_command_line() -> None:
    given = {"max_bytes": "2 MB", "warmup_tokens": "20k", "lr": "1e-3", "data": ["a", "b"], "emulate_gap": "0.5"}
    train = load(TrainConfig, SECTION, environment={}, overrides=given).value
    assert (train.max_bytes, train.warmup_tokens, train.lr, train.emulate_gap) == (2_000_000, 20_000, 1e-3, 0.5)
    assert train.data == (Path("a"), Path("b"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_size", "huge"),
        ("emulate_gap", 0.99),
        ("lr", 0),
        ("device", "tpu"),
        ("heldout_fraction", 0.9),
        ("inner_optimizer", "sgd"),
    ],
)
def test_a_wrong_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        load(TrainConfig, SECTION, environment={}, overrides={field: value})


def test_a_cuda_device_is_taken_if_there_is_one_unless_the_cpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [device_of(TrainConfig(device=name)).type for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="finds no CUDA device: give --device cpu"):
        device_of(TrainConfig(device="cuda"))
    assert device_of(TrainConfig(device="auto")).type == "cpu"


def test_the_learning_rate_of_a_step_is_the_one_given(text: Path) -> None:
    inner = InnerTrainer(config(text, device="cpu", weight_decay=0.0))
    batches = LeasedBatches(inner.text, 2, 32)
    batches.add([next(all_ranges(inner.text.plan))])
    before = inner.model.embedding.weight.detach().clone()
    inner.step(batches.next(), 1e-5)
    moved = (inner.model.embedding.weight.detach() - before).abs().max().item()
    assert 0 < moved < 1.1e-5


class Operations(TorchDispatchMode):
    """Counts those that read one number back, for which the host waits until the device has computed it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_does_not_wait_for_its_device_between_forward_backward_and_the_optimizer(text: Path) -> None:
    inner = InnerTrainer(config(text, device="cpu"))
    batches = LeasedBatches(inner.text, 2, 32)
    batches.add([next(all_ranges(inner.text.plan))])
    with Operations() as seen:
        inner_step(inner.model, (), batches.next(), 1e-3, 1.0)
    assert seen.n["_local_scalar_dense"] == 0  # the loss and the norm are read as one tensor
    assert seen.n["stack"] or seen.n["cat"]


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_no_number_changes_nothing_and_ends_the_process(
    text: Path, what: str, is_cut: bool
) -> None:
    """Also on a rank that holds a part of the model."""
    inner = InnerTrainer(config(text, device="cpu"))
    if is_cut:
        inner.cut = CutModel(inner.model, Parallelism(), 2, 32)
    batches = LeasedBatches(inner.text, 2, 32)
    batches.add([next(all_ranges(inner.text.plan))])
    if what == "gradient":
        inner.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    else:
        inner.model.norm.weight.detach().fill_(math.nan)
    before = inner.model.embedding.weight.detach().clone()
    with pytest.raises(FatalError, match=r"the loss is nan .*lower --lr"):
        inner.step(batches.next(), 1e-3)
    assert torch.equal(inner.model.embedding.weight, before)


def test_only_matrices_decay() -> None:
    model = ByteModel(ModelConfig(32, 1, 16))
    (optimizer,) = make_optimizers(model, TrainConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    assert all(decay[id(p)] == (0.3 if p.ndim == 2 else 0.0) for p in model.parameters())


def test_muon_steps_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    model = ByteModel(ModelConfig(32, 2, 16))
    muon, adamw = make_optimizers(model, TrainConfig(inner_optimizer="muon", weight_decay=0.3, lr=0.01))
    assert [type(muon), type(adamw)] == [torch.optim.Muon, torch.optim.AdamW]
    name_of = {id(p): name for name, p in model.named_parameters()}
    stepped = [[name_of[id(p)] for group in each.param_groups for p in group["params"]] for each in (muon, adamw)]
    assert sorted(stepped[0]) == sorted(n for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n)
    assert sorted(stepped[0] + stepped[1]) == sorted(name_of.values())
    decay = {
        name_of[id(p)]: g["weight_decay"] for each in (muon, adamw) for g in each.param_groups for p in g["params"]
    }
    assert all(decay[name] == (0.3 if p.ndim == 2 else 0.0) for name, p in model.named_parameters())


def test_a_step_of_muon_has_the_size_of_one_of_adamw() -> None:
    """So that AdamW's learning rate holds: 0.2 times the rate in each element (arXiv:2502.16982, section 2.2)."""
    torch.manual_seed(1)
    model = ByteModel(ModelConfig(96, 1, 256))
    muon, _ = make_optimizers(model, TrainConfig(inner_optimizer="muon", weight_decay=0.0, lr=0.01))
    matrices = muon.param_groups[0]["params"]
    assert {tuple(matrix.shape) for matrix in matrices} == {(96, 96), (256, 96), (96, 256)}
    before = [matrix.detach().clone() for matrix in matrices]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    muon.step()
    for matrix, old in zip(matrices, before, strict=True):
        assert (matrix.detach() - old).square().mean().sqrt().item() == pytest.approx(0.2 * 0.01, rel=0.25)


@pytest.mark.usefixtures("restored_threads")
def test_threads_are_set(text: Path) -> None:
    InnerTrainer(config(text, threads=2))
    assert torch.get_num_threads() == 2


def test_the_speed_is_measured_and_printed_as_json(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data", str(text), "--chunk-tokens", "64", "--sequence-tokens", "32", "--emulate-gap", "0.9"]
    assert calibrate.main(["--json", "--seconds", "0.05", *options]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--data", "/does/not/exist"], "/does/not/exist does not exist"),
        (["--lr", "fast"], "lr = 'fast'"),
        (["--seconds", "0"], "give more than 0"),
    ],
)
def test_a_wrong_option_is_one_sentence_and_exit_code_2(
    text: Path, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate.main([*options]) == ConfigError.exit_code
    err = capsys.readouterr().err
    assert says in err
    assert err.startswith("dips: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_heard_and_gives_the_exit_code(number: signal.Signals, code: int) -> None:
    heard: list[str] = []
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        signals.when_received(lambda: heard.append("heard"))
        assert not signals.wait(0.0)
        os.kill(os.getpid(), number)
        assert signals.wait(30.0)
        assert (signals.caught, heard, signals.exit_code) == (number, ["heard"], code)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_who_asks_too_late_still_hears() -> None:
    heard: list[str] = []
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        signals.when_received(lambda: heard.append("heard"))
    assert heard == ["heard"]


def test_the_second_interrupt_is_an_ordinary_one() -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.wait(30.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_it_only_waits() -> None:
    codes: list[int] = []

    def body() -> None:
        with StopSignals() as signals:
            signals.wait(0.0)
            codes.append(signals.exit_code)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert codes == [0]
