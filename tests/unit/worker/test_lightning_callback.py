"""The callback for Lightning's Trainer, called in the Trainer's order, against a run in memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.run_in_memory import RunInMemory
from support.trainer_models import Model

from dips.core.errors import TERMINATED, ConfigError
from dips.core.ids import Version
from dips.core.messages import VerdictKind
from dips.worker.integrations.lightning import LightningCallback
from dips.worker.step_checks import N_BATCHES


class Trainer:
    """Calls its callback as Lightning does. changes: of the Trainer's own attributes."""

    def __init__(self, run: RunInMemory, folder: Path, loop: dict[str, Any] | None = None, **changes: Any) -> None:
        given: dict[str, Any] = {"master": run.address, "cluster_id": "a", "insecure": True, **(loop or {})}
        self.callback = LightningCallback(**given)
        self.model = Model(1)
        self.model.automatic_optimization = True  # type: ignore[assignment]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        strategy = SingleDeviceStrategy("cpu")
        self.own: Any = SimpleNamespace(**{
            "optimizers": [self.optimizer], "strategy": strategy, "min_epochs": None, "min_steps": None,
            "checkpoint_callbacks": [object()], "default_root_dir": str(folder), "should_stop": False,
            "global_step": 0, "received_sigterm": False, "state": SimpleNamespace(fn=TrainerFn.FITTING), **changes,
        })  # fmt: skip

    def tell(self, event: str, *more: Any) -> None:
        getattr(self.callback, f"on_{event}")(self.own, self.model, *more)

    def step(self, *losses: float | None) -> None:
        """Several batches of 6 tokens for one step; None: training_step() returned it."""
        for number, loss in enumerate(losses):
            batch = {"input_ids": torch.zeros(2, 3)}
            self.tell("train_batch_start", batch, number)
            if number == 0:
                self.optimizer.zero_grad()
            if loss is not None:
                self.tell("before_backward", torch.tensor(loss))
                sum(w.sum() for w in self.model.parameters()).backward()  # type: ignore[union-attr]
            if number + 1 == len(losses):
                self.tell("before_optimizer_step", self.optimizer)
                self.optimizer.step()
                self.own.global_step += 1
            outputs = {} if loss is None else {"loss": torch.tensor(loss / len(losses))}
            self.tell("train_batch_end", outputs, batch, number)


def test_batches_of_a_step_count_together_and_a_checkpoint_has_its_label(run: RunInMemory, tmp_path: Path) -> None:
    trainer = Trainer(run, tmp_path)
    trainer.tell("train_start")
    sync = trainer.callback.sync
    assert sync is not None
    trainer.step(1.0, 3.0)
    kept: dict[str, Any] = {}
    trainer.tell("save_checkpoint", kept)
    assert (kept, len(list((tmp_path / "dips").glob("*.json")))) == ({"dips_label": "step 1"}, 1)
    for _ in range(3):
        trainer.step(2.0)
    assert (sync.version, sync.steps) == (Version(1, 1), 4)
    (push,) = run.pushes
    assert (push.steps, push.tokens, push.mean_loss) == (4, 5 * 6, 2.0)
    run.stop = True
    run.passes(0.0)
    trainer.step(2.0)
    assert trainer.own.should_stop
    trainer.tell("train_end")
    assert (trainer.callback.sync, len(run.leaves)) == (None, 1)
    run.stop = False
    for fn, resumes in ((TrainerFn.FITTING, True), (TrainerFn.TESTING, False)):
        again = Trainer(run, tmp_path, state=SimpleNamespace(fn=fn))
        again.tell("load_checkpoint", kept)
        again.tell("train_start")
        assert (run.joins[-1].caller.incarnation is not None) == resumes
        again.callback.close()


def test_without_a_master_the_module_trains_alone(
    run: RunInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DIPS_MASTER", raising=False)
    trainer = Trainer(run, tmp_path, {"master": None})
    trainer.tell("train_start")
    trainer.step(1.0, 3.0)
    kept: dict[str, Any] = {}
    trainer.tell("save_checkpoint", kept)
    trainer.tell("train_end")
    assert (trainer.callback.sync, trainer.own.should_stop, kept) == (None, False, {})
    assert (run.pushes, list(tmp_path.iterdir())) == ([], [])


def test_batches_and_steps_that_lightning_skips_are_not_counted(
    run: RunInMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(run, tmp_path)
    trainer.tell("train_start")
    sync = trainer.callback.sync
    assert sync is not None
    for losses in ([None], [2.0], [None], [None, 4.0], [2.0, None], [2.0]):
        trainer.step(*losses)
    assert sync.steps == 4
    (push,) = run.pushes
    assert (push.steps, push.tokens) == (4, 4 * 6)
    assert "has a gradient" not in caplog.text, "it is no mistake"
    trainer.callback.close()


def test_batches_of_a_loop_of_the_modules_own_are_counted(run: RunInMemory, tmp_path: Path) -> None:
    """It may call backward() itself."""
    trainer = Trainer(run, tmp_path)
    trainer.model.automatic_optimization = False  # type: ignore[assignment]
    trainer.tell("train_start")
    for number in range(4):
        batch = {"input_ids": torch.zeros(2, 3)}
        trainer.tell("train_batch_start", batch, number)
        sum(w.sum() for w in trainer.model.parameters()).backward()  # type: ignore[union-attr]
        trainer.tell("before_optimizer_step", trainer.optimizer)
        trainer.optimizer.step()
        trainer.tell("train_batch_end", None, batch, number)
    trainer.callback.close()
    assert [(push.steps, push.tokens) for push in run.pushes] == [(4, 4 * 6)]


def test_the_batches_that_lightning_gives_are_compared_with_other_clusters(run: RunInMemory, tmp_path: Path) -> None:
    """Lightning calls training_step(), not the module."""

    def digest(*values: float) -> bytes:
        trainer = Trainer(run, tmp_path, {"tokens_per_step": 6})
        trainer.tell("train_start")
        sync = trainer.callback.sync
        assert sync is not None
        assert sync.shell is not None
        for value in values:
            trainer.tell("train_batch_start", {"input_ids": torch.full((2, 3), value)}, 0)
        found = sync.shell.first_batches
        trainer.callback.close()
        return found

    first = digest(*range(N_BATCHES))
    assert first
    assert first == digest(*range(N_BATCHES + 1))
    assert first != digest(*range(1, N_BATCHES + 1))


@pytest.mark.parametrize("released", [False, True])
def test_a_sigterm_is_an_exit_code_unless_the_run_let_the_cluster_go(
    run: RunInMemory, tmp_path: Path, released: bool
) -> None:
    trainer = Trainer(run, tmp_path, {"tokens_per_step": 50})
    trainer.tell("train_start")
    trainer.step(1.0)
    if released:
        run.stop = True
        run.passes(0.0)
        trainer.step(1.0)
    error = SIGTERMException()
    before = error.code
    trainer.tell("exception", error)
    assert error.code == (before if released else TERMINATED)
    assert (trainer.callback.sync, len(run.leaves)) == (None, 1)
    assert [push.tokens for push in run.pushes] == ([] if released else [50])


@pytest.mark.parametrize("merged", [False, True])
def test_a_sigterm_at_the_end_is_an_exit_code_where_steps_are_lost(
    run: RunInMemory, tmp_path: Path, merged: bool
) -> None:
    """Lightning notes it, and does not look any more."""
    trainer = Trainer(run, tmp_path, {"tokens_per_step": 50})
    run.decide = lambda push: VerdictKind.APPLIED if merged else None

    def lightnings(number: int, frame: object) -> None:
        trainer.own.received_sigterm = True

    def happens() -> None:
        if not trainer.own.received_sigterm:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lightnings)
    try:
        trainer.tell("train_start")
        trainer.step(1.0)
        run.while_waiting = happens
        if merged:
            happens()
            trainer.tell("train_end")
        else:
            with pytest.raises(SystemExit) as ended:
                trainer.tell("train_end")
            assert ended.value.code == TERMINATED
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (trainer.own.received_sigterm, len(run.leaves)) == (True, 1)


@pytest.mark.parametrize(("changes", "says"), [
    ({"optimizers": []}, "has 0 optimizers"), ({"strategy": object.__new__(FSDPStrategy)}, "FSDPStrategy"),
    ({"min_steps": 3}, "min_steps"), ({"min_epochs": 3}, "min_epochs"),
])  # fmt: skip
def test_what_a_trainer_cannot_share_is_refused(
    run: RunInMemory, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Trainer(run, tmp_path, **changes).tell("train_start")
    assert run.joins == []
